//! What operations write and read, as reported by libtorch's observers: on every thread, whether or not it counts
//! towards version counters.

use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::{OnceLock, RwLockWriteGuard, Weak};

use crate::error::{TorchError, check};
use crate::ffi::{self, StReads, StStatistics, StStorage};
use crate::origin::{Lock, once};
use crate::storage::{Storage, StorageId, WeakStorage};

/// Is told about writes to storages that are [watched](Watch).
pub trait WriteObserver: Send + Sync {
    /// An operation on the calling thread is about to write to the storage, or has written to it after autograd may
    /// have saved it.
    fn written(&self, storage: StorageId);
}

type Observers = Vec<Weak<dyn WriteObserver>>;

static OBSERVERS: Lock<Observers> = Lock::new(Vec::new());

/// Tells `observer` about writes for as long as it lives. Writes through raw pointers are not seen.
///
/// A process that is forked off keeps the observers of its parent for ever, and tells them nothing: what they hold may belong to threads
/// that it does not have, so it must not be dropped there.
pub fn observe_writes(observer: Weak<dyn WriteObserver>) -> Result<(), TorchError> {
    install()?;
    let mut observers = OBSERVERS.write();
    observers.retain(|observer| observer.strong_count() > 0);
    observers.push(observer);
    Ok(())
}

/// Makes libtorch report operations, from now on and in the whole process.
pub(crate) fn install() -> Result<(), TorchError> {
    static INSTALLED: OnceLock<Result<(), TorchError>> = OnceLock::new();
    // SAFETY: the callback is a function, which lives forever.
    once(&INSTALLED, || check(unsafe { ffi::st_writes_observe(written) })).clone()
}

/// The observers, of which other threads see nothing until this is dropped.
pub(crate) type Locked = RwLockWriteGuard<'static, Observers>;

pub(crate) fn lock() -> Locked {
    OBSERVERS.write()
}

/// In a child process: keeps what its parent had, and tells it nothing more.
pub(crate) fn leave_to_parent(mut observers: Locked) {
    for observer in observers.drain(..).filter_map(|observer| observer.upgrade()) {
        Box::leak(Box::new(observer));
    }
}

extern "C" fn written(storage: *const StStorage) {
    let Some(storage) = NonNull::new(storage.cast_mut()) else { return };
    let id = StorageId::of(storage);
    // Not under the lock: an observer whose last reference is dropped here may want to take it.
    let observers: Vec<_> = OBSERVERS.read().iter().filter_map(Weak::upgrade).collect();
    // A panic must not unwind into C++. Its message has been printed by now, and the observer stays as it was.
    drop(catch_unwind(AssertUnwindSafe(|| observers.iter().for_each(|observer| observer.written(id)))));
}

/// A weak reference to a storage that knows whether an operation has written to the storage since.
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

    /// Whether an operation has written to the storage since it has been watched.
    pub fn is_written(&self) -> bool {
        // SAFETY: the address is only looked up.
        self.last_write != unsafe { ffi::st_storage_last_write(self.storage.as_ptr()) }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // SAFETY: this value watches the storage once.
        unsafe { ffi::st_storage_unwatch(self.storage.as_ptr()) };
    }
}

/// The tensors that a function reads but does not create. Tensors that no operation reads are not included.
pub struct Reads(NonNull<StReads>);

// SAFETY: it holds weak references, version counters and tensors of the caller, whose reference counts are atomic.
unsafe impl Send for Reads {}

/// Records what the calling thread reads; see [`Reads::begin`].
#[must_use = "reads are noted until this is ended or dropped"]
pub struct Reading {
    reads: Option<Reads>,
    thread_bound: PhantomData<*const ()>,
}

impl Reads {
    /// Starts recording what operations on the calling thread read. May be nested.
    pub fn begin() -> Result<Reading, TorchError> {
        install()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a valid place for the result.
        check(unsafe { ffi::st_reads_begin(&raw mut raw) })?;
        let raw = NonNull::new(raw).ok_or_else(|| TorchError("libtorch notes no reads".to_owned()))?;
        Ok(Reading { reads: Some(Reads(raw)), thread_bound: PhantomData })
    }

