//! A plan in the form that a step's saves look it up: one entry for each save, in their order.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use ssdtrain_plan::Placement;

use crate::telemetry::ScopeId;

/// The planned placements of a micro-batch's saves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Schedule(Vec<PlannedSave>);

/// One save that could be moved, and its placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlannedSave {
    pub(crate) bytes: u64,
    pub(crate) scope: ScopeId,
    pub(crate) placement: Placement,
}

/// A step's position in its schedule. A step without a schedule has no planned saves.
#[derive(Debug, Default)]
pub(crate) struct Cursor {
    schedule: Option<Arc<Schedule>>,
    /// Placements to use cyclically, whatever is saved.
    forced: Option<Arc<[Placement]>>,
    next: AtomicUsize,
    /// How often the schedule was read to its end.
    ends: AtomicU32,
    /// The step saved something smaller than scheduled, or only a part of it.
    part: AtomicBool,
    lost: AtomicBool,
    /// What has a recipe is saved anyway, unless the plan says otherwise.
    saves_all: bool,
}

/// How well a step followed its schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Adherence {
    /// Each of this many micro-batches followed it to its end.
    Whole(u32),
    /// It saved less, or smaller storages. The plan remains valid, but the step's costs say little about it.
    Part,
    /// It saved something else.
    Lost,
}

impl Schedule {
    pub(crate) fn new(saves: Vec<PlannedSave>) -> Schedule {
        Schedule(saves)
    }

    /// Whether a step that follows `other` to its end also follows this schedule.
    pub(crate) fn covers(&self, other: &Schedule) -> bool {
        self.0.len() == other.0.len()
            && self.0.iter().zip(&other.0).all(|(save, other)| save.is_for(other.bytes, other.scope))
    }
}

impl PlannedSave {
    /// A smaller storage at the same position belongs to a smaller micro-batch, and takes no more than was planned.
    fn is_for(&self, bytes: u64, scope: ScopeId) -> bool {
        self.scope == scope && bytes <= self.bytes
    }
}

impl Cursor {
    pub(crate) fn new(schedule: Arc<Schedule>) -> Cursor {
        Cursor { schedule: Some(schedule), saves_all: true, ..Cursor::default() }
    }

    /// For a step that is to show what it saves, or that keeps what fits.
    pub(crate) fn of_all() -> Cursor {
        Cursor { saves_all: true, ..Cursor::default() }
    }

    /// For a step that uses these placements cyclically, whatever it saves.
    pub(crate) fn forced(placements: Arc<[Placement]>) -> Cursor {
        Cursor { forced: Some(placements), ..Cursor::default() }
    }

    /// Whether a save that has a recipe needs no bytes, given its planned placement.
    pub(crate) fn recomputes(&self, planned: Option<Placement>) -> bool {
        planned.map_or(!self.saves_all, |planned| planned == Placement::Recompute)
    }

    /// The placement of the next save; `None` if nothing was planned for it. From the first save that does not match the schedule on,
    /// nothing is, up to the end of the step. After the last save the schedule may start again: with the next micro-batch, if the program
    /// ran backward itself and not through the cache.
    pub(crate) fn next(&self, bytes: u64, scope: ScopeId) -> Option<Placement> {
        if let Some(forced) = &self.forced {
            return forced.get(self.next.fetch_add(1, Ordering::Relaxed) % forced.len().max(1)).copied();
        }
        let saves = &self.schedule.as_ref()?.0;
        if self.is_lost() {
            return None;
        }
        let mut at = self.next.fetch_add(1, Ordering::Relaxed);
        if at >= saves.len() {
            at = 0;
            self.next.store(1, Ordering::Relaxed);
        }
        let Some(save) = saves.get(at).filter(|save| save.is_for(bytes, scope)) else {
            self.lost.store(true, Ordering::Relaxed);
            return None;
        };
        if bytes < save.bytes {
            self.part.store(true, Ordering::Relaxed);
        }
        if at + 1 == saves.len() {
            self.ends.fetch_add(1, Ordering::Relaxed);
        }
        Some(save.placement)
    }

    /// A micro-batch begins.
    pub(crate) fn rewind(&self) {
        if self.is_within(self.next.swap(0, Ordering::Relaxed)) {
            self.part.store(true, Ordering::Relaxed);
        }
    }

