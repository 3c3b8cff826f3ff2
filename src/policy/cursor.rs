//! The position of a step in the schedules of its saves.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, ThreadId};

use ssdtrain_plan::{
    Adherence, Course, Followed, Found, Headroom, Place, Placement, PlannedSave, Position, Room, Saves,
    Saving,
};
use ssdtrain_store::sync::Mutex;

/// A step's position in its courses. A step without any has no planned saves.
#[derive(Debug, Default)]
pub(crate) struct Cursor {
    courses: Vec<Course>,
    /// How much may stay that has no place.
    unplanned: Headroom,
    /// Placements to use cyclically, whatever is saved.
    in_turn: Option<Arc<[Placement]>>,
    next: AtomicUsize,
    state: Mutex<State>,
}

/// A save's placement, and how much may be on the device from now on if that changes.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Placed {
    /// `None` if nothing was planned for it.
    pub(crate) placement: Option<Placement>,
    pub(crate) room: Option<Room>,
    /// Whether it stays in the graph, as without a cache, because the course lets so much stay there, and no limit counts what stays.
    pub(crate) in_graph: bool,
}

/// What a step has done so far.
#[derive(Debug, Default)]
struct State {
    threads: Vec<Thread>,
    /// The courses that fit everything so far, and which of them counts.
    fitting: Vec<bool>,
    active: usize,
    /// Bytes that were saved, those that their places have in the plan, and those that had no place.
    saved: u64,
    planned: u64,
    /// Those that were saved in micro-batches before.
    saved_before: u64,
    unplaced: u64,
    /// Those that a graph may still hold, now and at most: what was saved since the last backward that was told of, or in the whole step if
    /// several micro-batches are open at once.
    open: u64,
    most_open: u64,
    are_several_open: bool,
    /// The room that is given now is so many times that of the active course.
    times: f64,
    /// This micro-batch stays on the device as a whole: `None` before its first save.
    stays_whole: Option<bool>,
    /// What any did so far.
    whole: Wholeness,
    /// A micro-batch was larger than planned.
    larger: bool,
    /// How many micro-batches ended before their last line.
    parts: u32,
    /// It left out or repeated something.
    altered: bool,
    lost: bool,
}

/// Whether micro-batches stay on the device as a whole.
#[derive(Clone, Copy, Debug, Default)]
struct Wholeness {
    /// A save stayed for that.
    kept: bool,
    /// A save went as planned.
    planned: bool,
    /// A micro-batch that was to stay became too large.
    outgrown: bool,
}

/// Where one thread of the step is.
#[derive(Debug)]
struct Thread {
    id: ThreadId,
    /// Its number in the positions of this step.
    strand: Option<u32>,
    /// Its place in each course, once it has one.
    places: Vec<Option<Place>>,
}

/// A step is lost once more than this share of the planned bytes was saved without a place; with a limit on bytes, at once.
const UNPLACED: f64 = 0.125;
/// There is more room each time that a step turns out to be so many times as large as known.
const PORTION: f64 = 1.1;
/// Steps whose bytes differ from the planned ones by no more than this share are as planned.
const LIKE: f64 = 0.02;

impl Cursor {
    /// For a step whose saves are to be treated like this.
    pub(crate) fn new(saves: &Saves) -> Cursor {
        let in_turn =
            |placements: &[Placement]| Cursor { in_turn: Some(placements.into()), ..Cursor::default() };
        match saves {
            Saves::Scheduled { courses, unplanned } => {
                let state = State { fitting: vec![true; courses.len()], times: 1.0, ..State::default() };
                let (courses, unplanned) = (courses.clone(), *unplanned);
                Cursor { courses, unplanned, state: Mutex::new(state), ..Cursor::default() }
            }
            Saves::InTurn(placements) => in_turn(placements),
            Saves::Keep => in_turn(&[Placement::Keep]),
            Saves::Count | Saves::Leave | Saves::Move => Cursor::default(),
        }
    }

