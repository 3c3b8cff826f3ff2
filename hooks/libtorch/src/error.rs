//! Errors as values, in both directions across the border.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};

use crate::ffi::{StStatus, st_last_error};

/// The error message from libtorch.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TorchError(pub String);

/// Turns a status of the shim into a result.
pub(crate) fn check(status: StStatus) -> Result<(), TorchError> {
    if status == 0 {
        return Ok(());
    }
    let message = st_last_error();
    // SAFETY: the shim never returns null, and the message lives until this thread's next failed call.
    let message = unsafe { CStr::from_ptr(message) };
    Err(TorchError(message.to_string_lossy().trim_end().to_owned()))
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Stores a callback's message for C++ to fetch with [`last_callback_error`], and returns the failed status.
pub(crate) fn park(message: &str) -> StStatus {
    let text = CString::new(message.replace('\0', " ")).unwrap_or_default();
    // A thread that is shutting down no longer has a slot; the status alone still says that the callback failed.
    _ = LAST.try_with(|last| *last.borrow_mut() = text);
    1
}

pub(crate) extern "C" fn last_callback_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr())
        .unwrap_or(c"a failed callback on a thread that is ending".as_ptr())
}

/// The text of a caught panic.
pub(crate) fn panic_text(payload: &(dyn Any + Send)) -> String {
    let text = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    format!("panic in a saved-tensor hook: {text}")
}
