//! Placements that do not depend on what is saved.

use std::sync::Arc;

use super::{Needs, Observation, Outset, Policy, PolicyReport, SavedPlan, Saves, StepPlan};
use crate::{Placement, Profile, ScopeId};

/// Another policy whose saves have these placements in turn instead, cyclically; for tests of plans.
#[derive(Clone, Debug)]
pub struct InTurn<P> {
    policy: P,
    placements: Arc<[Placement]>,
}

impl<P: Policy> InTurn<P> {
    /// With the room, the profiles and everything else of `policy`.
    pub fn new(policy: P, placements: impl Into<Arc<[Placement]>>) -> InTurn<P> {
        InTurn { policy, placements: placements.into() }
    }
}

impl<P: Policy> Policy for InTurn<P> {
    fn begin(&mut self, outset: &Outset<'_>) -> StepPlan {
        StepPlan { saves: Saves::InTurn(Arc::clone(&self.placements)), ..self.policy.begin(outset) }
    }

    fn end(&mut self, plan: &StepPlan, observed: Observation) {
        self.policy.end(plan, observed);
    }

    fn needs(&self) -> Needs {
        self.policy.needs()
    }

    fn check(&self) -> Result<(), String> {
        self.policy.check()
    }

    fn is_settled(&self) -> bool {
        self.policy.is_settled()
    }

    fn warnings(&self, plan: &StepPlan, observed: &Observation) -> Vec<String> {
        self.policy.warnings(plan, observed)
    }

    fn report(&mut self, course: usize, name: &dyn Fn(ScopeId) -> String) -> Option<PolicyReport> {
        self.policy.report(course, name)
    }

    fn profile(&self, name: &dyn Fn(ScopeId) -> String) -> Option<Profile> {
        self.policy.profile(name)
    }

    fn saved_plan(&self, name: &dyn Fn(ScopeId) -> String) -> Option<SavedPlan> {
        self.policy.saved_plan(name)
    }
}
