//! The policy that moves everything.

use std::collections::HashSet;

use bytesize::ByteSize;

use super::{Needs, Observation, Outset, Policy, Room, StepPlan};
use crate::{Budgets, Release, ScopeId};

/// Bytes that are loaded ahead if nothing else is set.
pub(super) const PREFETCH: u64 = 64 << 20;

/// Everything that can be moved and is worth moving leaves the device: from a GPU to pinned host memory and on to the
/// disk, from the CPU to the disk. What is marked (`remat`) is recomputed.
///
/// A GPU's tensors leave as late as [`device_budget`](Offload::device_budget) allows, and what fits it stays. If
/// neither it nor a [`backward_budget`](Offload::backward_budget) is set, the budget is
/// [`prefetch`](Offload::prefetch): everything else moves, and the GPU waits wherever it computes faster than the
/// copies run. The report warns of this and says how long the GPU waited.
#[derive(Clone, Debug)]
pub struct Offload {
    device_budget: Option<u64>,
    backward_budget: Option<u64>,
    prefetch: u64,
    keep_last: usize,
    /// The scopes that saved last in the step before.
    last: HashSet<ScopeId>,
}

impl Default for Offload {
    fn default() -> Offload {
        Offload {
            device_budget: None,
            backward_budget: None,
            prefetch: PREFETCH,
            keep_last: 0,
            last: HashSet::new(),
        }
    }
}

impl Offload {
    /// Upper limit on the activation bytes the cache holds on the device: those on their way out, those loaded early,
    /// and those kept by scope. A CPU thread that saves more waits for a store. A GPU waits in its own queue instead,
    /// so that the peak does not depend on how far the thread runs ahead of it. A GPU's budget is used to the full:
    /// what fits stays until backward wants it. Default: no limit on the CPU; for a GPU see [`Offload`].
    #[must_use]
    pub fn device_budget(mut self, bytes: u64) -> Offload {
        self.device_budget = Some(bytes);
        self
    }

    /// The device budget once backward asks for tensors, if it should be less than forward's: backward needs memory
    /// for gradients, and forward needs some for what is still on its way out. As backward begins, it waits until what
    /// exceeds it has left, as far as it is to leave. Values above the device budget count as the device budget. Default: the device budget.
    #[must_use]
    pub fn backward_budget(mut self, bytes: u64) -> Offload {
        self.backward_budget = Some(bytes);
        self
    }

    /// Bytes loaded to the device ahead of what backward has asked for. Default: 64 MiB.
    #[must_use]
    pub fn prefetch(mut self, bytes: u64) -> Offload {
        self.prefetch = bytes;
        self
    }

    /// Keeps on the device what the last `scopes` named scopes save, because backward starts with them at once. Which
    /// scopes are last is learned from the step before, so the first step moves everything. Default: 0. Paper section
    /// 5.3.1.
    #[must_use]
    pub fn keep_last(mut self, scopes: usize) -> Offload {
        self.keep_last = scopes;
        self
    }

    fn has_budget(&self) -> bool {
        self.device_budget.is_some() || self.backward_budget.is_some()
    }

    fn budgets(&self, release: Release) -> Budgets {
        // Storages that leave as late as possible would never leave under an unlimited budget.
        let is_late = release != Release::WhenStored;
        let by_default = if is_late && !self.has_budget() { self.prefetch } else { u64::MAX };
        budgets(self.device_budget.unwrap_or(by_default), self.backward_budget, self.prefetch)
    }
}

/// Budgets of which backward's is no larger than forward's.
pub(super) fn budgets(device_budget: u64, backward_budget: Option<u64>, prefetch: u64) -> Budgets {
    let backward_budget = backward_budget.unwrap_or(u64::MAX).min(device_budget);
    Budgets { device_budget, backward_budget, prefetch, ..Budgets::default() }
}

/// What users should know of a step that moved nothing.
pub(super) fn moved_nothing(observed: &Observation) -> Option<String> {
    let moved_nothing = observed.moved == 0 && observed.cancelled > 0;
    let told = "nothing was moved: what was saved fits the device budget, or backward asked for it first";
    moved_nothing.then(|| told.to_owned())
}

