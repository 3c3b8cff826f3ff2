//! What tells whether bytes came back from the disk as they were written: checksums, or the seals of encrypted ones.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::checksum::{checksum, chunks};
use crate::mem::IoBuf;
use crate::seal::{SEALED_BYTES, Seal, Sealer};

/// What was noted of a payload when it was written.
#[derive(Clone)]
pub(super) enum Marks {
    /// The checksum of each chunk of a transfer.
    Checksums(Arc<[u32]>),
    /// The seal of each [`SEALED_BYTES`], and what opens them.
    Seals(Arc<Sealer>, Arc<[Seal]>),
}

/// How bytes differ from those that were written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Difference {
    Checksum { written: u32, read: u32 },
    Seal,
}

impl Marks {
    /// Whether the payload is encrypted.
    pub(super) fn are_seals(&self) -> bool {
        matches!(self, Marks::Seals(..))
    }

    /// Compares a chunk that was read, the one with this index, with what was noted of it; one that is encrypted is decrypted
    /// where it is. The error has the place in the payload from which on it differs. Nobody else may have these bytes
    /// meanwhile.
    pub(super) fn examine(
        &self,
        buf: &dyn IoBuf,
        index: usize,
        chunk: Range<usize>,
    ) -> Result<(), (usize, Difference)> {
        match self {
            Marks::Checksums(checksums) => {
                let (written, read) = (checksums[index], checksum(buf, chunk.clone()));
                let differs = Err((chunk.start, Difference::Checksum { written, read }));
                if written == read { Ok(()) } else { differs }
            }
            Marks::Seals(sealer, seals) => pieces(chunk).try_for_each(|piece| {
                let (start, seal) = (piece.start, &seals[piece.start / SEALED_BYTES]);
                let is_open = with_bytes(buf, piece, |bytes| sealer.open(seal, bytes));
                if is_open { Ok(()) } else { Err((start, Difference::Seal)) }
            }),
        }
    }
}

/// For messages.
impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Difference::Checksum { written, read } => {
                write!(f, "written with CRC-32C {written:08x}, read with {read:08x}")
            }
            Difference::Seal => write!(f, "the tag of its encryption does not match"),
        }
    }
}

/// Encrypts a chunk where it is, after `fill` has been told of each of its pieces. Nobody else may have these bytes meanwhile.
pub(super) fn seal(
    sealer: &Sealer,
    buf: &dyn IoBuf,
    chunk: Range<usize>,
    fill: impl Fn(Range<usize>),
) -> Vec<Seal> {
    let sealed = pieces(chunk).map(|piece| {
        // One piece after the other, which the processor then has at hand.
        fill(piece.clone());
        with_bytes(buf, piece, |bytes| sealer.seal(bytes))
    });
    sealed.collect()
}

/// Whether each piece of the first `len` bytes of `buf` is contiguous, so that it can be decrypted where it is.
pub(super) fn opens_in_place(buf: &dyn IoBuf, len: usize) -> bool {
    pieces(0..len).all(|piece| buf.part(piece.start).1 >= piece.len())
}

/// The pieces of a chunk, which begins where a piece does, that have seals of their own.
fn pieces(chunk: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    debug_assert!(chunk.start.is_multiple_of(SEALED_BYTES));
    chunks(chunk.len(), SEALED_BYTES).map(move |piece| chunk.start + piece.start..chunk.start + piece.end)
}

/// Lends a piece of `buf`, which is contiguous.
fn with_bytes<R>(buf: &dyn IoBuf, piece: Range<usize>, work: impl FnOnce(&mut [u8]) -> R) -> R {
    let (memory, contiguous) = buf.part(piece.start);
    assert!(piece.len() <= contiguous, "a piece of a buffer whose pieces are contiguous");
    // SAFETY: the buffer, which the caller holds, has so many bytes there. The transfer that it belongs to has nothing else under
    // way that touches them: of a write, before the disk has the buffer, and of a read, after the disk has ended.
    work(unsafe { std::slice::from_raw_parts_mut(memory, piece.len()) })
}
