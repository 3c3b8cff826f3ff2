//! What operations write and read, as libtorch tells its observers: on every thread, whatever counts versions and whatever does not.

use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::{OnceLock, Weak};

use parking_lot::RwLock;

use crate::error::{TorchError, check};
use crate::ffi::{self, StReads, StStatistics, StStorage};
use crate::storage::{Storage, StorageId, WeakStorage};

/// Hears of writes to storages that are [watched](Watch).
pub trait WriteObserver: Send + Sync {
    /// An operation of the calling thread is about to write to the storage, or has written to it after it may have been saved.
    fn written(&self, storage: StorageId);
}

static OBSERVERS: RwLock<Vec<Weak<dyn WriteObserver>>> = RwLock::new(Vec::new());

/// Tells `observer` of writes for as long as it lives. What is written through raw pointers no one sees.
pub fn observe_writes(observer: Weak<dyn WriteObserver>) -> Result<(), TorchError> {
    install()?;
    let mut observers = OBSERVERS.write();
    observers.retain(|observer| observer.strong_count() > 0);
    observers.push(observer);
    Ok(())
}

/// Has libtorch tell of operations, from now on and in the whole process.
fn install() -> Result<(), TorchError> {
    static INSTALLED: OnceLock<Result<(), TorchError>> = OnceLock::new();
    // SAFETY: the callback is a function, which lives for ever.
    INSTALLED.get_or_init(|| check(unsafe { ffi::st_writes_observe(written) })).clone()
}

extern "C" fn written(storage: *const StStorage) {
    let Some(storage) = NonNull::new(storage.cast_mut()) else { return };
    let id = StorageId::of(storage);
    // Not within the lock, which an observer that goes with its last reference here may want.
    let observers: Vec<_> = OBSERVERS.read().iter().filter_map(Weak::upgrade).collect();
    // A panic must not unwind into C++; its message has been printed, and the observer stays as it was.
    drop(catch_unwind(AssertUnwindSafe(|| observers.iter().for_each(|observer| observer.written(id)))));
}

/// A weak reference to a storage that knows whether an operation has written to it since.
pub struct Watch {
    storage: WeakStorage,
    last_write: u64,
}

impl Watch {
    /// Watches `storage` from now on.
    pub fn new(storage: &Storage) -> Watch {
        let storage = storage.downgrade();
        // SAFETY: a weak reference is held, for as long as it is watched.
        let last_write = unsafe { ffi::st_storage_watch(storage.as_ptr()) };
        Watch { storage, last_write }
    }

    /// Which storage it is.
    pub fn id(&self) -> StorageId {
        self.storage.id()
    }

    /// The storage, if someone still holds it.
    pub fn upgrade(&self) -> Option<Storage> {
        self.storage.upgrade()
    }

    /// Whether an operation has written to it since it is watched.
    pub fn is_written(&self) -> bool {
        // SAFETY: the address is only looked up.
        self.last_write != unsafe { ffi::st_storage_last_write(self.storage.as_ptr()) }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // SAFETY: this value watches it once.
        unsafe { ffi::st_storage_unwatch(self.storage.as_ptr()) };
    }
}

/// The tensors that a function reads and does not make. What no operation reads is not among them.
pub struct Reads(NonNull<StReads>);

// SAFETY: it holds weak references, version counters and tensors of the caller's, whose reference counts are atomic.
unsafe impl Send for Reads {}

/// Notes what the calling thread reads; see [`Reads::begin`].
#[must_use = "reads are noted until this is ended or dropped"]
pub struct Reading {
    reads: Option<Reads>,
    thread_bound: PhantomData<*const ()>,
}

impl Reads {
    /// Notes what operations of the calling thread read from now on. May be nested.
    pub fn begin() -> Result<Reading, TorchError> {
        install()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a valid place for the result.
        check(unsafe { ffi::st_reads_begin(&raw mut raw) })?;
        let raw = NonNull::new(raw).ok_or_else(|| TorchError("libtorch notes no reads".to_owned()))?;
        Ok(Reading { reads: Some(Reads(raw)), thread_bound: PhantomData })
    }

    /// Fails, and names a tensor by its shape, if one that is still alive was changed in place while reads were noted.
    pub fn check_unchanged_within(&self) -> Result<(), TorchError> {
        // SAFETY: the notes are this value's.
        check(unsafe { ffi::st_reads_check_unchanged_within(self.0.as_ptr()) })
    }

    /// Fails, and names a tensor by its shape, if one that is still alive was changed in place since it was first read. Running statistics
    /// that can be [rewound](Reads::rewind_statistics) are not meant.
    pub fn check_unchanged_since(&self) -> Result<(), TorchError> {
        // SAFETY: the notes are this value's.
        check(unsafe { ffi::st_reads_check_unchanged_since(self.0.as_ptr()) })
    }

    /// Whether it is among what was read, or updated as running statistics.
    pub fn contains(&self, storage: &Storage) -> bool {
        // SAFETY: the notes are this value's, and the address is only compared.
        unsafe { ffi::st_reads_contain(self.0.as_ptr(), storage.0.as_ptr()) }
    }

    /// Whether running statistics (of batch normalisation) were updated while reads were noted.
    pub fn updates_statistics(&self) -> bool {
        // SAFETY: the notes are this value's.
        unsafe { ffi::st_reads_update_statistics(self.0.as_ptr()) }
    }

    /// Has the running statistics that were updated while reads were noted hold what they held before that, until they are restored. For one
    /// thread at a time.
    pub fn rewind_statistics(&self) -> Result<Statistics, TorchError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the notes are this value's, and `raw` is a valid place for the result.
        check(unsafe { ffi::st_statistics_rewind(self.0.as_ptr(), &raw mut raw) })?;
        NonNull::new(raw).map(Statistics).ok_or_else(|| TorchError("libtorch kept no statistics".to_owned()))
    }
}

impl Drop for Reads {
    fn drop(&mut self) {
        // SAFETY: the shim gave the notes to this value, and no thread notes anything in them any more.
        unsafe { ffi::st_reads_free(self.0.as_ptr()) }
    }
}

impl Reading {
    /// What was read.
    pub fn end(mut self) -> Option<Reads> {
        self.stop()
    }

    fn stop(&mut self) -> Option<Reads> {
        let reads = self.reads.take()?;
        // SAFETY: begun on this thread, to which this value is bound, and ended once.
        unsafe { ffi::st_reads_end(reads.0.as_ptr()) };
        Some(reads)
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        drop(self.stop());
    }
}

/// Values to put back; see [`Reads::rewind_statistics`]. Bound to its thread.
pub struct Statistics(NonNull<StStatistics>);

impl Statistics {
    /// Gives the tensors these values again, as if they had not been updated in between. Fails if another thread has updated them as well,
    /// or if `rerun`, which was noted meanwhile, updated others, which are put back too.
    pub fn restore(self, rerun: Option<&Reads>) -> Result<(), TorchError> {
        let raw = std::mem::ManuallyDrop::new(self).0;
        let notes = rerun.map_or(std::ptr::null(), |rerun| rerun.0.as_ptr().cast_const());
        // SAFETY: the shim gave them to this value, which gives them back.
        check(unsafe { ffi::st_statistics_restore(raw.as_ptr(), notes) })
    }
}

impl Drop for Statistics {
    fn drop(&mut self) {
        // What was not asked for is put back all the same: a rerun that failed must not have updated anything. There is no one to tell.
        // SAFETY: as above; `restore` does not come here.
        drop(check(unsafe { ffi::st_statistics_restore(self.0.as_ptr(), std::ptr::null()) }));
    }
}
