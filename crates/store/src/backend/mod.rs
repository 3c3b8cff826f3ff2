//! What carries operations out: the [`Backend`] trait, its implementations, and the [`Op`] they are given.

mod cufile;
mod faulty;
mod malloc_hook;
mod pool;
mod private_folder;
mod queue;
mod registered;
#[cfg(test)]
mod suite;
mod throttled;
mod uring;

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

pub(crate) use cufile::CuFile;
pub use faulty::{Fault, Faulty};
pub use pool::Pool;
pub use throttled::Throttled;
pub use uring::Uring;

use super::file::SpillFile;
use crate::mem::{BLOCK, IoBuf};

/// An operation that made no progress this many times in a row fails.
const MAX_STALLS: u32 = 100;

/// Carries operations out.
///
/// Dropping a backend finishes every operation that was submitted and then ends its threads; dropped on one of
/// those threads, it only arranges for that.
pub trait Backend: Send + Sync {
    /// Starts the operations, in order, and returns without waiting for them.
    ///
    /// For each of them the backend moves up to [`Op::len`] bytes between [`Op::ptr`] and [`Op::offset`] of
    /// [`Op::fd`] in the operation's direction, then hands the result to [`Op::complete`] and carries out what
    /// that returns. It keeps the operation until the kernel is done with its memory and file.
    fn submit(&self, ops: Vec<Op>);

    /// Learns of a spill file before its first operation, while that has a name still. Only stores of
    /// [`BackendKind::CuFile`](super::BackendKind::CuFile) tell.
    fn adopt(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        let _ = file;
        Ok(())
    }

    /// The backend in words, as reports name it.
    fn name(&self) -> &'static str;

    /// How bytes go if cuFile moves them.
    fn cufile(&self) -> Option<CuFileMode> {
        None
    }

    /// Whether the GPU memory that it reaches directly is registered, and who does it; none if it reaches none.
    fn registered(&self) -> Option<String> {
        None
    }
}

/// How cuFile moves bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CuFileMode {
    /// GPUDirect Storage, by the kernel module nvidia-fs: straight between a GPU and the disk.
    NvidiaFs,
    /// GPUDirect Storage, by the kernel's own PCI peer-to-peer transfers.
    PciP2pDma,
    /// Through host memory of cuFile's own, which NVIDIA calls compatibility mode.
    Compatibility,
}

impl fmt::Display for CuFileMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CuFileMode::NvidiaFs => "GPUDirect Storage by nvidia-fs",
            CuFileMode::PciP2pDma => "GPUDirect Storage by PCI P2PDMA",
            CuFileMode::Compatibility => "compatibility mode, through host memory",
        })
    }
}

/// Which way bytes move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the spill file into memory.
    Read,
    /// From memory to the spill file.
    Write,
}

/// One contiguous transfer between memory and a spill file: one range of the file, one of memory.
///
/// It owns what it points at, the memory and the file, until it completes. It completes exactly once: when it is
/// dropped instead, it completes with an error.
#[must_use = "an operation that is dropped fails"]
pub struct Op {
    direction: Direction,
    file: Arc<SpillFile>,
    offset: u64,
    buf: Arc<dyn IoBuf>,
    start: usize,
    len: usize,
    moved: usize,
    stalls: u32,
    done: Done,
}

/// What follows an operation; it returns the operations to carry out next.
type Follow = Box<dyn FnOnce(io::Result<()>) -> Vec<Op> + Send>;

/// Calls its function exactly once.
struct Done(Option<Follow>);

impl Op {
    /// Moves `len` bytes, at least 1, between `start` of `buf`, where they are contiguous, and `offset` of `file`,
    /// then calls `done`.
    pub(super) fn new(
        direction: Direction,
        (file, offset): (Arc<SpillFile>, u64),
        (buf, start, len): (Arc<dyn IoBuf>, usize, usize),
        done: Follow,
    ) -> Op {
        debug_assert!(len > 0 && len <= buf.part(start).1);
        Op { direction, file, offset, buf, start, len, moved: 0, stalls: 0, done: Done(Some(done)) }
    }

    /// Which way the bytes move.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// The file.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Where in the file the transfer goes on, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset + self.moved as u64
    }

    /// Where in memory the transfer goes on: [`len`](Op::len) bytes, valid until the operation completes.
    pub fn ptr(&self) -> *mut u8 {
        self.buf.part(self.start + self.moved).0
    }

    /// Whether the processor reaches them.
    fn is_on_host(&self) -> bool {
        self.buf.is_on_host(self.start + self.moved)
    }

    /// How many bytes are left to move; at least 1.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.len - self.moved
    }

    /// Takes what a system call returned, in bytes moved, and returns the operations to carry out next: the rest
    /// of this one if it was short or interrupted, or whatever follows it.
    #[must_use = "the operations are to be carried out"]
    pub fn complete(mut self, result: io::Result<usize>) -> Vec<Op> {
        let outcome = match result {
            Ok(0) if self.direction == Direction::Read => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(0) => Err(io::ErrorKind::WriteZero.into()),
            Ok(bytes) if bytes > self.len() => Err(io::Error::other("more bytes moved than asked for")),
            Ok(bytes) if bytes == self.len() => Ok(()),
            Ok(bytes) => {
                // Direct I/O can go on only from the start of a block.
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
        let Op { file, buf, done, .. } = self;
        // Let go first: whoever hears of the completion may count on it.
        drop((file, buf));
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

    fn op(blocks: usize) -> (Op, mpsc::Receiver<io::Result<()>>) {
        let file = Arc::new(SpillFile::in_memory(1 << 20).unwrap());
        let buf: Arc<dyn IoBuf> = Arc::new(AlignedBuf::new(blocks * BLOCK).unwrap());
        let (sender, receiver) = mpsc::channel();
        let done = Box::new(move |outcome| {
            sender.send(outcome).unwrap();
            Vec::new()
        });
        (Op::new(Direction::Read, (file, 0), (buf, 0, blocks * BLOCK), done), receiver)
    }

    /// The one operation that goes on.
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
    fn a_dropped_operation_fails_once() {
        let (op, done) = op(1);
        drop(op);
        assert!(done.recv().unwrap().is_err());
        assert!(done.recv().is_err());
    }
}