    /// Whether the step has deviated from its plan.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// How well the step, which has ended, followed its schedule; `None` if it has none.
    pub(crate) fn followed(&self) -> Option<Adherence> {
        self.schedule.as_ref()?;
        let ends = self.ends.load(Ordering::Relaxed);
        let part = self.part.load(Ordering::Relaxed) || self.is_within(self.next.load(Ordering::Relaxed));
        Some(match (self.is_lost(), part || ends == 0) {
            (true, _) => Adherence::Lost,
            (false, true) => Adherence::Part,
            (false, false) => Adherence::Whole(ends),
        })
    }

    /// Whether save number `next` is neither the first nor after the last.
    fn is_within(&self, next: usize) -> bool {
        self.schedule.as_ref().is_some_and(|schedule| (1..schedule.0.len()).contains(&next))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saves(saves: &[(u64, Placement)]) -> Arc<Schedule> {
        let save = |&(bytes, placement)| PlannedSave { bytes, scope: ScopeId::default(), placement };
        Arc::new(Schedule::new(saves.iter().map(save).collect()))
    }

    fn schedule(of: &[(u64, Placement)]) -> Cursor {
        Cursor::new(saves(of))
    }

    fn next(cursor: &Cursor, bytes: u64) -> Option<Placement> {
        cursor.next(bytes, ScopeId::default())
    }

    const TWO: [(u64, Placement); 2] = [(1, Placement::Keep), (2, Placement::Host)];

    #[test]
    fn each_micro_batch_reads_it_from_the_beginning() {
        for told in [true, false] {
            let cursor = schedule(&TWO);
            for _ in 0..2 {
                if told {
                    cursor.rewind();
                }
                assert_eq!(
                    [1, 2].map(|bytes| next(&cursor, bytes)),
                    [Some(Placement::Keep), Some(Placement::Host)]
                );
            }
            assert_eq!(cursor.followed(), Some(Adherence::Whole(2)));
        }
    }

    #[test]
    fn a_save_that_was_not_planned_ends_the_plan() {
        for saves in [&[1, 3, 2][..], &[1, 2, 2, 2]] {
            let cursor = schedule(&[(1, Placement::Keep), (2, Placement::Host), (2, Placement::Disk)]);
            let last = saves.iter().map(|&bytes| next(&cursor, bytes)).last();
            assert_eq!((last, cursor.followed()), (Some(None), Some(Adherence::Lost)), "{saves:?}");
            cursor.rewind();
            assert_eq!(next(&cursor, 1), None, "to the end of the step");
        }
    }

    #[test]
    fn smaller_saves_and_fewer_of_them_keep_to_a_part_of_the_plan() {
        let smaller = schedule(&TWO);
        assert_eq!([1, 1].map(|bytes| next(&smaller, bytes)), TWO.map(|(_, placement)| Some(placement)));
        let fewer = schedule(&TWO);
        next(&fewer, 1);
        let begun_again = schedule(&TWO);
        next(&begun_again, 1);
        begun_again.rewind();
        assert_eq!([1, 2].map(|bytes| next(&begun_again, bytes)), TWO.map(|(_, placement)| Some(placement)));
        for cursor in [smaller, fewer, begun_again, schedule(&TWO)] {
            assert_eq!(cursor.followed(), Some(Adherence::Part), "{cursor:?}");
        }
    }

    #[test]
    fn a_script_covers_those_of_smaller_micro_batches() {
        let [small, large] =
            [1, 2].map(|size| saves(&[(size, Placement::Keep), (2 * size, Placement::Host)]));
        assert!(large.covers(&small) && large.covers(&large) && !small.covers(&large));
        assert!(!large.covers(&saves(&[(1, Placement::Keep)])), "nor shorter ones");
    }

    #[test]
    fn what_has_a_recipe_is_recomputed_unless_something_else_is_planned() {
        let keep = Some(Placement::Keep);
        assert_eq!([None, keep].map(|planned| Cursor::default().recomputes(planned)), [true, false]);
        assert_eq!([None, keep].map(|planned| Cursor::of_all().recomputes(planned)), [false, false]);
    }

    #[test]
    fn without_a_script_nothing_is_planned_or_lost() {
        let cursor = Cursor::default();
        assert_eq!((next(&cursor, 1), cursor.followed()), (None, None));
    }
}
