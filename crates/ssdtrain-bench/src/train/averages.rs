//! The figures that a run reports about its steps.

use std::time::Duration;

use crate::common::learner::Outcome;
use crate::common::shape::Shape;

/// The costs of the steps since the last line.
#[derive(Default)]
pub(crate) struct StepAverages {
    steps: u32,
    wall: Duration,
    stall: Duration,
    /// The highest of any step.
    pub(crate) act_peak_bytes: u64,
    /// The same.
    pub(crate) step_peak_bytes: u64,
}

impl StepAverages {
    pub(crate) fn add(&mut self, outcome: &Outcome) {
        self.steps += 1;
        self.wall += outcome.wall;
        self.stall += outcome.report.as_ref().map_or(Duration::ZERO, |report| report.stall.total());
        self.act_peak_bytes = self.act_peak_bytes.max(outcome.act_peak_bytes);
        self.step_peak_bytes = self.step_peak_bytes.max(outcome.step_peak_bytes);
    }

    /// Average per step.
    pub(crate) fn step_ms(&self) -> f64 {
        self.wall.as_secs_f64() * 1e3 / f64::from(self.steps)
    }

    /// Average per step.
    pub(crate) fn stall_ms(&self) -> f64 {
        self.stall.as_secs_f64() * 1e3 / f64::from(self.steps)
    }

    pub(crate) fn tokens_per_s(&self, shape: &Shape) -> f64 {
        shape.tokens_per_step() as f64 / self.step_ms() * 1e3
    }
}
