//! Registered files, and transfers that block the caller.

use std::ffi::c_void;
use std::fmt;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr;
use std::sync::Arc;

use libc::off_t;

use crate::driver::Driver;
use crate::functions::Functions;
use crate::result::{Error, Result, check, transferred};
use crate::sys::{CUfileDescr_t, CUfileDescrHandle, CUfileFileHandleType, CUfileHandle_t};

/// A registered file. Clones share the registration. It ends with the last of them, and the descriptor is dropped
/// after that.
#[derive(Clone)]
pub struct File(Arc<Registered>);

struct Registered {
    handle: CUfileHandle_t,
    // Dropped after the handle has been deregistered; the descriptor is dropped before the driver.
    fd: Box<dyn AsFd + Send + Sync>,
    driver: Driver,
}

// SAFETY: the vendor's reference says that all functions are thread-safe; a handle is used by them alone.
unsafe impl Send for Registered {}
// SAFETY: as above; the handle does not change.
unsafe impl Sync for Registered {}

impl Driver {
    /// Registers an open file, which should have been opened with `O_DIRECT`. From now on the descriptor, or whatever
    /// shares it, belongs to the [`File`]; if the file cannot be registered, it is dropped.
    pub fn register_file(&self, fd: impl AsFd + Send + Sync + 'static) -> Result<File> {
        // Looked up now, because the drop of the file will need it.
        self.functions().handle_deregister()?;
        let function = self.functions().handle_register()?;
        let mut handle = ptr::null_mut();
        let mut descriptor = CUfileDescr_t {
            r#type: CUfileFileHandleType::CU_FILE_HANDLE_TYPE_OPAQUE_FD,
            handle: CUfileDescrHandle { fd: fd.as_fd().as_raw_fd() },
            fs_ops: ptr::null(),
        };
        // SAFETY: `handle` is a place for the result; the descriptor is open, as `fd` keeps it until the file is
        // deregistered.
        let outcome = unsafe { function(&raw mut handle, &raw mut descriptor) };
        check("cuFileHandleRegister", outcome).map_err(|error| error.about(describe(fd.as_fd())))?;
        Ok(File(Arc::new(Registered { handle, fd: Box::new(fd), driver: self.clone() })))
    }
}

impl File {
    /// Reads up to `len` bytes at `file_offset` into `base + memory_offset`, and returns how many were read: fewer at
    /// the end of the file. The transfer is direct if the memory is registered, the blocks are whole and the file has
    /// `O_DIRECT`.
    ///
    /// # Safety
    ///
    /// The `len` bytes at `base + memory_offset`, on a device or the host, are allocated and nobody else's until this
    /// returns; if `base` is registered, they are within the buffer. For memory of a device its CUDA context is
    /// current.
    pub unsafe fn read(
        &self,
        base: *mut c_void,
        len: usize,
        file_offset: u64,
        memory_offset: usize,
    ) -> Result<usize> {
        const NAME: &str = "cuFileRead";
        let function = self.functions().read()?;
        let (from, to) = offsets(NAME, file_offset, memory_offset)?;
        // SAFETY: the file is registered; the caller vouches for the memory.
        let outcome = unsafe { function(self.handle(), base, len, from, to) };
        transferred(NAME, outcome, len).map_err(|error| self.explain(error, file_offset, len))
    }

    /// Writes up to `len` bytes from `base + memory_offset` at `file_offset`, and returns how many were written.
    ///
    /// # Safety
    ///
    /// The `len` bytes at `base + memory_offset`, on a device or the host, are allocated and nobody writes them until
    /// this returns; if `base` is registered, they are within the buffer. For memory of a device its CUDA context is
    /// current.
    pub unsafe fn write(
        &self,
        base: *const c_void,
        len: usize,
        file_offset: u64,
        memory_offset: usize,
    ) -> Result<usize> {
        const NAME: &str = "cuFileWrite";
        let function = self.functions().write()?;
        let (to, from) = offsets(NAME, file_offset, memory_offset)?;
        // SAFETY: the file is registered; the caller vouches for the memory.
        let outcome = unsafe { function(self.handle(), base, len, to, from) };
        transferred(NAME, outcome, len).map_err(|error| self.explain(error, file_offset, len))
    }

    /// The driver that it is registered with.
    pub fn driver(&self) -> &Driver {
        &self.0.driver
    }

    /// The handle, for functions that the safe layer does not cover. It is valid as long as this value.
    pub fn handle(&self) -> CUfileHandle_t {
        self.0.handle
    }

    /// Adds the file and the position to an error.
    pub(crate) fn explain(&self, error: Error, offset: u64, len: usize) -> Error {
        error.about(format!("{len} bytes at {offset} of {}", describe(self.as_fd())))
    }

    pub(crate) fn functions(&self) -> &Functions {
        self.0.driver.functions()
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}

impl fmt::Debug for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("File").field(&self.as_fd()).finish()
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Ok(function) = self.driver.functions().handle_deregister() {
            // SAFETY: the handle was registered and is deregistered once; whatever is in flight holds the file.
            unsafe { function(self.handle) };
        }
    }
}

/// The offsets in C's type.
pub(crate) fn offsets(function: &'static str, file: u64, memory: usize) -> Result<(off_t, off_t)> {
    match (off_t::try_from(file), off_t::try_from(memory)) {
        (Ok(file), Ok(memory)) => Ok((file, memory)),
        _ => Err(Error::argument(function, format!("offsets {file} and {memory} must be below 2^63"))),
    }
}

/// The descriptor's number and, if the kernel provides it, its path.
fn describe(fd: BorrowedFd<'_>) -> String {
    let number = fd.as_raw_fd();
    match fs::read_link(format!("/proc/self/fd/{number}")) {
        Ok(path) => format!("descriptor {number} ({})", path.display()),
        Err(_) => format!("descriptor {number}"),
    }
}
