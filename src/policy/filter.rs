//! Which saved tensors are worth moving.

/// What the filter decides about a saved tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    Keep(KeepReason),
    /// To the tier below the device.
    Move,
}

/// Why a tensor stays in the graph as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeepReason {
    /// It cannot be moved: sparse, a wrapper, without storage, or on a device this build does not move from.
    Ineligible,
    /// It is a parameter, or a view of one: it lives elsewhere anyway.
    Parameter,
    /// Its storage is smaller than `min_bytes`.
    Small,
    /// The program holds its storage besides the graph.
    HeldElsewhere,
    /// The policy keeps everything, or everything of this scope, or the plan keeps this storage.
    Policy,
}

/// What is known of a tensor when autograd saves it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub(crate) movable: bool,
    pub(crate) parameter: bool,
    pub(crate) storage_bytes: u64,
    pub(crate) held: bool,
    pub(crate) scope_kept: bool,
}

/// The part of the decision that is fixed by the settings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Filter {
    pub(crate) keep_all: bool,
    pub(crate) min_bytes: u64,
}

impl Filter {
    pub(crate) fn decide(&self, facts: Facts) -> Decision {
        if !facts.movable {
            Decision::Keep(KeepReason::Ineligible)
        } else if facts.parameter {
            Decision::Keep(KeepReason::Parameter)
        } else if facts.storage_bytes < self.min_bytes {
            Decision::Keep(KeepReason::Small)
        } else if facts.held {
            Decision::Keep(KeepReason::HeldElsewhere)
        } else if self.keep_all || facts.scope_kept {
            Decision::Keep(KeepReason::Policy)
        } else {
            Decision::Move
        }
    }
}

impl Decision {
    /// Whether the graph may drop the bytes if there is a recipe, because only the policy would keep them.
    pub(crate) fn may_be_recomputed(self) -> bool {
        matches!(self, Decision::Move | Decision::Keep(KeepReason::Policy))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGE: Facts =
        Facts { movable: true, parameter: false, storage_bytes: 1 << 20, held: false, scope_kept: false };
    const FILTER: Filter = Filter { keep_all: false, min_bytes: 1 << 16 };

    #[test]
    fn a_large_activation_is_moved() {
        assert_eq!(FILTER.decide(LARGE), Decision::Move);
    }

    #[test]
    fn each_reason_to_keep_is_told_apart() {
        let keep = |facts| match FILTER.decide(facts) {
            Decision::Keep(reason) => reason,
            Decision::Move => panic!("{facts:?} was not kept"),
        };
        assert_eq!(keep(Facts { movable: false, ..LARGE }), KeepReason::Ineligible);
        assert_eq!(keep(Facts { parameter: true, ..LARGE }), KeepReason::Parameter);
        assert_eq!(keep(Facts { storage_bytes: (1 << 16) - 1, ..LARGE }), KeepReason::Small);
        assert_eq!(keep(Facts { held: true, ..LARGE }), KeepReason::HeldElsewhere);
        assert_eq!(keep(Facts { scope_kept: true, ..LARGE }), KeepReason::Policy);
    }

    #[test]
    fn what_is_kept_for_its_own_sake_is_not_recomputed() {
        for facts in [
            Facts { movable: false, ..LARGE },
            Facts { parameter: true, ..LARGE },
            Facts { held: true, ..LARGE },
        ] {
            assert!(!FILTER.decide(facts).may_be_recomputed(), "{facts:?}");
        }
        assert!(FILTER.decide(Facts { scope_kept: true, ..LARGE }).may_be_recomputed());
        assert!(FILTER.decide(LARGE).may_be_recomputed());
    }

    #[test]
    fn keeping_all_keeps_all() {
        let filter = Filter { keep_all: true, ..FILTER };
        assert_eq!(filter.decide(LARGE), Decision::Keep(KeepReason::Policy));
    }
}
