//! The largest micro-batch that reaches a goal.

use anyhow::{Context, Result};
use serde::Serialize;
use ssdtrain_plan::{Machine, Profile, Scaling};

use crate::common::cache::CacheArgs;

/// The largest micro-batch whose plan reaches the goal, and the predicted step.
#[derive(Serialize)]
pub(super) struct Largest {
    rows: u64,
    pub(super) step_ms: f64,
    pub(super) peak_bytes: u64,
}

impl Largest {
    /// The largest micro-batch of at most `most` sequences, interpolated or extrapolated from profiles of two sizes;
    /// `None` if not even one sequence reaches the goal.
    pub(super) fn between(
        one: (u64, &Profile),
        other: (u64, &Profile),
        machine: &Machine,
        cache: &CacheArgs,
        most: u64,
    ) -> Result<Option<Largest>> {
        let profiles = [one, other].map(|(rows, profile)| (rows, &profile.workload));
        let scaling = Scaling::between(profiles[0], profiles[1]).context(
            "micro-batches of two sizes do not save the same tensors: --min-bytes lies between, or they are of other models",
        )?;
        let Profile { workload, micro_batches, .. } = other.1;
        let found = scaling.largest(machine, cache.caps(workload.computed()), cache.goal(), most);
        Ok(found.map(|(rows, plan)| Largest {
            rows,
            step_ms: plan.prediction.step.as_secs_f64() * 1e3 * f64::from(micro_batches.get()),
            peak_bytes: plan.prediction.peak(),
        }))
    }

    /// The label in front of its figures.
    pub(super) fn name(&self) -> String {
        format!("planned with {} sequences", self.rows)
    }
}

/// The result, in words.
pub(super) fn report(found: Option<&Largest>) -> String {
    match found {
        Some(largest) => format!("Largest micro-batch that reaches the goal: {} sequences.", largest.rows),
        None => "Not even a micro-batch of one sequence reaches the goal.".to_owned(),
    }
}
