//! The CUDA driver functions that the hook intercepts.
//!
//! Programs that link the driver call these. Others get them when they ask CUDA for the real functions, see `entry`.
//! The types are C's: a `CUresult` is an int, a `CUdeviceptr` an address.
//! <https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html>,
//! <https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html>

use std::ffi::{c_int, c_ulonglong};

use crate::book::Kind;
use crate::control::HOOK;
use crate::real::{Library, NOT_FOUND, Real};

type MemAlloc = unsafe extern "C" fn(*mut u64, usize) -> c_int;
type MemFree = unsafe extern "C" fn(u64) -> c_int;
type MemMap = unsafe extern "C" fn(u64, usize, usize, u64, c_ulonglong) -> c_int;
type MemUnmap = unsafe extern "C" fn(u64, usize) -> c_int;
type MemSetAccess = unsafe extern "C" fn(u64, usize, *const AccessDesc, usize) -> c_int;

// SAFETY: the type is that of cuda.h.
pub(crate) static MEM_ALLOC: Real<MemAlloc> = unsafe { Real::new(c"cuMemAlloc_v2", Library::Driver) };
// SAFETY: as above.
pub(crate) static MEM_FREE: Real<MemFree> = unsafe { Real::new(c"cuMemFree_v2", Library::Driver) };
// SAFETY: as above.
pub(crate) static MEM_MAP: Real<MemMap> = unsafe { Real::new(c"cuMemMap", Library::Driver) };
// SAFETY: as above.
pub(crate) static MEM_UNMAP: Real<MemUnmap> = unsafe { Real::new(c"cuMemUnmap", Library::Driver) };
// SAFETY: as above.
pub(crate) static MEM_SET_ACCESS: Real<MemSetAccess> =
    unsafe { Real::new(c"cuMemSetAccess", Library::Driver) };

/// `CUmemAccessDesc`: who may access memory, and how.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AccessDesc {
    location_type: c_int,
    location_id: c_int,
    flags: c_int,
}

/// The bit of the flags that every access has: `CU_MEM_ACCESS_FLAGS_PROT_READ`.
const READ: c_int = 1;

/// `cuMemAlloc`; the memory will be registered.
///
/// # Safety
/// As the real one.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAlloc_v2(memory: *mut u64, bytes: usize) -> c_int {
    let Some(real) = MEM_ALLOC.get() else { return NOT_FOUND };
    // SAFETY: the caller's arguments, for the function they are meant for.
    let status = unsafe { real(memory, bytes) };
    if HOOK.is_on() && status == 0 {
        // SAFETY: the real function wrote there.
        HOOK.allocated(unsafe { *memory }, bytes, Kind::Plain);
    }
    status
}

/// `cuMemFree`; the memory is deregistered first.
///
/// # Safety
/// As the real one.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemFree_v2(memory: u64) -> c_int {
    let Some(real) = MEM_FREE.get() else { return NOT_FOUND };
    if HOOK.is_on() && memory != 0 {
        HOOK.freed(memory);
    }
    // SAFETY: the caller's argument, for the function it is meant for.
    unsafe { real(memory) }
}

/// `cuMemMap`; the mapping is recorded.
///
/// # Safety
/// As the real one.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemMap(
    start: u64,
    bytes: usize,
    offset: usize,
    handle: u64,
    flags: c_ulonglong,
) -> c_int {
    let Some(real) = MEM_MAP.get() else { return NOT_FOUND };
    // SAFETY: the caller's arguments, for the function they are meant for.
    let status = unsafe { real(start, bytes, offset, handle, flags) };
    if HOOK.is_on() && status == 0 {
        HOOK.mapped(start, bytes);
    }
    status
}

/// `cuMemSetAccess`; mappings that become accessible will be registered.
///
/// # Safety
/// As the real one.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemSetAccess(
    start: u64,
    bytes: usize,
    access: *const AccessDesc,
    count: usize,
) -> c_int {
    let Some(real) = MEM_SET_ACCESS.get() else { return NOT_FOUND };
    // SAFETY: the caller's arguments, for the function they are meant for.
    let status = unsafe { real(start, bytes, access, count) };
    if HOOK.is_on() && status == 0 && count != 0 && !access.is_null() {
        // SAFETY: the caller promises that many elements, and the real function has read them.
        let access = unsafe { std::slice::from_raw_parts(access, count) };
        if access.iter().any(|one| one.flags & READ != 0) {
            HOOK.granted(start, bytes);
        }
    }
    status
}

/// `cuMemUnmap`; the mappings are deregistered first.
///
/// # Safety
/// As the real one.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemUnmap(start: u64, bytes: usize) -> c_int {
    let Some(real) = MEM_UNMAP.get() else { return NOT_FOUND };
    if HOOK.is_on() {
        HOOK.unmapped(start, bytes);
    }
    // SAFETY: the caller's arguments, for the function they are meant for.
    unsafe { real(start, bytes) }
}
