//! The operations that a backend carries out.

use std::any::Any;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::mem::{BLOCK, IoBuf};
use crate::region::Region;
use crate::watch::{Clock, GivenUp, OnLost};

/// An operation fails after this many attempts in a row without progress.
const MAX_STALLS: u32 = 100;

/// Which way bytes move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the region into memory.
    Read,
    /// From memory to the region.
    Write,
}

/// One contiguous transfer between memory and a region: a single range of each.
///
/// An operation owns the memory and the region that it points at until it completes. It completes exactly once; if it
/// is dropped instead, it completes with an error.
///
/// An operation that takes longer than the store's time limit, from [`begin`](Op::begin) to its completion, is given up
/// with all others of its transfer. It still owns the memory and the region, and whoever has it keeps it until it really
/// ends; nobody waits for that any more.
#[must_use = "an operation that is dropped fails"]
pub struct Op {
    pub(super) direction: Direction,
    pub(super) region: Arc<dyn Region>,
    offset: u64,
    pub(super) buf: Arc<dyn IoBuf>,
    pub(super) start: usize,
    len: usize,
    pub(super) moved: usize,
    stalls: u32,
    /// `None` if there is no time limit.
    pub(super) clock: Option<Arc<Clock>>,
    done: Done,
}

/// Called when an operation ends; returns the operations to carry out next.
type Follow = Box<dyn FnOnce(io::Result<()>) -> Vec<Op> + Send>;

/// Calls its function exactly once.
struct Done(Option<Follow>);

impl Op {
    /// Moves `len` bytes, at least 1, between offset `start` of `buf`, where they are contiguous, and `offset` of
    /// `region`, then calls `done`.
    pub(crate) fn new(
        direction: Direction,
        (region, offset): (Arc<dyn Region>, u64),
        (buf, start, len): (Arc<dyn IoBuf>, usize, usize),
        done: Follow,
    ) -> Op {
        debug_assert!(len > 0 && len <= buf.part(start).1);
        Op {
            direction,
            region,
            offset,
            buf,
            start,
            len,
            moved: 0,
            stalls: 0,
            clock: None,
            done: Done(Some(done)),
        }
    }

    /// The operation with a time limit.
    pub(crate) fn timed(self, clock: Arc<Clock>) -> Op {
        Op { clock: Some(clock), ..self }
    }

    /// Must be called when the operation is about to be handed to what carries it out, and may not answer: its time runs
    /// from now on. If it runs out, `on_lost` is called before anybody hears of it. It should tell the backend to go on
    /// without the operations that [were given up](Op::is_given_up), and must not wait for the disk.
    pub fn begin(&self, on_lost: &Arc<dyn Fn() + Send + Sync>) {
        self.begin_within(None, on_lost);
    }

    /// As [`begin`](Op::begin), with a time limit of its own.
    pub(super) fn begin_within(&self, limit: Option<Duration>, on_lost: &OnLost) {
        if let Some(clock) = &self.clock {
            clock.start(limit, on_lost);
        }
    }

    /// Whether its transfer has ended without it. If it has not begun, it need not be carried out: drop it.
    pub fn is_given_up(&self) -> bool {
        self.clock.as_ref().is_some_and(|clock| clock.transfer().is_given_up())
    }

    /// Says later whether it was given up.
    pub(super) fn transfer(&self) -> Option<Arc<GivenUp>> {
        self.clock.as_ref().map(|clock| Arc::clone(clock.transfer()))
    }

    /// Which way the bytes move.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// The region, as the concrete type that the backend opened. If another backend opened it, this is an error,
    /// which the caller completes the operation with.
    pub fn region<R: Any>(&self) -> io::Result<&R> {
        let region = self.region.backing().downcast_ref();
        region.ok_or_else(|| io::Error::other("internal error: some other backend opened the region"))
    }

