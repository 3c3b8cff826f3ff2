//! The few cuFile functions that registrations need, looked up at run time.
//!
//! <https://docs.nvidia.com/gpudirect-storage/api-reference-guide/index.html>

use std::ffi::c_void;
use std::sync::OnceLock;

use cufile_sys::Search;
use cufile_sys::sys::{CUfileError_t, CUfileOpError, cuFileBufDeregister, cuFileBufRegister};

use crate::book::Segment;
use crate::context;
use crate::hook::Registrar;

/// The error code of registrations if there is no `libcufile.so.0`, or it lacks a function. cuFile's own codes are
/// 5001 and higher.
pub const NOT_FOUND: i32 = -1;

/// cuFile, once it has been loaded.
#[derive(Debug)]
pub struct CuFile {
    functions: OnceLock<Result<Functions, i32>>,
    /// Called when the process ends, while cuFile may still be called.
    at_exit: extern "C" fn(),
}

#[derive(Clone, Copy, Debug)]
struct Functions {
    register: cuFileBufRegister,
    deregister: cuFileBufDeregister,
}

impl CuFile {
    /// A value for which nothing has been loaded yet.
    pub const fn new(at_exit: extern "C" fn()) -> CuFile {
        CuFile { functions: OnceLock::new(), at_exit }
    }

    fn functions(&self) -> Result<Functions, i32> {
        *self.functions.get().unwrap_or(&Err(NOT_FOUND))
    }

    fn load(&self) -> Result<Functions, i32> {
        // Handlers run newest first, and the process may end at any moment. With one handler installed before cuFile
        // is loaded, one before it is opened and one after that, one of them always runs before those that shut
        // cuFile down.
        self.handle_exit();
        let library = Search::new().load().map_err(|_| NOT_FOUND)?;
        let functions = library.functions();
        let missing = |_| NOT_FOUND;
        let register = functions.buf_register().map_err(missing)?;
        let deregister = functions.buf_deregister().map_err(missing)?;
        let open = functions.driver_open().map_err(missing)?;
        self.handle_exit();
        // The driver stays open: nobody knows when the program is done with its memory.
        // SAFETY: it takes no arguments and may be called from any thread.
        match unsafe { open() }.err {
            CUfileOpError::CU_FILE_SUCCESS | CUfileOpError::CU_FILE_DRIVER_ALREADY_OPEN => {}
            status => return Err(code(status)),
        }
        self.handle_exit();
        Ok(Functions { register, deregister })
    }

    fn handle_exit(&self) {
        // SAFETY: the function exists as long as this library, which the handler is bound to.
        unsafe { libc::atexit(self.at_exit) };
    }
}

impl Registrar for CuFile {
    fn context(&self) -> usize {
        context::current()
    }

    fn open(&self) {
        context::ready();
        let functions = self.load();
        self.functions.get_or_init(|| functions);
    }

    fn register(&self, segment: Segment) -> Result<(), i32> {
        let register = self.functions()?.register;
        if !context::make_current(segment.context) {
            return Err(code(CUfileOpError::CU_FILE_CUDA_CONTEXT_MISMATCH));
        }
        // SAFETY: cuFile looks the range up and refuses what it cannot register. The book says that it is live now;
        // whoever frees it waits, and deregisters it first.
        checked(unsafe { register(segment.start as *const c_void, segment.bytes, 0) })
    }

    fn deregister(&self, start: u64) -> Result<(), i32> {
        let deregister = self.functions()?.deregister;
        // SAFETY: cuFile looks the address up; the book says that it is registered.
        checked(unsafe { deregister(start as *const c_void) })
    }
}

fn checked(outcome: CUfileError_t) -> Result<(), i32> {
    if outcome.err == CUfileOpError::CU_FILE_SUCCESS { Ok(()) } else { Err(code(outcome.err)) }
}

fn code(status: CUfileOpError) -> i32 {
    status.0.cast_signed()
}
