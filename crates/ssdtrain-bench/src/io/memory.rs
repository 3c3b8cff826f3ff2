//! Host memory for the transfers that are measured.

use std::ptr::NonNull;
use std::sync::Arc;

use anyhow::{Context, Result};
use ssdtrain_store::{HostPool, PAGE, Pin, Slot};

/// For memory that no device copies from or to.
pub(crate) struct Unpinned;

impl Pin for Unpinned {
    unsafe fn pin(&self, _memory: NonNull<u8>, _bytes: usize) -> Result<(), String> {
        Ok(())
    }

    unsafe fn unpin(&self, _memory: NonNull<u8>, _bytes: usize) {}
}

/// `count` buffers of `bytes` each, filled with bytes that no device can compress or deduplicate. Each is contiguous.
///
/// They are in huge pages, like the memory that the cache uses. A disk accepts only a limited number of memory
/// segments per request, so buffers in small pages are slow if their pages happen to be scattered.
pub(crate) fn buffers(count: usize, bytes: usize, pin: &Arc<dyn Pin>) -> Result<Vec<Arc<Slot>>> {
    let total = bytes.checked_next_multiple_of(PAGE).and_then(|padded| padded.checked_mul(count));
    let total = total.with_context(|| format!("{count} buffers of {bytes} bytes are too many"))? as u64;
    let pool = HostPool::new(total.next_multiple_of(2 << 20), Arc::clone(pin));
    pool.grow(total).with_context(|| {
        format!("{count} buffers of {bytes} bytes; give smaller --depth and --io-bytes, or --copy-depth and --copy-bytes")
    })?;
    let buffers = (0..count).map(|index| {
        let slot = pool.take(bytes as u64).context("the host pool is smaller than asked for")?;
        fill(&slot, index as u64);
        Ok(Arc::new(slot))
    });
    buffers.collect()
}

fn fill(slot: &Slot, seed: u64) {
    let mut state = seed;
    for (memory, len) in slot.parts() {
        // SAFETY: the part is that long and zeroed, and nobody else has the slot yet.
        let part = unsafe { std::slice::from_raw_parts_mut(memory, len) };
        for chunk in part.chunks_mut(8) {
            // Knuth's MMIX generator; its upper half is random enough.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            chunk.copy_from_slice(&(state ^ (state >> 32)).to_le_bytes()[..chunk.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_contiguous_and_filled() {
        let pin: Arc<dyn Pin> = Arc::new(Unpinned);
        for bytes in [4096, PAGE + 8192, 3 << 20] {
            for slot in buffers(5, bytes, &pin).unwrap() {
                let parts: Vec<_> = slot.parts().collect();
                assert_eq!(parts.iter().map(|part| part.1).collect::<Vec<_>>(), [bytes]);
                // SAFETY: the part is that long, and nobody writes to it.
                let held = unsafe { std::slice::from_raw_parts(parts[0].0, bytes) };
                assert_ne!(held[bytes - 8..], [0; 8]);
            }
        }
    }
}
