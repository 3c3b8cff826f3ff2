//! Registered memory, which transfers can use without bounce buffers.

use std::ffi::c_void;
use std::fmt;

use crate::driver::Driver;
use crate::result::{Result, check};

/// Registered memory; deregistered on drop.
pub struct Buffer {
    base: *const c_void,
    len: usize,
    driver: Driver,
    done: bool,
}

// SAFETY: the vendor's reference says that all functions are thread-safe; the base is only passed to them.
unsafe impl Send for Buffer {}
// SAFETY: as above; it does not change.
unsafe impl Sync for Buffer {}

impl Driver {
    /// Registers the `len` bytes at `base`, on a device or the host.
    ///
    /// # Safety
    ///
    /// The memory stays allocated until the [`Buffer`] has been dropped. If the drop failed, which
    /// [`Driver::take_errors`] reports, the memory must stay allocated even then: it may still be pinned.
    pub unsafe fn register_buffer(&self, base: *const c_void, len: usize) -> Result<Buffer> {
        // Looked up now, because the drop of the buffer will need it.
        self.functions().buf_deregister()?;
        let function = self.functions().buf_register()?;
        // SAFETY: the caller vouches for the memory; there are no flags.
        let outcome = unsafe { function(base, len, 0) };
        check("cuFileBufRegister", outcome).map_err(|error| error.about(describe(base, len)))?;
        Ok(Buffer { base, len, driver: self.clone(), done: false })
    }
}

impl Buffer {
    /// The first byte, as it was registered.
    pub fn base(&self) -> *const c_void {
        self.base
    }

    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Deregisters the memory and reports whether that succeeded. After an error the memory may still be pinned.
    pub fn deregister(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.done, true) {
            return Ok(());
        }
        let function = self.driver.functions().buf_deregister()?;
        // SAFETY: the base was registered and is deregistered once.
        let outcome = unsafe { function(self.base) };
        check("cuFileBufDeregister", outcome).map_err(|error| error.about(describe(self.base, self.len)))
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("base", &self.base).field("len", &self.len).finish_non_exhaustive()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let outcome = self.end();
        self.driver.keep_error(outcome);
    }
}

fn describe(base: *const c_void, len: usize) -> String {
    format!("{len} bytes at {base:p}")
}
