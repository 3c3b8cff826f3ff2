//! What happens to a tensor that autograd saves: one function of what is known of it and of what the step is told.

use ssdtrain_plan::{Placement, Recomputed, Saves, StepPlan};

/// What happens to a saved tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Its bytes are saved.
    Save(Place),
    /// The graph gets a recipe instead of the bytes. If there is none, the bytes are saved.
    Recompute { by: Recipes, otherwise: Place },
}

/// Where saved bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// They stay in the graph, and the cache has no part in it.
    Graph(KeepReason),
    /// They stay on the device, in the cache, and count against the device budget.
    Device,
    /// To the tier below the device.
    Below,
}

/// Which recipes count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recipes {
    /// Those of results that the program marked.
    Marked,
    /// A few operations on record, of what is there.
    Near,
    /// Those of marked results, and else recorded operations.
    Any,
}

/// Why a tensor stays in the graph as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeepReason {
    /// It cannot be moved: sparse, a wrapper, borrowed memory, without storage, or on a device this build does not move from.
    Ineligible,
    /// It is a parameter, or a view of one: it lives elsewhere anyway.
    Parameter,
    /// Its storage is smaller than `min_bytes`.
    Small,
    /// The program holds its storage besides the graph.
    HeldElsewhere,
    /// The policy keeps everything.
    Policy,
}

/// What a step does with the segments of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Segments {
    /// They are computed again for all that they save.
    Recomputed,
    /// They are one more way to have again what is saved within them.
    Offered,
    /// They are run like everything else.
    Left,
}

/// What is known of a tensor when autograd saves it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub(crate) movable: bool,
    pub(crate) parameter: bool,
    pub(crate) storage_bytes: u64,
    /// Whether the program holds its storage besides the graph.
    pub(crate) held: bool,
}

/// What the step is told about a save.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Instruction {
    /// Nothing is entered in the cache.
    pub(crate) keeps_all: bool,
    /// Its scope keeps what it saves.
    pub(crate) scope_kept: bool,
    /// Its planned placement, if one is planned.
    pub(crate) planned: Option<Placement>,
    /// Which recipes count if nothing is planned for it.
    pub(crate) unplanned: Option<Recipes>,
}

/// What happens to a saved tensor. `instruction` is asked for only if the tensor could be moved: plans have a line for each of those, in
/// their order.
pub(crate) fn decide(facts: Facts, min_bytes: u64, instruction: impl FnOnce() -> Instruction) -> Decision {
    if let Some(reason) = stays(facts, min_bytes) {
        return Decision::Save(Place::Graph(reason));
    }
    let Instruction { keeps_all, scope_kept, planned, unplanned } = instruction();
    let place = if keeps_all {
        Place::Graph(KeepReason::Policy)
    } else if scope_kept || planned == Some(Placement::Keep) {
        Place::Device
    } else {
        Place::Below
    };
    let recipes = match planned {
        Some(Placement::Recompute) => Some(Recipes::Any),
        Some(_) => None,
        // These only spare moving something.
        None => unplanned.filter(|recipes| *recipes != Recipes::Near || place == Place::Below),
    };
    recipes.map_or(Decision::Save(place), |by| Decision::Recompute { by, otherwise: place })
}

/// Which recipes count in a step with this plan where nothing is planned.
pub(crate) fn unplanned(plan: &StepPlan) -> Option<Recipes> {
    match plan {
        StepPlan { recomputes_marked: true, .. } => Some(Recipes::Marked),
        StepPlan { recomputed: Recomputed::Nothing, .. } => None,
        _ => Some(Recipes::Near),
    }
}

