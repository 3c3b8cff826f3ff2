//! The entries of one micro-batch in the order they were packed. Backward asks in roughly the reverse order, so the positions below the
//! last one asked for are wanted next.

#[cfg(any(test, fuzzing))]
#[path = "tape/model.rs"]
pub(crate) mod model;

use super::keys::EntryKey;

/// The tape of one micro-batch. It contains an entry once for each time it was saved.
#[derive(Debug, Default)]
pub(crate) struct Tape {
    slots: Vec<EntryKey>,
    /// Where backward is: it asked for this position last, or computes again what was saved there.
    at: usize,
    /// Everything at or above this position was asked for or considered for prefetching.
    cursor: usize,
    /// Everything at or above this position, or at or above the cursor, was brought near.
    near: usize,
    /// Whether backward has asked for anything since the last entry was saved.
    has_begun: bool,
    /// Handles in the graph.
    pub(crate) handles: usize,
    /// The step no longer uses the tape, which is removed with its last handle.
    pub(crate) closed: bool,
}

impl Tape {
    /// Appends an entry and returns its position.
    pub(crate) fn push(&mut self, entry: EntryKey) -> usize {
        self.slots.push(entry);
        self.at = self.slots.len();
        (self.cursor, self.near) = (self.at, self.at);
        self.has_begun = false;
        self.slots.len() - 1
    }

    /// Forgets entries at the end that no handle names any more. Without this, a step with many small backward passes would
    /// look through all it ever saved in each of them.
    pub(crate) fn forget_gone(&mut self, is_gone: impl Fn(EntryKey) -> bool) {
        while self.slots.pop_if(|last| is_gone(*last)).is_some() {}
        self.at = self.at.min(self.slots.len());
        self.cursor = self.cursor.min(self.slots.len());
        self.near = self.near.min(self.cursor);
    }

    /// The position of what is saved next.
    pub(crate) fn end(&self) -> usize {
        self.slots.len()
    }

    /// Backward has come to what was saved at `position`, where there is no entry: it is computed again.
    pub(crate) fn comes_to(&mut self, position: usize) {
        self.at = position.min(self.slots.len());
        self.cursor = self.cursor.min(position);
        self.near = self.near.min(position);
    }

    /// Backward asks for something.
    pub(crate) fn begins(&mut self) {
        self.has_begun = true;
    }

    /// Whether backward has asked for anything since the last entry was saved.
    pub(crate) fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// The entry that was saved last at `position` has left since it was considered. It is considered again if backward is still to come
    /// to it, there or where it was saved before.
    pub(crate) fn left(&mut self, position: usize) {
        let Some(entry) = self.slots.get(position) else { return };
        let ahead = &self.slots[..self.at.min(position + 1)];
        if let Some(next) = ahead.iter().rposition(|slot| slot == entry) {
            self.cursor = self.cursor.max(next + 1);
        }
    }

    /// What is computed again where backward is has to wait for something: what lies below was not looked at from there.
    pub(crate) fn missed(&mut self) {
        (self.cursor, self.near) = (self.at, self.at);
    }

    /// Backward has asked for the entry at `position`. `missed`: it had not been prefetched, which is also how a second backward that
    /// starts from the end again is noticed.
    pub(crate) fn asked(&mut self, position: usize, missed: bool) {
        self.at = position;
        self.cursor = if missed { position } else { self.cursor.min(position) };
        self.near = if missed { position } else { self.near.min(position) };
    }

    /// The entry that backward will want next and that was not considered yet.
    pub(crate) fn ahead(&self) -> Option<EntryKey> {
        self.cursor.checked_sub(1).map(|below| self.slots[below])
    }

    /// The entry below all those that were brought near.
    pub(crate) fn far(&self) -> Option<EntryKey> {
        self.near.min(self.cursor).checked_sub(1).map(|below| self.slots[below])
    }

    /// Marks the entry that [`Tape::far`] returned as brought near.
    pub(crate) fn advance_near(&mut self) {
        self.near = self.near.min(self.cursor).saturating_sub(1);
    }

