//! Which memory a transfer can use as it is, and the copies in place of what it cannot.

use std::ops::Range;

use super::blob::Blob;
use crate::mem::{BLOCK, IoBuf, parts};

/// The payload's length. It fits in a `usize`, since memory of at least that length exists.
pub(super) fn payload_len(blob: &Blob) -> usize {
    usize::try_from(blob.len()).unwrap_or(usize::MAX)
}

/// Whether the blob's padded bytes can move directly from or to `buf`: there is room for them, each part is aligned,
/// and parts meet only at block boundaries.
pub(super) fn suits(buf: &dyn IoBuf, blob: &Blob) -> bool {
    let alignment = blob.memory_alignment();
    let padded = usize::try_from(blob.padded_len()).ok().filter(|&padded| padded <= buf.len());
    padded.is_some_and(|padded| {
        let mut start = 0;
        parts(buf, padded).all(|(memory, bytes)| {
            // Only host memory has to satisfy the file's alignment.
            let aligned = !buf.is_on_host(start) || memory.addr().is_multiple_of(alignment);
            start += bytes;
            aligned && bytes.is_multiple_of(BLOCK)
        })
    })
}

pub(super) fn copy(from: &dyn IoBuf, to: &dyn IoBuf, bytes: Range<usize>) {
    let Range { mut start, end } = bytes;
    while start < end {
        let ((source, readable), (target, writable)) = (from.part(start), to.part(start));
        let bytes = readable.min(writable).min(end - start);
        // SAFETY: both buffers reach to `end` and are contiguous for `bytes` from here on, one of them is a bounce buffer
        // that nobody else has, and nobody else touches these bytes of the other while the transfer runs.
        unsafe { std::ptr::copy_nonoverlapping(source, target, bytes) };
        start += bytes;
    }
}
