//! The CUDA context of a thread: cuFile registers memory in its caller's context.
//!
//! <https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__CTX.html>,
//! <https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__STREAM.html>

use std::ffi::{c_int, c_void};

use crate::real::{Library, Real};

type Current = unsafe extern "C" fn(*mut *mut c_void) -> c_int;
type SetCurrent = unsafe extern "C" fn(*mut c_void) -> c_int;
type ExchangeCaptureMode = unsafe extern "C" fn(*mut c_int) -> c_int;

// SAFETY: the type is that of cuda.h.
static CURRENT: Real<Current> = unsafe { Real::new(c"cuCtxGetCurrent", Library::Driver) };
// SAFETY: as above.
static SET_CURRENT: Real<SetCurrent> = unsafe { Real::new(c"cuCtxSetCurrent", Library::Driver) };
// SAFETY: as above.
static EXCHANGE_CAPTURE_MODE: Real<ExchangeCaptureMode> =
    unsafe { Real::new(c"cuThreadExchangeStreamCaptureMode", Library::Driver) };

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: c_int = 2;

/// The context of this thread, or 0.
pub(crate) fn current() -> usize {
    let mut context = std::ptr::null_mut();
    // SAFETY: the context is ours to write.
    let found = CURRENT.get().is_some_and(|current| unsafe { current(&raw mut context) } == 0);
    if found { context.addr() } else { 0 }
}

/// Makes that context current on this thread, unless it already is. Returns false if CUDA refuses; also true if there
/// is no context to set, or no function to set it with.
pub(crate) fn make_current(context: usize) -> bool {
    if context == 0 || context == current() {
        return true;
    }
    // SAFETY: it was another thread's context; the driver refuses one that no longer exists.
    SET_CURRENT.get().is_none_or(|set| unsafe { set(context as *mut c_void) } == 0)
}

/// Prepares a thread that calls cuFile on its own account. Otherwise what cuFile does there would end graph captures
/// that other threads have begun in the meantime.
pub(crate) fn ready() {
    let mut mode = RELAXED;
    if let Some(exchange) = EXCHANGE_CAPTURE_MODE.get() {
        // If this fails, captures are affected as they would be without it.
        // SAFETY: the mode is ours to read and write.
        let _ = unsafe { exchange(&raw mut mode) };
    }
    // Looked up now, because that takes the loader's lock, and whoever holds that lock later may be waiting for a
    // registration.
    let _ = SET_CURRENT.get();
}
