//! Tracks which blocks of one spill file are in use.

#[cfg(any(test, fuzzing))]
#[cfg_attr(not(fuzzing), expect(unreachable_pub, reason = "fuzz targets are outside"))]
pub(crate) mod model;

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

    use super::model::SpaceStep;
    use super::*;

    const CAP: u64 = 256 * BLOCK as u64;

    fn steps() -> impl Strategy<Value = Vec<SpaceStep>> {
        let step = prop_oneof![
            1 => (0..=256_usize).prop_map(SpaceStep::Grow),
            9 => (0..CAP / 8).prop_map(SpaceStep::Take),
            6 => any::<usize>().prop_map(SpaceStep::GiveBack),
            1 => Just(SpaceStep::Shrink),
        ];
        proptest::collection::vec(step, 1..if cfg!(miri) { 30 } else { 200 })
    }

    proptest! {
        #[test]
        fn slots_never_overlap_come_from_the_shortest_gap_and_all_come_back(steps in steps()) {
            model::compare(steps);
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
