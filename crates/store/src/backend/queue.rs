//! The queue of operations that have not started yet.

use std::collections::{VecDeque, vec_deque};

use super::{Direction, Op};

/// First in, first out within each direction. A read goes ahead of the queued writes, since backward is waiting for
/// it. While both are queued they take turns, because a disk moves more bytes in both directions at once than in one
/// after the other.
#[derive(Default)]
pub(super) struct Queue {
    reads: VecDeque<Op>,
    writes: VecDeque<Op>,
    /// The last operation taken was a read.
    write_is_next: bool,
}

impl Queue {
    pub(super) fn push(&mut self, op: Op) {
        match op.direction() {
            Direction::Read => self.reads.push_back(op),
            Direction::Write => self.writes.push_back(op),
        }
    }

    pub(super) fn pop(&mut self) -> Option<Op> {
        let write_first = std::mem::take(&mut self.write_is_next) && !self.writes.is_empty();
        if let Some(read) = (!write_first).then(|| self.reads.pop_front()).flatten() {
            self.write_is_next = true;
            return Some(read);
        }
        self.writes.pop_front()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.reads.is_empty() && self.writes.is_empty()
    }
}

impl IntoIterator for Queue {
    type Item = Op;
    type IntoIter = std::iter::Chain<vec_deque::IntoIter<Op>, vec_deque::IntoIter<Op>>;

    fn into_iter(self) -> Self::IntoIter {
        self.reads.into_iter().chain(self.writes)
    }
}

impl Extend<Op> for Queue {
    fn extend<I: IntoIterator<Item = Op>>(&mut self, ops: I) {
        for op in ops {
            self.push(op);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::mem::{AlignedBuf, BLOCK, IoBuf};
    use crate::region::{Place, Region};
    use crate::spill_file::SpillFile;

    #[test]
    fn a_read_goes_first_then_they_take_turns_and_each_kind_keeps_its_order() {
        let region: Arc<dyn Region> = Arc::new(SpillFile::create(Place::Memory, 1 << 20).unwrap());
        let buf: Arc<dyn IoBuf> = Arc::new(AlignedBuf::new(BLOCK).unwrap());
        let op = |direction, offset| {
            Op::new(
                direction,
                (Arc::clone(&region), offset),
                (Arc::clone(&buf), 0, BLOCK),
                Box::new(|_| Vec::new()),
            )
        };
        let mut queue = Queue::default();
        queue.extend([1, 2].map(|offset| op(Direction::Write, offset)));
        queue.extend([11, 12, 13, 14].map(|offset| op(Direction::Read, offset)));
        let order: Vec<u64> = std::iter::from_fn(|| queue.pop()).map(|op| op.offset()).collect();
        assert_eq!(order, [11, 1, 12, 2, 13, 14]);
        assert!(queue.is_empty());
    }
}
