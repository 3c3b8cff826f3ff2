//! The position of a step in the schedule of its saves.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use parking_lot::Mutex;
use ssdtrain_plan::{Adherence, Found, Headroom, Place, Placement, Saves, Schedule};

use crate::telemetry::ScopeId;

/// A step's position in its schedule. A step without a schedule has no planned saves.
#[derive(Debug, Default)]
pub(crate) struct Cursor {
    schedule: Option<Arc<Schedule>>,
    /// Placements to use cyclically, whatever is saved.
    in_turn: Option<Arc<[Placement]>>,
    next: AtomicUsize,
    place: Mutex<Place>,
    /// Whether steps that are larger than planned follow the schedule too.
    grows: bool,
    /// How often the schedule was read to its end.
    ends: AtomicU32,
    /// The step saved something smaller than scheduled, or only a part of it.
    part: AtomicBool,
    /// The step is larger than planned.
    larger: AtomicBool,
    lost: AtomicBool,
}

impl Cursor {
    /// For a step whose saves are to be treated like this.
    pub(crate) fn new(saves: &Saves) -> Cursor {
        match saves {
            Saves::Scheduled { schedule, unplanned } => {
                // With a limit on bytes, a larger step has to find its own way to keep to it.
                let grows = *unplanned == Headroom::Free;
                Cursor { schedule: Some(Arc::clone(schedule)), grows, ..Cursor::default() }
            }
            Saves::InTurn(placements) => {
                Cursor { in_turn: Some(Arc::clone(placements)), ..Cursor::default() }
            }
            Saves::Keep => Cursor { in_turn: Some(Arc::new([Placement::Keep])), ..Cursor::default() },
            Saves::Count | Saves::Move => Cursor::default(),
        }
    }

    /// The placement of the next save; `None` if nothing was planned for it. From the first save that does not match the schedule on,
    /// nothing is, up to the end of the step. After the last save the schedule may start again: with the next micro-batch, if the program
    /// ran backward itself and not through the cache.
    pub(crate) fn next(&self, bytes: u64, scope: ScopeId) -> Option<Placement> {
        if let Some(in_turn) = &self.in_turn {
            return in_turn.get(self.next.fetch_add(1, Ordering::Relaxed) % in_turn.len().max(1)).copied();
        }
        let schedule = self.schedule.as_ref()?;
        if self.is_lost() {
            return None;
        }
        let mut place = self.place.lock();
        if place.next >= schedule.saves().len() {
            *place = place.again();
        }
        let found = schedule.find(&mut place, bytes, scope);
        let is_larger = place.times() > 1.0;
        let line = match found {
            Found::Line(line) if self.grows || !is_larger => schedule.saves().get(line),
            // It is small.
            Found::Unplanned if self.grows => return Some(Placement::Keep),
            _ => None,
        };
        let Some(save) = line else {
            self.lost.store(true, Ordering::Relaxed);
            return None;
        };
        if is_larger {
            self.larger.store(true, Ordering::Relaxed);
        } else if bytes < save.bytes {
            self.part.store(true, Ordering::Relaxed);
        }
        if place.next == schedule.saves().len() {
            self.ends.fetch_add(1, Ordering::Relaxed);
        }
        Some(save.placement)
    }

    /// How many times the planned size the micro-batch has by its first save; 1 if it is no larger.
    pub(crate) fn times(&self) -> f64 {
        if self.larger.load(Ordering::Relaxed) { self.place.lock().times().max(1.0) } else { 1.0 }
    }

    /// The planned placement of a result of a recorded operation; `None` if nothing was planned for it.
    pub(crate) fn result(&self, operation: u64, result: usize) -> Option<Placement> {
        if let Some(in_turn) = &self.in_turn {
            // One more than there are, so that for some nothing is planned.
            return in_turn.get((operation as usize + result) % (in_turn.len() + 1)).copied();
        }
        let schedule = self.schedule.as_ref().filter(|_| !self.is_lost())?;
        schedule.result(operation, result)
    }

    /// A micro-batch begins.
    pub(crate) fn rewind(&self) {
        let ended = std::mem::take(&mut *self.place.lock());
        self.next.store(0, Ordering::Relaxed);
        if self.is_within(ended.next) {
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
        let part = self.part.load(Ordering::Relaxed) || self.is_within(self.place.lock().next);
        Some(match () {
            () if self.is_lost() => Adherence::Lost,
            () if self.larger.load(Ordering::Relaxed) => Adherence::Larger,
            () if part || ends == 0 => Adherence::Part,
            () => Adherence::Whole(ends),
        })
    }

    /// Whether save number `next` is neither the first nor after the last.
    fn is_within(&self, next: usize) -> bool {
        self.schedule.as_ref().is_some_and(|schedule| (1..schedule.saves().len()).contains(&next))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use ssdtrain_plan::PlannedSave;

    use super::*;

    fn schedule(saves: &[(u64, Placement)]) -> Cursor {
        let save = |&(bytes, placement)| PlannedSave { bytes, scope: ScopeId::default(), placement };
        let schedule = Arc::new(Schedule::new(saves.iter().map(save).collect(), HashMap::new()));
        Cursor::new(&Saves::Scheduled { schedule, unplanned: Headroom::Free })
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
    fn larger_saves_follow_unless_bytes_are_limited() {
        let larger = schedule(&TWO);
        assert_eq!([3, 6].map(|bytes| next(&larger, bytes)), TWO.map(|(_, placement)| Some(placement)));
        assert_eq!((larger.followed(), larger.times()), (Some(Adherence::Larger), 3.0));
        let limited = Cursor { grows: false, ..schedule(&TWO) };
        assert_eq!((next(&limited, 3), limited.followed()), (None, Some(Adherence::Lost)));
    }

    #[test]
    fn without_a_script_nothing_is_planned_or_lost() {
        for saves in [Saves::Count, Saves::Move] {
            let cursor = Cursor::new(&saves);
            assert_eq!((next(&cursor, 1), cursor.followed()), (None, None), "{saves:?}");
        }
    }

    #[test]
    fn what_is_placed_in_turn_is_never_lost() {
        let places = [Placement::Keep, Placement::Disk];
        for (saves, expected) in [
            (Saves::Keep, [Placement::Keep; 3]),
            (Saves::InTurn(Arc::new(places)), [Placement::Keep, Placement::Disk, Placement::Keep]),
        ] {
            let cursor = Cursor::new(&saves);
            assert_eq!([1, 9, 1].map(|bytes| next(&cursor, bytes)), expected.map(Some), "{saves:?}");
            assert_eq!((cursor.followed(), cursor.is_lost()), (None, false), "{saves:?}");
        }
    }
}
