//! The bytes behind a storage at one moment.

use std::ffi::c_void;
use std::fmt;

use crate::ffi::{self, StBlock};
use crate::storage::Storage;

/// The bytes that a storage had at one moment, for transfers that may outlast them: a storage can be resized, and
/// then it has other bytes.
///
/// Bytes from [our CPU allocator](crate::install_cpu_allocator) stay where they are for as long as this value lives.
/// Those of other allocators stay only as long as the storage keeps them: check with
/// [`is_current`](Block::is_current).
pub struct Block {
    storage: Storage,
    raw: StBlock,
}

// SAFETY: the storage may be sent, the bytes belong to it, and the count of their owners is atomic.
unsafe impl Send for Block {}
// SAFETY: as above; nothing here changes through a shared reference.
unsafe impl Sync for Block {}

impl Block {
    /// The bytes that `storage` has now. Nobody may resize it during the call.
    pub fn of(storage: Storage) -> Block {
        // SAFETY: a strong reference is held.
        let raw = unsafe { ffi::st_storage_block(storage.0.as_ptr()) };
        Block { storage, raw }
    }

    /// The storage, whatever bytes it has now.
    pub fn storage(&self) -> &Storage {
        &self.storage
    }

    /// The first byte. Null if there is none.
    pub fn data(&self) -> *mut c_void {
        self.raw.data
    }

    /// The bytes that the storage was asked to hold at that time.
    pub fn bytes(&self) -> u64 {
        self.raw.bytes
    }

    /// The bytes that may be read and written starting at [`data`](Block::data), like [`Storage::capacity`].
    pub fn capacity(&self) -> u64 {
        self.raw.capacity
    }

    /// Whether the bytes stay where they are for as long as this value lives, even if the storage is resized.
    pub fn stays(&self) -> bool {
        self.raw.held
    }

    /// Whether the storage still has exactly these bytes.
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
