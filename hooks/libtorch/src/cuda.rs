//! CUDA, looked up at run time: one binary serves machines with and without it.

use std::ffi::{CStr, c_void};
use std::marker::PhantomData;

use crate::error::{TorchError, check};
use crate::ffi::{self, StMemory};
use crate::memory_stats::MemoryStats;
use crate::storage::Storage;

/// Loads libtorch's CUDA library into the process if it and all its dependencies are available; otherwise the error
/// says what is missing. Call it before the first use of a CUDA tensor. It may be called repeatedly.
pub fn load_cuda() -> Result<(), String> {
    // SAFETY: loading libtorch_cuda runs its initialisers, which register kernels with the libtorch already loaded.
    let library = unsafe { libc::dlopen(c"libtorch_cuda.so".as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if !library.is_null() {
        return Ok(());
    }
    // SAFETY: reads the message of the call that just failed on this thread.
    let message = unsafe { libc::dlerror() };
    if message.is_null() {
        return Err("libtorch_cuda.so cannot be loaded".to_owned());
    }
    // SAFETY: dlerror returned a C string that lives until the next call of its family on this thread.
    Err(unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned())
}

/// Makes operations use deterministic kernels, which give the same bits each time, at some cost in speed; operations
/// without such a kernel fail. Call it before the first use of a CUDA tensor and before other threads are started: it
/// sets an environment variable for cuBLAS.
pub fn make_deterministic() -> Result<(), TorchError> {
    check(ffi::st_deterministic())
}

/// One CUDA device, as libtorch uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaDevice {
    index: i8,
}

impl CudaDevice {
    /// The device with this number, ready for use, if it exists and [`load_cuda`] has succeeded.
    pub fn new(index: usize) -> Result<CudaDevice, TorchError> {
        let count = tch::Cuda::device_count();
        let known = usize::try_from(count).is_ok_and(|count| index < count);
        match i8::try_from(index) {
            Ok(index) if known => {
                check(ffi::st_device_initialise())?;
                Ok(CudaDevice { index })
            }
            _ => Err(TorchError(format!("there is no CUDA device {index}: libtorch sees {count}"))),
        }
    }

    /// The device's number.
    pub fn index(self) -> usize {
        usize::try_from(self.index).unwrap_or(0)
    }

    /// The stream that the calling thread computes on, as a `cudaStream_t`. It belongs to libtorch and lives as long
    /// as the process.
    pub fn stream(self) -> Result<*mut c_void, TorchError> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: `stream` is a valid place for the result.
        check(unsafe { ffi::st_device_stream(self.index, &raw mut stream) })?;
        Ok(stream)
    }

    /// Makes the calling thread compute on `stream`, a `cudaStream_t` that was not created by libtorch, until the
    /// guard is dropped.
    ///
    /// # Safety
    /// It is a stream of this device, and outlives the guard and all memory that libtorch allocates meanwhile.
    pub unsafe fn enter(self, stream: *mut c_void) -> Result<OnStream, TorchError> {
        let number =
            i64::try_from(stream.addr()).map_err(|_| TorchError("not a stream's address".to_owned()))?;
        self.exchange(number).map(|before| OnStream { device: self, before, thread_bound: PhantomData })
    }

    fn exchange(self, stream: i64) -> Result<i64, TorchError> {
        let mut before = 0;
        // SAFETY: `before` is a valid place for the result; whoever entered the stream promised that it is one.
        check(unsafe { ffi::st_device_exchange_stream(self.index, stream, &raw mut before) })?;
        Ok(before)
    }

    /// A new uninitialised storage of `bytes` bytes, allocated for the stream that the calling thread computes on.
    pub fn allocate(self, bytes: u64) -> Result<Storage, TorchError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a valid place for the result.
        check(unsafe { ffi::st_device_allocate(self.index, bytes, &raw mut raw) })?;
        // SAFETY: the shim gave its reference to us.
        unsafe { Storage::from_raw(raw) }
    }

    /// What libtorch's caching allocator holds on the device, in bytes.
    pub fn memory(self) -> Result<MemoryStats, TorchError> {
        let mut memory = StMemory::default();
        // SAFETY: `memory` is a valid place for the result.
        check(unsafe { ffi::st_device_memory(self.index, &raw mut memory) })?;
        Ok(memory.into())
    }

    /// Bytes that could be allocated on the device now: what the driver has free, plus what libtorch holds but does
    /// not use.
    pub fn free(self) -> Result<u64, TorchError> {
        let mut bytes = 0;
        // SAFETY: `bytes` is a valid place for the result.
        check(unsafe { ffi::st_device_free(self.index, &raw mut bytes) })?;
        Ok(bytes)
    }

    /// Gives memory that libtorch's allocator holds but does not use back to the driver, on all devices. Waits for them.
    pub fn trim(self) -> Result<(), TorchError> {
        check(ffi::st_device_trim())
    }

    /// Has libtorch's allocator ask for memory before it fails, on all devices and for as long as the process lives.
    pub(crate) fn ask(self) -> Result<(), TorchError> {
        check(ffi::st_device_ask())
    }

    /// Restarts `peak` from what is allocated now.
    pub fn reset_peak(self) -> Result<(), TorchError> {
        check(ffi::st_device_reset_peak(self.index))
    }
}

/// Guard of [`CudaDevice::enter`].
#[must_use = "the thread leaves the stream when this guard is dropped"]
pub struct OnStream {
    device: CudaDevice,
    before: i64,
    thread_bound: PhantomData<*const ()>,
}

impl Drop for OnStream {
    fn drop(&mut self) {
        // This fails only if CUDA fails, and then CUDA reports the error in later operations.
        drop(self.device.exchange(self.before));
    }
}
