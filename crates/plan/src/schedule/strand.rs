//! What one thread saves in a micro-batch, and where a step is in it.

use super::SLACK;
use crate::{Placement, Position, ScopeId};

/// What one thread saves in a micro-batch: a line for each save, in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Strand {
    /// The thread's number in the positions of the plan.
    number: u32,
    saves: Vec<PlannedSave>,
    /// What is smaller is not moved, and has no line.
    min_bytes: u64,
    /// The bytes of all lines whose size goes with no other's.
    varying_bytes: u64,
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
    /// When it is saved.
    pub position: Position,
    /// Whether its size goes with no other's.
    pub varies: bool,
}

/// One save of a step, which looks for its line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saving {
    /// The bytes of its storage.
    pub bytes: u64,
    /// The scope that saves it.
    pub scope: ScopeId,
    /// When it is saved, if operations are recorded.
    pub position: Option<Position>,
}

/// The line of a save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found<'a> {
    /// This one.
    Line(&'a PlannedSave),
    /// There is none, but the step goes on after it as planned.
    Unplanned,
    /// The step does something else than planned.
    Nothing,
}

/// Where a thread is in what it is planned to save.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Place {
    /// The strand that it follows.
    pub strand: usize,
    /// The number of the next line.
    pub next: usize,
    /// How many times the planned bytes the first storage had.
    pub times: f64,
    /// How far the sizes of others were from what that lets expect: the sum of the logarithms.
    strain: f64,
    /// How many bytes were saved in this micro-batch whose size goes with no other's.
    varied: u64,
    /// How often the last line was reached.
    pub ends: u32,
    /// Whether the next save is the first of another micro-batch, which may have another size.
    is_rewound: bool,
    /// The last save of this micro-batch: the number of operations before it, and before its line.
    last: Option<(u64, u64)>,
    /// The number of operations before the last save.
    since: u64,
    /// From which operation on how many operations more are planned before each than were recorded.
    shifts: Vec<(u64, i64)>,
}

/// Where a step whose first storage is no larger than planned saves something larger, it has at most so many times the planned bytes.
const GROWN: f64 = 8.0;
/// How many lines may be passed over before the first one.
const FIRST: usize = 8;

impl Strand {
    /// The thread with this number in the positions of the plan saves these, and nothing with fewer bytes can be moved.
    pub(super) fn new(number: u32, saves: Vec<PlannedSave>, min_bytes: u64) -> Strand {
        let varying_bytes = varying(&saves);
        Strand { number, saves, min_bytes, varying_bytes }
    }

    /// A line for each save, in their order.
    pub fn saves(&self) -> &[PlannedSave] {
        &self.saves
    }

    /// The place of a thread whose first save is this, and whose line may not be the first one, in the strand with this number, which is this
    /// one. That save is still to be found.
    pub(super) fn begin(&self, strand: usize, saving: Saving) -> Option<Place> {
        let lines = self.saves.iter().take(FIRST).enumerate().filter(|(_, save)| save.scope == saving.scope);
        let times = lines.map(|(at, save)| (at, saving.bytes as f64 / save.bytes.max(1) as f64));
        let fitting =
            times.filter(|(at, times)| self.saves[..*at].iter().all(|save| self.may_lack(save, *times)));
        let odds = |times: f64| times.max(f64::MIN_POSITIVE).ln().abs();
        let (next, times) = fitting.min_by(|one, other| odds(one.1).total_cmp(&odds(other.1)))?;
        Some(Place { strand, next, times, ..Place::default() })
    }