    /// Fails, naming a tensor by its shape, if a tensor that is still alive was changed in place while reads were
    /// being recorded.
    pub fn check_unchanged_within(&self) -> Result<(), TorchError> {
        // SAFETY: the records belong to this value.
        check(unsafe { ffi::st_reads_check_unchanged_within(self.0.as_ptr()) })
    }

    /// Fails, naming a tensor by its shape, if a tensor that is still alive was changed in place since it was first
    /// read. Running statistics that can be [rewound](Reads::rewind_statistics) do not count.
    pub fn check_unchanged_since(&self) -> Result<(), TorchError> {
        // SAFETY: the records belong to this value.
        check(unsafe { ffi::st_reads_check_unchanged_since(self.0.as_ptr()) })
    }

    /// Whether the storage was read, or updated as running statistics.
    pub fn contains(&self, storage: &Storage) -> bool {
        // SAFETY: the records belong to this value, and the address is only compared.
        unsafe { ffi::st_reads_contain(self.0.as_ptr(), storage.0.as_ptr()) }
    }

    /// Whether the outermost function whose reads the calling thread is recording has read this storage so far, and did not make it.
    pub fn are_noted(storage: StorageId) -> bool {
        // SAFETY: the address is only compared.
        unsafe { ffi::st_reads_noted(std::ptr::without_provenance(storage.0)) }
    }

    /// Whether running statistics (of batch normalisation) were updated while reads were being recorded.
    pub fn updates_statistics(&self) -> bool {
        // SAFETY: the records belong to this value.
        unsafe { ffi::st_reads_update_statistics(self.0.as_ptr()) }
    }

    /// Sets the running statistics that were updated while reads were being recorded back to their earlier values,
    /// until they are restored. Only one thread at a time may do this.
    pub fn rewind_statistics(&self) -> Result<Statistics, TorchError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the records belong to this value, and `raw` is a valid place for the result.
        check(unsafe { ffi::st_statistics_rewind(self.0.as_ptr(), &raw mut raw) })?;
        NonNull::new(raw).map(Statistics).ok_or_else(|| TorchError("libtorch kept no statistics".to_owned()))
    }
}

impl Drop for Reads {
    fn drop(&mut self) {
        // SAFETY: the shim gave the records to this value, and no thread adds to them any more.
        unsafe { ffi::st_reads_free(self.0.as_ptr()) }
    }
}

impl Reading {
    /// Stops recording and returns what was read.
    pub fn end(mut self) -> Option<Reads> {
        self.stop()
    }

    fn stop(&mut self) -> Option<Reads> {
        let reads = self.reads.take()?;
        // SAFETY: begun on this thread, which this value is bound to, and ended once.
        unsafe { ffi::st_reads_end(reads.0.as_ptr()) };
        Some(reads)
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        drop(self.stop());
    }
}

/// Values to restore; see [`Reads::rewind_statistics`]. Bound to its thread.
pub struct Statistics(NonNull<StStatistics>);

impl Statistics {
    /// Sets the tensors to these values again, as if they had not been updated in between. Fails if another thread
    /// has updated them as well, or if `rerun`, which was recorded meanwhile, updated other statistics, which are
    /// restored too.
    pub fn restore(self, rerun: Option<&Reads>) -> Result<(), TorchError> {
        let raw = std::mem::ManuallyDrop::new(self).0;
        let notes = rerun.map_or(std::ptr::null(), |rerun| rerun.0.as_ptr().cast_const());
        // SAFETY: the shim gave the values to this value, which gives them back.
        check(unsafe { ffi::st_statistics_restore(raw.as_ptr(), notes) })
    }
}

impl Drop for Statistics {
    fn drop(&mut self) {
        // Values that were not restored explicitly are restored all the same: a rerun that failed must not have updated anything.
        // There is nobody to report an error to.
        // SAFETY: as above; `restore` does not come here.
        drop(check(unsafe { ffi::st_statistics_restore(self.0.as_ptr(), std::ptr::null()) }));
    }
}
