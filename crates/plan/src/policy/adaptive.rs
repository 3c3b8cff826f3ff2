//! The paper's policy: as much leaves as can be back in time.

use std::time::Duration;

use serde::Serialize;

use super::offload::{self, PREFETCH};
use super::{Needs, Observation, Outset, Policy, PolicyReport, Room, StepPlan};
use crate::ScopeId;
use crate::step_profile::StepProfile;

/// The first step does work that later ones need not repeat, so the second is the first to be profiled.
const FIRST_PROFILED: u64 = 2;
/// If a profiled step shows nothing, the next one is profiled too, up to this one.
const LAST_PROFILED: u64 = 8;

/// Moves as much as can be back in time. How much that is, is measured: the paper's method (section 5.3.5).
///
/// Steps one and two move everything; the second is profiled. From then on, the scopes up to a last one, in the order
/// of forward, move their tensors. That last scope is the latest one for which the measured write bandwidth suffices to
/// store everything before it, and to store and load its own tensors, by the time its backward begins. Backward is
/// assumed to take twice as long as forward.
///
/// The last scope always stays, and so do the last `keep_last` ones if that is more. Never more is kept than a device
/// budget has room for beside `prefetch`. The CPU needs no budget. A GPU does: its tensors leave as late as the budget
/// allows, so without one none leaves.
#[derive(Clone, Debug)]
pub struct Adaptive {
    device_budget: Option<u64>,
    backward_budget: Option<u64>,
    prefetch: u64,
    keep_last: usize,
    decided: Option<Decided>,
}

/// Which scopes adaptive offloading moves, and why; paper section 5.3.5.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct AdaptiveReport {
    /// Scopes that save something.
    pub scopes: usize,
    /// How many of them, the first in the order of forward, move their tensors; the others keep them.
    pub offloaded: usize,
    /// The last scope that moves its tensors; `None` if all keep theirs.
    pub last: Option<String>,
    /// Bytes per second needed to have everything back in time.
    pub required_bytes_per_s: f64,
    /// Bytes per second that left the device in the profiled step, counting only the time while any did.
    pub measured_bytes_per_s: f64,
}

/// A decision, and what it was made from.
#[derive(Clone, Debug)]
struct Decided {
    forward: Forward,
    decision: Decision,
}

/// What one step's forward showed.
#[derive(Clone, Debug, PartialEq)]
struct Forward {
    /// Modules in the order of forward.
    modules: Vec<Module>,
    /// The time of all of forward: that of the modules, and of what saves nothing.
    time: Duration,
    /// Bytes per second that left the device, counting only the time while any did.
    bandwidth: f64,
}

/// What one step showed of a module: one scope of the model.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Module {
    scope: ScopeId,
    /// How long forward computes up to its saves.
    forward: Duration,
    /// Bytes that it is the first to save.
    bytes: u64,
}

/// Which modules move their tensors: the first `offloaded`, in the order of forward.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Decision {
    offloaded: usize,
    /// The bytes per second that this needs.
    required: f64,
}

/// What stays on the device, and may stay, whatever is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stay {
    /// The number of last modules that stay in any case, so that backward can start with them at once (section 5.3.1).
    modules: usize,
    /// Upper limit on the bytes that may stay.
    bytes: u64,
}

impl Default for Adaptive {
    fn default() -> Adaptive {
        Adaptive {
            device_budget: None,
            backward_budget: None,
            prefetch: PREFETCH,
            keep_last: 0,
            decided: None,
        }
    }
}

impl Adaptive {
    /// As [`Offload::device_budget`](super::Offload::device_budget). Default: no limit.
    #[must_use]
    pub fn device_budget(mut self, bytes: u64) -> Adaptive {
        self.device_budget = Some(bytes);
        self
    }

    /// As [`Offload::backward_budget`](super::Offload::backward_budget). Default: the device budget.
    #[must_use]
    pub fn backward_budget(mut self, bytes: u64) -> Adaptive {
        self.backward_budget = Some(bytes);
        self
    }

