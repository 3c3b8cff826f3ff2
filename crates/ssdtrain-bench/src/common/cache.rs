//! The cache, as the command line describes it.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{ValueEnum, value_parser};
use serde::Serialize;
use ssdtrain::{BackendKind, IoPath, TensorCache, Verify, write_traces};
use ssdtrain_plan::{Caps, Goal, Machine};
use tch::nn::VarStore;

use crate::common::endurance::EnduranceArgs;
use crate::common::policy::PolicyArgs;
use crate::common::profile::SaveArgs;
use crate::common::progress::Progress;
use crate::common::spill::SpillArgs;
use crate::common::strategy::Strategy;
use crate::common::{defaults, float, size};

/// The arguments that describe a cache.
#[derive(Clone, Debug, Serialize, clap::Args)]
#[command(next_help_heading = "Cache")]
pub(crate) struct CacheArgs {
    #[command(flatten)]
    #[serde(flatten)]
    spill: SpillArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub(crate) policy: PolicyArgs,
    /// Storages smaller than this stay in memory
    #[arg(long, value_name = "SIZE", default_value = defaults::MIN_BYTES, value_parser = size::parse)]
    min_bytes: u64,
    /// Pinned host memory for activations of a GPU, all of it pinned before the first step; 0: no more than the way to the disk
    /// needs. Default: as much as steps ask for (offload-disk: 0)
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    host_pool: Option<u64>,
    /// Which way a GPU's activations take to disk: straight by cuFile, or through the host pool. auto: through the pool where there is one
    /// (--host-pool is not 0), and else the faster one, tried out first
    #[arg(long, value_enum, default_value_t)]
    path: Way,
    /// Refuse to run unless the way to disk is GPUDirect Storage: cuFile's compatibility mode, through host memory, is not
    #[arg(long)]
    require_direct: bool,
    /// Bytes read from the disk into the host pool ahead of the loads to a GPU
    #[arg(long, value_name = "SIZE", default_value = defaults::READ_AHEAD, value_parser = size::parse)]
    read_ahead: u64,
    /// Most bytes on disk; what does not fit stays in memory
    #[arg(long, value_name = "SIZE", default_value = defaults::DISK_CAP, value_parser = size::parse_positive)]
    disk_cap: u64,
    /// Bytes of each disk that are left to others: no spill file grows into them. Default: the larger of 1GiB and 1 % of the disk, but no
    /// more than a tenth of it
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    #[serde(skip_serializing_if = "Option::is_none")]
    disk_keep_free: Option<u64>,
    /// Seconds that the disk may take for one operation, or "none" for no limit. What it does not write in time stays in memory; what it
    /// does not read in time ends the run. Default: 120
    #[arg(long, value_name = "SECONDS", value_parser = parse_timeout)]
    #[serde(skip_serializing_if = "Option::is_none")]
    disk_timeout: Option<Duration>,
    /// Seconds that the cache waits for a GPU, or "none" for no limit. What is not computed or copied by then is not written to disk;
    /// where memory to read into is still in use, the run ends. Default: 600
    #[arg(long, value_name = "SECONDS", value_parser = parse_timeout)]
    #[serde(skip_serializing_if = "Option::is_none")]
    device_timeout: Option<Duration>,
    #[command(flatten)]
    #[serde(flatten)]
    endurance: EnduranceArgs,
    /// Most bytes per second to and from disk, together: for disks that others use too, or to see what a slower one would do
    #[arg(long, value_name = "SIZE", value_parser = size::parse_positive)]
    disk_rate: Option<u64>,
    /// Transfers under way at once
    #[arg(long, value_name = "N", default_value = defaults::QUEUE_DEPTH, value_parser = value_parser!(u32).range(1..=4096))]
    queue_depth: u32,
    /// What is verified. checksums: of everything that is written to disk, compared when it is read. full: also that what is computed
    /// again has the same bytes. auto: checksums, as long as they cost less than 1 % of a step
    #[arg(long, value_name = "LEVEL", value_enum, default_value_t)]
    verify: Level,
    /// Record the steps and write them to FILE, for Perfetto (ui.perfetto.dev): scopes, stalls, copies and transfers on one time line.
    /// All steps count, warm-up too; of each strategy the latest million events are kept (about 100 MB). Under compare the file
    /// has every strategy with a cache, each as a process of its name; train leaves the table at the end out of it
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    trace: Option<PathBuf>,
    #[command(flatten)]
    #[serde(skip)]
    pub(crate) profile: SaveArgs,
}

/// [`IoPath`] on the command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Way {
    /// The faster one, if the host pool leaves a choice
    #[default]
    Auto,
    /// By cuFile
    Direct,
    /// Through pinned host memory
    Staged,
}

/// [`Verify`] on the command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
enum Level {
    /// Nothing
    Off,
    /// Checksums, as long as they cost little
    #[default]
    Auto,
    /// Checksums of everything on disk
    Checksums,
    /// Checksums, and what is computed again
    Full,
}