    /// Looks for the line of the next save. Steps of other shapes follow the plan as well: their storages are larger or
    /// smaller, most of them by what the first one is, or by its square, and some by another factor. Where operations are recorded, a storage that is saved at the
    /// same point of the program has the same line, whatever its size.
    pub(super) fn find(&self, place: &mut Place, saving: Saving) -> Found<'_> {
        let is_at_end = place.next >= self.saves.len();
        let begun = (is_at_end || place.is_rewound).then(|| {
            let again = place.again();
            match self.begin(place.strand, saving) {
                // Without word of a backward, it is most likely one like the last.
                Some(begun) if place.is_rewound || !self.begins_like_it(&again, saving) => {
                    Place { next: begun.next, times: begun.times, ..again }
                }
                _ => again,
            }
        });
        let at = begun.as_ref().unwrap_or(place);
        let index = saving.position.map(|position| position.index);
        let here = || {
            let lines = self.saves.iter().enumerate().skip(at.next);
            // What varies in another scope may be nothing at all this time, such as the rows of one of several experts.
            let may_lack = |save: &PlannedSave| {
                self.may_lack(save, at.times) || (save.varies && save.scope != saving.scope)
            };
            let first = lines.clone().take_while(|(_, save)| may_lack(save)).count();
            lines.take(first + 1).filter(|(_, save)| save.scope == saving.scope)
        };
        // In steps as small as the planned one, it was too small to be moved.
        let is_small = at.times > 1.0 && (saving.bytes as f64) < at.most() * self.min_bytes as f64;
        let is_expected = |save: &PlannedSave| save.is_in_proportion(saving.bytes, at.times);
        let may_be = |save: &PlannedSave| {
            // It has no line then, and what has one may come after as many operations.
            let is_tiny = is_small && saving.bytes as f64 <= SLACK * at.times * self.min_bytes as f64;
            if is_tiny && !save.varies && save.bytes as f64 > GROWN * saving.bytes as f64 {
                return false;
            }
            let may_grow = at.times <= 1.0 || save.varies;
            let has_grown = may_grow && saving.bytes as f64 <= GROWN * at.times.max(1.0) * save.bytes as f64;
            has_grown || save.is_like(saving.bytes, at.most()) || at.leads_to(save, index)
        };
        let found = here().find(|(_, save)| is_expected(save)).or_else(|| {
            // What varies may have the size of something else that does by chance.
            let is_other = |line: &PlannedSave, save: &PlannedSave| !(line.varies && save.varies);
            let is_alone =
                |line: &PlannedSave| self.elsewhere(at, saving, |save| is_other(line, save)).is_none();
            here().find(|(_, save)| may_be(save)).filter(|(_, line)| is_alone(line))
        });
        if let Some((number, save)) = found {
            *place = begun.unwrap_or_else(|| std::mem::take(place));
            place.takes(number, save, saving);
            if !save.is_in_proportion(saving.bytes, place.times) {
                place.strain += (saving.bytes as f64 / save.bytes.max(1) as f64 / place.times).ln().abs();
            }
            place.ends += u32::from(place.next == self.saves.len());
            return Found::Line(save);
        }
        if is_small { Found::Unplanned } else { Found::Nothing }
    }

    /// Whether the first line has the scope and the size of this save.
    fn begins_like_it(&self, place: &Place, saving: Saving) -> bool {
        let first = self.saves.first().filter(|save| save.scope == saving.scope);
        first.is_some_and(|save| save.is_in_proportion(saving.bytes, place.times))
    }

    /// The next line of this scope and size that counts, or else the last one before.
    fn elsewhere(
        &self,
        place: &Place,
        saving: Saving,
        counts: impl Fn(&PlannedSave) -> bool,
    ) -> Option<usize> {
        let next = place.next.min(self.saves.len());
        let is_it = |number: &usize| {
            let save = &self.saves[*number];
            counts(save) && save.scope == saving.scope && save.is_in_proportion(saving.bytes, place.times)
        };
        (next..self.saves.len()).find(is_it).or_else(|| (0..next).rev().find(is_it))
    }

    /// Looks for the next line of this scope and size, or else for the last one before. So the step goes on behind what it
    /// leaves out, and does again what it repeats.
    pub(super) fn resume(&self, place: &mut Place, saving: Saving) -> Option<&PlannedSave> {
        let number = self.elsewhere(place, saving, |_| true)?;
        let save = &self.saves[number];
        if number < place.next {
            place.varied = place.varied.min(varying(&self.saves[..number]));
        }
        place.takes(number, save, saving);
        Some(save)
    }

    /// Whether a step that may not grow may have saved so many bytes on this line, after which it is at `place`: no more than planned or, if
    /// its size goes with no other's, no more in all such lines up to there than all of them are planned to have.
    pub(super) fn has_room(&self, place: &Place, line: &PlannedSave, bytes: u64) -> bool {
        if line.varies { place.varied <= self.varying_bytes } else { bytes <= line.bytes }
    }

    /// Whether a step that follows `other` to its end also follows this one, and finds room on all lines unless it may grow.
    pub(super) fn covers(&self, other: &Strand, may_grow: bool) -> bool {
        let saving = |save: &PlannedSave| Saving {
            bytes: save.bytes,
            scope: save.scope,
            position: Some(save.position),
        };
        let Some(first) = other.saves.first() else { return true };
        let Some(mut place) = self.begin(0, saving(first)) else { return false };
        let follows = other.saves.iter().all(|save| match self.find(&mut place, saving(save)) {
            Found::Line(line) => may_grow || self.has_room(&place, line, save.bytes),
            Found::Unplanned | Found::Nothing => false,
        });
        follows && self.saves[place.next..].iter().all(|save| self.may_lack(save, place.times))
    }

    /// The planned position of an operation that the thread at `place` recorded after this many others.
    pub fn position(&self, place: &Place, index: u64) -> Option<Position> {
        let before = place.shifts.partition_point(|(from, _)| *from <= index).checked_sub(1);
        let (_, shift) = place.shifts.get(before.unwrap_or_default())?;
        Some(Position { strand: self.number, index: index.checked_add_signed(*shift)? })
    }

    /// Whether a step whose first storage has so many times the planned bytes may have something too small to be moved in place of this.
    fn may_lack(&self, save: &PlannedSave, times: f64) -> bool {
        times < 1.0 && save.bytes as f64 * times * times < self.min_bytes as f64
    }
}