    /// Bytes loaded to the device ahead of what backward has asked for. Default: 64 MiB.
    #[must_use]
    pub fn prefetch(mut self, bytes: u64) -> Adaptive {
        self.prefetch = bytes;
        self
    }

    /// The least number of last scopes that stay. Default: 1.
    #[must_use]
    pub fn keep_last(mut self, scopes: usize) -> Adaptive {
        self.keep_last = scopes;
        self
    }

    fn room(&self) -> crate::Budgets {
        offload::budgets(self.device_budget.unwrap_or(u64::MAX), self.backward_budget, self.prefetch)
    }
}

impl Policy for Adaptive {
    fn begin(&mut self, outset: &Outset<'_>) -> StepPlan {
        let kept = self.decided.iter().flat_map(|decided| {
            let kept = &decided.forward.modules[decided.decision.offloaded..];
            kept.iter().map(|module| module.scope)
        });
        let is_time = (FIRST_PROFILED..=LAST_PROFILED).contains(&outset.step);
        StepPlan {
            profiled: self.decided.is_none() && is_time,
            kept_scopes: kept.collect(),
            recomputes_marked: true,
            room: Room::Within(self.room()),
            ..StepPlan::default()
        }
    }

    fn end(&mut self, _plan: &StepPlan, observed: Observation) {
        let Some(forward) = observed.profile.and_then(|profile| Forward::of(&profile)) else { return };
        let room = self.room();
        let bytes = room.device_budget.min(room.backward_budget).saturating_sub(room.prefetch);
        let decision = forward.decide(Stay { modules: self.keep_last.max(1), bytes });
        self.decided = Some(Decided { forward, decision });
    }

    fn needs(&self) -> Needs {
        Needs::default()
    }

    fn is_settled(&self) -> bool {
        self.decided.is_some()
    }

    fn warnings(&self, _plan: &StepPlan, observed: &Observation) -> Vec<String> {
        offload::moved_nothing(observed).into_iter().collect()
    }

    fn report(&mut self, _course: usize, name: &dyn Fn(ScopeId) -> String) -> Option<PolicyReport> {
        let Decided { forward, decision } = self.decided.as_ref()?;
        let last = decision.offloaded.checked_sub(1).map(|last| name(forward.modules[last].scope));
        Some(PolicyReport::Adaptive(AdaptiveReport {
            scopes: forward.modules.len(),
            offloaded: decision.offloaded,
            last,
            required_bytes_per_s: decision.required,
            measured_bytes_per_s: forward.bandwidth,
        }))
    }
}

impl Forward {
    /// `None` if nothing left the device.
    fn of(profile: &StepProfile) -> Option<Forward> {
        let bandwidth = profile.rates.written.or(profile.rates.out)?;
        let mut seen = vec![false; profile.work.activations.len()];
        // By the order of their last saves.
        let mut modules: Vec<Module> = Vec::new();
        for &(save, activation) in &profile.saves {
            let known = modules.iter().position(|module| module.scope == save.scope);
            let mut module = known.map_or_else(
                || Module { scope: save.scope, forward: Duration::ZERO, bytes: 0 },
                |place| modules.remove(place),
            );
            if !std::mem::replace(&mut seen[activation], true) {
                module.forward += profile.work.activations[activation].forward;
                module.bytes += save.bytes;
            }
            modules.push(module);
        }
        let time =
            profile.work.activations.iter().map(|one| one.forward).sum::<Duration>() + profile.work.turn;
        Some(Forward { modules, time, bandwidth })
    }

    /// Decides which module is the last to move its tensors.
    ///
    /// A module can be the last if, by the time its backward begins, everything before it can have been stored, and its own tensors
    /// stored and loaded again. The time until then is all of forward, and the backward of the modules after it, taken as twice their
    /// forward. Modules that may not stay move, whatever bandwidth that needs.
    fn decide(&self, stay: Stay) -> Decision {
        let candidates = 0..self.modules.len().saturating_sub(stay.modules);
        let last = candidates.rev().find(|&last| self.required(last) <= self.bandwidth);
        let affordable = last.map_or(0, |last| last + 1);
        let mut kept = 0_u64;
        let may_stay = self.modules.iter().rev().take_while(|module| {
            kept = kept.saturating_add(module.bytes);
            kept <= stay.bytes
        });
        let offloaded = affordable.max(self.modules.len() - may_stay.count());
        Decision { offloaded, required: offloaded.checked_sub(1).map_or(0.0, |last| self.required(last)) }
    }

