//! Driver functions that a program asks CUDA for by name.
//!
//! PyTorch gets the virtual memory functions from `cudaGetDriverEntryPointByVersion`, so it never calls the names
//! that a preloaded library defines. The result of such a lookup is replaced by the hook's function, which calls the
//! one that was found.

use std::ffi::{CStr, c_char, c_int, c_void};

use crate::driver;
use crate::real::{Library, NOT_FOUND, Real};

type GetProcAddress = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64) -> c_int;
type GetProcAddressV2 =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;

// SAFETY: the type is that of cuda.h.
static GET_PROC_ADDRESS: Real<GetProcAddress> = unsafe { Real::new(c"cuGetProcAddress", Library::Driver) };
// SAFETY: as above.
static GET_PROC_ADDRESS_V2: Real<GetProcAddressV2> =
    unsafe { Real::new(c"cuGetProcAddress_v2", Library::Driver) };

/// Functions have the types known here from this version of CUDA on.
const OLDEST: u32 = 3020;
/// And only below this version: later ones may give a name another type.
const TOO_NEW: u32 = 14_000;
/// From this version on, `cuGetProcAddress` takes one more argument.
const FIVE_ARGUMENTS: u32 = 12_000;

/// Replaces the function that was found for this symbol, if the hook intercepts it. The version is the one that was
/// asked for, or `None` for the runtime's.
///
/// # Safety
/// `symbol` is null or a C string. `function` is null or holds null or the function of that name and version.
pub(crate) unsafe fn replace(symbol: *const c_char, function: *mut *mut c_void, version: Option<u32>) {
    if symbol.is_null() || function.is_null() {
        return;
    }
    // SAFETY: the caller's promise.
    let symbol = unsafe { CStr::from_ptr(symbol) };
    // SAFETY: the caller's promise.
    let real = unsafe { *function };
    if let Some(ours) = stand_in(symbol, real, version) {
        // SAFETY: the real function has just written there.
        unsafe { *function = ours };
    }
}

fn stand_in(symbol: &CStr, real: *mut c_void, version: Option<u32>) -> Option<*mut c_void> {
    if real.is_null() || version.is_some_and(|version| !(OLDEST..TOO_NEW).contains(&version)) {
        return None;
    }
    let ours = match symbol.to_bytes() {
        b"cuMemAlloc" | b"cuMemAlloc_v2" => {
            driver::MEM_ALLOC.replaced(real, driver::cuMemAlloc_v2 as *mut c_void)
        }
        b"cuMemFree" | b"cuMemFree_v2" => {
            driver::MEM_FREE.replaced(real, driver::cuMemFree_v2 as *mut c_void)
        }
        b"cuMemMap" => driver::MEM_MAP.replaced(real, driver::cuMemMap as *mut c_void),
        b"cuMemUnmap" => driver::MEM_UNMAP.replaced(real, driver::cuMemUnmap as *mut c_void),
        b"cuMemSetAccess" => driver::MEM_SET_ACCESS.replaced(real, driver::cuMemSetAccess as *mut c_void),
        b"cuGetProcAddress_v2" => GET_PROC_ADDRESS_V2.replaced(real, cuGetProcAddress_v2 as *mut c_void),
        // Without a version it is not known which of the two it is.
        b"cuGetProcAddress" if version? >= FIVE_ARGUMENTS => {
            GET_PROC_ADDRESS_V2.replaced(real, cuGetProcAddress_v2 as *mut c_void)
        }
        b"cuGetProcAddress" => GET_PROC_ADDRESS.replaced(real, cuGetProcAddress as *mut c_void),
        _ => return None,
    };
    Some(ours)
}

/// `cuGetProcAddress` of CUDA 11; functions that the hook intercepts are replaced.
///
/// # Safety
/// As the real one.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetProcAddress(
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> c_int {
    let Some(real) = GET_PROC_ADDRESS.get() else { return NOT_FOUND };
    // SAFETY: the caller's arguments, for the function they are meant for.
    let status = unsafe { real(symbol, function, version, flags) };
    if status == 0 {
        // SAFETY: the real function read the symbol and wrote the function.
        unsafe { replace(symbol, function, u32::try_from(version).ok()) };
    }
    status
}

/// `cuGetProcAddress` of CUDA 12 and later; functions that the hook intercepts are replaced.
///
/// # Safety
/// As the real one.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: u64,
    found: *mut c_int,
) -> c_int {
    let Some(real) = GET_PROC_ADDRESS_V2.get() else { return NOT_FOUND };
    // SAFETY: the caller's arguments, for the function they are meant for.
    let status = unsafe { real(symbol, function, version, flags, found) };
    if status == 0 {
        // SAFETY: the real function read the symbol and wrote the function.
        unsafe { replace(symbol, function, u32::try_from(version).ok()) };
    }
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An address that is not one of ours.
    fn real() -> *mut c_void {
        main_like as *mut c_void
    }

    extern "C" fn main_like() {}

    #[test]
    fn functions_of_virtual_memory_are_replaced() {
        for symbol in [c"cuMemMap", c"cuMemUnmap", c"cuMemSetAccess"] {
            let ours = stand_in(symbol, real(), Some(10_020)).unwrap();
            assert_ne!(ours, real(), "{symbol:?}");
        }
    }

    #[test]
    fn other_functions_stay_as_they_are() {
        assert_eq!(stand_in(c"cuMemCreate", real(), Some(10_020)), None);
        assert_eq!(stand_in(c"cuMemMapArrayAsync", real(), Some(11_010)), None);
    }

    #[test]
    fn what_was_not_found_stays_so() {
        assert_eq!(stand_in(c"cuMemMap", std::ptr::null_mut(), Some(10_020)), None);
    }

    #[test]
    fn versions_whose_types_are_not_known_stay_as_they_are() {
        assert_eq!(stand_in(c"cuMemAlloc", real(), Some(3000)), None);
        assert_eq!(stand_in(c"cuMemMap", real(), Some(14_000)), None);
    }

    #[test]
    fn the_lookup_itself_is_replaced_by_the_one_of_its_version() {
        let eleven = stand_in(c"cuGetProcAddress", real(), Some(11_030)).unwrap();
        let twelve = stand_in(c"cuGetProcAddress", real(), Some(12_000)).unwrap();
        assert_eq!(eleven, cuGetProcAddress as *mut c_void);
        assert_eq!(twelve, cuGetProcAddress_v2 as *mut c_void);
        assert_eq!(stand_in(c"cuGetProcAddress", real(), None), None);
    }
}
