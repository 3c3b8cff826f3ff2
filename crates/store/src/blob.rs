//! Where a value's bytes are stored.

use std::fmt;
use std::sync::Arc;

use crate::sync::Mutex;
use bytesize::ByteSize;

use super::allowance::Grant;
use super::stripe::{self, Span};
use super::volume::Extent;
use crate::marks::Marks;
use crate::mem::round_to_block;

/// Bytes reserved in the spill files; freed on drop.
///
/// A transfer holds its blob, so the bytes are never given to another blob while one runs. The contents are
/// unspecified before the first write and after a failed write.
pub struct Blob {
    len: u64,
    stripe_bytes: u64,
    pieces: Vec<Extent>,
    marks: Mutex<Option<Marks>>,
    grant: Option<Arc<Grant>>,
}

impl Blob {
    pub(super) fn new(len: u64, stripe_bytes: u64, pieces: Vec<Extent>, grant: Option<Arc<Grant>>) -> Blob {
        Blob { len, stripe_bytes, pieces, marks: Mutex::default(), grant }
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

    /// What it may still write.
    pub(super) fn grant(&self) -> Option<&Arc<Grant>> {
        self.grant.as_ref()
    }

    pub(super) fn pieces(&self) -> &[Extent] {
        &self.pieces
    }

    /// The spans of a whole transfer, one per operation. A span that begins at `start` has at most `longest(start)`
    /// bytes.
    pub(super) fn spans(&self, longest: impl Fn(u64) -> u64) -> impl Iterator<Item = Span> {
        stripe::spans(self.padded_len(), self.pieces.len(), self.stripe_bytes, longest)
    }

    /// What was noted of the payload when it was written, if anything was.
    pub(super) fn marks(&self) -> Option<Marks> {
        self.marks.lock().clone()
    }

    pub(super) fn set_marks(&self, marks: Option<Marks>) {
        *self.marks.lock() = marks;
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
