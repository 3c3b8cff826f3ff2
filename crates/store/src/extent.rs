//! Tracks which blocks of one spill file are in use.

use std::collections::{BTreeMap, BTreeSet};

use crate::mem::BLOCK;

/// The space of one spill file, up to the size it has grown to, handed out in whole blocks. All numbers are bytes.
#[derive(Default)]
pub(super) struct Space {
    /// Free ranges: start to length. Adjacent ranges are merged.
    free: BTreeMap<u64, u64>,
    /// The same ranges, shortest first: (length, start).
    by_len: BTreeSet<(u64, u64)>,
    end: u64,
    taken: u64,
}

/// A contiguous range of allocated blocks. It is returned, once, with [`Space::give_back`].
#[derive(Clone, Copy)]
pub(super) struct Slot {
    offset: u64,
    len: u64,
}

impl Space {
    /// Adds free space up to `end`, which is a multiple of the block size.
    pub(super) fn grow(&mut self, end: u64) {
        let (from, to) = (self.end, end.max(self.end));
        self.end = to;
        self.add(from, to - from);
    }

    /// Removes the free range at the end, if there is one.
    pub(super) fn shrink(&mut self) {
        let last = self.free.last_key_value().map(|(offset, len)| (*offset, *len));
        if let Some((offset, len)) = last.filter(|(offset, len)| offset + len == self.end) {
            self.forget(offset, len);
            self.end = offset;
        }
    }

    /// Takes a contiguous range of `bytes`, rounded up to whole blocks, from the shortest free range that is long
    /// enough; `None` if there is none.
    pub(super) fn take(&mut self, bytes: u64) -> Option<Slot> {
        let len = whole_blocks(bytes)?;
        let &(free, offset) = self.by_len.range((len, 0)..).next()?;
        self.forget(offset, free);
        self.insert(offset + len, free - len);
        self.taken += len;
        Some(Slot { offset, len })
    }

    /// Frees a slot that this space handed out and that was not freed before.
    pub(super) fn give_back(&mut self, slot: Slot) {
        self.taken -= slot.len;
        self.add(slot.offset, slot.len);
    }

    /// The size to which the space would have to grow to have a free range of `bytes` at its end; `None` if that
    /// overflows.
    pub(super) fn end_with(&self, bytes: u64) -> Option<u64> {
        let last = self.free.last_key_value().filter(|(offset, len)| *offset + *len == self.end);
        last.map_or(self.end, |(offset, _)| *offset).checked_add(whole_blocks(bytes)?)
    }

    /// The size to which the space has grown.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// Bytes in use now.
    pub(super) fn taken(&self) -> u64 {
        self.taken
    }

    /// Marks a range as free and merges it with the free ranges next to it.
    fn add(&mut self, mut offset: u64, mut len: u64) {
        let before = self.free.range(..offset).next_back().map(|(before, len)| (*before, *len));
        if let Some((before, before_len)) = before.filter(|(before, len)| before + len == offset) {
            self.forget(before, before_len);
            (offset, len) = (before, before_len + len);
        }
        if let Some(&after_len) = self.free.get(&(offset + len)) {
            self.forget(offset + len, after_len);
            len += after_len;
        }
        self.insert(offset, len);
    }

    fn insert(&mut self, offset: u64, len: u64) {
        if len > 0 {
            self.free.insert(offset, len);
            self.by_len.insert((len, offset));
        }
    }

    fn forget(&mut self, offset: u64, len: u64) {
        self.free.remove(&offset);
        self.by_len.remove(&(len, offset));
    }
}

fn whole_blocks(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(BLOCK as u64).filter(|&bytes| bytes > 0)
}

impl Slot {
    /// Where the range begins, in bytes.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }
}

#[cfg(test)]
impl Slot {
    /// Length of the range, in bytes.
    pub(super) fn len(&self) -> u64 {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CAP: u64 = 256 * BLOCK as u64;

    #[derive(Clone, Debug)]
    enum Step {
        Grow(u64),
        Take(u64),
        GiveBack(usize),
        Shrink,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            1 => (0..=CAP / BLOCK as u64).prop_map(|blocks| Step::Grow(blocks * BLOCK as u64)),
            9 => (1..CAP / 8).prop_map(Step::Take),
            6 => any::<usize>().prop_map(Step::GiveBack),
            1 => Just(Step::Shrink),
        ];
        proptest::collection::vec(step, 1..200)
    }

    /// The start and length of each gap between the slots; the last gap ends at `end`.
    fn gaps(taken: &[Slot], end: u64) -> Vec<(u64, u64)> {
        let mut slots: Vec<_> = taken.iter().map(|slot| (slot.offset, slot.offset + slot.len)).collect();
        slots.sort_unstable();
        let gap_starts = [0].into_iter().chain(slots.iter().map(|slot| slot.1));
        let gap_ends = slots.iter().map(|slot| slot.0).chain([end]);
        let gap = |(start, end): (u64, u64)| (start, end.checked_sub(start).expect("slots never overlap"));
        gap_starts.zip(gap_ends).map(gap).collect()
    }

    proptest! {
        #[test]
        fn slots_never_overlap_come_from_the_shortest_gap_and_all_come_back(steps in steps()) {
            let mut space = Space::default();
            let mut taken: Vec<Slot> = Vec::new();
            for step in steps {
                let free = gaps(&taken, space.end());
                match step {
                    Step::Grow(end) => {
                        let end = end.max(space.end());
                        space.grow(end);
                        prop_assert_eq!(space.end(), end);
                    }
                    Step::Take(bytes) => {
                        let whole = bytes.next_multiple_of(BLOCK as u64);
                        prop_assert_eq!(space.end_with(bytes), free.last().map(|(last, _)| last + whole));
                        let slot = space.take(bytes);
                        let shortest = free.iter().map(|gap| gap.1).filter(|&len| len >= whole).min();
                        let cut = |slot: Slot| free.iter().find(|gap| gap.0 == slot.offset).map(|gap| gap.1);
                        prop_assert_eq!(slot.map(cut), shortest.map(Some));
                        prop_assert!(slot.is_none_or(|slot| slot.len == whole));
                        taken.extend(slot);
                    }
                    Step::GiveBack(index) if !taken.is_empty() => {
                        space.give_back(taken.swap_remove(index % taken.len()));
                    }
                    Step::GiveBack(_) => {}
                    Step::Shrink => {
                        space.shrink();
                        let last = taken.iter().map(|slot| slot.offset + slot.len).max();
                        prop_assert_eq!(space.end(), last.unwrap_or(0));
                    }
                }
                prop_assert_eq!(space.taken(), taken.iter().map(Slot::len).sum::<u64>());
            }
            for slot in taken.drain(..) {
                space.give_back(slot);
            }
            prop_assert_eq!(space.taken(), 0);
            space.grow(CAP);
            prop_assert!(space.take(CAP).is_some(), "the whole file is one free range again");
        }
    }

    #[test]
    fn nothing_is_taken_beyond_the_end() {
        let mut space = Space::default();
        assert!(space.take(1).is_none());
        space.grow(CAP);
        assert!(space.take(CAP + 1).is_none());
        assert!(space.take(u64::MAX).is_none() && space.end_with(u64::MAX).is_none());
        assert!(space.take(0).is_none());
        let whole = space.take(CAP).unwrap();
        assert!(space.take(1).is_none());
        space.give_back(whole);
        assert!(space.take(1).is_some());
    }
}
