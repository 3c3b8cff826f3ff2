//! The CUDA runtime functions that the hook intercepts.
//!
//! Each calls the real one and returns its result. The types are C's: a `cudaError_t` is an int, streams and pools
//! are pointers. <https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html>

#![expect(non_snake_case, reason = "the names are CUDA's")]

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use crate::book::Kind;
use crate::control::HOOK;
use crate::entry;
use crate::real::{Library, NOT_FOUND, Real};

type Malloc = unsafe extern "C" fn(*mut *mut c_void, usize) -> c_int;
type Free = unsafe extern "C" fn(*mut c_void) -> c_int;
type MallocAsync = unsafe extern "C" fn(*mut *mut c_void, usize, *mut c_void) -> c_int;
type MallocFromPool = unsafe extern "C" fn(*mut *mut c_void, usize, *mut c_void, *mut c_void) -> c_int;
type FreeAsync = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;
type IsCapturing = unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int;
type EntryPoint = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_ulonglong, *mut c_int) -> c_int;
type EntryPointByVersion =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_uint, c_ulonglong, *mut c_int) -> c_int;

// SAFETY: the type is that of cuda_runtime_api.h.
static MALLOC: Real<Malloc> = unsafe { Real::new(c"cudaMalloc", Library::Runtime) };
// SAFETY: as above.
static FREE: Real<Free> = unsafe { Real::new(c"cudaFree", Library::Runtime) };

/// `cudaMalloc`; the memory will be registered.
///
/// # Safety
/// As the real one.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cudaMalloc(memory: *mut *mut c_void, bytes: usize) -> c_int {
    let Some(real) = MALLOC.get() else { return NOT_FOUND };
    // SAFETY: the caller's arguments, for the function they are meant for.
    let status = unsafe { real(memory, bytes) };
    if HOOK.is_on() && status == 0 {
        // SAFETY: the real function wrote there.
        HOOK.allocated(unsafe { *memory } as u64, bytes, Kind::Plain);
    }
    status
}

/// `cudaFree`; the memory is deregistered first.
///
/// # Safety
/// As the real one.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cudaFree(memory: *mut c_void) -> c_int {
    let Some(real) = FREE.get() else { return NOT_FOUND };
    if HOOK.is_on() && !memory.is_null() {
        HOOK.freed(memory as u64);
    }
    // SAFETY: the caller's argument, for the function it is meant for.
    unsafe { real(memory) }
}

