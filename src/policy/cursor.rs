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
    /// It stays only if no more than this stays with it: the plan is for a peak, and was made for no more. `None` for no limit.
    pub(crate) kept_up_to: Option<u64>,
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
    /// How many micro-batches ended with a backward that was told of.
    told: u32,
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
        let kept = self.courses.get(state.active).map(|course| course.schedule.kept_bytes());
        let kept_up_to = kept.filter(|_| self.unplanned != Headroom::Free);
        Placed { placement, room, in_graph, kept_up_to }
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

    /// Whether a result stays on the device for whose bytes nothing was planned: the step follows a plan, and its goal has no peak.
    pub(crate) fn keeps_unplanned(&self) -> bool {
        !self.courses.is_empty() && self.unplanned == Headroom::Free && !self.is_lost()
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

    /// Whether the step follows a plan, and not one that keeps everything for comparison or is for the meantime.
    pub(crate) fn is_planned(&self) -> bool {
        let state = self.state.lock();
        self.courses
            .get(state.active)
            .is_some_and(|course| !course.is_baseline && !course.is_interim && !state.lost)
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
        let told = state.told + u32::from(state.saved > state.saved_before);
        let one_by_one = !state.are_several_open && ends + parts <= told;
        let Wholeness { kept, planned, outgrown } = state.whole;
        let stayed_whole = kept && !planned;
        let course = state.active;
        Some(Followed {
            course,
            how,
            size,
            micro_batches,
            at_once,
            one_by_one,
            stayed_whole,
            outgrew: outgrown,
        })
    }
}

impl State {
    /// What is saved next is read from the beginning of the courses.
    fn rewind(&mut self, courses: &[Course]) {
        self.parts += u32::from(self.is_within(courses));
        for place in self.threads.iter_mut().flat_map(|thread| &mut thread.places) {
            *place = place.take().map(Place::rewound);
        }
        self.told += u32::from(self.saved > self.saved_before);
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
        let mut found = vec![Found::Nothing; courses.len()];
        for (number, course) in courses.iter().enumerate().filter(|(number, _)| self.fitting[*number]) {
            let entered = match self.threads[thread].places[number].take() {
                Some(place) => Some(place),
                None => course.schedule.enter(saving, |strand| self.is_taken(number, strand)),
            };
            let Some(mut place) = entered else { continue };
            let schedule = &course.schedule;
            let before = (!grows).then(|| place.clone());
            found[number] = schedule.find(&mut place, saving);
            // With a limit on bytes, a larger step has to find its own way to keep to it.
            if let Some(before) = before {
                let has_room = |line: &PlannedSave| schedule.has_room(&place, line, saving.bytes);
                if !matches!(found[number], Found::Line(line) if has_room(line)) {
                    (found[number], place) = (Found::Nothing, before);
                }
            }
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
        let stays_whole = self.stays_whole != Some(false) && self.is_small(so_far, courses);
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

    /// Whether the micro-batch may stay whole, as far as is known: in the course that counts it has `so_far` times the planned bytes. Several
    /// that are open at once add up, and so does what is repeated. While it fits several courses equally well, it is small in each.
    fn is_small(&self, so_far: f64, courses: &[Course]) -> bool {
        let is_small = |(number, course): (usize, &Course)| {
            let all = (self.saved - self.saved_before) as f64 / course.schedule.bytes().max(1) as f64;
            let places = self.threads.iter().filter_map(|thread| thread.places.get(number)?.as_ref());
            let of_first = places.map(|place| place.times).fold(all, f64::max);
            let size = if number == self.active { of_first.max(so_far) } else { of_first };
            course.whole_up_to > 0.0 && size <= course.whole_up_to
        };
        let closest = self.odds(self.active);
        let is_close =
            |(number, _): &(usize, &Course)| self.fitting[*number] && self.odds(*number) <= closest;
        !self.are_several_open && courses.iter().enumerate().filter(is_close).all(is_small)
    }

    /// The course that counts from now on: of those that fit, the one that is closest in size.
    fn choose(&self, found: &[Found<'_>]) -> Option<usize> {
        let fitting = (0..found.len()).filter(|course| found[*course] != Found::Nothing);
        let fitting = fitting.map(|course| (self.odds(course), course != self.active, course));
        let closest = fitting.min_by(|one, other| one.0.total_cmp(&other.0).then(one.1.cmp(&other.1)));
        closest.map(|(_, _, course)| course)
    }

    /// How far the sizes of what was saved are from what this course lets expect.
    fn odds(&self, course: usize) -> f64 {
        let places = self.threads.iter().filter_map(|thread| thread.places[course].as_ref());
        places.map(Place::odds).sum()
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
        let resumed = schedule.resume(place, saving);
        if let Some(save) = resumed.filter(|save| grows || schedule.has_room(place, save, saving.bytes)) {
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
mod tests;
