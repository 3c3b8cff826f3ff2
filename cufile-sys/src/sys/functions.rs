//! The types of the functions.
//!
//! What each function requires of its arguments is in the vendor's reference, named in [`crate::sys`]. All may be
//! called from any thread on which the CUDA context of the memory is current.

use std::ffi::{c_char, c_int, c_long, c_void};

use libc::{off_t, size_t, ssize_t};

use super::*;

/// Opens the driver.
pub type cuFileDriverOpen = unsafe extern "C" fn() -> CUfileError_t;
/// Closes the driver. The header gives callers `cuFileDriverClose_v2` under this name.
pub type cuFileDriverClose = unsafe extern "C" fn() -> CUfileError_t;
/// How many users the driver has in this process.
pub type cuFileUseCount = unsafe extern "C" fn() -> c_long;
/// Reads the driver's properties.
pub type cuFileDriverGetProperties = unsafe extern "C" fn(*mut CUfileDrvProps_t) -> CUfileError_t;
/// Sets whether, and up to how many KiB, the driver polls.
pub type cuFileDriverSetPollMode = unsafe extern "C" fn(bool, size_t) -> CUfileError_t;
/// Sets the largest single transfer, in KiB.
pub type cuFileDriverSetMaxDirectIOSize = unsafe extern "C" fn(size_t) -> CUfileError_t;
/// Sets the GPU memory per device for bounce buffers, in KiB.
pub type cuFileDriverSetMaxCacheSize = unsafe extern "C" fn(size_t) -> CUfileError_t;
/// Sets the GPU memory that can be registered, in KiB.
pub type cuFileDriverSetMaxPinnedMemSize = unsafe extern "C" fn(size_t) -> CUfileError_t;
/// Reads the size of a GPU's BAR1, in KiB.
pub type cuFileGetBARSizeInKB = unsafe extern "C" fn(c_int, *mut size_t) -> CUfileError_t;
/// Reads the version: 1000 times the major number plus 10 times the minor one.
pub type cuFileGetVersion = unsafe extern "C" fn(*mut c_int) -> CUfileError_t;

/// Registers a file.
pub type cuFileHandleRegister =
    unsafe extern "C" fn(*mut CUfileHandle_t, *mut CUfileDescr_t) -> CUfileError_t;
/// Deregisters a file.
pub type cuFileHandleDeregister = unsafe extern "C" fn(CUfileHandle_t);
/// Registers memory: its base, its bytes, flags.
pub type cuFileBufRegister = unsafe extern "C" fn(*const c_void, size_t, c_int) -> CUfileError_t;
/// Deregisters the memory that has this base.
pub type cuFileBufDeregister = unsafe extern "C" fn(*const c_void) -> CUfileError_t;
/// Reads: file, base of the memory, bytes, offset in the file, offset from the base.
pub type cuFileRead = unsafe extern "C" fn(CUfileHandle_t, *mut c_void, size_t, off_t, off_t) -> ssize_t;
/// Writes: file, base of the memory, bytes, offset in the file, offset from the base.
pub type cuFileWrite = unsafe extern "C" fn(CUfileHandle_t, *const c_void, size_t, off_t, off_t) -> ssize_t;

/// Reads a number.
pub type cuFileGetParameterSizeT =
    unsafe extern "C" fn(CUFileSizeTConfigParameter_t, *mut size_t) -> CUfileError_t;
/// Reads a switch; the C type is `bool`, here a byte, for it is the library that writes it.
pub type cuFileGetParameterBool = unsafe extern "C" fn(CUFileBoolConfigParameter_t, *mut u8) -> CUfileError_t;
/// Reads text into so many bytes.
pub type cuFileGetParameterString =
    unsafe extern "C" fn(CUFileStringConfigParameter_t, *mut c_char, c_int) -> CUfileError_t;
/// Reads the least and the largest value of a number.
pub type cuFileGetParameterMinMaxValue =
    unsafe extern "C" fn(CUFileSizeTConfigParameter_t, *mut size_t, *mut size_t) -> CUfileError_t;
/// Reads the sizes in KiB and the counts of the host buffers.
pub type cuFileGetParameterPosixPoolSlabArray =
    unsafe extern "C" fn(*mut size_t, *mut size_t, c_int) -> CUfileError_t;
/// Sets a number.
pub type cuFileSetParameterSizeT =
    unsafe extern "C" fn(CUFileSizeTConfigParameter_t, size_t) -> CUfileError_t;
/// Sets a switch.
pub type cuFileSetParameterBool = unsafe extern "C" fn(CUFileBoolConfigParameter_t, bool) -> CUfileError_t;
/// Sets text.
pub type cuFileSetParameterString =
    unsafe extern "C" fn(CUFileStringConfigParameter_t, *const c_char) -> CUfileError_t;
/// Sets the sizes in KiB and the counts of the host buffers.
pub type cuFileSetParameterPosixPoolSlabArray =
    unsafe extern "C" fn(*const size_t, *const size_t, c_int) -> CUfileError_t;

/// Sets the level of statistics, 0 to 3.
pub type cuFileSetStatsLevel = unsafe extern "C" fn(c_int) -> CUfileError_t;
/// Reads the level of statistics.
pub type cuFileGetStatsLevel = unsafe extern "C" fn(*mut c_int) -> CUfileError_t;
/// Starts to count.
pub type cuFileStatsStart = unsafe extern "C" fn() -> CUfileError_t;
/// Stops counting.
pub type cuFileStatsStop = unsafe extern "C" fn() -> CUfileError_t;
/// Makes all counts zero.
pub type cuFileStatsReset = unsafe extern "C" fn() -> CUfileError_t;
/// Reads statistics of level 1.
pub type cuFileGetStatsL1 = unsafe extern "C" fn(*mut CUfileStatsLevel1_t) -> CUfileError_t;
/// Reads statistics of level 2.
pub type cuFileGetStatsL2 = unsafe extern "C" fn(*mut CUfileStatsLevel2_t) -> CUfileError_t;
/// Reads statistics of level 3.
pub type cuFileGetStatsL3 = unsafe extern "C" fn(*mut CUfileStatsLevel3_t) -> CUfileError_t;