    /// Marks the entry that [`Tape::ahead`] returned as considered.
    pub(crate) fn advance(&mut self) {
        self.cursor = self.cursor.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::model::TapeStep;
    use super::*;

    fn tape_of(len: usize) -> Tape {
        let mut tape = Tape::default();
        for serial in 0..len {
            tape.push(EntryKey { index: serial, serial: serial as u64 });
        }
        tape
    }

    fn look_ahead(tape: &mut Tape, most: usize) -> Vec<usize> {
        std::iter::from_fn(|| {
            let next = tape.ahead()?;
            tape.advance();
            Some(next.index)
        })
        .take(most)
        .collect()
    }

    #[test]
    fn looks_ahead_in_the_reverse_order_of_saving() {
        assert_eq!(look_ahead(&mut tape_of(4), 9), [3, 2, 1, 0]);
    }

    #[test]
    fn what_has_left_meanwhile_is_looked_at_again() {
        let mut tape = tape_of(4);
        tape.asked(3, false);
        assert_eq!(look_ahead(&mut tape, 2), [2, 1]);
        tape.left(2);
        assert_eq!(look_ahead(&mut tape, 9), [2, 1, 0]);
        tape.left(3);
        assert!(look_ahead(&mut tape, 9).is_empty(), "backward has passed it");
    }

    #[test]
    fn what_has_left_and_was_saved_twice_is_looked_at_where_backward_is_still_to_come_to_it() {
        let mut tape = tape_of(4);
        assert_eq!(tape.push(EntryKey { index: 1, serial: 1 }), 4);
        tape.comes_to(2);
        assert_eq!(look_ahead(&mut tape, 9), [1, 0]);
        tape.left(4);
        assert_eq!(look_ahead(&mut tape, 9), [1, 0]);
    }

    #[test]
    fn where_something_is_computed_again_and_has_to_wait_it_is_looked_ahead_from_there() {
        let mut tape = tape_of(6);
        tape.comes_to(2);
        assert_eq!(look_ahead(&mut tape, 9), [1, 0]);
        tape.comes_to(5);
        assert!(look_ahead(&mut tape, 9).is_empty(), "all of it may be there");
        tape.missed();
        assert_eq!(look_ahead(&mut tape, 9), [4, 3, 2, 1, 0]);
    }

    #[test]
    fn a_second_backward_starts_from_the_end_again() {
        let mut tape = tape_of(3);
        look_ahead(&mut tape, 3);
        tape.asked(2, true);
        assert_eq!(look_ahead(&mut tape, 3), [1, 0]);
    }

    #[test]
    fn what_is_gone_is_not_looked_at_again() {
        let mut tape = tape_of(5);
        tape.forget_gone(|key| key.index > 1);
        assert_eq!(look_ahead(&mut tape, 9), [1, 0]);
        assert_eq!(tape.push(EntryKey { index: 7, serial: 7 }), 2);
        tape.asked(2, true);
        assert_eq!(look_ahead(&mut tape, 9), [1, 0]);
    }

    /// More of them save than release, so that tapes become long.
    fn any_step() -> impl Strategy<Value = TapeStep> {
        prop_oneof![
            6 => Just(TapeStep::Save),
            2 => any::<usize>().prop_map(TapeStep::Release),
            2 => any::<(usize, bool)>().prop_map(|(which, missed)| TapeStep::Ask { which, missed }),
            1 => any::<usize>().prop_map(TapeStep::Left),
            1 => any::<usize>().prop_map(TapeStep::ComeTo),
            1 => Just(TapeStep::Miss),
            2 => Just(TapeStep::LookAhead),
            2 => Just(TapeStep::BringNear),
        ]
    }

    proptest! {
        #[test]
        fn a_tape_is_what_a_plain_record_of_it_says(steps in prop::collection::vec(any_step(), 0..60)) {
            model::compare(steps);
        }

        #[test]
        fn every_entry_is_looked_at_or_asked_for_exactly_once(len in 1usize..60, steps in prop::collection::vec(0usize..4, 0..80)) {
            let mut tape = tape_of(len);
            let mut seen = vec![0; len];
            let mut next_asked = len;
            for ahead in steps {
                for index in look_ahead(&mut tape, ahead) { seen[index] += 1; }
                if next_asked == 0 { break; }
                next_asked -= 1;
                if seen[next_asked] == 0 { seen[next_asked] += 1; }
                tape.asked(next_asked, false);
            }
            for index in look_ahead(&mut tape, len) { seen[index] += 1; }
            prop_assert!(seen.iter().all(|&times| times == 1), "{seen:?}");
        }
    }
}