    /// The placement of the calling thread's next save. What matches none of the courses goes on in the one that it followed so far where
    /// that saves something like it. If there is too much for which there is no place, nothing is planned up to the end of the step. After
    /// its last save a course may start again: with the next micro-batch, if the program ran backward itself and not through the cache.
    pub(crate) fn next(&self, saving: Saving) -> Placed {
        if let Some(in_turn) = &self.in_turn {
            let next = self.next.fetch_add(1, Ordering::Relaxed) % in_turn.len().max(1);
            return Placed { placement: in_turn.get(next).copied(), ..Placed::default() };
        }
        let mut state = self.state.lock();
        if self.courses.is_empty() || state.lost {
            return Placed::default();
        }
        let before = (state.active, state.times);
        let placement = state.place(self, saving);
        let room = match (state.lost, self.courses.get(state.active)) {
            (true, _) => Some(Room::Fitting(self.unplanned)),
            (false, Some(course)) if (state.active, state.times) != before => {
                Some(Room::Within(course.budgets).times(state.times))
            }
            _ => None,
        };
        let may_stay = self.courses.get(state.active).map_or(0, |course| course.in_graph);
        let is_free = !state.lost && self.unplanned == Headroom::Free && state.open <= may_stay;
        let in_graph = is_free && placement == Some(Placement::Keep);
        Placed { placement, room, in_graph }
    }

    /// The planned placement of a result of a recorded operation; `None` if nothing was planned for it.
    pub(crate) fn result(&self, operation: Position, result: usize) -> Option<Placement> {
        if let Some(in_turn) = &self.in_turn {
            // One more than there are, so that for some nothing is planned.
            return in_turn.get((operation.index as usize + result) % (in_turn.len() + 1)).copied();
        }
        let state = self.state.lock();
        let schedule = &self
            .courses
            .get(state.active)
            .filter(|_| !state.lost && state.stays_whole != Some(true))?
            .schedule;
        let thread = state.threads.iter().find(|thread| thread.strand == Some(operation.strand))?;
        let place = thread.places.get(state.active)?.as_ref()?;
        let planned = schedule.strands().get(place.strand)?.position(place, operation.index)?;
        schedule.result(planned, result)
    }

    /// A micro-batch begins, or goes on, while others may be open.
    pub(crate) fn switch(&self) {
        let mut state = self.state.lock();
        state.are_several_open = true;
        state.rewind(&self.courses);
    }

    /// A backward keeps its graph: what is saved next comes on top of it.
    pub(crate) fn keeps_graph(&self) {
        self.state.lock().are_several_open = true;
    }

    /// A backward has ended: what is saved next belongs to another micro-batch.
    pub(crate) fn backward_ended(&self) {
        let mut state = self.state.lock();
        if !state.are_several_open {
            state.open = 0;
        }
        state.rewind(&self.courses);
    }

    /// Whether the step has deviated from its plan.
    pub(crate) fn is_lost(&self) -> bool {
        self.state.lock().lost
    }

    /// Whether the step follows a plan, and not one that keeps everything for comparison.
    pub(crate) fn is_planned(&self) -> bool {
        let state = self.state.lock();
        self.courses.get(state.active).is_some_and(|course| !course.is_baseline && !state.lost)
    }

    /// Which course the step, which has ended, followed, and how well; `None` if it has none.
    pub(crate) fn followed(&self) -> Option<Followed> {
        let state = self.state.lock();
        let schedule = &self.courses.get(state.active)?.schedule;
        let ends = state.places().map(|place| place.ends).min().unwrap_or_default();
        let parts = state.parts + u32::from(state.is_within(&self.courses));
        let micro_batches = state.saved as f64 / (schedule.bytes() as f64).max(1.0);
        let size = micro_batches / f64::from((ends + parts).max(1));
        let is_all = state.places().count() == schedule.strands().len()
            && state.places().all(|place| place.ends == ends)
            && ends > 0;
        let how = match () {
            () if state.lost => Adherence::Lost,
            () if state.altered => Adherence::Altered,
            () if state.larger || size > 1.0 + LIKE => Adherence::Larger,
            () if parts > 0 || !is_all || size < 1.0 - LIKE => Adherence::Part,
            () => Adherence::Whole(ends),
        };
        let at_once = state.most_open as f64 / (schedule.bytes() as f64).max(1.0);
        let Wholeness { kept, planned, outgrown } = state.whole;
        let stayed_whole = kept && !planned;
        let course = state.active;
        Some(Followed { course, how, size, micro_batches, at_once, stayed_whole, outgrew: outgrown })
    }
}

