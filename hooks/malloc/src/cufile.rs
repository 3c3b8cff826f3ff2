//! The few functions of cuFile that registrations need, found at run time.
//!
//! <https://docs.nvidia.com/gpudirect-storage/api-reference-guide/index.html>

use std::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;

use crate::hook::Registrar;

/// The code of a registration while there is no `libcufile.so.0`, or it lacks a function. cuFile's own codes are 5001 and more.
pub const NOT_FOUND: i32 = -1;

const SUCCESS: i32 = 0;
const DRIVER_ALREADY_OPEN: i32 = 5026;

/// cuFile, once it is there.
#[derive(Debug)]
pub struct CuFile {
    functions: OnceLock<Result<Functions, i32>>,
    /// Called when the process ends, while cuFile may still be called.
    at_exit: extern "C" fn(),
}

#[derive(Clone, Copy, Debug)]
struct Functions {
    register: unsafe extern "C" fn(*const c_void, usize, c_int) -> Outcome,
    deregister: unsafe extern "C" fn(*const c_void) -> Outcome,
}

/// `CUfileError_t`: cuFile's code, and CUDA's where that is the cause.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Outcome {
    code: c_int,
    cuda: c_int,
}

impl CuFile {
    /// Nothing is loaded yet.
    pub const fn new(at_exit: extern "C" fn()) -> CuFile {
        CuFile { functions: OnceLock::new(), at_exit }
    }

    fn functions(&self) -> Result<Functions, i32> {
        *self.functions.get().unwrap_or(&Err(NOT_FOUND))
    }

    fn load(&self) -> Result<Functions, i32> {
        // SAFETY: the name is a C string; what the library does when it is loaded is NVIDIA's.
        let library = unsafe { libc::dlopen(c"libcufile.so.0".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return Err(NOT_FOUND);
        }
        let open = symbol(library, c"cuFileDriverOpen")?;
        let register = symbol(library, c"cuFileBufRegister")?;
        let deregister = symbol(library, c"cuFileBufDeregister")?;
        // SAFETY: `CUfileError_t cuFileDriverOpen(void)` is how cufile.h declares it.
        let open = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> Outcome>(open) };
        // SAFETY: as above, from cufile.h.
        let register = unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_void, usize, c_int) -> Outcome>(
                register,
            )
        };
        // SAFETY: as above, from cufile.h.
        let deregister = unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_void) -> Outcome>(deregister)
        };
        // SAFETY: it takes nothing and may be called from any thread.
        match unsafe { open() }.code {
            SUCCESS | DRIVER_ALREADY_OPEN => {}
            code => return Err(code),
        }
        // Handlers run newest first: this one runs before those that take cuFile down.
        // SAFETY: the function is there as long as this library, which the handler is bound to.
        unsafe { libc::atexit(self.at_exit) };
        Ok(Functions { register, deregister })
    }
}

impl Registrar for CuFile {
    fn open(&self) {
        // Not `get_or_init`, in which other threads would wait. The hook calls this once.
        let functions = self.load();
        self.functions.get_or_init(|| functions);
    }

    fn register(&self, start: u64, bytes: usize) -> Result<(), i32> {
        let register = self.functions()?.register;
        // SAFETY: cuFile looks the range up and refuses what it cannot register. The book says it is live now, and it is
        // deregistered before it is freed.
        unsafe { register(start as *const c_void, bytes, 0) }.into()
    }

    fn deregister(&self, start: u64) -> Result<(), i32> {
        let deregister = self.functions()?.deregister;
        // SAFETY: cuFile looks the address up; the book says that it is registered.
        unsafe { deregister(start as *const c_void) }.into()
    }
}

impl From<Outcome> for Result<(), i32> {
    fn from(outcome: Outcome) -> Result<(), i32> {
        if outcome.code == SUCCESS { Ok(()) } else { Err(outcome.code) }
    }
}

fn symbol(library: *mut c_void, name: &CStr) -> Result<*mut c_void, i32> {
    // SAFETY: the library is loaded and stays so: its handle is never closed.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    if address.is_null() { Err(NOT_FOUND) } else { Ok(address) }
}