/// The functions that take a stream. The runtime has them twice: for programs with one default stream for all
/// threads, and for programs where each thread has its own.
macro_rules! by_stream {
    ($malloc:ident, $from_pool:ident, $free:ident, $is_capturing:ident, $entry:ident, $by_version:ident) => {
        /// `cudaMallocAsync`; the memory will be registered, unless the call is only recorded in a graph.
        ///
        /// # Safety
        /// As the real one.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $malloc(
            memory: *mut *mut c_void,
            bytes: usize,
            stream: *mut c_void,
        ) -> c_int {
            static REAL: Real<MallocAsync> =
                // SAFETY: the type is that of cuda_runtime_api.h.
                unsafe { Real::new(c_name(concat!(stringify!($malloc), "\0")), Library::Runtime) };
            let Some(real) = REAL.get() else { return NOT_FOUND };
            // SAFETY: the caller's arguments, for the function they are meant for.
            let status = unsafe { real(memory, bytes, stream) };
            if HOOK.is_on() && status == 0 && !$is_capturing(stream) {
                // SAFETY: the real function wrote there.
                HOOK.allocated(unsafe { *memory } as u64, bytes, Kind::Pool);
            }
            status
        }

        /// `cudaMallocFromPoolAsync`; the memory will be registered, unless the call is only recorded in a graph.
        ///
        /// # Safety
        /// As the real one.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $from_pool(
            memory: *mut *mut c_void,
            bytes: usize,
            pool: *mut c_void,
            stream: *mut c_void,
        ) -> c_int {
            static REAL: Real<MallocFromPool> =
                // SAFETY: the type is that of cuda_runtime_api.h.
                unsafe { Real::new(c_name(concat!(stringify!($from_pool), "\0")), Library::Runtime) };
            let Some(real) = REAL.get() else { return NOT_FOUND };
            // SAFETY: the caller's arguments, for the function they are meant for.
            let status = unsafe { real(memory, bytes, pool, stream) };
            if HOOK.is_on() && status == 0 && !$is_capturing(stream) {
                // SAFETY: the real function wrote there.
                HOOK.allocated(unsafe { *memory } as u64, bytes, Kind::Pool);
            }
            status
        }

        /// `cudaFreeAsync`; the memory is deregistered first.
        ///
        /// # Safety
        /// As the real one.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $free(memory: *mut c_void, stream: *mut c_void) -> c_int {
            static REAL: Real<FreeAsync> =
                // SAFETY: the type is that of cuda_runtime_api.h.
                unsafe { Real::new(c_name(concat!(stringify!($free), "\0")), Library::Runtime) };
            let Some(real) = REAL.get() else { return NOT_FOUND };
            if HOOK.is_on() && !memory.is_null() {
                HOOK.freed(memory as u64);
            }
            // SAFETY: the caller's arguments, for the function they are meant for.
            unsafe { real(memory, stream) }
        }

        /// Whether calls on the stream are currently recorded in a graph: what they allocate has no memory behind it
        /// yet.
        fn $is_capturing(stream: *mut c_void) -> bool {
            static REAL: Real<IsCapturing> =
                // SAFETY: the type is that of cuda_runtime_api.h.
                unsafe { Real::new(c_name(concat!(stringify!($is_capturing), "\0")), Library::Runtime) };
            let mut capturing = 0;
            // SAFETY: the stream was good for an allocation; the status is ours.
            REAL.get().is_some_and(|real| unsafe { real(stream, &raw mut capturing) } != 0 || capturing != 0)
        }

        /// `cudaGetDriverEntryPoint`; functions that the hook intercepts are replaced.
        ///
        /// # Safety
        /// As the real one.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $entry(
            symbol: *const c_char,
            function: *mut *mut c_void,
            flags: c_ulonglong,
            found: *mut c_int,
        ) -> c_int {
            static REAL: Real<EntryPoint> =
                // SAFETY: the type is that of cuda_runtime_api.h.
                unsafe { Real::new(c_name(concat!(stringify!($entry), "\0")), Library::Runtime) };
            let Some(real) = REAL.get() else { return NOT_FOUND };
            // SAFETY: the caller's arguments, for the function they are meant for.
            let status = unsafe { real(symbol, function, flags, found) };
            if status == 0 {
                // SAFETY: the real function read the symbol and wrote the function.
                unsafe { entry::replace(symbol, function, None) };
            }
            status
        }

        /// `cudaGetDriverEntryPointByVersion`; functions that the hook intercepts are replaced. This is how PyTorch
        /// finds the virtual memory functions.
        ///
        /// # Safety
        /// As the real one.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $by_version(
            symbol: *const c_char,
            function: *mut *mut c_void,
            version: c_uint,
            flags: c_ulonglong,
            found: *mut c_int,
        ) -> c_int {
            static REAL: Real<EntryPointByVersion> =
                // SAFETY: the type is that of cuda_runtime_api.h.
                unsafe { Real::new(c_name(concat!(stringify!($by_version), "\0")), Library::Runtime) };
            let Some(real) = REAL.get() else { return NOT_FOUND };
            // SAFETY: the caller's arguments, for the function they are meant for.
            let status = unsafe { real(symbol, function, version, flags, found) };
            if status == 0 {
                // SAFETY: the real function read the symbol and wrote the function.
                unsafe { entry::replace(symbol, function, Some(version)) };
            }
            status
        }
    };
}

by_stream!(
    cudaMallocAsync,
    cudaMallocFromPoolAsync,
    cudaFreeAsync,
    cudaStreamIsCapturing,
    cudaGetDriverEntryPoint,
    cudaGetDriverEntryPointByVersion
);
by_stream!(
    cudaMallocAsync_ptsz,
    cudaMallocFromPoolAsync_ptsz,
    cudaFreeAsync_ptsz,
    cudaStreamIsCapturing_ptsz,
    cudaGetDriverEntryPoint_ptsz,
    cudaGetDriverEntryPointByVersion_ptsz
);

/// The name as a C string; the macro adds the zero at its end.
const fn c_name(name: &'static str) -> &'static std::ffi::CStr {
    match std::ffi::CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("the name ends in a zero byte"),
    }
}