/// What a step with this plan does with segments.
pub(crate) fn segments(plan: &StepPlan) -> Segments {
    match plan.saves {
        Saves::Scheduled { .. } | Saves::InTurn(_) if plan.offers_segments() => Segments::Offered,
        Saves::Scheduled { .. } | Saves::InTurn(_) => Segments::Left,
        Saves::Count | Saves::Leave | Saves::Keep | Saves::Move if plan.recomputes_marked => {
            Segments::Recomputed
        }
        Saves::Count | Saves::Leave | Saves::Keep | Saves::Move if plan.profiled => Segments::Offered,
        Saves::Count | Saves::Leave | Saves::Keep | Saves::Move => Segments::Left,
    }
}

/// Why a tensor stays in the graph whatever the step is told; `None` if it could be moved.
pub(crate) fn stays(facts: Facts, min_bytes: u64) -> Option<KeepReason> {
    if !facts.movable {
        Some(KeepReason::Ineligible)
    } else if facts.parameter {
        Some(KeepReason::Parameter)
    } else if facts.storage_bytes < min_bytes {
        Some(KeepReason::Small)
    } else if facts.held {
        Some(KeepReason::HeldElsewhere)
    } else {
        None
    }
}

impl Place {
    /// Whether a plan or a policy has decided it, and not what the tensor is.
    pub(crate) fn was_chosen(self) -> bool {
        matches!(self, Place::Graph(KeepReason::Policy) | Place::Device | Place::Below)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::Arc;

    use ssdtrain_plan::{Budgets, Course, Headroom, PlannedSave, Position, Schedule, ScopeId};

    use super::*;

    use Placement::{Disk, Host, Keep, Recompute};

    const MIN_BYTES: u64 = 1 << 16;
    const LARGE: Facts = Facts { movable: true, parameter: false, storage_bytes: 1 << 20, held: false };
    const MOVE: Instruction =
        Instruction { keeps_all: false, scope_kept: false, planned: None, unplanned: None };
    const KEPT: Place = Place::Graph(KeepReason::Policy);

    fn again(by: Recipes, otherwise: Place) -> Decision {
        Decision::Recompute { by, otherwise }
    }

    #[test]
    fn what_a_tensor_is_decides_before_what_the_step_is_told() {
        let stays = [
            (Facts { movable: false, ..LARGE }, KeepReason::Ineligible),
            (Facts { parameter: true, ..LARGE }, KeepReason::Parameter),
            (Facts { storage_bytes: MIN_BYTES - 1, ..LARGE }, KeepReason::Small),
            (Facts { held: true, ..LARGE }, KeepReason::HeldElsewhere),
            // Of several reasons, the first one.
            (Facts { movable: false, parameter: true, storage_bytes: 0, held: true }, KeepReason::Ineligible),
            (Facts { parameter: true, storage_bytes: 0, held: true, ..LARGE }, KeepReason::Parameter),
            (Facts { storage_bytes: 0, held: true, ..LARGE }, KeepReason::Small),
        ];
        for (facts, reason) in stays {
            let asked = || panic!("a plan has no line for {facts:?}");
            assert_eq!(decide(facts, MIN_BYTES, asked), Decision::Save(Place::Graph(reason)), "{facts:?}");
        }
        let just = Facts { storage_bytes: MIN_BYTES, ..LARGE };
        assert_eq!(decide(just, MIN_BYTES, || MOVE), Decision::Save(Place::Below));
    }

    #[test]
    fn what_could_be_moved_goes_where_the_step_is_told() {
        let told = |planned| Instruction { planned, ..MOVE };
        let scope_kept = |planned| Instruction { scope_kept: true, planned, ..MOVE };
        let marks = |instruction| Instruction { unplanned: Some(Recipes::Marked), ..instruction };
        let near = |instruction| Instruction { unplanned: Some(Recipes::Near), ..instruction };
        let keeps_all = |planned| Instruction { keeps_all: true, planned, ..MOVE };
        let table = [
            // Planned, or not.
            (told(None), Decision::Save(Place::Below)),
            (told(Some(Keep)), Decision::Save(Place::Device)),
            (told(Some(Host)), Decision::Save(Place::Below)),
            (told(Some(Disk)), Decision::Save(Place::Below)),
            (told(Some(Recompute)), again(Recipes::Any, Place::Below)),
            // In a scope that keeps what it saves.
            (scope_kept(None), Decision::Save(Place::Device)),
            (scope_kept(Some(Disk)), Decision::Save(Place::Device)),
            (scope_kept(Some(Recompute)), again(Recipes::Any, Place::Device)),
            // What was marked is computed again, unless it is planned otherwise.
            (marks(told(None)), again(Recipes::Marked, Place::Below)),
            (marks(told(Some(Keep))), Decision::Save(Place::Device)),
            (marks(told(Some(Host))), Decision::Save(Place::Below)),
            (marks(scope_kept(None)), again(Recipes::Marked, Place::Device)),
            // What a few operations make again need not be moved.
            (near(told(None)), again(Recipes::Near, Place::Below)),
            (near(told(Some(Host))), Decision::Save(Place::Below)),
            (near(told(Some(Recompute))), again(Recipes::Any, Place::Below)),
            (near(scope_kept(None)), Decision::Save(Place::Device)),
            (near(keeps_all(None)), Decision::Save(KEPT)),
            // Nothing is entered in the cache.
            (keeps_all(None), Decision::Save(KEPT)),
            (keeps_all(Some(Disk)), Decision::Save(KEPT)),
            (keeps_all(Some(Recompute)), again(Recipes::Any, KEPT)),
            (marks(keeps_all(None)), again(Recipes::Marked, KEPT)),
        ];
        for (instruction, expected) in table {
            assert_eq!(decide(LARGE, MIN_BYTES, || instruction), expected, "{instruction:?}");
        }
    }

    #[test]
    fn segments_run_again_where_nothing_is_planned_and_are_offered_where_something_needs_them() {
        let marked = |saves| StepPlan { saves, recomputes_marked: true, ..StepPlan::default() };
        for saves in [Saves::Count, Saves::Keep, Saves::Move] {
            assert_eq!(segments(&marked(saves.clone())), Segments::Recomputed);
            assert_eq!(segments(&StepPlan { saves, ..StepPlan::default() }), Segments::Left);
        }
        let profiled = StepPlan { profiled: true, ..StepPlan::default() };
        assert_eq!(segments(&profiled), Segments::Offered);
        let in_turn = |placement| marked(Saves::InTurn(Arc::new([placement])));
        assert_eq!(segments(&in_turn(Keep)), Segments::Left);
        assert_eq!(segments(&in_turn(Recompute)), Segments::Offered);
        let schedule = |placement| {
            let (scope, position) = (ScopeId::default(), Position::default());
            Schedule::new(
                vec![PlannedSave { bytes: 1, scope, placement, position, varies: false }],
                HashMap::new(),
                0,
            )
        };
        let scheduled = |schedule| {
            let schedule = Arc::new(schedule);
            let courses = vec![Course {
                schedule,
                budgets: Budgets::default(),
                is_baseline: false,
                is_interim: false,
                in_graph: 0,
                whole_up_to: 0.0,
            }];
            marked(Saves::Scheduled { courses, unplanned: Headroom::Free })
        };
        assert_eq!(segments(&scheduled(schedule(Keep))), Segments::Left);
        assert_eq!(segments(&scheduled(schedule(Recompute))), Segments::Offered);
        assert_eq!(segments(&scheduled(schedule(Recompute).without_segments())), Segments::Left);
    }

    #[test]
    fn only_what_could_be_moved_has_a_chosen_place() {
        assert!([KEPT, Place::Device, Place::Below].into_iter().all(Place::was_chosen));
        let of_itself =
            [KeepReason::Ineligible, KeepReason::Parameter, KeepReason::Small, KeepReason::HeldElsewhere];
        assert!(!of_itself.into_iter().any(|reason| Place::Graph(reason).was_chosen()));
    }
}
