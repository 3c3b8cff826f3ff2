//! Turns the notes of a step into the workload that it computes. Pure.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::time::Duration;

use ssdtrain_plan::{Activation, Handling, Recompute, Save, StepProfile, Workload};

use super::Alive;
use super::family::Family;
use super::lineage::Lineage;
use super::stalls::Stalls;
use crate::trace::{Moves, Reached};

/// What a tensor that is saved through the cache takes of the program's thread, forward and backward together, beyond one that stays in the
/// graph; and an operation that is recorded (`examples/host_cost.rs`).
const SAVE: Duration = Duration::from_nanos(2000);
const RECORD: Duration = Duration::from_nanos(1500);

/// The event that was noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Note {
    Saved(Save),
    Asked(u64),
    /// It was asked for, and computed again if need be.
    Computed(u64),
    /// The first backward ended.
    Ended,
}

/// A note, the time when the device reached it, and the memory around it.
#[derive(Debug)]
pub(super) struct Notes {
    pub(super) note: Note,
    /// When the device reached the point at which the bytes were asked for.
    pub(super) before: Option<Reached>,
    pub(super) reached: Reached,
    /// The most allocated bytes since the previous note, had there been memory for it, without those allocated when the step began.
    pub(super) peak: u64,
    /// Allocated bytes after the event, without those of the step's beginning and those of saved storages.
    pub(super) beside: u64,
    /// The saved storages that were on the device after the event.
    pub(super) alive: Alive,
    /// For a save with a recipe: the recipe's time, and the note of its first input.
    pub(super) recipe: Option<(Duration, usize)>,
}

/// All notes of a step.
pub(super) struct Step {
    pub(super) begun: Reached,
    pub(super) notes: Vec<Notes>,
    pub(super) lineage: Lineage,
    /// How many operations were recorded.
    pub(super) operations: usize,
    /// What sending off a storage takes of the program's thread, and fetching it back.
    pub(super) each_move: Duration,
    /// Bytes that the first micro-batch leaves to those after it: gradients.
    pub(super) left: u64,
    pub(super) rest: Duration,
    pub(super) moves: Moves,
    /// When the device came by operations.
    pub(super) came_by: Vec<Reached>,
}