impl Place {
    /// How far sizes are from the planned ones: 0 if they are the same.
    pub fn odds(&self) -> f64 {
        self.times.max(f64::MIN_POSITIVE).ln().abs() + self.strain
    }

    /// The place of a thread that follows this strand, though its first save has no line.
    pub fn of(strand: usize) -> Place {
        Place { strand, times: 1.0, ..Place::default() }
    }

    /// The place of the first save of another micro-batch.
    #[must_use]
    pub fn rewound(self) -> Place {
        Place { is_rewound: true, ..self.again() }
    }

    /// The place of the first save of another micro-batch like this one.
    fn again(&self) -> Place {
        let Place { strand, times, strain, ends, ref shifts, since, .. } = *self;
        let shifts = shifts.last().map(|(_, shift)| (0, *shift)).into_iter().collect();
        Place { strand, times, strain, ends, shifts, since, ..Place::default() }
    }

    /// How many times the planned bytes a storage may have.
    fn most(&self) -> f64 {
        self.times.max(1.0).powi(2)
    }

    /// Whether as many operations were recorded since the last save, at least one, as are planned between that and this one.
    fn leads_to(&self, save: &PlannedSave, index: Option<u64>) -> bool {
        let (Some((here, planned)), Some(index)) = (self.last, index) else { return false };
        index > here && index.checked_sub(here) == save.position.index.checked_sub(planned)
    }

    /// A save is line number `number`.
    fn takes(&mut self, number: usize, save: &PlannedSave, saving: Saving) {
        (self.next, self.is_rewound) = (number + 1, false);
        self.varied += if save.varies { saving.bytes } else { 0 };
        let Some(Position { index, .. }) = saving.position else { return };
        let shift = save.position.index.wrapping_sub(index).cast_signed();
        if self.shifts.last().is_none_or(|(_, before)| *before != shift) {
            self.shifts.push((self.since, shift));
        }
        self.since = index;
        self.last = Some((index, save.position.index));
    }
}

