//! Operations that wait their turn.

use std::collections::VecDeque;

use super::{Direction, Op};

/// While both wait, one operation in so many is a write.
const WRITE_SHARE: u32 = 4;

/// First in, first out, but most reads before writes: backward waits for reads. Writes still get a share, since a disk moves
/// more bytes in both directions at once than in one after the other.
#[derive(Default)]
pub(super) struct Queue {
    reads: VecDeque<Op>,
    writes: VecDeque<Op>,
    /// Reads that have gone since a write did.
    reads_gone: u32,
}

impl Queue {
    pub(super) fn push(&mut self, op: Op) {
        match op.direction() {
            Direction::Read => self.reads.push_back(op),
            Direction::Write => self.writes.push_back(op),
        }
    }

    pub(super) fn pop(&mut self) -> Option<Op> {
        let write_is_due = self.reads_gone + 1 >= WRITE_SHARE && !self.writes.is_empty();
        if let Some(read) = (!write_is_due).then(|| self.reads.pop_front()).flatten() {
            self.reads_gone += 1;
            return Some(read);
        }
        self.reads_gone = 0;
        self.writes.pop_front()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.reads.is_empty() && self.writes.is_empty()
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
    use crate::store::file::SpillFile;

    #[test]
    fn reads_go_first_writes_get_a_share_and_each_kind_keeps_its_order() {
        let file = Arc::new(SpillFile::in_memory(1 << 20).unwrap());
        let buf: Arc<dyn IoBuf> = Arc::new(AlignedBuf::new(BLOCK).unwrap());
        let op = |direction, offset| {
            Op::new(
                direction,
                (Arc::clone(&file), offset),
                (Arc::clone(&buf), 0, BLOCK),
                Box::new(|_| Vec::new()),
            )
        };
        let mut queue = Queue::default();
        queue.extend([1, 2].map(|offset| op(Direction::Write, offset)));
        queue.extend([11, 12, 13, 14, 15].map(|offset| op(Direction::Read, offset)));
        let order: Vec<u64> = std::iter::from_fn(|| queue.pop()).map(|op| op.offset()).collect();
        assert_eq!(order, [11, 12, 13, 1, 14, 15, 2]);
        assert!(queue.is_empty());
    }
}
