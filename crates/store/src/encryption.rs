//! What a store encrypts with: a key, and memory for what is encrypted.

use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::Result;
use crate::mem::{AlignedBuf, BLOCK, HostPool, IoBuf, Pin, Slot, parts_of};
use crate::seal::Sealer;

/// The least that the memory grows by, in bytes.
const PORTION: u64 = 8 << 20;

/// How a store encrypts.
pub(super) struct Encryption {
    pub(super) sealer: Arc<Sealer>,
    /// Bounce buffers lie in huge pages, which disks write twice as fast, and are used again: fresh pages cost more than
    /// encryption.
    memory: HostPool,
}

impl Encryption {
    /// With a key of its own.
    pub(super) fn new() -> Result<Encryption> {
        Ok(Encryption {
            sealer: Arc::new(Sealer::new()?),
            memory: HostPool::new(u64::MAX, Arc::new(Unpinned)),
        })
    }

    /// A bounce buffer for a payload of `bytes`. It has any contents, but zeroes from there to the end of the block. `None` if
    /// memory has run out.
    fn bounce(&self, bytes: usize) -> Option<Slot> {
        let slot = loop {
            if let Some(slot) = self.memory.take(bytes as u64) {
                break slot;
            }
            if let Err(error) = self.memory.grow(PORTION.max(bytes as u64)) {
                tracing::debug!(%error, "there is no memory for a bounce buffer");
                return None;
            }
        };
        for (memory, bytes) in parts_of(&slot, bytes..bytes.next_multiple_of(BLOCK)) {
            // SAFETY: the part is that long and the slot's own, which nobody else has yet.
            unsafe { memory.write_bytes(0, bytes) };
        }
        Some(slot)
    }

    /// Gives memory back that nothing is in. Returns the bytes.
    pub(super) fn trim(&self) -> u64 {
        self.memory.shrink().bytes()
    }
}

/// Memory for the bytes of a transfer that cannot move them from or to the caller's. `None` if there is none left.
pub(super) fn bounce(encryption: Option<&Encryption>, bytes: usize) -> Option<Arc<dyn IoBuf>> {
    match encryption {
        Some(encryption) => Some(Arc::new(encryption.bounce(bytes)?)),
        None => Some(Arc::new(AlignedBuf::new(bytes)?)),
    }
}

/// For memory that no device copies from or to.
struct Unpinned;

impl Pin for Unpinned {
    unsafe fn pin(&self, _memory: NonNull<u8>, _bytes: usize) -> Result<(), String> {
        Ok(())
    }

    unsafe fn unpin(&self, _memory: NonNull<u8>, _bytes: usize) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::PAGE;

    fn addresses(slot: &Slot) -> Vec<usize> {
        slot.parts().map(|(memory, _)| memory.addr()).collect()
    }

    #[test]
    fn a_bounce_buffer_is_used_again() {
        let encryption = Encryption::new().unwrap();
        let slot = encryption.bounce(5 * PAGE).unwrap();
        let before = addresses(&slot);
        drop(slot);
        assert_eq!(addresses(&encryption.bounce(5 * PAGE).unwrap()), before);
        let many: Vec<_> = (0..3).map(|_| encryption.bounce(PORTION as usize + 1).unwrap()).collect();
        drop(many);
        let capacity = encryption.memory.capacity();
        let again: Vec<_> = (0..3).map(|_| encryption.bounce(PORTION as usize + 1).unwrap()).collect();
        assert_eq!(encryption.memory.capacity(), capacity);
        drop(again);
        assert_eq!((encryption.trim(), encryption.memory.capacity()), (capacity, 0));
    }

    #[test]
    fn padding_holds_nothing_of_what_was_there_before() {
        let encryption = Encryption::new().unwrap();
        let bytes = |slot: &Slot, len: usize| {
            // SAFETY: the slot, which is contiguous, is a page long, and nobody else has it.
            unsafe { std::slice::from_raw_parts_mut(slot.part(0).0, len) }.to_vec()
        };
        let slot = encryption.bounce(PAGE).unwrap();
        // SAFETY: as above.
        unsafe { slot.part(0).0.write_bytes(7, PAGE) };
        drop(slot);
        let again = bytes(&encryption.bounce(BLOCK + 10).unwrap(), 3 * BLOCK);
        assert_eq!((again[0], again[BLOCK + 9], again[2 * BLOCK]), (7, 7, 7), "it is the same");
        assert!(again[BLOCK + 10..2 * BLOCK].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn memory_that_there_is_not_is_none() {
        assert!(Encryption::new().unwrap().bounce(usize::MAX / 4).is_none());
    }
}
