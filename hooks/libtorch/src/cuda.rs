//! CUDA, found at run time: one binary serves machines with and without it.

use std::ffi::CStr;

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
