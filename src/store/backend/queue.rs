//! Operations that wait their turn.

use std::collections::VecDeque;

use super::{Direction, Op};

/// First in, first out, but reads before writes: backward waits for reads, and nobody for writes.
#[derive(Default)]
pub(super) struct Queue {
    reads: VecDeque<Op>,
    writes: VecDeque<Op>,
}

impl Queue {
    pub(super) fn push(&mut self, op: Op) {
        match op.direction() {
            Direction::Read => self.reads.push_back(op),
            Direction::Write => self.writes.push_back(op),
        }
    }

    pub(super) fn pop(&mut self) -> Option<Op> {
        self.reads.pop_front().or_else(|| self.writes.pop_front())
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
    fn reads_go_first_and_each_kind_keeps_its_order() {
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
        queue.extend([op(Direction::Write, 1), op(Direction::Read, 2), op(Direction::Write, 3)]);
        queue.push(op(Direction::Read, 4));
        let order: Vec<u64> = std::iter::from_fn(|| queue.pop()).map(|op| op.offset()).collect();
        assert_eq!(order, [2, 4, 1, 3]);
        assert!(queue.is_empty());
    }
}
