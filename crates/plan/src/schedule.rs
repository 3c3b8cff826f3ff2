//! A plan in the form that a step's saves look it up: for each thread, one line for each save, in their order.

mod strand;

use std::collections::{BTreeMap, HashMap};

pub(crate) use self::strand::is_in_proportion;
pub use self::strand::{Found, Place, PlannedSave, Saving, Strand};
use crate::{Placement, Position};

/// The planned placements of a micro-batch's saves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// What each thread saves.
    strands: Vec<Strand>,
    results: HashMap<(Position, usize), Placement>,
    without_segments: bool,
    bytes: u64,
    kept_bytes: u64,
}

impl Schedule {
    /// With the placements of `saves`, in their order, and those of the `results` of recorded operations, saved or not:
    /// the operation, and which of its results. What has fewer than `min_bytes` bytes is not moved, and has no line.
    pub fn new(
        saves: Vec<PlannedSave>,
        results: HashMap<(Position, usize), Placement>,
        min_bytes: u64,
    ) -> Schedule {
        let bytes = saves.iter().map(|save| save.bytes).sum();
        let kept = saves.iter().filter(|save| save.placement == Placement::Keep);
        let kept_bytes = kept.map(|save| save.bytes).sum();
        let mut strands: BTreeMap<u32, Vec<PlannedSave>> = BTreeMap::new();
        for save in saves {
            strands.entry(save.position.strand).or_default().push(save);
        }
        let strands = strands.into_iter().map(|(number, saves)| Strand::new(number, saves, min_bytes));
        Schedule { strands: strands.collect(), results, without_segments: false, bytes, kept_bytes }
    }

    /// The same, where recorded operations make everything that is to be computed again: segments of the program are run
    /// like everything else.
    #[must_use]
    pub fn without_segments(self) -> Schedule {
        Schedule { without_segments: true, ..self }
    }

    /// The same, where some lines are of the same storage: what stays has so many bytes in all.
    #[must_use]
    pub fn keeping(self, kept_bytes: u64) -> Schedule {
        Schedule { kept_bytes, ..self }
    }

    /// What each thread saves.
    pub fn strands(&self) -> &[Strand] {
        &self.strands
    }

    /// All lines, thread by thread.
    pub fn saves(&self) -> impl Iterator<Item = &PlannedSave> {
        self.strands.iter().flat_map(Strand::saves)
    }

    /// The bytes of all lines.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The bytes of what stays on the device.
    pub fn kept_bytes(&self) -> u64 {
        self.kept_bytes
    }

    /// Whether a step that may not grow may have saved so many bytes on this line, after which its thread is at `place`: no more than planned
    /// or, if its size goes with no other's, no more in all such lines of the micro-batch than these are planned to have.
    pub fn has_room(&self, place: &Place, line: &PlannedSave, bytes: u64) -> bool {
        self.strands.get(place.strand).is_some_and(|strand| strand.has_room(place, line, bytes))
    }

    /// The placement of a result of a recorded operation; `None` if nothing is planned for it.
    pub fn result(&self, operation: Position, result: usize) -> Option<Placement> {
        self.results.get(&(operation, result)).copied()
    }

    /// Whether anything is to be computed again.
    pub fn recomputes(&self) -> bool {
        self.saves().any(|save| save.placement == Placement::Recompute)
    }

    /// Whether segments of the program may have to run again.
    pub fn offers_segments(&self) -> bool {
        self.recomputes() && !self.without_segments
    }

    /// The place of a thread in this schedule whose first save is `saving`; `is_taken` says which of the strands other
    /// threads follow. Of several that fit, the one that is closest in size.
    pub fn enter(&self, saving: Saving, is_taken: impl Fn(usize) -> bool) -> Option<Place> {
        let fitting = self.strands.iter().enumerate().filter(|(number, _)| !is_taken(*number));
        let places = fitting.filter_map(|(number, strand)| strand.begin(number, saving));
        places.min_by(|one, other| one.odds().total_cmp(&other.odds()))
    }

