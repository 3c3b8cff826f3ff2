//! Storages by reference count: the identity, the lifetime and the bytes behind tensors.

use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;

use tch::{Device, Tensor};

use crate::error::{TorchError, check};
use crate::ffi::{self, StStorage};

/// A strong reference to a libtorch storage (`c10::StorageImpl`): the bytes live at least as long as this value.
pub struct Storage(pub(crate) NonNull<StStorage>);

/// A weak reference: it keeps the storage's address from being reused, but does not keep its bytes.
pub struct WeakStorage(NonNull<StStorage>);

/// The address of a storage. It identifies a storage only while a [`Storage`] or a [`WeakStorage`] of it is held.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StorageId(pub(crate) usize);

// SAFETY: libtorch's reference counts are atomic, and the methods here touch nothing else of the storage that changes.
unsafe impl Send for Storage {}
// SAFETY: as above.
unsafe impl Sync for Storage {}
// SAFETY: as above.
unsafe impl Send for WeakStorage {}
// SAFETY: as above.
unsafe impl Sync for WeakStorage {}

impl Storage {
    /// The storage of `tensor`, or `None` if it has no storage.
    pub fn of(tensor: &Tensor) -> Option<Storage> {
        // SAFETY: the tensor is borrowed, so its pointer is valid.
        let raw = unsafe { ffi::st_tensor_storage(tensor.as_ptr()) };
        // SAFETY: the borrowed tensor keeps the storage alive.
        NonNull::new(raw).map(|raw| unsafe { Storage::retain(raw) })
    }

    /// A new uninitialised storage of `bytes` bytes on the CPU.
    pub fn allocate(bytes: u64) -> Result<Storage, TorchError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a valid place for the result.
        check(unsafe { ffi::st_storage_allocate(bytes, &raw mut raw) })?;
        // SAFETY: the shim gave its reference to us.
        unsafe { Storage::from_raw(raw) }
    }

    /// Takes over a strong reference that C++ gave away.
    ///
    /// # Safety
    /// `raw` is null, or points to a storage one of whose strong references belongs to the caller.
    pub(crate) unsafe fn from_raw(raw: *mut StStorage) -> Result<Storage, TorchError> {
        NonNull::new(raw).map(Storage).ok_or_else(|| TorchError("libtorch returned no storage".to_owned()))
    }

    /// Takes over the strong reference that locking a weak one gave.
    pub(crate) fn from_locked(raw: NonNull<StStorage>) -> Storage {
        Storage(raw)
    }

    /// The identity of this storage.
    pub fn id(&self) -> StorageId {
        StorageId(self.0.as_ptr().addr())
    }

    /// The bytes that the storage was asked to hold.
    pub fn bytes(&self) -> u64 {
        // SAFETY: a strong reference is held.
        unsafe { ffi::st_storage_bytes(self.0.as_ptr()) }
    }

    /// Which stream of its device the calling thread computes on; always 0 on the CPU.
    pub fn stream(&self) -> Result<i64, TorchError> {
        let mut stream = 0;
        // SAFETY: a strong reference is held, and `stream` is a valid place for the result.
        check(unsafe { ffi::st_storage_stream(self.0.as_ptr(), &raw mut stream) })?;
        Ok(stream)
    }

    /// Once its memory is freed, keeps it from being reused before everything that is queued by then on the stream that the
    /// calling thread computes on has finished. This is needed if that is not the stream that it was allocated for.
    pub fn record_use(&self) -> Result<(), TorchError> {
        // SAFETY: a strong reference is held.
        check(unsafe { ffi::st_storage_record_use(self.0.as_ptr()) })
    }

    /// How many strong references there are to it, with this one. Others may come and go meanwhile.
    pub fn owners(&self) -> u64 {
        // SAFETY: a strong reference is held.
        unsafe { ffi::st_storage_owners(self.0.as_ptr()) }
    }

    /// The first byte. Null if the storage has none.
    pub fn data(&self) -> *mut c_void {
        // SAFETY: a strong reference is held.
        unsafe { ffi::st_storage_data(self.0.as_ptr()) }
    }

    /// The bytes that may be read and written starting at [`Storage::data`]: at least [`Storage::bytes`], and a
    /// multiple of 4 KiB for large storages of this crate's allocator.
    pub fn capacity(&self) -> u64 {
        // SAFETY: a strong reference is held.
        unsafe { ffi::st_storage_capacity(self.0.as_ptr()) }
    }

    /// Its bytes, as a tensor of bytes that shares them.
    pub fn elements(&self) -> Result<Tensor, TorchError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: a strong reference is held, and `raw` is a valid place for the result.
        check(unsafe { ffi::st_storage_elements(self.0.as_ptr(), &raw mut raw) })?;
        // SAFETY: the shim created the tensor and gave it to us.
        Ok(unsafe { Tensor::from_ptr(raw) })
    }

    /// A new storage with the same bytes. Waits until they are there.
    pub fn copy(&self) -> Result<Storage, TorchError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: a strong reference is held, and `raw` is a valid place for the result.
        check(unsafe { ffi::st_storage_copy(self.0.as_ptr(), &raw mut raw) })?;
        // SAFETY: the shim gave its reference to us.
        unsafe { Storage::from_raw(raw) }
    }

    /// A weak reference to the same storage.
    pub fn downgrade(&self) -> WeakStorage {
        // SAFETY: a strong reference is held.
        unsafe { ffi::st_storage_weak_retain(self.0.as_ptr()) };
        WeakStorage(self.0)
    }

    /// Takes an additional reference to a storage that someone keeps alive.
    ///
    /// # Safety
    /// `raw` points to a storage that has at least one strong reference now.
    pub(crate) unsafe fn retain(raw: NonNull<StStorage>) -> Storage {
        // SAFETY: the caller's promise.
        unsafe { ffi::st_storage_retain(raw.as_ptr()) };
        Storage(raw)
    }

    /// Gives the reference to C++.
    pub(crate) fn into_raw(self) -> *mut StStorage {
        std::mem::ManuallyDrop::new(self).0.as_ptr()
    }
}