    /// Bytes per second that it takes to have module `last` as the last one.
    fn required(&self, last: usize) -> f64 {
        let before: u64 = self.modules[..last].iter().map(|module| module.bytes).sum();
        let after: Duration = self.modules[last + 1..].iter().map(|module| module.forward).sum();
        (before + 2 * self.modules[last].bytes) as f64 / (self.time + 2 * after).as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Activation, Position, Rates, Release, Resources, Save, Workload};

    fn forward(modules: &[(u64, u64)], bandwidth: f64) -> Forward {
        let module = |&(millis, bytes)| Module {
            scope: ScopeId::default(),
            forward: Duration::from_millis(millis),
            bytes,
        };
        let modules: Vec<_> = modules.iter().map(module).collect();
        let time = modules.iter().map(|module| module.forward).sum();
        Forward { modules, time, bandwidth }
    }

    const ANY: Stay = Stay { modules: 0, bytes: u64::MAX };

    fn offloaded(modules: &[(u64, u64)], bandwidth: f64) -> usize {
        forward(modules, bandwidth).decide(ANY).offloaded
    }

    #[test]
    fn the_last_module_is_the_one_whose_tensors_are_back_just_in_time() {
        // The third of four has 4 s of forward and 2 s of the last one's backward for 200 + 2 · 100 bytes; the last one has 4 s
        // for 300 + 2 · 100.
        let modules = [(1000, 100); 4];
        let just = 400.0 / 6.0;
        assert_eq!(forward(&modules, just).decide(ANY), Decision { offloaded: 3, required: just });
        assert_eq!(offloaded(&modules, 500.0 / 4.0), 4);
        assert_eq!(offloaded(&modules, just - 0.1), 2);
        assert_eq!(offloaded(&modules, 1.0), 0);
    }

    #[test]
    fn what_saves_nothing_gives_time_all_the_same() {
        let mut forward = forward(&[(1000, 100); 4], 50.0);
        assert_eq!(forward.decide(ANY).offloaded, 2);
        forward.time *= 2;
        assert_eq!(forward.decide(ANY).offloaded, 3);
    }

    #[test]
    fn a_module_that_saves_little_can_be_the_last_though_the_one_before_it_cannot() {
        assert_eq!(offloaded(&[(1000, 100), (1000, 1000), (1000, 1)], 1102.0 / 3.0), 3);
    }

    #[test]
    fn what_may_not_stay_moves_whatever_it_takes() {
        let forward = forward(&[(1000, 100); 4], 0.0);
        assert_eq!(forward.decide(Stay { bytes: 250, ..ANY }).offloaded, 2);
        assert_eq!(forward.decide(Stay { bytes: 0, ..ANY }).offloaded, 4);
    }

    #[test]
    fn the_last_modules_stay_unless_there_is_no_room_for_them() {
        let forward = forward(&[(1000, 100); 4], f64::MAX);
        assert_eq!(forward.decide(Stay { modules: 2, ..ANY }).offloaded, 2);
        assert_eq!(forward.decide(Stay { modules: 9, ..ANY }).offloaded, 0);
        assert_eq!(forward.decide(Stay { modules: 2, bytes: 150 }).offloaded, 3);
    }

    #[test]
    fn nothing_is_decided_of_nothing() {
        assert_eq!(
            forward(&[], 1.0).decide(Stay { modules: 1, bytes: 0 }),
            Decision { offloaded: 0, required: 0.0 }
        );
    }