    /// Looks for the line of the next save on the thread at `place`, which moves on if there is one.
    pub fn find(&self, place: &mut Place, saving: Saving) -> Found<'_> {
        self.strands.get(place.strand).map_or(Found::Nothing, |strand| strand.find(place, saving))
    }

    /// Looks for a line like that of a save that has none where it is: later ones first, and then earlier ones.
    pub fn resume(&self, place: &mut Place, saving: Saving) -> Option<&PlannedSave> {
        self.strands.get(place.strand)?.resume(place, saving)
    }

    /// Whether `place` is neither before the first line nor after the last.
    pub fn is_within(&self, place: &Place) -> bool {
        self.strands.get(place.strand).is_some_and(|strand| (1..strand.saves().len()).contains(&place.next))
    }

    /// Whether `place` is after the last line.
    pub fn is_at_end(&self, place: &Place) -> bool {
        self.strands.get(place.strand).is_some_and(|strand| place.next >= strand.saves().len())
    }

    /// Whether a step that follows `other` to its end also follows this schedule, and saves no more in all. Unless it `may_grow`, it saves no
    /// more anywhere either, but where sizes go with no other's.
    pub fn covers(&self, other: &Schedule, may_grow: bool) -> bool {
        other.strands.len() <= self.strands.len()
            && other.bytes() as f64 <= SLACK * self.bytes() as f64
            && other.strands.iter().zip(&self.strands).all(|(other, strand)| strand.covers(other, may_grow))
    }
}

/// Sizes differ by no more than this from what they are expected to be.
const SLACK: f64 = 1.01;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ScopeId;

    fn on(strand: u32, bytes: u64) -> PlannedSave {
        let position = Position { strand, index: 0 };
        let (scope, placement) = (ScopeId::default(), Placement::Keep);
        PlannedSave { bytes, scope, placement, position, varies: false }
    }

    fn schedule(saves: &[PlannedSave]) -> Schedule {
        Schedule::new(saves.to_vec(), HashMap::new(), 0)
    }

    #[test]
    fn a_schedule_covers_those_of_smaller_micro_batches() {
        let [small, large] = [1, 2].map(|size| schedule(&[on(0, size), on(0, 2 * size)]));
        assert!([true, false].into_iter().all(|may_grow| {
            large.covers(&small, may_grow)
                && large.covers(&large, may_grow)
                && !small.covers(&large, may_grow)
        }));
        assert!(!large.covers(&schedule(&[on(0, 1)]), true), "nor shorter ones");
        assert!(!large.covers(&schedule(&[on(0, 1), on(0, 2), on(1, 1)]), true), "nor those of more threads");
    }

    #[test]
    fn a_schedule_covers_those_whose_parts_vary_and_are_no_larger_in_all() {
        let varying = |sizes: [u64; 3]| {
            let save = |(number, bytes)| PlannedSave { varies: number > 0, ..on(0, bytes) };
            schedule(&sizes.into_iter().enumerate().map(save).collect::<Vec<_>>())
        };
        let known = varying([1000, 100, 100]);
        assert!(
            known.covers(&varying([1000, 150, 50]), false) && !known.covers(&varying([900, 150, 100]), false)
        );
        assert!(known.covers(&varying([900, 150, 100]), true));
    }

    #[test]
    fn each_thread_follows_the_strand_that_its_first_save_fits() {
        let two = schedule(&[on(0, 1000), on(1, 300), on(0, 10), on(1, 20)]);
        let saving = |bytes| Saving { bytes, scope: ScopeId::default(), position: None };
        let second = two.enter(saving(300), |_| false);
        assert_eq!(second.map(|place| place.strand), Some(1), "the one of its size");
        let first = two.enter(saving(1000), |strand| strand == 1);
        assert_eq!(first.map(|place| place.strand), Some(0));
        assert_eq!(two.enter(saving(1000), |_| true), None);
    }
}
