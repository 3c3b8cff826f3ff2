//! The policy of a cache, as the command line describes it.

use std::time::Duration;

use anyhow::{Result, ensure};
use clap::value_parser;
use serde::Serialize;
use ssdtrain::{Adaptive, Auto, Keep, Offload, TensorCacheBuilder};
use ssdtrain_plan::Goal;
use tch::Device;

use crate::common::saved_plan::SavedPlanArgs;
use crate::common::strategy::Strategy;
use crate::common::{defaults, float, size};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// The arguments that only some strategies obey.
#[derive(Clone, Debug, Serialize, clap::Args)]
#[command(next_help_heading = "Cache")]
pub(crate) struct PolicyArgs {
    /// Activation bytes the cache may have on the device, or "none" for no limit; on the CPU, saving more waits for the disk.
    /// Default: 96MiB on the CPU, 4GiB on a GPU, where it is used to the full
    #[arg(long, value_name = "SIZE", value_parser = size::parse_limit)]
    device_budget: Option<u64>,
    /// The same once backward has begun, which needs memory for gradients; default: as --device-budget
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    backward_budget: Option<u64>,
    /// Bytes loaded to the device ahead of what backward has asked for; default: 32MiB on the CPU, 1GiB on a GPU
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    prefetch: Option<u64>,
    /// Keep on the device what the last N scopes save (each attention, MLP and the head is one): backward begins with them.
    /// Default: 2 on the CPU, 0 on a GPU
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(0..=1 << 16))]
    keep_last: Option<u32>,
    /// Of auto: the activation peak to stay under, weights and optimizer left out. The quickest step there is is taken, or, with
    /// --overhead, the lowest peak
    #[arg(long, value_name = "SIZE", value_parser = size::parse_positive)]
    budget: Option<u64>,
    /// Of auto: how much longer a step may take than with everything kept, as a share of it; for that, the lowest peak there is.
    /// Default, without --budget: 0.02
    #[arg(long, value_name = "SHARE", value_parser = float::non_negative)]
    overhead: Option<f64>,
    /// Of auto: most bytes written to the disks in a day (of UTC), such as 2TB, by all runs together, as the endurance of the SSDs asks for.
    /// What exceeds it stays on the device or is computed again
    #[arg(long, value_name = "SIZE", value_parser = size::parse_of_disk)]
    written_per_day: Option<u64>,
    #[command(flatten)]
    #[serde(skip)]
    pub(crate) saved: SavedPlanArgs,
}

/// The defaults that suit a device.
struct Defaults {
    device_budget: u64,
    prefetch: u64,
    keep_last: u32,
}

impl Defaults {
    fn of(device: Device) -> Defaults {
        if device.is_cuda() {
            Defaults {
                device_budget: defaults::GPU_DEVICE_BUDGET,
                prefetch: defaults::GPU_PREFETCH,
                keep_last: defaults::GPU_KEEP_LAST,
            }
        } else {
            Defaults {
                device_budget: defaults::DEVICE_BUDGET,
                prefetch: defaults::PREFETCH,
                keep_last: defaults::KEEP_LAST,
            }
        }
    }
}

impl PolicyArgs {
    /// Gives `builder` the policy of a strategy.
    pub(crate) fn set(
        &self,
        builder: TensorCacheBuilder,
        strategy: Strategy,
        device: Device,
    ) -> TensorCacheBuilder {
        let defaults = Defaults::of(device);
        let device_budget = self.device_budget.unwrap_or(defaults.device_budget);
        let prefetch = self.prefetch.unwrap_or(defaults.prefetch);
        let keep_last = self.keep_last.unwrap_or(defaults.keep_last) as usize;
        match strategy {
            Strategy::Plain | Strategy::Keep | Strategy::Recompute => builder.policy(Keep),
            Strategy::Offload | Strategy::OffloadHost | Strategy::OffloadDisk => {
                let mut policy =
                    Offload::default().device_budget(device_budget).prefetch(prefetch).keep_last(keep_last);
                if let Some(bytes) = self.backward_budget {
                    policy = policy.backward_budget(bytes);
                }
                builder.policy(policy)
            }
            Strategy::AdaptivePaper => {
                let mut policy = Adaptive::default().prefetch(prefetch).keep_last(keep_last);
                if self.device_budget.is_some() || device.is_cuda() {
                    policy = policy.device_budget(device_budget);
                }
                if let Some(bytes) = self.backward_budget {
                    policy = policy.backward_budget(bytes);
                }
                builder.policy(policy)
            }
            Strategy::Auto => {
                let mut policy = Auto::new(self.goal());
                if let Some(bytes) = self.written_per_day {
                    policy = policy.written_per_day(bytes);
                }
                if let Some(saved) = self.saved.start() {
                    policy = policy.starting_with(saved.clone());
                }
                builder.policy(policy)
            }
        }
    }

    /// Fails if an argument was given that none of the strategies obeys.
    pub(crate) fn ensure_obeyed(&self, strategies: &[Strategy]) -> Result<()> {
        let moves = "offload, offload-host, offload-disk and adaptive-paper";
        let given = [
            ("--device-budget", self.device_budget.is_some(), moves),
            ("--backward-budget", self.backward_budget.is_some(), moves),
            ("--prefetch", self.prefetch.is_some(), moves),
            ("--keep-last", self.keep_last.is_some(), moves),
            ("--budget", self.budget.is_some(), "auto"),
            ("--overhead", self.overhead.is_some(), "auto"),
            ("--written-per-day", self.written_per_day.is_some(), "auto"),
            ("--plan", self.saved.start().is_some(), "auto"),
        ];
        for (flag, _, of) in given.into_iter().filter(|(_, is_given, _)| *is_given) {
            let obeyed = strategies.iter().any(|strategy| match strategy {
                Strategy::Plain | Strategy::Keep | Strategy::Recompute => false,
                Strategy::Auto => of == "auto",
                Strategy::Offload
                | Strategy::OffloadHost
                | Strategy::OffloadDisk
                | Strategy::AdaptivePaper => of == moves,
            });
            let names: Vec<_> = strategies.iter().map(|strategy| strategy.name()).collect();
            ensure!(
                obeyed,
                "{flag} would be ignored: it is of {of}, and the strategy is {}",
                names.join(", ")
            );
        }
        Ok(())
    }

    /// Whether the user has set how much may stay on the device.
    pub(crate) fn has_budget(&self) -> bool {
        self.device_budget.is_some() || self.backward_budget.is_some() || self.keep_last.is_some()
    }

    /// Whether the user has said what auto is to reach, or with what.
    pub(crate) fn has_goal(&self) -> bool {
        let is_limited = self.budget.is_some() || self.overhead.is_some() || self.written_per_day.is_some();
        is_limited || self.saved.start().is_some() || self.saved.saves()
    }

    /// The most bytes that auto may write to the disk in a step with this much computation.
    pub(crate) fn written(&self, computed: Duration) -> u64 {
        let share = computed.div_duration_f64(DAY);
        self.written_per_day.map_or(u64::MAX, |bytes| (bytes as f64 * share) as u64)
    }

    /// The goal that auto plans for.
    pub(crate) fn goal(&self) -> Goal {
        let overhead = self.overhead.or_else(|| self.budget.is_none().then_some(defaults::OVERHEAD));
        Goal { peak: self.budget, step: overhead.map(|share| 1.0 + share) }
    }
}
