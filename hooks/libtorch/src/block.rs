//! The bytes behind a storage as they lie at one moment.

use std::ffi::c_void;
use std::fmt;

use crate::ffi::{self, StBlock};
use crate::storage::Storage;

/// The bytes that a storage had at one moment, for transfers that outlast it: a storage may be resized, and has other bytes then.
///
/// Those of [our CPU allocator](crate::install_cpu_allocator) stay where they are for as long as this lives. Those of other
/// allocators stay as long as the storage keeps them: ask [`is_current`](Block::is_current).
pub struct Block {
    storage: Storage,
    raw: StBlock,
}

// SAFETY: the storage may be sent, the bytes are its own, and the count of their holders is atomic.
unsafe impl Send for Block {}
// SAFETY: as above; nothing here changes through a shared reference.
unsafe impl Sync for Block {}

impl Block {
    /// What `storage` has now. Nobody resizes it meanwhile.
    pub fn of(storage: Storage) -> Block {
        // SAFETY: a strong reference is held.
        let raw = unsafe { ffi::st_storage_block(storage.0.as_ptr()) };
        Block { storage, raw }
    }

    /// The storage, whatever it has now.
    pub fn storage(&self) -> &Storage {
        &self.storage
    }

    /// First byte. Null if there is none.
    pub fn data(&self) -> *mut c_void {
        self.raw.data
    }

    /// Bytes the storage was asked to hold then.
    pub fn bytes(&self) -> u64 {
        self.raw.bytes
    }

    /// Bytes that may be read and written from [`data`](Block::data) on, as [`Storage::capacity`].
    pub fn capacity(&self) -> u64 {
        self.raw.capacity
    }

    /// Whether the storage still has these bytes and no others.
    pub fn is_current(&self) -> bool {
        (self.storage.data(), self.storage.bytes()) == (self.raw.data, self.raw.bytes)
    }
}

impl Clone for Block {
    fn clone(&self) -> Block {
        if self.raw.held {
            // SAFETY: this value holds the block.
            unsafe { ffi::st_block_hold(self.raw.data) };
        }
        Block { storage: self.storage.clone(), raw: self.raw }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.raw.held {
            // SAFETY: this value holds the block, once.
            unsafe { ffi::st_block_release(self.raw.data) };
        }
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of {:?}", self.bytes(), self.storage)
    }
}
