//! One strategy of a comparison: its model, the measurements of its steps, and their summary.

use std::sync::Arc;

use anyhow::Result;
use serde::Serialize;
use ssdtrain::{AdaptiveReport, PlanReport, SavedPlan, StepReport, TensorCache};
use ssdtrain_models::{Batch, Optimizer};
use ssdtrain_plan::Profile;
use ssdtrain_store::StoreStats;

use crate::common::learner::{Learner, Outcome, Update};
use crate::common::stats::{Estimate, median, ratio_of_medians};
use crate::common::strategy::Strategy;
use crate::common::{size, table};

/// All strategies train with this rate; what they compute does not depend on it.
const LEARNING_RATE: f64 = 3e-4;

/// One strategy's model and the measurements of its steps.
pub(crate) struct StrategyRun {
    pub(crate) strategy: Strategy,
    pub(crate) learner: Learner<Box<dyn Optimizer>>,
    outcomes: Vec<Outcome>,
    /// The store's counts, and the bytes pinned, when measuring began.
    store_before: Option<StoreStats>,
    pinned_before: u64,
}

impl StrategyRun {
    pub(crate) fn new(strategy: Strategy, learner: Learner<Box<dyn Optimizer>>) -> StrategyRun {
        StrategyRun { strategy, learner, outcomes: Vec::new(), store_before: None, pinned_before: 0 }
    }

    /// Forgets the steps so far: measuring begins now.
    pub(crate) fn begin(&mut self) {
        self.outcomes.clear();
        self.store_before = self.learner.cache().and_then(TensorCache::store_stats);
        self.pinned_before = self.pinned();
    }

    pub(crate) fn step(&mut self, micro_batches: &[Batch]) -> Result<()> {
        let update = Update { learning_rate: LEARNING_RATE, clip: None };
        self.outcomes.push(self.learner.step(micro_batches, update)?);
        Ok(())
    }

    /// Whether the decisions about its steps are final, as far as is known.
    pub(crate) fn is_settled(&self) -> bool {
        self.learner.cache().is_none_or(TensorCache::is_settled)
    }

    /// Whether any of the steps followed a plan.
    pub(crate) fn has_planned(&self) -> bool {
        self.outcomes.iter().filter_map(|outcome| outcome.report.as_ref()).any(|report| report.plan.is_some())
    }

    /// The loss of the last step, in nats per token.
    pub(crate) fn loss(&self) -> f64 {
        self.losses(1).next().unwrap_or(f64::NAN)
    }

    /// The losses of the last `steps` steps.
    pub(crate) fn losses(&self, steps: usize) -> impl Iterator<Item = f64> {
        let before = self.outcomes.len().saturating_sub(steps);
        self.outcomes[before..].iter().map(|outcome| outcome.loss)
    }

    /// In milliseconds.
    fn walls(&self) -> Vec<f64> {
        self.outcomes.iter().map(|outcome| outcome.wall.as_secs_f64() * 1e3).collect()
    }

    fn peaks(&self) -> impl Iterator<Item = u64> {
        self.outcomes.iter().map(|outcome| outcome.act_peak_bytes)
    }

    fn peak(&self) -> u64 {
        self.peaks().max().unwrap_or(0)
    }

    fn pinned(&self) -> u64 {
        self.learner.cache().map_or(0, TensorCache::pinned_bytes)
    }

