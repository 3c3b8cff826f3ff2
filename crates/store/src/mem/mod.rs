//! Memory that transfers read from and write to.

mod aligned;
mod mapping;
mod pool;
mod runs;

use std::iter;
use std::ops::Range;

pub use aligned::AlignedBuf;
pub use pool::{HostPool, PAGE, Pin, Shrunk, Slot};
#[cfg(fuzzing)]
pub use runs::model::{RunsStep, compare as compare_runs};

/// The granularity of transfers. Direct I/O requires addresses, lengths and offsets that are multiples of the
/// device's logical block, and 4 KiB suits every device that this library transfers to directly.
pub const BLOCK: usize = 4096;

/// `bytes` rounded up to whole blocks.
pub(crate) const fn round_to_block(bytes: u64) -> u64 {
    bytes.next_multiple_of(BLOCK as u64)
}

/// Memory that a transfer reads from or writes to; it need not be contiguous.
///
/// # Safety
///
/// From creation to drop, `part` names the same `len` bytes, each at an address of its own and valid for reads and
/// writes by whatever can access them. Whoever holds the value ensures that nobody writes those bytes while a
/// transfer from them runs, and that nobody touches them while a transfer into them runs. All `len` bytes belong to
/// the transfer, not only its payload: a transfer may read or overwrite what follows the payload up to the next
/// multiple of [`BLOCK`].
pub unsafe trait IoBuf: Send + Sync {
    /// The address of the byte at `offset`, and how many bytes are contiguous from there: at least 1 and at most
    /// `len() - offset`. `offset` is less than `len()`.
    fn part(&self, offset: usize) -> (*mut u8, usize);

    /// How many bytes a transfer may use: the capacity, not the payload.
    fn len(&self) -> usize;

    /// Whether the processor can access the byte at `offset`. If not, the value may only be given to a backend that
    /// can access it: no checksum is taken of it, and nothing copies it into suitable memory.
    fn is_on_host(&self, _offset: usize) -> bool {
        true
    }

    /// Whether the bytes can be read until drop whatever the program does meanwhile. If not, no checksum is
    /// taken of them, and only the kernel reads what is written from them, or the thread that begins a write which needs a copy.
    fn stays(&self) -> bool {
        true
    }

    /// Whether there is no byte to use.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The contiguous parts of the first `len` bytes of `buf`, in order: the address and length of each.
pub fn parts(buf: &dyn IoBuf, len: usize) -> impl Iterator<Item = (*mut u8, usize)> {
    parts_of(buf, 0..len)
}

/// As [`parts`], for any range of bytes of `buf`.
pub(crate) fn parts_of(buf: &dyn IoBuf, bytes: Range<usize>) -> impl Iterator<Item = (*mut u8, usize)> {
    let Range { mut start, end } = bytes;
    iter::from_fn(move || {
        let rest = end.checked_sub(start).filter(|&rest| rest > 0)?;
        let (memory, bytes) = buf.part(start);
        let bytes = bytes.min(rest);
        start += bytes;
        Some((memory, bytes))
    })
}
