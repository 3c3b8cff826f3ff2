//! CUDA, found at run time: one binary serves machines with and without it.

use std::ffi::{CStr, c_void};

use crate::error::{TorchError, check};
use crate::ffi::{self, StMemory};
use crate::memory::MemoryStats;
use crate::storage::Storage;

/// Loads libtorch's CUDA half into the process if it and all it needs are there; says what is missing otherwise. Call it
/// before the first use of a CUDA tensor. Harmless to repeat.
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

/// Makes operations take kernels that give the same bits each time, at some cost in speed; those that have none are errors. Call it
/// before the first use of a CUDA tensor, and before other threads are started: it sets an environment variable for cuBLAS.
pub fn make_deterministic() -> Result<(), TorchError> {
    check(ffi::st_deterministic())
}

/// One CUDA device, as libtorch uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaDevice {
    index: i8,
}

impl CudaDevice {
    /// The device of this number, ready for use, once [`load_cuda`] has succeeded and if there is one.
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

    /// Its number.
    pub fn index(self) -> usize {
        usize::try_from(self.index).unwrap_or(0)
    }

    /// The stream that the calling thread computes on, as a `cudaStream_t`. It is libtorch's own and lives as long as the
    /// process.
    pub fn stream(self) -> Result<*mut c_void, TorchError> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: `stream` is a valid place for the result.
        check(unsafe { ffi::st_device_stream(self.index, &raw mut stream) })?;
        Ok(stream)
    }

    /// A new storage of `bytes` bytes, uninitialised, allocated for the stream that the calling thread computes on.
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
        Ok(MemoryStats { allocated: memory.allocated, peak: memory.peak, reserved: memory.reserved })
    }

    /// Makes `peak` start again from what is allocated now.
    pub fn reset_peak(self) -> Result<(), TorchError> {
        check(ffi::st_device_reset_peak(self.index))
    }
}
