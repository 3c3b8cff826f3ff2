//! The policy that moves nothing.

use super::{Needs, Observation, Outset, Policy, Saves, StepPlan};

/// Everything stays on the device, as without a cache; saves are only counted, and what is marked (`remat`) is recomputed. Needs no spill
/// directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keep;

impl Policy for Keep {
    fn begin(&mut self, _outset: &Outset<'_>) -> StepPlan {
        StepPlan { saves: Saves::Count, recomputes_marked: true, ..StepPlan::default() }
    }

    fn end(&mut self, _plan: &StepPlan, _observed: Observation) {}

    fn needs(&self) -> Needs {
        Needs { tiers: false, profiles: false, one_path: false, days: false }
    }
}