impl State {
    /// What is saved next is read from the beginning of the courses.
    fn rewind(&mut self, courses: &[Course]) {
        self.parts += u32::from(self.is_within(courses));
        for place in self.threads.iter_mut().flat_map(|thread| &mut thread.places) {
            *place = place.take().map(Place::rewound);
        }
        self.fitting.fill(true);
        self.times = 1.0;
        (self.saved_before, self.planned, self.stays_whole) = (self.saved, 0, None);
    }

    /// The placement of the calling thread's next save.
    fn place(&mut self, cursor: &Cursor, saving: Saving) -> Option<Placement> {
        let Cursor { courses, unplanned, .. } = cursor;
        let grows = *unplanned == Headroom::Free;
        let thread = self.thread(courses.len());
        self.threads[thread].strand = saving.position.map(|position| position.strand);
        self.saved += saving.bytes;
        self.open += saving.bytes;
        self.most_open = self.most_open.max(self.open);
        // With a limit on bytes, a larger step has to find its own way to keep to it.
        let fits = |save: &PlannedSave| grows || saving.bytes <= save.bytes;
        let mut found = vec![Found::Nothing; courses.len()];
        for (number, course) in courses.iter().enumerate().filter(|(number, _)| self.fitting[*number]) {
            let entered = match self.threads[thread].places[number].take() {
                Some(place) => Some(place),
                None => course.schedule.enter(saving, |strand| self.is_taken(number, strand)),
            };
            let Some(mut place) = entered else { continue };
            found[number] = match course.schedule.find(&mut place, saving) {
                Found::Line(save) if !fits(save) => Found::Nothing,
                Found::Unplanned if !grows => Found::Nothing,
                found => found,
            };
            self.threads[thread].places[number] = Some(place);
        }
        let Some(active) = self.choose(&found) else { return self.resume(cursor, thread, saving) };
        for (fitting, found) in self.fitting.iter_mut().zip(&found) {
            *fitting &= *found != Found::Nothing;
        }
        self.active = active;
        let of_first = self.places().map(|place| place.times).fold(1.0, f64::max);
        self.larger |= of_first > 1.0;
        if let Found::Line(save) = found[active] {
            self.planned += save.bytes;
        }
        // Others may grow where the first one does not. Room is given in portions, because that takes a lock.
        let so_far = (self.saved - self.saved_before) as f64 / self.planned.max(1) as f64;
        self.times =
            if so_far > PORTION * of_first.max(self.times) { so_far } else { of_first.max(self.times) };
        let stays_whole = self.stays_whole != Some(false) && self.is_small(so_far, &courses[active]);
        self.whole.outgrown |= self.stays_whole == Some(true) && !stays_whole;
        self.stays_whole = Some(stays_whole);
        match found[active] {
            Found::Line(_) if stays_whole => {
                self.whole.kept = true;
                Some(Placement::Keep)
            }
            Found::Line(save) => {
                self.whole.planned = true;
                Some(save.placement)
            }
            // It is small.
            _ => Some(Placement::Keep),
        }
    }

    /// Whether the micro-batch may stay whole in this course, as far as is known: it has `so_far` times the planned bytes. Several that are
    /// open at once add up, and so does what is repeated.
    fn is_small(&self, so_far: f64, course: &Course) -> bool {
        if course.whole_up_to <= 0.0 || self.are_several_open {
            return false;
        }
        let all = (self.saved - self.saved_before) as f64 / course.schedule.bytes().max(1) as f64;
        let of_first = self.places().map(|place| place.times);
        of_first.fold(so_far.max(all), f64::max) <= course.whole_up_to
    }