    /// The summary for steps of `tokens` tokens, compared with `keep`.
    pub(crate) fn row(&self, tokens: usize, keep: Option<&StrategyRun>, seed: u64) -> Row {
        let walls = self.walls();
        let reports: Vec<_> = self.outcomes.iter().filter_map(|outcome| outcome.report.as_ref()).collect();
        let of = |figure: fn(&StepReport) -> f64| {
            let figures: Vec<_> = reports.iter().map(|report| figure(report)).collect();
            if figures.is_empty() { 0.0 } else { median(&figures) }
        };
        let step_ms_median = median(&walls);
        let plan = reports.iter().rev().find_map(|report| report.plan.as_ref());
        Row {
            strategy: self.strategy.name(),
            step_ms_median,
            tokens_per_s: tokens as f64 / step_ms_median * 1e3,
            act_peak_bytes: self.peak(),
            act_peak_spread_bytes: self.peak() - self.peaks().min().unwrap_or(0),
            step_peak_bytes: self.outcomes.iter().map(|outcome| outcome.step_peak_bytes).max().unwrap_or(0),
            act_peak_to_keep: keep.map(|keep| self.peak() as f64 / keep.peak() as f64),
            saved_bytes: (!reports.is_empty()).then(|| of(|report| report.saved.bytes as f64) as u64),
            offloaded_bytes: of(|report| report.offloaded.bytes as f64) as u64,
            recomputed_bytes: of(|report| report.recomputed.bytes as f64) as u64,
            rerun_ms: of(|report| report.rerun_time.as_secs_f64() * 1e3),
            deduplicated_bytes: of(|report| report.deduplicated.bytes as f64) as u64,
            forwarded_bytes: of(|report| report.forwarded.bytes as f64) as u64,
            stall_ms: of(|report| report.stall.total().as_secs_f64() * 1e3),
            stall_ms_by_cause: Causes {
                device_budget: of(|report| report.stall.device_budget.as_secs_f64() * 1e3),
                host_pool: of(|report| report.stall.host_pool.as_secs_f64() * 1e3),
                load: of(|report| report.stall.load.as_secs_f64() * 1e3),
                copy_in: of(|report| report.stall.copy_in.as_secs_f64() * 1e3),
                memory: of(|report| report.stall.memory.as_secs_f64() * 1e3),
            },
            pinned_bytes: self.pinned() - self.pinned_before,
            disk: self.disk(),
            planned: plan.map(|plan| Planned::of(plan)),
            explained: plan.map(Arc::clone),
            profile: self.learner.cache().and_then(TensorCache::profile),
            saved_plan: self.learner.cache().and_then(TensorCache::saved_plan),
            adaptive: reports.last().and_then(|report| report.adaptive.as_ref()).map(Decided::of),
            ratio_to_keep: keep.map(|keep| ratio_of_medians(&walls, &keep.walls(), seed)),
            loss_last: self.loss(),
            io_path: self.learner.io_path(),
        }
    }

    fn disk(&self) -> Option<Disk> {
        let now = self.learner.cache()?.store_stats()?;
        let before = self.store_before.unwrap_or_default();
        let (written, read) = (now.bytes_written - before.bytes_written, now.bytes_read - before.bytes_read);
        let busy = (now.busy - before.busy).as_secs_f64();
        let steps = self.outcomes.len().max(1) as u64;
        Some(Disk {
            written_bytes_per_step: written / steps,
            read_bytes_per_step: read / steps,
            checked_bytes_per_step: (now.bytes_checked - before.bytes_checked) / steps,
            busy_bytes_per_s: if busy > 0.0 { (written + read) as f64 / busy } else { 0.0 },
            busy_share: 1e3 * busy / self.walls().iter().sum::<f64>(),
        })
    }
}

/// The measurements of one strategy; the fields are the JSON contract.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) strategy: &'static str,
    pub(crate) step_ms_median: f64,
    pub(crate) tokens_per_s: f64,
    pub(crate) act_peak_bytes: u64,
    /// The difference between the highest and the lowest peak of a measured step.
    act_peak_spread_bytes: u64,
    pub(crate) act_peak_to_keep: Option<f64>,
    /// Including gradients.
    pub(crate) step_peak_bytes: u64,
    saved_bytes: Option<u64>,
    pub(crate) offloaded_bytes: u64,
    pub(crate) recomputed_bytes: u64,
    /// Host time of reruns.
    rerun_ms: f64,
    deduplicated_bytes: u64,
    forwarded_bytes: u64,
    pub(crate) stall_ms: f64,
    stall_ms_by_cause: Causes,
    /// Bytes pinned during the measured steps.
    pinned_bytes: u64,
    disk: Option<Disk>,
    pub(crate) planned: Option<Planned>,
    /// The whole plan.
    #[serde(skip)]
    pub(crate) explained: Option<Arc<PlanReport>>,
    /// The profile that the plan was made from.
    #[serde(skip)]
    pub(crate) profile: Option<Profile>,
    /// The plan, for another run.
    #[serde(skip)]
    pub(crate) saved_plan: Option<SavedPlan>,
    adaptive: Option<Decided>,
    pub(crate) ratio_to_keep: Option<Estimate>,
    loss_last: f64,
    io_path: String,
}

/// Median waiting time in milliseconds, by cause.
#[derive(Clone, Copy, Debug, Serialize)]
struct Causes {
    device_budget: f64,
    host_pool: f64,
    load: f64,
    copy_in: f64,
    memory: f64,
}

/// What a plan predicted.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Planned {
    pub(crate) step_ms: f64,
    pub(crate) peak_bytes: u64,
    stall_ms: f64,
    /// Whether the goal is reached.
    pub(crate) in_reach: bool,
    /// Plans made so far.
    plans: u64,
}

/// What adaptive offloading has decided.
#[derive(Clone, Debug, Serialize)]
struct Decided {
    scopes: usize,
    offloaded_scopes: usize,
    last_scope: Option<String>,
    required_bytes_per_s: f64,
    measured_bytes_per_s: f64,
}

