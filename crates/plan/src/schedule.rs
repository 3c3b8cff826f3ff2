//! A plan in the form that a step's saves look it up: one line for each save, in their order.

use std::collections::HashMap;

use crate::{Placement, ScopeId};

/// The planned placements of a micro-batch's saves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    saves: Vec<PlannedSave>,
    /// What is smaller is not moved, and has no line.
    min_bytes: u64,
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
        Schedule { saves, min_bytes: 0, results, without_segments: false }
    }

    /// The same, where recorded operations make everything that is to be computed again: segments of the program are run
    /// like everything else.
    #[must_use]
    pub fn without_segments(self) -> Schedule {
        Schedule { without_segments: true, ..self }
    }

    /// The same, where storages of fewer bytes than this have no line.
    #[must_use]
    pub fn of_at_least(self, min_bytes: u64) -> Schedule {
        Schedule { min_bytes, ..self }
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

    /// Whether a step that follows `other` to its end also follows this schedule, and is no larger.
    pub fn covers(&self, other: &Schedule) -> bool {
        let mut place = Place::default();
        let follows = other.saves.iter().all(|save| {
            matches!(self.find(&mut place, save.bytes, save.scope), Found::Line(_)) && place.times() <= 1.0
        });
        follows
            && self.saves[place.next.min(self.saves.len())..]
                .iter()
                .all(|save| self.may_lack(save, place.times()))
    }

    /// Looks for the line of the next save, which has `bytes` bytes and is in `scope`. Steps of other shapes follow the
    /// schedule as well: their storages are larger or smaller, by up to the square of what the first one is.
    pub fn find(&self, place: &mut Place, bytes: u64, scope: ScopeId) -> Found {
        if place.times.is_none() && !self.begin(place, bytes, scope) {
            return Found::Nothing;
        }
        let most = place.most();
        for (at, save) in self.saves.iter().enumerate().skip(place.next) {
            if save.scope == scope && save.is_like(bytes, most) {
                place.next = at + 1;
                return Found::Line(at);
            }
            if !self.may_lack(save, place.times()) {
                break;
            }
        }
        // In steps as small as the planned one, it was too small to be moved.
        if place.times() > 1.0 && (bytes as f64) < most * self.min_bytes as f64 {
            Found::Unplanned
        } else {
            Found::Nothing
        }
    }

    /// Finds out how large the step is by its first save, whose line may not be the first one.
    fn begin(&self, place: &mut Place, bytes: u64, scope: ScopeId) -> bool {
        let lines = self.saves.iter().take(FIRST).enumerate().filter(|(_, save)| save.scope == scope);
        let times = lines.map(|(at, save)| (at, bytes as f64 / save.bytes.max(1) as f64));
        let mut fitting =
            times.filter(|(at, times)| self.saves[..*at].iter().all(|save| self.may_lack(save, *times)));
        let Some((first, larger)) = fitting.next() else { return false };
        let (first, times) = if larger > 1.0 {
            fitting.find(|(_, times)| *times <= 1.0).unwrap_or((first, larger))
        } else {
            (first, larger)
        };
        (place.next, place.times) = (first, Some(times));
        true
    }

    /// Whether a step whose first storage has so many times the planned bytes may have something too small to be moved in place of this.
    fn may_lack(&self, save: &PlannedSave, times: f64) -> bool {
        times < 1.0 && save.bytes as f64 * times * times < self.min_bytes as f64
    }
}

/// How many lines may be passed over before the first one.
const FIRST: usize = 8;
/// Sizes differ by no more than this from what they are expected to be.
const SLACK: f64 = 1.01;

/// Where a step is in its schedule.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Place {
    /// The number of the next line.
    pub next: usize,
    /// How many times the planned bytes the first storage had, once that is known.
    pub times: Option<f64>,
}

/// The line of a save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// It has this number.
    Line(usize),
    /// The schedule has none, but goes on after it.
    Unplanned,
    /// The step does something else than planned.
    Nothing,
}

impl Place {
    /// How many times the planned bytes the first storage had.
    pub fn times(self) -> f64 {
        self.times.unwrap_or(1.0)
    }

    /// The place of the first save of another micro-batch like this one.
    #[must_use]
    pub fn again(self) -> Place {
        Place { next: 0, ..self }
    }

    /// How many times the planned bytes a storage may have.
    fn most(self) -> f64 {
        self.times().max(1.0).powi(2)
    }
}

impl PlannedSave {
    /// Whether a storage of `bytes` bytes may be in place of the planned one, where storages have up to `most` times the planned bytes.
    /// Those of smaller steps take no more than was planned, and those of larger ones no less.
    fn is_like(&self, bytes: u64, most: f64) -> bool {
        let times = bytes as f64 / self.bytes.max(1) as f64;
        if most > 1.0 { (1.0 / SLACK..=SLACK * most).contains(&times) } else { bytes <= self.bytes }
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

    const KEEP: Placement = Placement::Keep;

    /// The lines of a step's saves.
    fn found(schedule: &Schedule, saves: &[u64]) -> Vec<Found> {
        let mut place = Place::default();
        saves.iter().map(|bytes| schedule.find(&mut place, *bytes, ScopeId::default())).collect()
    }

    #[test]
    fn what_is_too_small_to_be_moved_in_a_smaller_step_is_passed_over() {
        let large =
            schedule(&[(64, KEEP), (4000, KEEP), (64, KEEP), (8000, KEEP), (64, KEEP)]).of_at_least(64);
        let lines = |lines: &[usize]| lines.iter().map(|line| Found::Line(*line)).collect::<Vec<_>>();
        assert_eq!(found(&large, &[64, 4000, 64, 8000, 64]), lines(&[0, 1, 2, 3, 4]));
        assert_eq!(found(&large, &[2000, 4000]), lines(&[1, 3]));
        assert!(large.covers(&schedule(&[(2000, KEEP), (4000, KEEP)])));
        assert!(!large.covers(&schedule(&[(2000, KEEP)])), "a large one is missing");
    }

    #[test]
    fn larger_steps_follow_with_all_their_storages() {
        let small = schedule(&[(1000, KEEP), (3000, KEEP), (500, KEEP)]).of_at_least(300);
        let lines = [Found::Line(0), Found::Line(1), Found::Line(2)];
        assert_eq!(found(&small, &[2000, 6000, 1000]), lines);
        assert_eq!(found(&small, &[2000, 12_000, 500]), lines, "some grow by the square, and some do not");
        let [first, second, third] = lines;
        assert_eq!(found(&small, &[2000, 600, 6000, 1000]), [first, Found::Unplanned, second, third]);
        assert_eq!(found(&small, &[2000, 13_000])[1], Found::Nothing);
        assert_eq!(found(&small, &[2000, 2900])[1], Found::Nothing, "nothing of it is smaller");
        assert!(!small.covers(&schedule(&[(2000, KEEP), (6000, KEEP), (1000, KEEP)])));
    }
}