    /// The course that counts from now on: of those that fit, the one that is closest in size.
    fn choose(&self, found: &[Found<'_>]) -> Option<usize> {
        let odds = |course: usize| {
            let places = self.threads.iter().filter_map(|thread| thread.places[course].as_ref());
            places.map(Place::odds).sum::<f64>()
        };
        let fitting = (0..found.len()).filter(|course| found[*course] != Found::Nothing);
        let fitting = fitting.map(|course| (odds(course), course != self.active, course));
        let closest = fitting.min_by(|one, other| one.0.total_cmp(&other.0).then(one.1.cmp(&other.1)));
        closest.map(|(_, _, course)| course)
    }

    /// The placement of a save that fits no course where it is.
    fn resume(&mut self, cursor: &Cursor, thread: usize, saving: Saving) -> Option<Placement> {
        let Cursor { courses, unplanned, .. } = cursor;
        let grows = *unplanned == Headroom::Free;
        let active = self.active;
        self.fitting.iter_mut().enumerate().for_each(|(number, fitting)| *fitting = number == active);
        self.altered = true;
        (self.stays_whole, self.whole.planned) = (Some(false), true);
        let schedule = &courses[active].schedule;
        let strands = schedule.strands().len();
        let free = (0..strands).find(|strand| !self.is_taken(active, *strand)).unwrap_or_default();
        let place = self.threads[thread].places[active].get_or_insert_with(|| Place::of(free));
        if let Some(save) = schedule.resume(place, saving).filter(|save| grows || saving.bytes <= save.bytes)
        {
            return Some(save.placement);
        }
        self.unplaced += saving.bytes;
        self.lost = !grows || self.unplaced as f64 > UNPLACED * schedule.bytes() as f64;
        (!self.lost).then_some(Placement::Keep)
    }

    /// The calling thread's number.
    fn thread(&mut self, courses: usize) -> usize {
        let id = thread::current().id();
        self.threads.iter().position(|thread| thread.id == id).unwrap_or_else(|| {
            self.threads.push(Thread { id, strand: None, places: vec![None; courses] });
            self.threads.len() - 1
        })
    }

    /// Whether a thread follows this strand of a course.
    fn is_taken(&self, course: usize, strand: usize) -> bool {
        let places = self.threads.iter().filter_map(|thread| thread.places[course].as_ref());
        places.into_iter().any(|place| place.strand == strand)
    }

    /// The places of the threads in the active course.
    fn places(&self) -> impl Iterator<Item = &Place> {
        self.threads.iter().filter_map(|thread| thread.places.get(self.active)?.as_ref())
    }

    /// Whether a thread is neither before its first line nor after its last.
    fn is_within(&self, courses: &[Course]) -> bool {
        courses
            .get(self.active)
            .is_some_and(|course| self.places().any(|place| course.schedule.is_within(place)))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use ssdtrain_plan::{Budgets, Schedule, ScopeId};

    use super::*;

    const KEEP: Placement = Placement::Keep;
    const HOST: Placement = Placement::Host;
    const TWO: [(u64, Placement); 2] = [(10, KEEP), (20, HOST)];

    /// A course with these lines, and so much room on the device.
    fn course(saves: &[(u64, Placement)], device_budget: u64) -> Course {
        let save = |(number, &(bytes, placement)): (usize, &(u64, Placement))| PlannedSave {
            bytes,
            scope: ScopeId::default(),
            placement,
            position: Position { strand: 0, index: 2 * number as u64 },
        };
        let schedule =
            Arc::new(Schedule::new(saves.iter().enumerate().map(save).collect(), HashMap::new(), 0));
        Course {
            schedule,
            budgets: Budgets { device_budget, ..Budgets::default() },
            is_baseline: false,
            in_graph: 0,
            whole_up_to: 0.0,
        }
    }

    fn cursor(courses: &[Course]) -> Cursor {
        Cursor::new(&Saves::Scheduled { courses: courses.to_vec(), unplanned: Headroom::Free })
    }

    fn planned(saves: &[(u64, Placement)]) -> Cursor {
        cursor(&[course(saves, 1)])
    }

    fn placed(cursor: &Cursor, bytes: u64) -> Placed {
        cursor.next(Saving { bytes, scope: ScopeId::default(), position: None })
    }

    fn next(cursor: &Cursor, bytes: u64) -> Option<Placement> {
        placed(cursor, bytes).placement
    }

    fn how(cursor: &Cursor) -> Option<Adherence> {
        cursor.followed().map(|followed| followed.how)
    }

    #[test]
    fn what_a_course_leaves_in_the_graph_stays_there_unless_it_is_too_much_limited_or_lost() {
        let step = |in_graph, unplanned, saved: [u64; 4]| {
            let courses = vec![Course { in_graph, ..course(&[(10, KEEP), (20, KEEP)], 0) }];
            let cursor = Cursor::new(&Saves::Scheduled { courses, unplanned });
            saved.map(|bytes| placed(&cursor, bytes).in_graph)
        };
        let (as_known, lost, larger) = ([10, 20, 10, 20], [10, 20, 10, 7000], [10, 20, 35, 70]);
        assert_eq!(step(60, Headroom::Free, as_known), [true; 4]);
        assert_eq!(
            step(59, Headroom::Free, as_known),
            [true, true, true, false],
            "it went on without a backward"
        );
        assert_eq!(step(7040, Headroom::Free, lost), [true, true, true, false]);
        assert_eq!(step(70, Headroom::Free, larger), [true, true, true, false]);
        assert_eq!(step(60, Headroom::Bytes(1 << 30), as_known), [false; 4], "what stays counts");
        assert_eq!(step(0, Headroom::Free, as_known), [false; 4]);
    }

    #[test]
    fn what_a_backward_was_told_to_need_no_more_is_no_longer_open_unless_others_are() {
        for (several, most) in [(false, 1.0), (true, 2.0)] {
            let cursor = cursor(&[Course { in_graph: 30, ..course(&[(10, KEEP), (20, KEEP)], 0) }]);
            for _ in 0..2 {
                if several {
                    cursor.switch();
                }
                assert_eq!([10, 20].map(|bytes| next(&cursor, bytes)), [Some(KEEP); 2]);
                cursor.backward_ended();
            }
            assert_eq!(cursor.followed().map(|followed| followed.at_once), Some(most));
            assert_eq!(placed(&cursor, 10).in_graph, !several);
        }
    }

    #[test]
    fn each_micro_batch_reads_it_from_the_beginning() {
        for told in [true, false] {
            let cursor = planned(&TWO);
            for _ in 0..2 {
                if told {
                    cursor.backward_ended();
                }
                assert_eq!([10, 20].map(|bytes| next(&cursor, bytes)), [Some(KEEP), Some(HOST)]);
            }
            assert_eq!(how(&cursor), Some(Adherence::Whole(2)));
        }
    }

    #[test]
    fn a_micro_batch_stays_whole_as_long_as_it_is_small() {
        let lines = [(100, HOST), (200, HOST), (200, HOST)];
        let small = || cursor(&[Course { whole_up_to: 0.5, ..course(&lines, 1) }]);
        let placements = |cursor: &Cursor, saves: [u64; 3]| saves.map(|bytes| next(cursor, bytes));
        let [small_one, as_planned, growing] =
            [[50, 100, 100], [60, 120, 120], [50, 100, 200]].map(|saves| placements(&small(), saves));
        assert_eq!((small_one, as_planned), ([Some(KEEP); 3], [Some(HOST); 3]));
        assert_eq!(growing, [Some(KEEP), Some(KEEP), Some(HOST)]);
        let repeating = small();
        let repeated = [50, 100, 100, 100].map(|bytes| next(&repeating, bytes));
        assert_eq!(repeated[..3], [Some(KEEP); 3]);
        assert_ne!(repeated[3], Some(KEEP), "it is as large as others by now");
        for opens in [Cursor::switch, Cursor::keeps_graph] {
            let several = small();
            opens(&several);
            assert_eq!(placements(&several, [50, 100, 100]), [Some(HOST); 3], "others may be open");
        }
    }

    #[test]
    fn a_step_stayed_whole_if_nothing_of_it_went_as_planned() {
        let lines = [(100, HOST), (200, HOST), (200, HOST)];
        let whole = |micro_batches: &[[u64; 3]]| {
            let cursor = cursor(&[Course { whole_up_to: 0.5, ..course(&lines, 1) }]);
            for saves in micro_batches {
                saves.iter().for_each(|bytes| {
                    next(&cursor, *bytes);
                });
                cursor.backward_ended();
            }
            let Followed { stayed_whole, outgrew, .. } = cursor.followed().unwrap();
            (stayed_whole, outgrew)
        };
        let (small, large, growing) = ([50, 100, 100], [100, 200, 200], [50, 100, 200]);
        assert_eq!(whole(&[small, small]), (true, false));
        assert_eq!(whole(&[small, large]), (false, false));
        assert_eq!(whole(&[large]), (false, false));
        assert_eq!(whole(&[growing]), (false, true));
        assert_eq!(whole(&[growing, small]), (false, true));
        // A shrinking one does not become small again.
        assert_eq!(whole(&[[60, 20, 20]]), (false, false));
    }

    #[test]
    fn nothing_is_stored_in_others_place_while_a_micro_batch_stays_whole() {
        let position = |index| Position { strand: 0, index };
        let save = PlannedSave {
            bytes: 100,
            scope: ScopeId::default(),
            placement: Placement::Recompute,
            position: position(1),
        };
        let results = HashMap::from([((position(2), 0), HOST)]);
        let schedule = Arc::new(Schedule::new(vec![save], results, 0));
        for (bytes, expected) in [(100, Some(HOST)), (50, None)] {
            let budgets = Budgets::default();
            let (is_baseline, in_graph, whole_up_to) = (false, 0, 0.5);
            let schedule = Arc::clone(&schedule);
            let cursor = cursor(&[Course { schedule, budgets, is_baseline, in_graph, whole_up_to }]);
            cursor.next(Saving { bytes, scope: ScopeId::default(), position: Some(position(1)) });
            assert_eq!(cursor.result(position(2), 0), expected);
        }
    }

    #[test]
    fn what_is_left_out_or_repeated_alters_the_plan_and_does_not_end_it() {
        let lines = [(10, KEEP), (20, HOST), (30, KEEP), (20, HOST), (400, KEEP)];
        for saves in [&[10, 20, 400][..], &[10, 20, 30, 20, 30, 20, 400]] {
            let cursor = planned(&lines);
            let expected =
                saves.iter().map(|bytes| lines.iter().find(|line| line.0 == *bytes).map(|line| line.1));
            let placements = saves.iter().map(|bytes| next(&cursor, *bytes));
            assert_eq!(placements.collect::<Vec<_>>(), expected.collect::<Vec<_>>(), "{saves:?}");
            assert_eq!(how(&cursor), Some(Adherence::Altered), "{saves:?}");
        }
    }

    #[test]
    fn too_much_without_a_place_ends_the_plan() {
        let cursor = planned(&[(100, HOST), (200, HOST), (200, HOST)]);
        assert_eq!(next(&cursor, 100), Some(HOST));
        assert_eq!(next(&cursor, 60), Some(HOST), "it may be the next one, which is smaller now");
        assert_eq!((next(&cursor, 7000), how(&cursor)), (None, Some(Adherence::Lost)));
        cursor.backward_ended();
        assert_eq!(next(&cursor, 100), None, "to the end of the step");
        let little = planned(&[(8000, HOST), (100, HOST), (8000, HOST)]);
        let placements = [8000, 1300, 100, 8000].map(|bytes| next(&little, bytes));
        assert_eq!(placements, [Some(HOST), Some(KEEP), Some(HOST), Some(HOST)], "a little stays");
        assert_eq!(how(&little), Some(Adherence::Altered));
    }

    #[test]
    fn what_stays_without_a_plan_is_limited_once_it_is_lost() {
        let cursor = planned(&TWO);
        assert_eq!(placed(&cursor, 10).room, None);
        assert_eq!(placed(&cursor, 7000).room, Some(Room::Fitting(Headroom::Free)));
        assert_eq!(placed(&cursor, 7000), Placed::default());
    }

    #[test]
    fn smaller_saves_and_fewer_of_them_keep_to_a_part_of_the_plan() {
        let smaller = planned(&TWO);
        assert_eq!([5, 10].map(|bytes| next(&smaller, bytes)), TWO.map(|(_, placement)| Some(placement)));
        assert_eq!(smaller.followed().map(|followed| followed.size), Some(0.5));
        let fewer = planned(&TWO);
        next(&fewer, 10);
        let begun_again = planned(&TWO);
        next(&begun_again, 10);
        begun_again.backward_ended();
        assert_eq!(
            [10, 20].map(|bytes| next(&begun_again, bytes)),
            TWO.map(|(_, placement)| Some(placement))
        );
        for cursor in [smaller, fewer, begun_again, planned(&TWO)] {
            assert_eq!(how(&cursor), Some(Adherence::Part), "{cursor:?}");
        }
    }

    #[test]
    fn larger_saves_follow_with_more_room_unless_bytes_are_limited() {
        let larger = planned(&TWO);
        let more = Room::Within(Budgets { device_budget: 1, ..Budgets::default() }).times(3.0);
        assert_eq!(
            placed(&larger, 30),
            Placed { placement: Some(KEEP), room: Some(more), ..Placed::default() }
        );
        assert_eq!(placed(&larger, 60), Placed { placement: Some(HOST), room: None, ..Placed::default() });
        assert_eq!(how(&larger), Some(Adherence::Larger));
        let limited = Cursor { unplanned: Headroom::Bytes(1), ..planned(&TWO) };
        assert_eq!((next(&limited, 30), how(&limited)), (None, Some(Adherence::Lost)));
    }

    #[test]
    fn a_step_follows_the_course_that_it_fits() {
        let courses = [
            course(&[(100, KEEP), (200, KEEP), (50, KEEP)], 1),
            course(&[(100, HOST), (300, HOST), (50, HOST)], 2),
            course(&[(80, KEEP)], 3),
        ];
        let room = |bytes| Some(Room::Within(Budgets { device_budget: bytes, ..Budgets::default() }));
        for _ in 0..2 {
            let second = cursor(&courses);
            assert_eq!(placed(&second, 100).room, None, "the first one as yet");
            assert_eq!(
                placed(&second, 300),
                Placed { placement: Some(HOST), room: room(2), ..Placed::default() }
            );
            assert_eq!(
                placed(&second, 50),
                Placed { placement: Some(HOST), room: None, ..Placed::default() }
            );
            let whole = Adherence::Whole(1);
            let followed = Followed {
                course: 1,
                how: whole,
                size: 1.0,
                micro_batches: 1.0,
                at_once: 1.0,
                stayed_whole: false,
                outgrew: false,
            };
            assert_eq!(second.followed(), Some(followed));
        }
        let third = cursor(&courses);
        assert_eq!(placed(&third, 80).room, room(3), "the one that is closest in size");
        assert_eq!(third.followed().map(|followed| followed.course), Some(2));
    }

    #[test]
    fn each_thread_follows_its_own_strand() {
        let save = |(strand, bytes, placement)| {
            let position = Position { strand, index: 0 };
            PlannedSave { bytes, scope: ScopeId::default(), placement, position }
        };
        let saves = [(0, 100, KEEP), (1, 33, HOST), (0, 200, KEEP), (1, 44, HOST)].map(save);
        let schedule = Arc::new(Schedule::new(saves.to_vec(), HashMap::new(), 0));
        let both = cursor(&[Course {
            schedule,
            budgets: Budgets::default(),
            is_baseline: false,
            in_graph: 0,
            whole_up_to: 0.0,
        }]);
        // The thread that saves the smaller ones comes first this time, and the other between its saves.
        assert_eq!(next(&both, 33), Some(HOST));
        let others =
            thread::scope(|scope| scope.spawn(|| [100, 200].map(|bytes| next(&both, bytes))).join().unwrap());
        assert_eq!((others, next(&both, 44)), ([Some(KEEP), Some(KEEP)], Some(HOST)));
        assert_eq!(how(&both), Some(Adherence::Whole(1)));
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
        let places = [KEEP, Placement::Disk];
        for (saves, expected) in
            [(Saves::Keep, [KEEP; 3]), (Saves::InTurn(Arc::new(places)), [KEEP, Placement::Disk, KEEP])]
        {
            let cursor = Cursor::new(&saves);
            assert_eq!([1, 9, 1].map(|bytes| next(&cursor, bytes)), expected.map(Some), "{saves:?}");
            assert_eq!((cursor.followed(), cursor.is_lost()), (None, false), "{saves:?}");
        }
    }
}