/// The work of the spill files during the measured steps.
#[derive(Clone, Copy, Debug, Serialize)]
struct Disk {
    written_bytes_per_step: u64,
    read_bytes_per_step: u64,
    /// Those among them that were compared with checksums.
    checked_bytes_per_step: u64,
    /// While at least one transfer was in flight.
    busy_bytes_per_s: f64,
    busy_share: f64,
}

impl Planned {
    fn of(report: &PlanReport) -> Planned {
        Planned {
            step_ms: report.step.as_secs_f64() * 1e3,
            peak_bytes: report.prediction.peak(),
            stall_ms: report.prediction.stall.total().as_secs_f64() * 1e3,
            in_reach: report.in_reach,
            plans: report.plans,
        }
    }

    fn describe(&self) -> String {
        format!(
            "planned {:.1} ms and {}, with stalls of {:.1} ms{}; plan {}",
            self.step_ms,
            size::format(self.peak_bytes),
            self.stall_ms,
            if self.in_reach { "" } else { ", the lowest peak there is: the goal is out of reach" },
            self.plans,
        )
    }
}

impl Decided {
    fn of(report: &AdaptiveReport) -> Decided {
        Decided {
            scopes: report.scopes,
            offloaded_scopes: report.offloaded,
            last_scope: report.last.clone(),
            required_bytes_per_s: report.required_bytes_per_s,
            measured_bytes_per_s: report.measured_bytes_per_s,
        }
    }

    fn describe(&self) -> String {
        let until = self.last_scope.as_ref().map_or_else(String::new, |last| format!(", up to {last}"));
        format!(
            "{} of {} scopes move{until}: that takes {}/s of {}/s measured",
            self.offloaded_scopes,
            self.scopes,
            size::format(self.required_bytes_per_s as u64),
            size::format(self.measured_bytes_per_s as u64),
        )
    }
}

/// A table for people.
pub(crate) fn render(rows: &[Row]) -> String {
    let header = [
        "per step",
        "ms",
        "ratio to keep (95 %)",
        "tokens/s",
        "activation peak",
        "/ keep",
        "with gradients",
        "saved",
        "moved",
        "recomputed",
        "dedup",
        "forward",
        "stall ms",
    ];
    let body = rows.iter().map(|row| {
        let ratio = row.ratio_to_keep.map_or_else(
            || "-".to_owned(),
            |ratio| format!("{:.3} ({:.3}-{:.3})", ratio.median, ratio.low, ratio.high),
        );
        [
            row.strategy.to_owned(),
            format!("{:.1}", row.step_ms_median),
            ratio,
            format!("{:.0}", row.tokens_per_s),
            size::format(row.act_peak_bytes),
            row.act_peak_to_keep.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.3}")),
            size::format(row.step_peak_bytes),
            row.saved_bytes.map_or_else(|| "-".to_owned(), size::format),
            size::format(row.offloaded_bytes),
            size::format(row.recomputed_bytes),
            size::format(row.deduplicated_bytes),
            size::format(row.forwarded_bytes),
            format!("{:.1}", row.stall_ms),
        ]
    });
    let mut text = table::render(header, body);
    if let Some(last) = rows.last() {
        text += &format!("\nLast loss {:.4}.", last.loss_last);
    }
    for row in rows.iter().filter(|row| !["plain", "keep", "recompute"].contains(&row.strategy)) {
        let Causes { device_budget, host_pool, load, copy_in, memory } = row.stall_ms_by_cause;
        text += &format!(
            "\n{}: through {}; stalls in ms: device budget {device_budget:.1}, host pool {host_pool:.1}, load {load:.1}, \
             copy in {copy_in:.1}, memory {memory:.1}; peaks differ by {}; {} pinned while measured.",
            row.strategy,
            row.io_path,
            size::format(row.act_peak_spread_bytes),
            size::format(row.pinned_bytes),
        );
        if let Some(disk) = row.disk.filter(|disk| disk.written_bytes_per_step > 0) {
            text += &format!(
                " Disk: {} written and {} read per step, {}/s while busy ({:.0} % of the time).",
                size::format(disk.written_bytes_per_step),
                size::format(disk.read_bytes_per_step),
                size::format(disk.busy_bytes_per_s as u64),
                100.0 * disk.busy_share,
            );
        }
        if let Some(planned) = &row.planned {
            text += &format!(" {}.", planned.describe());
        }
        if let Some(adaptive) = &row.adaptive {
            text += &format!(" {}.", adaptive.describe());
        }
    }
    text
}