impl Clone for Storage {
    fn clone(&self) -> Storage {
        // SAFETY: a strong reference is held.
        unsafe { Storage::retain(self.0) }
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        // SAFETY: this value owns one strong reference.
        unsafe { ffi::st_storage_release(self.0.as_ptr()) };
    }
}

impl WeakStorage {
    /// The identity of this storage.
    pub fn id(&self) -> StorageId {
        StorageId(self.0.as_ptr().addr())
    }

    pub(crate) fn as_ptr(&self) -> *mut StStorage {
        self.0.as_ptr()
    }

    /// The storage, if someone still holds it.
    pub fn upgrade(&self) -> Option<Storage> {
        // SAFETY: a weak reference is held, so the counts are valid.
        unsafe { ffi::st_storage_lock(self.0.as_ptr()) }.then(|| Storage(self.0))
    }
}

impl Drop for WeakStorage {
    fn drop(&mut self) {
        // SAFETY: this value owns one weak reference.
        unsafe { ffi::st_storage_weak_release(self.0.as_ptr()) };
    }
}

/// The device with this `c10::DeviceType` and index; only the CPU and CUDA devices are told apart.
pub(crate) fn device_of(kind: i8, index: i8) -> Device {
    match kind {
        1 => Device::Cuda(usize::try_from(index).unwrap_or(0)),
        _ => Device::Cpu,
    }
}

impl StorageId {
    /// Of the storage of `tensor`, or `None` if it has no storage. Quicker than [`Storage::of`], since it holds nothing.
    pub fn of_tensor(tensor: &Tensor) -> Option<StorageId> {
        // SAFETY: the tensor is borrowed, so its pointer is valid.
        NonNull::new(unsafe { ffi::st_tensor_storage(tensor.as_ptr()) }).map(StorageId::of)
    }

    pub(crate) fn of(raw: NonNull<StStorage>) -> StorageId {
        StorageId(raw.as_ptr().addr())
    }
}

impl fmt::Debug for StorageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "storage {:#x}", self.0)
    }
}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of {} bytes", self.id(), self.bytes())
    }
}

impl fmt::Debug for WeakStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "weak {:?}", self.id())
    }
}