impl Policy for Offload {
    fn begin(&mut self, outset: &Outset<'_>) -> StepPlan {
        StepPlan {
            kept_scopes: self.last.clone(),
            recomputes_marked: true,
            room: Room::Within(self.budgets(outset.resources.release)),
            ..StepPlan::default()
        }
    }

    fn end(&mut self, _plan: &StepPlan, observed: Observation) {
        self.last = observed.scopes.into_iter().rev().take(self.keep_last).collect();
    }

    fn needs(&self) -> Needs {
        Needs { profiles: false, ..Needs::default() }
    }

    fn warnings(&self, plan: &StepPlan, observed: &Observation) -> Vec<String> {
        let without_budget =
            !self.has_budget() && plan.room != Room::Within(self.budgets(Release::WhenStored));
        let waits = (observed.moved > 0 && without_budget).then(|| {
            format!(
                "no device budget: all that was saved except the last {} leaves the GPU, which waits for it as long as the stalls show; \
                 set a device_budget(bytes), or use Auto",
                ByteSize(self.prefetch)
            )
        });
        moved_nothing(observed).into_iter().chain(waits).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Resources, Saves};

    fn begin(policy: &mut Offload, release: Release) -> StepPlan {
        let resources = Resources { host_pool: 0, disk: u64::MAX, release };
        policy.begin(&Outset {
            step: 1,
            resources,
            today: crate::Today::default(),
            free: &|| 0,
            provide: &|_| true,
            scope: &|_| ScopeId::default(),
        })
    }

    fn within(policy: &mut Offload, release: Release) -> [u64; 3] {
        match begin(policy, release).room {
            Room::Within(room) => [room.device_budget, room.backward_budget, room.prefetch],
            room => panic!("{room:?}"),
        }
    }

    const GPU: Release = Release::InStreamOrder;
    const CPU: Release = Release::WhenStored;

    #[test]
    fn the_last_scopes_of_the_step_before_are_kept() {
        let mut policy = Offload::default().keep_last(2);
        let [a, b, c] = [1, 2, 3].map(ScopeId);
        let mut kept_after = |scopes: &[ScopeId]| {
            let plan = begin(&mut policy, CPU);
            policy.end(&plan, Observation { scopes: scopes.to_vec(), ..Observation::default() });
            plan.kept_scopes
        };
        assert_eq!(kept_after(&[a, b, c]), [].into());
        assert_eq!(kept_after(&[b, c, a]), [b, c].into());
        assert_eq!(kept_after(&[]), [c, a].into());
    }

    #[test]
    fn only_what_leaves_late_has_a_budget_by_default() {
        let mut policy = Offload::default().prefetch(5);
        assert_eq!(within(&mut policy, CPU), [u64::MAX, u64::MAX, 5]);
        assert_eq!(within(&mut policy, GPU), [5, 5, 5]);
        assert_eq!(begin(&mut policy, CPU).saves, Saves::Move);
    }

    #[test]
    fn a_budget_for_backward_is_no_larger_than_that_for_all() {
        let mut policy = Offload::default().backward_budget(9).prefetch(5);
        assert_eq!(within(&mut policy, GPU), [u64::MAX, 9, 5]);
        assert_eq!(within(&mut policy.device_budget(7), GPU), [7, 7, 5]);
    }

    #[test]
    fn what_a_missing_budget_costs_is_told_where_it_does() {
        let warnings = |policy: &Offload, release, moved, cancelled| {
            let plan = begin(&mut policy.clone(), release);
            policy.warnings(&plan, &Observation { moved, cancelled, ..Observation::default() }).join("\n")
        };
        let (without, with) = (Offload::default(), Offload::default().device_budget(7));
        assert!(warnings(&without, GPU, 1, 0).contains("device_budget"));
        for (policy, release) in [(&without, CPU), (&with, GPU), (&with, CPU)] {
            assert_eq!(warnings(policy, release, 1, 0), "", "{policy:?}");
            assert!(warnings(policy, release, 0, 1).contains("nothing was moved"), "{policy:?}");
        }
    }
}