impl PlannedSave {
    /// Whether a storage of `bytes` bytes may be in place of the planned one, where storages have up to `most` times the planned bytes.
    /// Those of smaller steps take no more than was planned, and those of larger ones no less.
    fn is_like(&self, bytes: u64, most: f64) -> bool {
        let times = bytes as f64 / self.bytes.max(1) as f64;
        if most > 1.0 { (1.0 / SLACK..=SLACK * most).contains(&times) } else { bytes <= self.bytes }
    }

    /// Whether a storage of `bytes` bytes has the planned size, or grows with the first one, or with its square.
    fn is_in_proportion(&self, bytes: u64, times: f64) -> bool {
        is_in_proportion(bytes, self.bytes, times)
    }
}

/// The bytes of those of these lines whose size goes with no other's.
fn varying(saves: &[PlannedSave]) -> u64 {
    saves.iter().filter(|save| save.varies).map(|save| save.bytes).sum()
}

/// Whether a storage has the planned size, or grows with the first one, which has so many times the planned bytes, or with its square.
pub(crate) fn is_in_proportion(bytes: u64, planned: u64, times: f64) -> bool {
    let seen = bytes as f64 / planned.max(1) as f64;
    [1.0, times, times * times].iter().any(|times| (*times / SLACK..=SLACK * times).contains(&seen))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEEP: Placement = Placement::Keep;

    /// Lines of these sizes, with two operations before each, of a step that moves what has at least so many bytes.
    fn strand(sizes: &[u64], min_bytes: u64) -> Strand {
        let save = |(number, bytes): (usize, &u64)| {
            let position = Position { strand: 0, index: 2 * number as u64 };
            PlannedSave { bytes: *bytes, scope: ScopeId::default(), placement: KEEP, position, varies: false }
        };
        Strand::new(0, sizes.iter().enumerate().map(save).collect(), min_bytes)
    }

    fn saving(bytes: u64) -> Saving {
        Saving { bytes, scope: ScopeId::default(), position: None }
    }

    fn at(bytes: u64, index: u64) -> Saving {
        Saving { position: Some(Position { strand: 7, index }), ..saving(bytes) }
    }

    /// The numbers of the lines of a step's saves: `Err(true)` where there is none but the step goes on.
    fn found(strand: &Strand, saves: &[Saving]) -> Vec<Result<u64, bool>> {
        let mut place = strand.begin(0, saves[0]).unwrap();
        let find = |saving: &Saving| match strand.find(&mut place, *saving) {
            Found::Line(save) => Ok(save.position.index / 2),
            Found::Unplanned => Err(true),
            Found::Nothing => Err(false),
        };
        saves.iter().map(find).collect()
    }

    fn found_by_size(strand: &Strand, sizes: &[u64]) -> Vec<Result<u64, bool>> {
        found(strand, &sizes.iter().map(|bytes| saving(*bytes)).collect::<Vec<_>>())
    }

    #[test]
    fn what_is_too_small_to_be_moved_in_a_smaller_step_is_passed_over() {
        let large = strand(&[64, 4000, 64, 8000, 64], 64);
        assert_eq!(found_by_size(&large, &[64, 4000, 64, 8000, 64]), [0, 1, 2, 3, 4].map(Ok));
        assert_eq!(found_by_size(&large, &[2000, 4000]), [1, 3].map(Ok));
        assert!(large.covers(&strand(&[2000, 4000], 64), true));
        assert!(!large.covers(&strand(&[2000], 64), true), "a large one is missing");
    }

    #[test]
    fn a_slightly_larger_step_is_not_taken_for_a_much_smaller_one() {
        let lines = strand(&[294_912, 294_912, 884_736, 884_736], 65_536);
        assert_eq!(found_by_size(&lines, &[311_296, 311_296, 933_888]), [0, 1, 2].map(Ok));
    }

    #[test]
    fn larger_steps_follow_with_all_their_storages() {
        let small = strand(&[1000, 3000, 500], 300);
        assert_eq!(found_by_size(&small, &[2000, 6000, 1000]), [0, 1, 2].map(Ok));
        assert_eq!(found_by_size(&small, &[2000, 12_000, 500]), [0, 1, 2].map(Ok), "some grow by the square");
        assert_eq!(found_by_size(&small, &[2000, 600, 6000, 1000]), [Ok(0), Err(true), Ok(1), Ok(2)]);
        assert_eq!(found_by_size(&small, &[2000, 13_000])[1], Err(false));
        assert_eq!(found_by_size(&small, &[2000, 2900])[1], Err(false), "nothing of it is smaller");
    }

    /// An operation saves two tensors, one of which is too small to be moved in the planned step.
    #[test]
    fn what_has_become_large_enough_to_be_moved_takes_no_line_of_what_comes_after_as_many_operations() {
        let planned = strand(&[3000, 9000, 3000], 300);
        let saves = [at(4000, 0), at(310, 2), at(12_000, 2), at(310, 4), at(4000, 4)];
        assert_eq!(found(&planned, &saves), [Ok(0), Err(true), Ok(1), Err(true), Ok(2)]);
    }

    #[test]
    fn what_is_saved_at_the_same_point_has_its_line_whatever_its_size() {
        let routed = strand(&[1000, 400, 600, 1000], 0);
        assert_eq!(found(&routed, &[at(1000, 0), at(700, 2), at(300, 4), at(1000, 6)]), [0, 1, 2, 3].map(Ok));
        assert_eq!(found(&routed, &[at(1000, 0), at(700, 3)]), [Ok(0), Ok(1)], "or so near to it");
        assert_eq!(found(&routed, &[at(1000, 0), at(4000, 3)]), [Ok(0), Err(false)], "something else");
    }

    /// The same strand, where these lines vary.
    fn varying(strand: &Strand, lines: &[usize]) -> Strand {
        let mut varying = strand.clone();
        lines.iter().for_each(|line| varying.saves[*line].varies = true);
        varying
    }

    #[test]
    fn what_varies_is_not_taken_for_another_line_of_its_size_that_does() {
        let experts = strand(&[1000, 400, 410, 600, 1000], 0);
        let saves = [at(1000, 0), at(600, 2), at(300, 4), at(400, 6), at(1000, 8)];
        assert_eq!(found(&experts, &saves)[1], Err(false), "it has the size of a later one");
        let routed = varying(&experts, &[1, 2, 3]);
        assert_eq!(found(&routed, &saves), [0, 1, 2, 3, 4].map(Ok));
        assert_eq!(found_by_size(&routed, &[1000, 600, 300, 400, 1000]), [0, 1, 2, 3, 4].map(Ok));
        assert_eq!(found_by_size(&routed, &[2000, 600, 300, 400, 2000]), [0, 1, 2, 3, 4].map(Ok));
        let other = strand(&[1000, 600, 300, 400, 1010], 0);
        assert!(routed.covers(&other, true) && !experts.covers(&other, true));
        assert!(!routed.covers(&other, false), "some of it is larger");
    }

    #[test]
    fn where_something_that_varies_is_left_out_the_next_that_does_not_has_its_line() {
        let experts = varying(&strand(&[1000, 400, 300, 1000, 400, 300, 1000], 0), &[1, 2, 4, 5]);
        assert_eq!(resumed(&experts, &[1000, 650, 1000, 400, 300, 1000]), [0, 1, 3, 4, 5, 6].map(Some));
    }

    /// Each of the experts has a scope of its own, and some get nothing.
    #[test]
    fn where_something_that_varies_is_left_out_what_varies_in_other_scopes_has_its_line() {
        let mut experts = varying(&strand(&[1000, 400, 410, 600, 500, 1000], 0), &[1, 2, 3, 4]);
        let scope = |number: usize| ScopeId(if (1..5).contains(&number) { number as u32 } else { 0 });
        experts.saves.iter_mut().enumerate().for_each(|(number, save)| save.scope = scope(number));
        let follow = |saves: &[(u64, usize)]| -> Vec<Option<u64>> {
            let mut place = experts.begin(0, saving(saves[0].0)).unwrap();
            let find = |(bytes, line): &(u64, usize)| match experts
                .find(&mut place, Saving { scope: scope(*line), ..saving(*bytes) })
            {
                Found::Line(save) => Some(save.position.index / 2),
                _ => None,
            };
            saves.iter().map(find).collect()
        };
        let lines = |lines: &[u64]| -> Vec<Option<u64>> { lines.iter().copied().map(Some).collect() };
        assert_eq!(follow(&[(1000, 0), (300, 1), (900, 3), (200, 4), (1000, 5)]), lines(&[0, 1, 3, 4, 5]));
        assert_eq!(follow(&[(1000, 0), (1900, 4), (1000, 5)]), lines(&[0, 4, 5]));
    }

    #[test]
    fn what_varies_may_be_tiny_in_a_larger_step() {
        let routed = varying(&strand(&[1000, 9000, 9000, 1000], 300), &[1, 2]);
        assert_eq!(found_by_size(&routed, &[2000, 310, 9000, 2000]), [0, 1, 2, 3].map(Ok));
    }

    /// The numbers of the lines where the first save begins, and each of the others goes on where it can.
    fn resumed(strand: &Strand, sizes: &[u64]) -> Vec<Option<u64>> {
        let mut place = strand.begin(0, saving(sizes[0])).unwrap();
        let find = |bytes: &u64| match strand.find(&mut place, saving(*bytes)) {
            Found::Line(save) => Some(save),
            _ => strand.resume(&mut place, saving(*bytes)),
        };
        sizes.iter().map(find).map(|save| Some(save?.position.index / 2)).collect()
    }

    #[test]
    fn a_step_goes_on_behind_what_it_leaves_out() {
        let layers = strand(&[10, 20, 30, 40, 50], 0);
        assert_eq!(resumed(&layers, &[10, 20, 40, 50]), [0, 1, 3, 4].map(Some));
    }

    #[test]
    fn a_step_does_again_what_it_repeats() {
        let times = strand(&[30, 10, 20, 10, 20, 50], 0);
        assert_eq!(resumed(&times, &[30, 10, 20, 10, 20, 10, 20, 50]), [0, 1, 2, 3, 4, 3, 4, 5].map(Some));
        assert_eq!(resumed(&times, &[30, 10, 900]), [Some(0), Some(1), None]);
    }

    #[test]
    fn the_next_micro_batch_begins_where_the_last_line_was() {
        let two = strand(&[10, 20], 0);
        assert_eq!(found_by_size(&two, &[10, 20, 10, 20]), [0, 1, 0, 1].map(Ok));
    }

    #[test]
    fn operations_have_their_planned_positions_behind_what_was_left_out() {
        let layers = strand(&[10, 20, 30, 40, 50], 0);
        let mut place = layers.begin(0, at(10, 100)).unwrap();
        let mut take = |bytes, index| {
            let found = layers.find(&mut place, at(bytes, index));
            assert!(matches!(found, Found::Line(_)) || layers.resume(&mut place, at(bytes, index)).is_some());
        };
        take(10, 100);
        take(20, 102);
        take(50, 104);
        let planned = |index| layers.position(&place, index).map(|position| position.index);
        assert_eq!([99, 100, 101, 103, 104].map(planned), [None, Some(0), Some(1), Some(7), Some(8)]);
    }
}
