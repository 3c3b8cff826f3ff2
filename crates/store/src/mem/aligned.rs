//! Heap memory that direct I/O accepts.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use super::{BLOCK, IoBuf};

/// Zeroed heap memory. Its address and size are multiples of [`BLOCK`] bytes.
///
/// Its bytes are reachable only through `&mut`, so never while a transfer holds an `Arc` of it.
#[derive(Debug)]
pub struct AlignedBuf {
    memory: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory is owned by this value alone, and bytes may move between threads.
unsafe impl Send for AlignedBuf {}
// SAFETY: through `&AlignedBuf` only the address and the length are reachable.
unsafe impl Sync for AlignedBuf {}

// SAFETY: `memory` is allocated with `layout` in `new`, never moved, and freed only on drop; nothing but a
// transfer reaches the bytes through a shared reference.
unsafe impl IoBuf for AlignedBuf {
    fn part(&self, offset: usize) -> (*mut u8, usize) {
        (self.memory.as_ptr().wrapping_add(offset), self.len() - offset)
    }

    fn len(&self) -> usize {
        self.layout.size()
    }
}

impl AlignedBuf {
    /// Allocates room for `bytes`, rounded up to whole blocks (at least one). `None` if memory has run out.
    pub fn new(bytes: usize) -> Option<AlignedBuf> {
        let size = bytes.max(1).checked_next_multiple_of(BLOCK)?;
        let layout = Layout::from_size_align(size, BLOCK).ok()?;
        // SAFETY: `layout` is at least one block long.
        let memory = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(AlignedBuf { memory, layout })
    }

    /// All bytes, the padding included.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the memory is valid for `layout.size()` bytes, was zeroed when allocated, and `&mut self`
        // proves that neither a transfer nor anyone else holds a reference.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr(), self.layout.size()) }
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this very layout, and not freed before.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_up_to_whole_aligned_blocks() {
        for (bytes, expected) in [(0, BLOCK), (1, BLOCK), (BLOCK, BLOCK), (BLOCK + 1, 2 * BLOCK)] {
            let buf = AlignedBuf::new(bytes).unwrap();
            assert_eq!(buf.len(), expected);
            let (memory, contiguous) = buf.part(0);
            assert_eq!((memory.addr() % BLOCK, contiguous), (0, expected));
        }
    }

    #[test]
    fn starts_zeroed_and_keeps_what_is_written() {
        let mut buf = AlignedBuf::new(10_000).unwrap();
        assert!(buf.as_mut_slice().iter().all(|&byte| byte == 0));
        buf.as_mut_slice()[9_999] = 7;
        assert_eq!(buf.as_mut_slice()[9_999], 7);
    }

    #[test]
    fn an_impossible_size_is_none() {
        assert!(AlignedBuf::new(usize::MAX).is_none());
        assert!(AlignedBuf::new(usize::MAX / 2).is_none());
    }
}
