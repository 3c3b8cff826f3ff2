//! A loaded library.

use std::ffi::{CStr, c_void};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

/// A library that the dynamic linker has loaded; it is never unloaded.
pub(crate) struct Handle {
    address: NonNull<c_void>,
    path: PathBuf,
}

// SAFETY: the dynamic linker may be asked about a library from any thread.
unsafe impl Send for Handle {}
// SAFETY: as above; the handle does not change.
unsafe impl Sync for Handle {}

impl Handle {
    /// `address` is what the dynamic linker returned for the library at `path`.
    pub(crate) fn new(address: NonNull<c_void>, path: PathBuf) -> Handle {
        Handle { address, path }
    }

    /// The address of the symbol, whose name ends with a zero byte, if the library has it.
    pub(crate) fn symbol(&self, name: &str) -> Option<NonNull<c_void>> {
        let name = CStr::from_bytes_with_nul(name.as_bytes()).ok()?;
        // SAFETY: the library is never unloaded, and the name is a C string.
        NonNull::new(unsafe { libc::dlsym(self.address.as_ptr(), name.as_ptr()) })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}