impl Step {
    /// `None` if nothing was saved, or there was no backward.
    pub(super) fn profile(self, micro_batches: u32) -> Option<StepProfile> {
        let points = self.notes.iter().flat_map(|notes| notes.before.into_iter().chain([notes.reached]));
        let stalls = Stalls::new(points.chain(self.came_by.iter().copied()).collect(), &self.moves);
        let accumulated = self.accumulated(micro_batches);
        let mut activations: Vec<Activation> = Vec::new();
        let mut places: HashMap<u64, usize> = HashMap::new();
        let (mut saves, mut entries) = (Vec::new(), Vec::new());
        let (mut turn, mut turn_extra) = (Duration::ZERO, 0);
        let (mut asked, mut asked_for) = (Asked::default(), HashSet::new());
        let (mut held_at_turn, mut used_together) = (HashSet::new(), HashSet::new());
        let (mut since, mut held, mut lasted, mut most) = (self.begun.at, 0, Duration::ZERO, 0);
        for (index, notes) in self.notes.iter().enumerate() {
            let Notes { note, reached, peak, recipe, .. } = *notes;
            // What computing something again takes is no part of what the program computes.
            let until = notes.before.filter(|_| matches!(note, Note::Computed(_))).unwrap_or(reached);
            lasted += stalls.computed(since, until.at);
            most = most.max(peak.saturating_sub(held) + accumulated[index]);
            (since, held) = (reached.at, notes.alive.bytes);
            match note {
                Note::Saved(save) => {
                    let place = activations.len();
                    let known = *places.entry(save.entry).or_insert(place);
                    saves.push((save, known));
                    // The next entry is computed while what is in use now still is.
                    let next = place + usize::from(known == place);
                    held_at_turn = in_use(&notes.alive, &places).filter(|other| *other < place).collect();
                    held_at_turn.iter().for_each(|other: &usize| activations[*other].in_use_until = next);
                    if known < place {
                        continue;
                    }
                    entries.push(save.entry);
                    let input = recipe.and_then(|(_, input)| self.saved_at(input, index, &places));
                    activations.push(Activation {
                        bytes: save.bytes,
                        forward: lasted,
                        forward_extra: most.saturating_sub(save.bytes),
                        recompute: recipe
                            .map(|(time, _)| Recompute { time, inputs: input.into_iter().collect() }),
                        in_use_until: next,
                        ..Activation::default()
                    });
                }
                Note::Asked(entry) | Note::Computed(entry) => {
                    let Some(&place) = places.get(&entry).filter(|&&place| asked.last() != Some(place))
                    else {
                        continue;
                    };
                    if asked.last().is_some() {
                        asked.lasted(lasted, most);
                    } else {
                        (turn, turn_extra) = (lasted, most);
                    }
                    let still_used: HashSet<usize> = in_use(&notes.alive, &places).collect();
                    asked.next(place, &still_used);
                    asked_for.insert(place);
                    for other in still_used {
                        let is_asked_for = asked_for.contains(&other);
                        if !is_asked_for
                            || (held_at_turn.contains(&other) && !asked.now.places.contains(&other))
                        {
                            activations[other].in_use_until = usize::MAX;
                        }
                        if is_asked_for {
                            used_together.insert((place.max(other), place.min(other)));
                        }
                    }
                }
                Note::Ended => {
                    if asked.last().is_some() {
                        asked.lasted(lasted, most);
                        asked.end();
                    }
                }
            }
            (lasted, most) = (Duration::ZERO, 0);
        }
        if asked_for.is_empty() {
            return None;
        }
        // In backward the later one comes first and waits for the other, unless the program holds that anyway, such as a batch whose parts
        // are read one by one.
        for (later, sooner) in used_together {
            if activations[sooner].in_use_until < usize::MAX {
                let entry = &mut activations[later];
                entry.in_use_with = entry.in_use_with.max(later - sooner);
            }
        }
        asked.shares_out(&mut activations);
        let Family { activations, places, operators, from_segments, results } =
            Family::of(&self.lineage, activations, &entries);
        let saves: Vec<_> = saves.into_iter().map(|(save, place)| (save, places[place])).collect();
        let operators = operators.into_iter().map(|name| name.map(Cow::Borrowed)).collect();
        let handling = self.handling(&saves, micro_batches);
        let work = Workload { activations, turn, turn_extra, rest: self.rest, handling };
        let Moves { rates, moved, .. } = self.moves;
        // What is too small to be moved is not known here.
        let min_bytes = 0;
        Some(StepProfile {
            work,
            saves,
            results,
            operators,
            from_segments,
            min_bytes,
            micro_batches,
            rates,
            moved,
            varying: Vec::new(),
        })
    }

    /// What plans take of each of the threads that have saved something.
    fn handling(&self, saves: &[(Save, usize)], micro_batches: u32) -> Handling {
        let strands: HashSet<u32> = saves.iter().map(|(save, _)| save.position.strand).collect();
        let threads = strands.len().max(1) as f64;
        let each = |time: Duration, count: f64| time.mul_f64(count / threads);
        let operations = self.operations as f64 / f64::from(micro_batches.max(1));
        Handling {
            saves: each(SAVE, saves.len() as f64),
            operations: each(RECORD, operations),
            each_move: self.each_move.div_f64(threads),
        }
    }