    fn profile(saves: &[(u64, u32, usize)]) -> StepProfile {
        let count = saves.iter().map(|(_, _, activation)| activation + 1).max().unwrap_or(0);
        let one = Activation { bytes: 100, forward: Duration::from_secs(1), ..Activation::default() };
        let work =
            Workload { activations: vec![one; count], turn: Duration::from_secs(1), ..Workload::default() };
        let save = |&(bytes, scope, activation): &(u64, u32, usize)| {
            (
                Save {
                    entry: activation as u64,
                    bytes,
                    scope: ScopeId(scope),
                    position: Position::default(),
                },
                activation,
            )
        };
        let rates = Rates { out: Some(90.0), written: Some(60.0), ..Rates::default() };
        StepProfile { work, saves: saves.iter().map(save).collect(), rates, ..StepProfile::default() }
    }

    #[test]
    fn a_module_has_what_it_is_the_first_to_save_and_stands_where_it_saves_last() {
        let forward = Forward::of(&profile(&[(100, 1, 0), (100, 2, 1), (100, 2, 0), (100, 1, 2)])).unwrap();
        let module =
            |scope, secs, bytes| Module { scope: ScopeId(scope), forward: Duration::from_secs(secs), bytes };
        let modules = vec![module(2, 1, 100), module(1, 2, 200)];
        assert_eq!(forward, Forward { modules, time: Duration::from_secs(4), bandwidth: 60.0 });
    }

    #[test]
    fn steps_are_profiled_until_one_of_them_decides() {
        let mut policy = Adaptive::default();
        let resources = Resources { host_pool: 0, disk: u64::MAX, release: Release::WhenStored };
        let begin = |policy: &mut Adaptive, step| {
            policy.begin(&Outset {
                step,
                resources,
                today: crate::Today::default(),
                free: &|| 0,
                provide: &|_| true,
                scope: &|_| ScopeId::default(),
            })
        };
        let profiled = [1, 2, 3, 9].map(|step| begin(&mut policy, step).profiled);
        assert_eq!(profiled, [false, true, true, false]);
        // A step that moved nothing shows nothing.
        let nothing = StepProfile { rates: Rates::default(), ..profile(&[(100, 1, 0)]) };
        let plan = begin(&mut policy, 2);
        policy.end(&plan, Observation { profile: Some(Box::new(nothing)), ..Observation::default() });
        assert!(!policy.is_settled());
        // Forward takes 3 s with the second one's 1 s, and two seconds of its backward may be waited for.
        let shown = profile(&[(100, 1, 0), (100, 2, 1)]);
        policy.end(&plan, Observation { profile: Some(Box::new(shown)), ..Observation::default() });
        let plan = begin(&mut policy, 3);
        assert!(policy.is_settled() && !plan.profiled && plan.kept_scopes == [ScopeId(2)].into());
        let Some(PolicyReport::Adaptive(report)) = policy.report(0, &|scope| format!("{scope:?}")) else {
            panic!("it has decided")
        };
        assert_eq!((report.scopes, report.offloaded, report.measured_bytes_per_s), (2, 1, 60.0));
        assert_eq!(report.last.as_deref(), Some("ScopeId(1)"));
    }

    fn modules() -> impl Strategy<Value = Vec<(u64, u64)>> {
        prop::collection::vec((1_u64..1000, 0_u64..1 << 40), 1..40)
    }

    proptest! {
        #[test]
        fn more_bandwidth_never_moves_less(modules in modules(), bandwidth in 0.0..1e12, more in 1.0..10.0) {
            prop_assert!(offloaded(&modules, bandwidth) <= offloaded(&modules, bandwidth * more));
        }

        #[test]
        fn what_is_required_can_be_had_unless_more_may_not_stay(
            modules in modules(), bandwidth in 0.0..1e12, keep: u64
        ) {
            let Decision { offloaded, required } = forward(&modules, bandwidth).decide(Stay { bytes: keep, ..ANY });
            let kept: u64 = modules[offloaded..].iter().map(|(_, bytes)| bytes).sum();
            prop_assert!(kept <= keep);
            let all: u64 = modules.iter().map(|(_, bytes)| bytes).sum();
            prop_assert!(required <= bandwidth || all > keep);
        }
    }
}