impl CacheArgs {
    /// Opens the cache of a strategy, if it has one. It leaves the parameters in `vs` alone.
    pub(crate) fn open(&self, strategy: Strategy, vs: &VarStore) -> Result<Option<TensorCache>> {
        let builder = TensorCache::builder()
            .parameters(vs)
            .min_bytes(self.min_bytes)
            .read_ahead(self.read_ahead)
            .disk_cap(self.disk_cap)
            .disk_rate(self.disk_rate.unwrap_or(0))
            .backend(self.spill.backend())
            .encrypt(self.spill.encrypt())
            .queue_depth(self.queue_depth as usize)
            .verify(self.verify.verify())
            .trace(self.trace.is_some());
        let builder = match self.disk_keep_free {
            Some(bytes) => builder.disk_keep_free(bytes),
            None => builder,
        };
        let builder = match self.disk_timeout {
            Some(limit) => builder.disk_timeout(limit),
            None => builder,
        };
        let builder = match self.device_timeout {
            Some(limit) => builder.device_timeout(limit),
            None => builder,
        };
        let mut builder = self.endurance.set(self.policy.set(builder, strategy, vs.device()));
        let host_only = match strategy {
            Strategy::Plain => return Ok(None),
            Strategy::Keep | Strategy::Recompute => return Ok(Some(builder.build()?)),
            Strategy::OffloadHost => true,
            Strategy::Offload | Strategy::OffloadDisk | Strategy::Auto | Strategy::AdaptivePaper => false,
        };
        ensure!(
            !host_only || vs.device().is_cuda(),
            "offload-host moves activations from a GPU to the host's memory; on the CPU they are there already"
        );
        let host_pool = self.host_pool.or_else(|| (strategy == Strategy::OffloadDisk).then_some(0));
        if let Some(bytes) = host_pool {
            builder = builder.host_pool(bytes);
        }
        if host_only {
            builder = builder.backend(BackendKind::Auto);
        } else {
            builder = builder.path(self.path.path());
            if self.require_direct {
                ensure!(
                    vs.device().is_cuda(),
                    "--require-direct is for a GPU: on the CPU there is no other way than straight to the spill files; leave it out"
                );
                builder = builder.require_path(IoPath::Direct);
            }
            for directory in self.spill.directories()? {
                builder = builder.spill_to(directory);
            }
        }
        Ok(Some(builder.build()?))
    }

    /// Whether the user has set how much may stay on the device.
    pub(crate) fn has_budget(&self) -> bool {
        self.policy.has_budget()
    }

    /// Whether the user has said what auto is to reach, or with what.
    pub(crate) fn has_goal(&self) -> bool {
        self.policy.has_goal() || self.profile.saves()
    }

    /// What auto may use of the disk in a step with this much computation.
    pub(crate) fn caps(&self, computed: Duration) -> Caps {
        Caps { disk: self.disk_cap, written: self.policy.written(computed) }
    }

    /// A profiled machine, with the host pool and the disk replaced by those that were asked for.
    pub(crate) fn instead_of(&self, machine: Machine) -> Machine {
        let rate = self.disk_rate.map_or(f64::INFINITY, |rate| rate as f64);
        Machine {
            host_pool: self.host_pool.unwrap_or(machine.host_pool),
            disk_write: machine.disk_write.min(rate),
            disk_read: machine.disk_read.min(rate),
            ..machine
        }
    }

    /// The goal that auto plans for.
    pub(crate) fn goal(&self) -> Goal {
        self.policy.goal()
    }

    /// The same cache without a trace.
    pub(crate) fn untraced(&self) -> CacheArgs {
        CacheArgs { trace: None, ..self.clone() }
    }

    /// Checks the arguments against the strategies, and prepares the output files that were asked for, so that problems with them are
    /// reported before training begins.
    pub(crate) fn prepare(&self, strategies: &[Strategy]) -> Result<()> {
        self.policy.ensure_obeyed(strategies)?;
        self.profile.prepare(strategies)?;
        self.policy.saved.prepare(strategies)?;
        let Some(path) = &self.trace else { return Ok(()) };
        ensure!(
            strategies.iter().any(|&strategy| strategy != Strategy::Plain),
            "--trace shows what a cache does, and plain has none: add another strategy"
        );
        fs::write(path, "").with_context(|| format!("--trace {} cannot be written", path.display()))
    }

    /// Writes the trace, if one was asked for.
    pub(crate) fn write_trace(&self, caches: &[(&str, &TensorCache)], progress: &Progress) -> Result<()> {
        let Some(path) = &self.trace else { return Ok(()) };
        write_traces(path, caches)?;
        progress.line(&format!("trace  {}; https://ui.perfetto.dev shows it", path.display()));
        Ok(())
    }

    /// Where spill files are placed, in words.
    pub(crate) fn describe(&self) -> Result<String> {
        self.spill.describe()
    }
}

/// A time limit in seconds; `none` means no limit.
fn parse_timeout(text: &str) -> Result<Duration, String> {
    if text == "none" {
        return Ok(Duration::MAX);
    }
    let limit = float::positive(text)?;
    match Duration::try_from_secs_f64(limit) {
        Ok(limit) if !limit.is_zero() => Ok(limit),
        _ => Err("give a number of seconds such as 120, or none".to_owned()),
    }
}

impl Way {
    fn path(self) -> IoPath {
        match self {
            Way::Auto => IoPath::Auto,
            Way::Direct => IoPath::Direct,
            Way::Staged => IoPath::Staged,
        }
    }
}

impl Level {
    fn verify(self) -> Verify {
        match self {
            Level::Off => Verify::Off,
            Level::Auto => Verify::Auto,
            Level::Checksums => Verify::Checksums,
            Level::Full => Verify::Full,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_limit_is_a_number_of_seconds_above_0_or_none() {
        assert_eq!(parse_timeout("1.5"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_timeout("none"), Ok(Duration::MAX));
        for text in ["0", "-1", "1e-30", "1e300", "inf", "NaN", "2min", ""] {
            assert!(parse_timeout(text).is_err(), "{text}");
        }
    }
}
