//! Where a value's bytes are stored.

use std::fmt;
use std::sync::Arc;

use crate::sync::Mutex;
use bytesize::ByteSize;

use super::stripe::{self, Span};
use super::volume::Extent;
use crate::mem::round_to_block;

/// Bytes reserved in the spill files; freed on drop.
///
/// A transfer holds its blob, so the bytes are never given to another blob while one runs. The contents are
/// unspecified before the first write and after a failed write.
pub struct Blob {
    len: u64,
    stripe_bytes: u64,
    pieces: Vec<Extent>,
    checksums: Mutex<Option<Arc<[u32]>>>,
}

impl Blob {
    pub(super) fn new(len: u64, stripe_bytes: u64, pieces: Vec<Extent>) -> Blob {
        Blob { len, stripe_bytes, pieces, checksums: Mutex::default() }
    }

    /// Payload bytes: what was asked for.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there is no payload.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes that a transfer moves: the payload, padded to whole blocks. The blob also counts that much towards the
    /// cap.
    pub fn padded_len(&self) -> u64 {
        round_to_block(self.len)
    }

    /// The memory alignment, in bytes, that a transfer needs to avoid a copy.
    pub fn memory_alignment(&self) -> usize {
        self.pieces.iter().map(|piece| piece.volume().info().alignment).max().unwrap_or(1)
    }

    pub(super) fn pieces(&self) -> &[Extent] {
        &self.pieces
    }

    /// The spans of a whole transfer, one per operation. A span that begins at `start` has at most `longest(start)`
    /// bytes.
    pub(super) fn spans(&self, longest: impl Fn(u64) -> u64) -> impl Iterator<Item = Span> {
        stripe::spans(self.padded_len(), self.pieces.len(), self.stripe_bytes, longest)
    }

    /// The checksum of each chunk of the payload, if they were taken when it was written.
    pub(super) fn checksums(&self) -> Option<Arc<[u32]>> {
        self.checksums.lock().clone()
    }

    pub(super) fn set_checksums(&self, checksums: Option<Arc<[u32]>>) {
        *self.checksums.lock() = checksums;
    }
}

/// For messages: `4.2 MiB at offset 12345678 of the spill file in /mnt/nvme`.
impl fmt::Display for Blob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", ByteSize(self.len))?;
        for (index, piece) in self.pieces.iter().enumerate() {
            let word = if index == 0 { "at" } else { "and" };
            write!(f, " {word} offset {} of the {}", piece.offset(), piece.volume().info().name)?;
        }
        Ok(())
    }
}

impl fmt::Debug for Blob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Blob({self})")
    }
}
