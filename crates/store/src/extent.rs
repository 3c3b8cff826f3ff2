//! Which blocks of one spill file are taken.

use offset_allocator::{Allocation, Allocator};

use crate::mem::BLOCK;

/// Largest file that extents can be found in: the allocator counts blocks in 32 bits.
pub(super) const MAX_FILE_BYTES: u64 = (u32::MAX as u64) * BLOCK as u64;
/// Most ranges, taken or free, that one file is divided into; each costs 32 bytes from the start.
const MAX_RANGES: u32 = 128 << 10;

/// The space of one spill file, handed out in whole blocks.
pub(super) struct Space {
    allocator: Allocator,
    taken_blocks: u64,
}

/// A contiguous range of taken blocks; goes back, once, with [`Space::give_back`].
#[derive(Clone, Copy)]
pub(super) struct Slot {
    allocation: Allocation,
    blocks: u32,
}

impl Space {
    /// All of `bytes` free; `bytes` is a multiple of the block and at most [`MAX_FILE_BYTES`].
    pub(super) fn new(bytes: u64) -> Space {
        let blocks = u32::try_from(bytes / BLOCK as u64).unwrap_or(u32::MAX);
        let ranges = blocks.saturating_add(2).min(MAX_RANGES);
        Space { allocator: Allocator::with_max_allocs(blocks, ranges), taken_blocks: 0 }
    }

    /// A contiguous range of `bytes`, rounded up to whole blocks; `None` if no free range is known to be as large.
    ///
    /// Free ranges are kept in size classes, so the last eighth of a range may go unused.
    pub(super) fn take(&mut self, bytes: u64) -> Option<Slot> {
        let blocks = u32::try_from(bytes.div_ceil(BLOCK as u64)).ok().filter(|&blocks| blocks > 0)?;
        let allocation = self.allocator.allocate(blocks)?;
        self.taken_blocks += u64::from(blocks);
        Some(Slot { allocation, blocks })
    }

    /// Frees a slot that this space handed out and that was not freed before.
    pub(super) fn give_back(&mut self, slot: Slot) {
        self.taken_blocks -= u64::from(slot.blocks);
        self.allocator.free(slot.allocation);
    }

    /// Bytes taken now.
    pub(super) fn taken(&self) -> u64 {
        self.taken_blocks * BLOCK as u64
    }
}

impl Slot {
    /// Where the range begins, in bytes.
    pub(super) fn offset(&self) -> u64 {
        u64::from(self.allocation.offset) * BLOCK as u64
    }

    /// Bytes of the range.
    pub(super) fn len(&self) -> u64 {
        u64::from(self.blocks) * BLOCK as u64
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CAP: u64 = 256 * BLOCK as u64;

    #[derive(Clone, Debug)]
    enum Step {
        Take(u64),
        GiveBack(usize),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            3 => (1..CAP / 8).prop_map(Step::Take),
            2 => any::<usize>().prop_map(Step::GiveBack),
        ];
        proptest::collection::vec(step, 1..200)
    }

    proptest! {
        #[test]
        fn slots_never_overlap_stay_within_the_file_and_all_come_back(steps in steps()) {
            let mut space = Space::new(CAP);
            let mut taken: Vec<Slot> = Vec::new();
            for step in steps {
                match step {
                    Step::Take(bytes) => {
                        let Some(slot) = space.take(bytes) else { continue };
                        prop_assert!(slot.len() >= bytes && slot.len() < bytes + BLOCK as u64);
                        prop_assert!(slot.offset() + slot.len() <= CAP);
                        for other in &taken {
                            let apart = slot.offset() + slot.len() <= other.offset()
                                || other.offset() + other.len() <= slot.offset();
                            prop_assert!(apart);
                        }
                        taken.push(slot);
                    }
                    Step::GiveBack(index) if !taken.is_empty() => {
                        space.give_back(taken.swap_remove(index % taken.len()));
                    }
                    Step::GiveBack(_) => {}
                }
                prop_assert_eq!(space.taken(), taken.iter().map(Slot::len).sum::<u64>());
            }
            for slot in taken.drain(..) {
                space.give_back(slot);
            }
            prop_assert_eq!(space.taken(), 0);
            prop_assert!(space.take(CAP).is_some(), "the whole file is one free range again");
        }
    }

    #[test]
    fn nothing_is_taken_beyond_the_cap() {
        let mut space = Space::new(CAP);
        assert!(space.take(CAP + 1).is_none());
        assert!(space.take(u64::MAX).is_none());
        assert!(space.take(0).is_none());
        let whole = space.take(CAP).unwrap();
        assert!(space.take(1).is_none());
        space.give_back(whole);
        assert!(space.take(1).is_some());
    }
}
