//! The paper's adaptive offloading (section 5.3.5): from one profiled step, the last module whose tensors are worth moving.

use std::time::Duration;

use crate::telemetry::ScopeId;

/// What one step showed of a module: one scope of the model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Module {
    pub(crate) scope: ScopeId,
    /// How long forward computes in it.
    pub(crate) forward: Duration,
    /// Bytes it saves that could be moved.
    pub(crate) bytes: u64,
}

/// What one step showed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Profile {
    /// Modules in the order of forward.
    pub(crate) modules: Vec<Module>,
    /// The time of all of forward: that of the modules, and of what saves nothing.
    pub(crate) forward: Duration,
    /// Bytes per second that left the device, counting only the time while any did.
    pub(crate) bandwidth: f64,
}

/// Which modules move their tensors: the first `offloaded`, in the order of forward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Decision {
    pub(crate) offloaded: usize,
    /// The bytes per second that this needs.
    pub(crate) required: f64,
}

/// What stays on the device, and may stay, whatever is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stay {
    /// The number of last modules that stay in any case, so that backward can start with them at once (section 5.3.1).
    pub(crate) modules: usize,
    /// Upper limit on the bytes that may stay.
    pub(crate) bytes: u64,
}

impl Profile {
    /// Decides which module is the last to move its tensors.
    ///
    /// A module can be the last if, by the time its backward begins, everything before it can have been stored, and its own tensors
    /// stored and loaded again. The time until then is all of forward, and the backward of the modules after it, taken as twice their
    /// forward. Modules that may not stay move, whatever bandwidth that needs.
    pub(crate) fn decide(&self, stay: Stay) -> Decision {
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
        (before + 2 * self.modules[last].bytes) as f64 / (self.forward + 2 * after).as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn profile(modules: &[(u64, u64)], bandwidth: f64) -> Profile {
        let module = |&(millis, bytes)| Module {
            scope: ScopeId::default(),
            forward: Duration::from_millis(millis),
            bytes,
        };
        let modules: Vec<_> = modules.iter().map(module).collect();
        let forward = modules.iter().map(|module| module.forward).sum();
        Profile { modules, forward, bandwidth }
    }

    const ANY: Stay = Stay { modules: 0, bytes: u64::MAX };

    fn offloaded(modules: &[(u64, u64)], bandwidth: f64) -> usize {
        profile(modules, bandwidth).decide(ANY).offloaded
    }

    #[test]
    fn the_last_module_is_the_one_whose_tensors_are_back_just_in_time() {
        // The third of four has 4 s of forward and 2 s of the last one's backward for 200 + 2 · 100 bytes; the last one has 4 s
        // for 300 + 2 · 100.
        let modules = [(1000, 100); 4];
        let just = 400.0 / 6.0;
        assert_eq!(profile(&modules, just).decide(ANY), Decision { offloaded: 3, required: just });
        assert_eq!(offloaded(&modules, 500.0 / 4.0), 4);
        assert_eq!(offloaded(&modules, just - 0.1), 2);
        assert_eq!(offloaded(&modules, 1.0), 0);
    }

    #[test]
    fn what_saves_nothing_gives_time_all_the_same() {
        let mut profile = profile(&[(1000, 100); 4], 50.0);
        assert_eq!(profile.decide(ANY).offloaded, 2);
        profile.forward *= 2;
        assert_eq!(profile.decide(ANY).offloaded, 3);
    }

    #[test]
    fn a_module_that_saves_little_can_be_the_last_though_the_one_before_it_cannot() {
        assert_eq!(offloaded(&[(1000, 100), (1000, 1000), (1000, 1)], 1102.0 / 3.0), 3);
    }

    #[test]
    fn what_may_not_stay_moves_whatever_it_takes() {
        let profile = profile(&[(1000, 100); 4], 0.0);
        assert_eq!(profile.decide(Stay { bytes: 250, ..ANY }).offloaded, 2);
        assert_eq!(profile.decide(Stay { bytes: 0, ..ANY }).offloaded, 4);
    }

    #[test]
    fn the_last_modules_stay_unless_there_is_no_room_for_them() {
        let profile = profile(&[(1000, 100); 4], f64::MAX);
        assert_eq!(profile.decide(Stay { modules: 2, ..ANY }).offloaded, 2);
        assert_eq!(profile.decide(Stay { modules: 9, ..ANY }).offloaded, 0);
        assert_eq!(profile.decide(Stay { modules: 2, bytes: 150 }).offloaded, 3);
    }

    #[test]
    fn nothing_is_decided_of_nothing() {
        assert_eq!(
            profile(&[], 1.0).decide(Stay { modules: 1, bytes: 0 }),
            Decision { offloaded: 0, required: 0.0 }
        );
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
            let Decision { offloaded, required } = profile(&modules, bandwidth).decide(Stay { bytes: keep, ..ANY });
            let kept: u64 = modules[offloaded..].iter().map(|(_, bytes)| bytes).sum();
            prop_assert!(kept <= keep);
            let all: u64 = modules.iter().map(|(_, bytes)| bytes).sum();
            prop_assert!(required <= bandwidth || all > keep);
        }
    }
}
