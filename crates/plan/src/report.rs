//! What was planned for a step, and why.

mod explained;

use std::fmt;
use std::time::Duration;

pub use self::explained::{OperationRow, PeakPhase, PeakReport, PeakRow};
use crate::{Budgets, Machine, Prediction, Tally};
use bytesize::ByteSize;
use serde::Serialize;

/// The plan for a step, for comparison with what the step did.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PlanReport {
    /// Predicted time of the step, from its beginning to its `finish`.
    pub step: Duration,
    /// Predicted time with everything kept, which the time of a [`Goal`](crate::Goal) is relative to.
    pub kept_step: Duration,
    /// Where `kept_step` comes from.
    pub baseline: Baseline,
    /// What is predicted for one micro-batch, including its share of what follows the last one.
    pub prediction: Prediction,
    /// The chosen settings.
    pub budgets: Budgets,
    /// The bandwidths that the plan relies on: somewhat less than those measured.
    pub machine: Machine,
    /// Whether the goal is reached. If not, this is the quickest plan within the goal's peak, or else the one with the lowest activation
    /// peak.
    pub in_reach: bool,
    /// How often steps exceeded the time of the goal, so that their plan was replaced by one that takes less time or has a higher peak.
    /// After five times everything is kept.
    pub loosened: u32,
    /// How often steps were so quick that their plan was replaced by one that takes more of the time that the goal allows.
    pub tightened: u32,
    /// Plans made so far, including this one.
    pub plans: u64,
    /// What goes where, by scope in the order of forward.
    pub rows: Vec<PlanRow>,
    /// What is recomputed, and what is saved in others' place, by operation; what frees the most bytes comes first.
    pub operations: Vec<OperationRow>,
    /// Who holds the predicted peak.
    pub peak: PeakReport,
    /// Who holds the peak of a step that keeps everything; `None` if that is the plan.
    pub kept_peak: Option<PeakReport>,
}

/// Where the time of a step with everything kept comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Baseline {
    /// Computed from the profiled step and corrected by planned steps. What a plan costs besides its stalls does not show in it.
    Profile,
    /// Taken from steps of another kind that kept everything, by how much they save.
    Others,
    /// Measured in steps that kept everything.
    Measured,
}

/// Where the storages of one scope go, each counted where it is first saved.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PlanRow {
    /// The scope's path; empty outside every scope.
    pub scope: String,
    /// Compute time of forward up to its saves.
    pub forward: Duration,
    /// Compute time of backward with what it saved.
    pub backward: Duration,
    /// Stays on the device.
    pub keep: Tally,
    /// Stays in host memory.
    pub host: Tally,
    /// Goes to the disk.
    pub disk: Tally,
    /// Is computed again.
    pub recompute: Tally,
}

impl PlanReport {
    /// Whether everything stays on the device.
    pub fn keeps_all(&self) -> bool {
        self.rows.iter().all(|row| row.host.count + row.disk.count + row.recompute.count == 0)
    }
}

/// Tables of what goes where, of what is recomputed and of who holds the peak, with what all that is predicted to cost.
impl fmt::Display for PlanReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.rows.iter().map(|row| row.scope.len()).max().unwrap_or(0).max("scope".len());
        let ms = |time: Duration| format!("{:.1}", time.as_secs_f64() * 1e3);
        let bytes =
            |tally: Tally| if tally.count == 0 { "-".to_owned() } else { ByteSize(tally.bytes).to_string() };
        writeln!(
            f,
            "{:width$}  {:>10}  {:>11}  {:>10}  {:>10}  {:>10}  {:>10}",
            "scope", "forward ms", "backward ms", "keep", "host", "disk", "recompute"
        )?;
        for row in &self.rows {
            writeln!(
                f,
                "{:width$}  {:>10}  {:>11}  {:>10}  {:>10}  {:>10}  {:>10}",
                row.scope,
                ms(row.forward),
                ms(row.backward),
                bytes(row.keep),
                bytes(row.host),
                bytes(row.disk),
                bytes(row.recompute),
            )?;
        }
        let Prediction { stall, recomputed, memory_bound, moving, handled, .. } = self.prediction;
        let part = |time: Duration, what: &str| match time.is_zero() {
            true => String::new(),
            false => format!(", {} ms {what}", ms(time)),
        };
        let rate = |name: &str, rate: f64| match rate.is_finite() {
            true => format!(", {name} {}/s", ByteSize(rate as u64)),
            false => String::new(),
        };
        write!(
            f,
            "expected: step {} ms ({:.3} of {} ms with everything kept, {}), activation peak {} (forward {}, backward {}); \
             of each micro-batch {} ms computed again{}, stalls {} ms{}{}\n\
             counting on{}{}{}{}",
            ms(self.step),
            self.step.as_secs_f64() / self.kept_step.as_secs_f64().max(f64::MIN_POSITIVE),
            ms(self.kept_step),
            match self.baseline {
                Baseline::Profile => "by the profile",
                Baseline::Others => "as other kinds of steps show",
                Baseline::Measured => "as measured",
            },
            ByteSize(self.prediction.peak()),
            ByteSize(self.prediction.forward_peak),
            ByteSize(self.prediction.backward_peak),
            ms(recomputed),
            match memory_bound.is_zero() {
                true => String::new(),
                false => format!(" ({} ms by memory-bound operations)", ms(memory_bound)),
            },
            ms(stall.total()),
            part(moving, "that moving takes of the program's own time"),
            part(handled, "in which the program's thread works for the cache"),
            rate("copies out at", self.machine.copy_out).trim_start_matches(','),
            rate("copies in at", self.machine.copy_in),
            rate("writes at", self.machine.disk_write),
            rate("reads at", self.machine.disk_read),
        )?;
        let times = |count| if count == 1 { "once" } else { "several times" };
        if self.loosened > 0 {
            write!(f, "\nloosened {}: steps took longer than the goal allows", times(self.loosened))?;
        }
        if self.tightened > 0 {
            write!(f, "\ntightened {}: steps took less time than the goal allows", times(self.tightened))?;
        }
        if self.keeps_all() {
            write!(f, "\neverything is kept")?;
        }
        if !self.in_reach {
            write!(f, "\nthe goal is out of reach: this is what comes closest to it")?;
        }
        if !self.operations.is_empty() {
            write!(f, "\n\n")?;
            explained::write_operations(f, &self.operations)?;
        }
        write!(f, "\n\npeak as planned: {}", self.peak)?;
        self.kept_peak.iter().try_for_each(|peak| write!(f, "\n\npeak with everything kept: {peak}"))
    }
}
