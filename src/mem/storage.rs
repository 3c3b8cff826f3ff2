//! A storage's bytes as the memory of a transfer.

use ssdtrain_libtorch::Storage;

use super::IoBuf;

/// Keeps a storage alive for as long as a transfer from or to it runs.
pub(crate) struct StorageBuf {
    storage: Storage,
    data: *mut u8,
    capacity: usize,
}

impl StorageBuf {
    pub(crate) fn new(storage: Storage) -> StorageBuf {
        let data = storage.data().cast();
        // A storage larger than the address space does not exist.
        let capacity = usize::try_from(storage.capacity()).unwrap_or(usize::MAX);
        StorageBuf { storage, data, capacity }
    }
}

// SAFETY: the strong reference keeps the bytes at their address until the value is dropped; `capacity` is what the allocator
// says may be accessed. A storage that is written to disk is read by the kernel only: if the program changes it meanwhile,
// its version counter tells and what was written is never served. A storage that is loaded into is ours alone until then.
unsafe impl IoBuf for StorageBuf {
    fn part(&self, offset: usize) -> (*mut u8, usize) {
        (self.data.wrapping_add(offset), self.capacity - offset)
    }

    fn len(&self) -> usize {
        self.capacity
    }
}

// SAFETY: the pointer is the storage's own, and `Storage` may be sent.
unsafe impl Send for StorageBuf {}
// SAFETY: nothing here changes through a shared reference.
unsafe impl Sync for StorageBuf {}

impl std::fmt::Debug for StorageBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "buffer of {:?}", self.storage)
    }
}