    /// How many more bytes are allocated up to each note in the micro-batches after the first: the gradients that the first one leaves,
    /// less those that it had itself made by then.
    fn accumulated(&self, micro_batches: u32) -> Vec<u64> {
        if micro_batches < 2 {
            return vec![0; self.notes.len()];
        }
        let asked =
            self.notes.iter().filter(|notes| matches!(notes.note, Note::Asked(_) | Note::Computed(_)));
        let flowing = asked.map(|notes| notes.beside).min().unwrap_or(0);
        // Gradients of parameters stay. By any note there were thus never more of them than the memory beside storages at any later note,
        // less the gradients that flow through backward.
        let mut made = self.left;
        let made_after = self.notes.iter().rev().map(|notes| {
            made = match notes.note {
                Note::Saved(_) => 0,
                Note::Asked(_) | Note::Computed(_) => made.min(notes.beside - flowing),
                Note::Ended => made,
            };
            made
        });
        let mut more: Vec<u64> = made_after.skip(1).map(|made| self.left - made).collect();
        more.push(self.left);
        more.reverse();
        more
    }

    /// The entry that was saved at note `input`, if that comes before `index`.
    fn saved_at(&self, input: usize, index: usize, places: &HashMap<u64, usize>) -> Option<usize> {
        match self.notes[..index].get(input)?.note {
            Note::Saved(save) => places.get(&save.entry).copied(),
            Note::Asked(_) | Note::Computed(_) | Note::Ended => None,
        }
    }
}

/// What one operation of backward has asked for, and the time and the memory from each of these until the next.
///
/// An operation asks for all that it saved, in any order, before it computes. In a workload, backward asks for what was
/// saved last first, so what follows the last one that is asked for belongs to the one that was saved first.
#[derive(Default)]
struct Asked {
    now: Group,
    /// Those that have ended.
    ended: Vec<Group>,
}

/// What one operation asks for, and what follows each.
#[derive(Default)]
struct Group {
    places: Vec<usize>,
    followed: Vec<(Duration, u64)>,
}

impl Asked {
    fn last(&self) -> Option<usize> {
        self.now.places.last().copied()
    }

    /// The latest one was followed by this time, and by this many bytes at most.
    fn lasted(&mut self, time: Duration, most: u64) {
        self.now.followed.push((time, most));
    }

    /// Backward asks for the entry at `place`. If not all of the others are still used, another operation does.
    fn next(&mut self, place: usize, still_used: &HashSet<usize>) {
        let Group { places, .. } = &self.now;
        let is_new = !places.contains(&place) && places.iter().all(|other| still_used.contains(other));
        if !is_new {
            self.end();
        }
        self.now.places.push(place);
    }

    fn end(&mut self) {
        self.now.places.sort_unstable_by(|left, right| right.cmp(left));
        self.ended.push(std::mem::take(&mut self.now));
    }

    /// Each place gets what followed it. Nobody waits for what the program holds, so what follows that belongs to others of the operation,
    /// or else to those before it if there are any that come before it in the workload.
    fn shares_out(self, activations: &mut [Activation]) {
        let waits = |group: &Group, activations: &[Activation]| -> Vec<usize> {
            let places = group.places.iter().copied();
            places.filter(|place| activations[*place].in_use_until < usize::MAX).collect()
        };
        let mut highest = None;
        let later = self.ended.iter().rev().map(|group| {
            let later = highest;
            highest = highest.max(waits(group, activations).first().copied());
            later
        });
        let mut later: Vec<Option<usize>> = later.collect();
        later.reverse();
        let mut before = None;
        for (group, later) in self.ended.into_iter().zip(later) {
            let mut places = waits(&group, activations);
            if places.is_empty() {
                let is_early = later > group.places.first().copied();
                places = before.filter(|_| is_early).map_or(group.places, |place| vec![place]);
            } else {
                before = places.last().copied();
            }
            let missing = group.followed.len().saturating_sub(places.len());
            for (number, (time, most)) in group.followed.into_iter().enumerate() {
                let Some(place) = places.get(number.saturating_sub(missing)) else { continue };
                let entry = &mut activations[*place];
                entry.backward += time;
                entry.backward_extra = entry.backward_extra.max(most);
            }
        }
    }
}

