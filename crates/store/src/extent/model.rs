//! A plain record of every block of a spill file, and steps that are taken with it and with [`Space`] alike.

use super::{Slot, Space};
use crate::mem::BLOCK;

const BLOCK_BYTES: u64 = BLOCK as u64;

/// A change of a space.
#[derive(Clone, Copy, Debug)]
pub enum SpaceStep {
    /// It grows to this many blocks, unless it has as many.
    Grow(usize),
    /// This many bytes are taken, if there is room.
    Take(u64),
    /// One of the slots that were taken comes back; they are counted round.
    GiveBack(usize),
    /// It gives up what is free at its end.
    Shrink,
}

/// Whether each block is free.
#[derive(Default)]
struct Blocks(Vec<bool>);

impl Blocks {
    /// The free ranges, none of them next to another: the first block, and the number of blocks.
    fn free_ranges(&self) -> Vec<(usize, usize)> {
        let mut ranges: Vec<(usize, usize)> = Vec::new();
        for block in (0..self.0.len()).filter(|&block| self.0[block]) {
            match ranges.last_mut().filter(|(first, len)| first + len == block) {
                Some((_, len)) => *len += 1,
                None => ranges.push((block, 1)),
            }
        }
        ranges
    }

    /// Where so many blocks have to be taken: at the beginning of the shortest free range, and of those the first.
    fn place_for(&self, blocks: u128) -> Option<usize> {
        let fitting = self.free_ranges().into_iter().filter(|&(_, len)| blocks > 0 && len as u128 >= blocks);
        fitting.min_by_key(|&(first, len)| (len, first)).map(|(first, _)| first)
    }

    /// In bytes, how far the space has to grow for so many blocks at its end.
    fn end_with(&self, blocks: u128) -> Option<u64> {
        let at_end = self.0.iter().rev().take_while(|is_free| **is_free).count();
        let end = ((self.0.len() - at_end) as u128 + blocks) * u128::from(BLOCK_BYTES);
        u64::try_from(end).ok().filter(|_| blocks > 0)
    }

    fn set(&mut self, slot: Slot, free: bool) {
        let first = (slot.offset / BLOCK_BYTES) as usize;
        for block in &mut self.0[first..first + (slot.len / BLOCK_BYTES) as usize] {
            assert_ne!(*block, free, "a block is taken once and given back once");
            *block = free;
        }
    }
}

/// Takes `steps` with a space and with a record of its blocks, and gives everything back at last. Panics where the two
/// differ.
pub fn compare(steps: impl IntoIterator<Item = SpaceStep>) {
    let (mut space, mut blocks, mut slots) = (Space::default(), Blocks::default(), Vec::new());
    for step in steps {
        match step {
            SpaceStep::Grow(end) => {
                space.grow(end as u64 * BLOCK_BYTES);
                blocks.0.resize(end.max(blocks.0.len()), true);
            }
            SpaceStep::Take(bytes) => {
                let whole = u128::from(bytes).div_ceil(u128::from(BLOCK_BYTES));
                assert_eq!(space.end_with(bytes), blocks.end_with(whole));
                let expected = blocks.place_for(whole);
                let slot = space.take(bytes);
                let found = slot.map(|slot| (slot.offset, u128::from(slot.len)));
                let bytes_of = |first: usize| (first as u64 * BLOCK_BYTES, whole * u128::from(BLOCK_BYTES));
                assert_eq!(found, expected.map(bytes_of));
                slot.iter().for_each(|slot| blocks.set(*slot, false));
                slots.extend(slot);
            }
            SpaceStep::GiveBack(_) if slots.is_empty() => {}
            SpaceStep::GiveBack(index) => {
                let slot = slots.swap_remove(index % slots.len());
                space.give_back(slot);
                blocks.set(slot, true);
            }
            SpaceStep::Shrink => {
                space.shrink();
                while blocks.0.pop_if(|is_free| *is_free).is_some() {}
            }
        }
        assert_same(&space, &blocks);
    }
    for slot in slots {
        space.give_back(slot);
        blocks.set(slot, true);
    }
    assert_same(&space, &blocks);
    space.shrink();
    assert_eq!((space.end(), space.taken()), (0, 0));
}

fn assert_same(space: &Space, blocks: &Blocks) {
    let taken = blocks.0.iter().filter(|is_free| !**is_free).count();
    assert_eq!(
        (space.end(), space.taken()),
        (blocks.0.len() as u64 * BLOCK_BYTES, taken as u64 * BLOCK_BYTES)
    );
    let ranges = blocks.free_ranges();
    let ranges = ranges.iter().map(|&(first, len)| (first as u64 * BLOCK_BYTES, len as u64 * BLOCK_BYTES));
    assert!(space.free.iter().map(|(&offset, &len)| (offset, len)).eq(ranges), "the free ranges differ");
    assert_eq!(space.by_len.len(), space.free.len());
    assert!(space.by_len.iter().all(|(len, offset)| space.free.get(offset) == Some(len)));
}
