//! What was planned, and why.

use std::fmt;
use std::time::Duration;

use bytesize::ByteSize;
use serde::Serialize;
use ssdtrain_plan::{Budgets, Machine, Prediction};

use super::Tally;

/// What was planned for a step, to be held beside what it did.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PlanReport {
    /// How long the step takes, from its beginning to its `finish`.
    pub step: Duration,
    /// How long it would with everything kept: what the time of a [`Goal`](ssdtrain_plan::Goal) is held beside.
    pub kept_step: Duration,
    /// Where that is known from.
    pub baseline: Baseline,
    /// What one micro-batch does, with its share of what follows the last.
    pub prediction: Prediction,
    /// The settings that were chosen.
    pub budgets: Budgets,
    /// What the plan counts on: nine tenths of the bandwidths that were measured.
    pub machine: Machine,
    /// Whether the goal is reached. If not, this is the quickest step within its peak, or else the lowest activation peak there is.
    pub in_reach: bool,
    /// How often steps stayed beyond the time of the goal, so that a plan with a higher peak took this one's place. After five times
    /// everything is kept.
    pub loosened: u32,
    /// Plans made so far, this one included.
    pub plans: u64,
    /// What goes where, by scope in the order of forward.
    pub rows: Vec<PlanRow>,
}

/// Where it is known from how long a step takes with everything kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Baseline {
    /// What the profiled step computed, corrected by what planned steps do: what a plan costs beside its stalls does not show in it.
    Profile,
    /// Steps that kept everything.
    Measured,
}

/// What becomes of the storages of one scope, each counted where it is saved first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PlanRow {
    /// Its path; empty outside every scope.
    pub scope: String,
    /// Time computed up to its saves.
    pub forward: Duration,
    /// Time computed with what it saved.
    pub backward: Duration,
    /// Stay on the device.
    pub keep: Tally,
    /// Rest in host memory.
    pub host: Tally,
    /// Go to the disk.
    pub disk: Tally,
    /// Are computed again.
    pub recompute: Tally,
}

impl PlanReport {
    /// Whether everything stays on the device.
    pub fn keeps_all(&self) -> bool {
        self.rows.iter().all(|row| row.host.count + row.disk.count + row.recompute.count == 0)
    }
}

/// A table: what goes where, and what that is expected to cost.
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
        let Prediction { stall, recomputed, .. } = self.prediction;
        let rate = |name: &str, rate: f64| match rate.is_finite() {
            true => format!(", {name} {}/s", ByteSize(rate as u64)),
            false => String::new(),
        };
        write!(
            f,
            "expected: step {} ms ({:.3} of {} ms with everything kept, {}), activation peak {} (forward {}, backward {}); \
             of each micro-batch {} ms computed again, stalls {} ms\n\
             counting on{}{}{}{}",
            ms(self.step),
            self.step.as_secs_f64() / self.kept_step.as_secs_f64().max(f64::MIN_POSITIVE),
            ms(self.kept_step),
            match self.baseline {
                Baseline::Profile => "by the profile",
                Baseline::Measured => "as measured",
            },
            ByteSize(self.prediction.peak()),
            ByteSize(self.prediction.forward_peak),
            ByteSize(self.prediction.backward_peak),
            ms(recomputed),
            ms(stall.total()),
            rate("copies out at", self.machine.copy_out).trim_start_matches(','),
            rate("copies in at", self.machine.copy_in),
            rate("writes at", self.machine.disk_write),
            rate("reads at", self.machine.disk_read),
        )?;
        if self.loosened > 0 {
            let times = if self.loosened == 1 { "once" } else { "several times" };
            write!(f, "\nloosened {times}: steps took longer than the goal allows")?;
        }
        if self.keeps_all() {
            write!(f, "\neverything is kept")?;
        }
        if self.in_reach {
            Ok(())
        } else {
            write!(f, "\nthe goal is out of reach: this is what comes closest to it")
        }
    }
}