/// The places of the entries that the program holds.
fn in_use(alive: &Alive, places: &HashMap<u64, usize>) -> impl Iterator<Item = usize> {
    alive.in_use.iter().filter_map(|entry| places.get(entry).copied())
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use ssdtrain_plan::ScopeId;

    use super::*;
    use crate::trace::Wait;

    const MS: Duration = Duration::from_millis(1);

    struct Story {
        start: Instant,
        step: Step,
    }

    impl Story {
        fn begin() -> Story {
            let start = Instant::now();
            let begun = Reached { host: start, at: start };
            let step = Step {
                begun,
                notes: Vec::new(),
                lineage: Lineage::default(),
                operations: 0,
                each_move: Duration::ZERO,
                left: 0,
                rest: 5 * MS,
                moves: Moves::default(),
                came_by: Vec::new(),
            };
            Story { start, step }
        }

        /// A note at `millis` milliseconds, both of the thread and of the device.
        fn note(&mut self, millis: u32, note: Note, peak: u64, held: u64) -> &mut Notes {
            let at = self.start + millis * MS;
            let alive = Alive { bytes: held, in_use: Vec::new() };
            let reached = Reached { host: at, at };
            self.step.notes.push(Notes { note, before: None, reached, peak, beside: 0, alive, recipe: None });
            self.step.notes.last_mut().unwrap()
        }

        fn saved(&mut self, millis: u32, entry: u64, peak: u64, held: u64) -> &mut Notes {
            let save = Save {
                entry,
                bytes: 100,
                scope: ScopeId::default(),
                position: ssdtrain_plan::Position::default(),
            };
            self.note(millis, Note::Saved(save), peak, held)
        }

        fn stretch(&self, from: u32, to: u32) -> (Instant, Instant) {
            (self.start + from * MS, self.start + to * MS)
        }

        fn profile(self) -> StepProfile {
            self.step.profile(1).unwrap()
        }
    }

    /// Two activations, saved at 10 and 30 ms and asked for at 50 and 70, with the end at 100 ms.
    fn two() -> Story {
        let mut story = Story::begin();
        story.saved(10, 1, 130, 100);
        story.saved(30, 2, 250, 200);
        story.note(50, Note::Asked(2), 260, 200);
        story.note(70, Note::Asked(1), 240, 100);
        story.note(100, Note::Ended, 170, 0);
        story
    }

    #[test]
    fn what_plans_take_of_the_programs_thread_goes_with_what_it_saves_and_records() {
        let handling = |micro_batches, operations| {
            let mut story = two();
            (story.step.operations, story.step.each_move) = (operations, MS);
            story.step.profile(micro_batches).unwrap().work.handling
        };
        let one = Handling { saves: 2 * SAVE, operations: 6 * RECORD, each_move: MS };
        assert_eq!((handling(1, 6), handling(2, 12)), (one, one), "that of a micro-batch");
        let mut story = two();
        if let Note::Saved(save) = &mut story.step.notes[1].note {
            save.position.strand = 1;
        }
        assert_eq!(story.profile().work.handling.saves, SAVE, "each thread has its own");
    }

    #[test]
    fn each_entry_has_the_time_and_the_memory_around_its_notes() {
        let Workload { activations, turn, turn_extra, rest, .. } = two().profile().work;
        let facts =
            |entry: &Activation| (entry.forward, entry.backward, entry.forward_extra, entry.backward_extra);
        assert_eq!(
            activations.iter().map(facts).collect::<Vec<_>>(),
            [(10 * MS, 30 * MS, 30, 70), (20 * MS, 20 * MS, 50, 40)]
        );
        assert_eq!((turn, turn_extra, rest), (20 * MS, 60, 5 * MS));
    }

    #[test]
    fn what_is_computed_again_takes_no_time_of_the_programs() {
        let mut story = two();
        let at = story.start + 42 * MS;
        let asked = &mut story.step.notes[2];
        (asked.note, asked.before) = (Note::Computed(2), Some(Reached { host: at, at }));
        let Workload { activations, turn, .. } = story.profile().work;
        let backward: Vec<Duration> = activations.iter().map(|entry| entry.backward).collect();
        assert_eq!((turn, backward), (12 * MS, vec![30 * MS, 20 * MS]));
    }

    #[test]
    fn micro_batches_after_the_first_have_the_gradients_that_it_leaves() {
        let mut story = two();
        for (notes, beside) in story.step.notes.iter_mut().zip([25, 25, 10, 30, 50]) {
            notes.beside = beside;
        }
        story.step.left = 50;
        let Workload { activations, turn_extra, .. } = story.step.profile(2).unwrap().work;
        // All 50 are there in forward and in the first use, after which the first micro-batch itself has made 20 of them.
        assert_eq!(activations.iter().map(|entry| entry.forward_extra).collect::<Vec<_>>(), [80, 100]);
        assert_eq!(turn_extra, 110);
        assert_eq!(activations.iter().map(|entry| entry.backward_extra).collect::<Vec<_>>(), [100, 90]);
    }

    #[test]
    fn what_the_device_waited_is_no_ones() {
        let mut story = two();
        story.step.moves.device_stalls =
            vec![story.stretch(12, 18), story.stretch(15, 22), story.stretch(68, 75)];
        let work = story.profile().work;
        assert_eq!((work.activations[1].forward, work.activations[1].backward), (10 * MS, 18 * MS));
        assert_eq!(work.activations[0].backward, 25 * MS);
    }

    #[test]
    fn a_device_that_is_behind_computes_while_the_thread_waits() {
        let mut story = two();
        // The thread reached the first save at 10 ms, the device at 16; the thread waited from 12 to 20.
        story.step.notes[0].reached = Reached { host: story.start + 10 * MS, at: story.start + 16 * MS };
        let (from, to) = story.stretch(12, 20);
        story.step.moves.host_stalls = vec![Wait { thread: 0, from, to }];
        story.step.came_by = vec![Reached { host: story.start + 11 * MS, at: story.start + 18 * MS }];
        let activations = story.profile().work.activations;
        assert_eq!((activations[0].forward, activations[1].forward), (16 * MS, 12 * MS));
    }

    #[test]
    fn what_is_saved_or_asked_for_again_is_the_same_entry() {
        let mut story = Story::begin();
        story.saved(10, 1, 100, 100);
        story.saved(15, 1, 100, 100);
        story.saved(30, 2, 200, 200);
        for (millis, entry) in [(40, 2), (50, 1), (55, 1)] {
            story.note(millis, Note::Asked(entry), 200, 200);
        }
        story.note(60, Note::Ended, 200, 0);
        let StepProfile { work, saves, .. } = story.profile();
        assert_eq!(saves.iter().map(|(_, place)| *place).collect::<Vec<_>>(), [0, 0, 1]);
        assert_eq!((work.activations[1].forward, work.activations[0].backward), (20 * MS, 10 * MS));
    }

    #[test]
    fn recipes_and_what_the_program_holds_are_told_by_place() {
        let mut story = Story::begin();
        story.saved(10, 7, 100, 100);
        story.saved(20, 8, 200, 200).recipe = Some((3 * MS, 0));
        story.saved(30, 9, 300, 300).alive.in_use = vec![7];
        story.note(40, Note::Asked(9), 300, 300);
        story.note(50, Note::Ended, 300, 0);
        let activations = story.profile().work.activations;
        assert_eq!(activations[1].recompute, Some(Recompute { time: 3 * MS, inputs: vec![0] }));
        assert_eq!([0, 1, 2].map(|place: usize| activations[place].in_use_until), [3, 2, 3]);
    }

    #[test]
    fn what_the_program_holds_when_backward_asks_for_it_cannot_leave() {
        let mut story = Story::begin();
        for (millis, entry) in [(10, 7), (20, 8), (30, 9)] {
            story.saved(millis, entry, 300, 300).alive.in_use = vec![7];
        }
        // Backward uses 9, which it was served, and 8 a moment later; the program has never released 7.
        story.note(40, Note::Asked(9), 300, 300).alive.in_use = vec![7, 9];
        story.note(50, Note::Asked(8), 300, 300).alive.in_use = vec![7, 8, 9];
        story.note(60, Note::Asked(7), 300, 300).alive.in_use = vec![7];
        story.note(70, Note::Ended, 300, 0);
        let activations = story.profile().work.activations;
        assert_eq!([0, 1, 2].map(|place: usize| activations[place].in_use_until), [usize::MAX, 2, 3]);
    }

    #[test]
    fn what_one_operation_asks_for_is_in_use_together_in_whatever_order() {
        let mut story = Story::begin();
        for (millis, entry) in [(10, 5), (20, 6), (30, 7), (40, 8), (50, 9)] {
            story.saved(millis, entry, 300, 300);
        }
        // One operation asks for 9 and 8, the next for 6 and 7, the last for 5.
        let asked = [
            (60, 9, vec![9], 300),
            (61, 8, vec![9, 8], 310),
            (65, 6, vec![6], 350),
            (66, 7, vec![6, 7], 310),
            (70, 5, vec![5], 350),
        ];
        for (millis, entry, in_use, peak) in asked {
            story.note(millis, Note::Asked(entry), peak, 300).alive.in_use = in_use;
        }
        story.note(80, Note::Ended, 300, 0);
        let activations = story.profile().work.activations;
        let places = [0, 1, 2, 3, 4];
        assert_eq!(places.map(|place: usize| activations[place].in_use_with), [0, 0, 1, 0, 1]);
        // Each operation computes when it has all it asks for: what was saved first is asked for last.
        assert_eq!(
            places.map(|place: usize| activations[place].backward),
            [10, 4, 1, 4, 1].map(|ms| ms * MS)
        );
        assert_eq!(places.map(|place: usize| activations[place].backward_extra), [0, 50, 10, 50, 10]);
    }

    #[test]
    fn nobody_waits_for_what_the_program_holds() {
        let mut story = Story::begin();
        for (millis, entry) in [(10, 5), (20, 6), (30, 7), (40, 8)] {
            story.saved(millis, entry, 300, 300).alive.in_use = vec![5, entry];
        }
        // Parts of 5 are read with 8, with 7 and with 6.
        for (millis, entry, in_use) in [
            (60, 5, vec![5]),
            (61, 8, vec![8, 5]),
            (70, 7, vec![7, 5]),
            (71, 5, vec![7, 5]),
            (80, 6, vec![6, 5]),
            (81, 5, vec![6, 5]),
        ] {
            let peak = 300 + if entry == 5 { 0 } else { u64::from(millis / 10 - 3) };
            story.note(millis, Note::Asked(entry), peak, 300).alive.in_use = in_use;
        }
        story.note(90, Note::Ended, 306, 0);
        let activations = story.profile().work.activations;
        let facts = |place: usize| (activations[place].in_use_until, activations[place].in_use_with);
        assert_eq!([0, 1, 2, 3].map(facts), [(usize::MAX, 0), (2, 0), (3, 0), (4, 0)]);
        // What follows belongs to those that are waited for.
        assert_eq!(
            [0, 1, 2, 3].map(|place: usize| activations[place].backward),
            [0, 10, 10, 10].map(|ms| ms * MS)
        );
        assert_eq!([0, 1, 2, 3].map(|place: usize| activations[place].backward_extra), [0, 6, 5, 4]);
    }

    #[test]
    fn a_step_without_a_backward_shows_nothing() {
        let mut story = Story::begin();
        story.saved(10, 1, 100, 100);
        assert!(story.step.profile(0).is_none());
    }
}
