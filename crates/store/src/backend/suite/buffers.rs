//! Memory of all kinds, for tests of transfers.

use std::ptr::NonNull;
use std::sync::Arc;

use crate::mem::{AlignedBuf, BLOCK, IoBuf, Pin, parts};

/// Bytes that differ from position to position and from seed to seed.
pub(super) fn pattern(seed: usize, len: usize) -> Vec<u8> {
    let (mut state, mut bytes) = (seed as u64, Vec::with_capacity(len + 8));
    while bytes.len() < len {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&state.to_be_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Aligned memory with room for the padding; it begins with `bytes`.
pub(super) fn aligned(bytes: &[u8]) -> Arc<AlignedBuf> {
    let mut buf = AlignedBuf::new(bytes.len()).unwrap();
    buf.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
    Arc::new(buf)
}

/// The first `len` bytes, once nobody else holds the memory.
pub(super) fn bytes(buf: &mut Arc<AlignedBuf>, len: usize) -> &[u8] {
    &Arc::get_mut(buf).expect("no transfer holds the memory").as_mut_slice()[..len]
}

/// A part of aligned memory, chosen to be as unsuitable as possible.
pub(super) struct Part {
    pub(super) whole: AlignedBuf,
    pub(super) start: usize,
    pub(super) len: usize,
}

// SAFETY: it is a part of memory that `whole` owns and never moves; only a transfer reaches it.
unsafe impl IoBuf for Part {
    fn part(&self, offset: usize) -> (*mut u8, usize) {
        (self.whole.part(self.start + offset).0, self.len - offset)
    }

    fn len(&self) -> usize {
        self.len
    }
}

/// Several pieces of aligned memory used as one buffer; the last `short` bytes of each piece are left out.
pub(super) struct Scattered {
    pieces: Vec<AlignedBuf>,
    short: usize,
}

impl Scattered {
    /// Room for at least `len` bytes, in pieces of different sizes.
    pub(super) fn new(len: usize, short: usize) -> Scattered {
        let mut scattered = Scattered { pieces: Vec::new(), short };
        for blocks in [1, 6, 4, 2].into_iter().cycle() {
            if scattered.len() >= len {
                break;
            }
            scattered.pieces.push(AlignedBuf::new(blocks * BLOCK).unwrap());
        }
        scattered
    }
}

// SAFETY: each byte is in a piece that this value owns and that never moves; only a transfer reaches it.
unsafe impl IoBuf for Scattered {
    fn part(&self, mut offset: usize) -> (*mut u8, usize) {
        for piece in &self.pieces {
            let len = piece.len() - self.short;
            if offset < len {
                return (piece.part(offset).0, len - offset);
            }
            offset -= len;
        }
        panic!("nothing lies at the end");
    }

    fn len(&self) -> usize {
        self.pieces.iter().map(|piece| piece.len() - self.short).sum()
    }
}

/// For pools without a device.
pub(super) struct Unpinned;

impl Pin for Unpinned {
    unsafe fn pin(&self, _: NonNull<u8>, _: usize) -> Result<(), String> {
        Ok(())
    }

    unsafe fn unpin(&self, _: NonNull<u8>, _: usize) {}
}

/// Sets the first bytes of memory that no transfer uses now.
pub(super) fn fill(buf: &dyn IoBuf, bytes: &[u8]) {
    let mut rest = bytes;
    for (memory, len) in parts(buf, bytes.len()) {
        let (bytes, after) = rest.split_at(len);
        // SAFETY: the part is `len` bytes long, `bytes` are too, and no transfer touches it now.
        unsafe { memory.copy_from_nonoverlapping(bytes.as_ptr(), len) };
        rest = after;
    }
}

/// The first `len` bytes of memory that no transfer uses now.
pub(super) fn contents(buf: &dyn IoBuf, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len);
    for (memory, len) in parts(buf, len) {
        // SAFETY: the part is `len` bytes long, and no transfer touches it now.
        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(memory, len) });
    }
    bytes
}
