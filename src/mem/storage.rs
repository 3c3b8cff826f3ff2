//! A storage's bytes as the memory of a transfer.

use ssdtrain_libtorch::Block;
use ssdtrain_store::IoBuf;

/// Keeps a storage's bytes alive for as long as a transfer from or to them runs.
pub(crate) struct StorageBuf {
    block: Block,
    capacity: usize,
}

impl StorageBuf {
    pub(crate) fn new(block: Block) -> StorageBuf {
        // A storage larger than the address space does not exist.
        let capacity = usize::try_from(block.capacity()).unwrap_or(usize::MAX);
        StorageBuf { block, capacity }
    }
}

// SAFETY: the block keeps the bytes at their address until the value is dropped; `capacity` is what the allocator says may be accessed.
// Bytes of another allocator stay until the storage is resized: it was not when the transfer was begun, and `stays` says that they may go.
// If the program changes a storage that is being written to disk, its version counter tells, and neither what was written nor its checksums
// are ever served. A storage that is loaded into is ours alone until then.
unsafe impl IoBuf for StorageBuf {
    fn part(&self, offset: usize) -> (*mut u8, usize) {
        (self.block.data().cast::<u8>().wrapping_add(offset), self.capacity - offset)
    }

    fn len(&self) -> usize {
        self.capacity
    }

    fn stays(&self) -> bool {
        self.block.stays()
    }
}

impl std::fmt::Debug for StorageBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "buffer of {:?}", self.block)
    }
}