    /// Where in the region the transfer continues, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset + self.moved as u64
    }

    /// Where in memory the transfer continues: [`len`](Op::len) bytes, valid until the operation completes.
    pub fn ptr(&self) -> *mut u8 {
        self.buf.part(self.start + self.moved).0
    }

    /// Whether the processor can access those bytes.
    pub(super) fn is_on_host(&self) -> bool {
        self.buf.is_on_host(self.start + self.moved)
    }

    /// How many bytes are left to move; at least 1.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.len - self.moved
    }

    /// Takes the result of a system call, in bytes moved, and returns the operations to carry out next: the rest of
    /// this one if it was short or interrupted, otherwise whatever follows it.
    #[must_use = "the operations are to be carried out"]
    pub fn complete(mut self, result: io::Result<usize>) -> Vec<Op> {
        if let Some(clock) = &self.clock {
            clock.stop();
        }
        let outcome = match result {
            // Nobody wants the rest.
            _ if self.is_given_up() => Err(io::ErrorKind::TimedOut.into()),
            Ok(0) if self.direction == Direction::Read => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(0) => Err(io::ErrorKind::WriteZero.into()),
            Ok(bytes) if bytes > self.len() => Err(io::Error::other("more bytes moved than asked for")),
            Ok(bytes) if bytes == self.len() => Ok(()),
            Ok(bytes) => {
                // Direct I/O can continue only at the start of a block.
                let moved = (self.moved + bytes) / BLOCK * BLOCK;
                self.stalls = if moved > self.moved { 0 } else { self.stalls + 1 };
                self.moved = moved;
                if self.stalls < MAX_STALLS {
                    return vec![self];
                }
                Err(io::Error::other("the transfer does not get on"))
            }
            Err(error) => {
                self.stalls += 1;
                let passing = matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN));
                if passing && self.stalls < MAX_STALLS {
                    return vec![self];
                }
                Err(error)
            }
        };
        let Op { region, buf, clock, done, .. } = self;
        // Dropped first: whoever is told of the completion may rely on that.
        drop((region, buf, clock));
        done.call(outcome)
    }
}

impl Done {
    fn call(mut self, outcome: io::Result<()>) -> Vec<Op> {
        self.0.take().map_or_else(Vec::new, |done| done(outcome))
    }
}

impl Drop for Done {
    fn drop(&mut self) {
        if let Some(done) = self.0.take() {
            drop(done(Err(io::Error::other("the backend has stopped"))));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::mem::AlignedBuf;
    use crate::region::Place;
    use crate::spill_file::SpillFile;
    use crate::watch::Watch;

    fn op(blocks: usize) -> (Op, mpsc::Receiver<io::Result<()>>) {
        let file = Arc::new(SpillFile::create(Place::Memory, 1 << 20).unwrap());
        let buf: Arc<dyn IoBuf> = Arc::new(AlignedBuf::new(blocks * BLOCK).unwrap());
        let (sender, receiver) = mpsc::channel();
        let done = Box::new(move |outcome| {
            sender.send(outcome).unwrap();
            Vec::new()
        });
        (Op::new(Direction::Read, (file, 0), (buf, 0, blocks * BLOCK), done), receiver)
    }

    /// The single operation that continues this one.
    fn resumed(op: Op, result: io::Result<usize>) -> Op {
        let mut ops = op.complete(result);
        assert_eq!(ops.len(), 1);
        ops.remove(0)
    }

    fn errno(code: i32) -> io::Result<usize> {
        Err(io::Error::from_raw_os_error(code))
    }

    #[test]
    fn a_short_transfer_goes_on_from_the_last_whole_block() {
        let (op, done) = op(3);
        let start = op.ptr();
        let op = resumed(op, Ok(BLOCK + 100));
        assert_eq!((op.offset(), op.len(), op.ptr()), (BLOCK as u64, 2 * BLOCK, start.wrapping_add(BLOCK)));
        assert!(op.complete(Ok(2 * BLOCK)).is_empty());
        assert!(done.recv().unwrap().is_ok());
    }

    #[test]
    fn an_interrupted_transfer_is_tried_again() {
        let (op, done) = op(1);
        let op = resumed(resumed(op, errno(libc::EINTR)), errno(libc::EAGAIN));
        assert!(op.complete(Ok(BLOCK)).is_empty());
        assert!(done.recv().unwrap().is_ok());
    }

    #[test]
    fn a_transfer_that_never_gets_on_fails() {
        for result in [|| Ok(100), || errno(libc::EINTR)] {
            let (op, done) = op(1);
            let mut ops = vec![op];
            while let Some(op) = ops.pop() {
                ops = op.complete(result());
            }
            assert!(done.recv().unwrap().is_err());
        }
    }

    #[test]
    fn the_end_of_the_file_is_an_error() {
        let (op, done) = op(1);
        assert!(op.complete(Ok(0)).is_empty());
        assert_eq!(done.recv().unwrap().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn one_that_was_given_up_is_not_continued() {
        let watch = Watch::new(Duration::MAX).unwrap();
        let transfer = watch.watcher().transfer();
        for result in [Ok(BLOCK), errno(libc::EINTR), Ok(3 * BLOCK)] {
            let (op, done) = op(3);
            let op = op.timed(Clock::new(&transfer, |_| {}));
            transfer.give_up();
            assert!(op.complete(result).is_empty());
            assert_eq!(done.recv().unwrap().unwrap_err().kind(), io::ErrorKind::TimedOut);
        }
        transfer.end();
    }

    #[test]
    fn a_dropped_operation_fails_once() {
        let (op, done) = op(1);
        drop(op);
        assert!(done.recv().unwrap().is_err());
        assert!(done.recv().is_err());
    }
}
