//! A plan in the form that a step's saves look it up: one line for each save, in their order.

use std::collections::HashMap;

use crate::{Placement, ScopeId};

/// The planned placements of a micro-batch's saves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    saves: Vec<PlannedSave>,
    results: HashMap<(u64, usize), Placement>,
    without_segments: bool,
}

/// One save that could be moved, and its placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedSave {
    /// The bytes of its storage.
    pub bytes: u64,
    /// The scope that saves it.
    pub scope: ScopeId,
    /// Where it goes.
    pub placement: Placement,
}

impl Schedule {
    /// With the placements of `saves`, in their order, and those of the `results` of recorded operations, saved or not:
    /// the operation's number, and which of its results.
    pub fn new(saves: Vec<PlannedSave>, results: HashMap<(u64, usize), Placement>) -> Schedule {
        Schedule { saves, results, without_segments: false }
    }

    /// The same, where recorded operations make everything that is to be computed again: segments of the program are run
    /// like everything else.
    #[must_use]
    pub fn without_segments(self) -> Schedule {
        Schedule { without_segments: true, ..self }
    }

    /// A line for each save, in their order.
    pub fn saves(&self) -> &[PlannedSave] {
        &self.saves
    }

    /// The placement of a result of a recorded operation; `None` if nothing is planned for it.
    pub fn result(&self, operation: u64, result: usize) -> Option<Placement> {
        self.results.get(&(operation, result)).copied()
    }

    /// Whether anything is to be computed again.
    pub fn recomputes(&self) -> bool {
        self.saves.iter().any(|save| save.placement == Placement::Recompute)
    }

    /// Whether segments of the program may have to run again.
    pub fn offers_segments(&self) -> bool {
        self.recomputes() && !self.without_segments
    }

    /// Whether a step that follows `other` to its end also follows this schedule.
    pub fn covers(&self, other: &Schedule) -> bool {
        self.saves.len() == other.saves.len()
            && self.saves.iter().zip(&other.saves).all(|(save, other)| save.is_for(other.bytes, other.scope))
    }
}

impl PlannedSave {
    /// Whether the line is for a save of `bytes` bytes in `scope`. A smaller storage at the same position belongs to a
    /// smaller micro-batch, and takes no more than was planned.
    pub fn is_for(&self, bytes: u64, scope: ScopeId) -> bool {
        self.scope == scope && bytes <= self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(saves: &[(u64, Placement)]) -> Schedule {
        let save = |&(bytes, placement)| PlannedSave { bytes, scope: ScopeId::default(), placement };
        Schedule::new(saves.iter().map(save).collect(), HashMap::new())
    }

    #[test]
    fn a_schedule_covers_those_of_smaller_micro_batches() {
        let [small, large] =
            [1, 2].map(|size| schedule(&[(size, Placement::Keep), (2 * size, Placement::Host)]));
        assert!(large.covers(&small) && large.covers(&large) && !small.covers(&large));
        assert!(!large.covers(&schedule(&[(1, Placement::Keep)])), "nor shorter ones");
    }
}
