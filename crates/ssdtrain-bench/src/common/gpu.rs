//! A GPU through its driver, which is looked up at run time: its properties, and host memory pinned for it.

use std::ffi::c_int;
use std::ptr::NonNull;

use anyhow::{Context, Result, anyhow, ensure};
use cudarc::driver::{DriverError, result, sys};
use ssdtrain_store::Pin;

/// The primary context of a GPU, the one that libtorch uses as well.
pub(crate) struct Gpu {
    handle: sys::CUdevice,
    context: sys::CUcontext,
}

/// The properties of a GPU.
pub(crate) struct Properties {
    pub(crate) name: String,
    pub(crate) memory_bytes: u64,
    /// Compute capability.
    pub(crate) capability: (i32, i32),
    /// Its PCI address, as the kernel writes it.
    pub(crate) pci_address: String,
}

// SAFETY: the handles are the driver's, which may be called from any thread; the context is made current on each that
// does.
unsafe impl Send for Gpu {}
// SAFETY: as above; neither handle changes.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// Opens the device with this number.
    pub(crate) fn open(index: usize) -> Result<Gpu> {
        let handle = handle(index)?;
        // SAFETY: the driver gave the device's handle.
        let context = check("cuDevicePrimaryCtxRetain", unsafe { result::primary_ctx::retain(handle) })?;
        Ok(Gpu { handle, context })
    }

    /// Makes the context current on the calling thread.
    pub(crate) fn enter(&self) -> Result<()> {
        // SAFETY: the context is retained until drop.
        check("cuCtxSetCurrent", unsafe { result::ctx::set_current(self.context) })
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // A failure means that the context no longer exists.
        // SAFETY: retained once, in `open`.
        _ = unsafe { result::primary_ctx::release(self.handle) };
    }
}

impl Pin for Gpu {
    unsafe fn pin(&self, memory: NonNull<u8>, bytes: usize) -> Result<(), String> {
        self.enter().map_err(|error| error.to_string())?;
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: the caller's promise: the bytes are mapped, and stay so until `unpin`.
        let outcome = unsafe { sys::cuMemHostRegister_v2(memory.as_ptr().cast(), bytes, flags) };
        check("cuMemHostRegister", outcome.result()).map_err(|error| error.to_string())
    }

    unsafe fn unpin(&self, memory: NonNull<u8>, _bytes: usize) {
        // A failure means that the context no longer exists, and neither does its record of the memory.
        if self.enter().is_ok() {
            // SAFETY: the caller's promise: `pin` registered memory that begins here.
            _ = unsafe { sys::cuMemHostUnregister(memory.as_ptr().cast()) };
        }
    }
}

/// The properties of the device with this number. This takes no device memory.
pub(crate) fn properties(index: usize) -> Result<Properties> {
    use sys::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID,
    };
    let handle = handle(index)?;
    let attribute = |name| {
        // SAFETY: the driver gave the device's handle.
        check("cuDeviceGetAttribute", unsafe { result::device::get_attribute(handle, name) })
    };
    let (domain, bus, device) = (
        attribute(CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
        attribute(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
        attribute(CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?,
    );
    // SAFETY: as above.
    let memory = check("cuDeviceTotalMem", unsafe { result::device::total_mem(handle) })?;
    Ok(Properties {
        name: check("cuDeviceGetName", result::device::get_name(handle))?,
        memory_bytes: memory as u64,
        capability: (
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        pci_address: format!("{domain:04x}:{bus:02x}:{device:02x}.0"),
    })
}

/// The newest CUDA version that the driver supports, such as `13.0`.
pub(crate) fn driver_serves() -> Result<String> {
    load()?;
    let mut version: c_int = 0;
    // SAFETY: the driver is there, and `version` is a valid place for the result.
    let outcome = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    check("cuDriverGetVersion", outcome.result())?;
    Ok(format!("{}.{}", version / 1000, version % 1000 / 10))
}

/// The result of a driver call, or an error that names the call.
pub(crate) fn check<T>(call: &str, outcome: Result<T, DriverError>) -> Result<T> {
    outcome.map_err(|error| {
        let name =
            error.error_name().map_or_else(|_| format!("{error:?}"), |name| name.to_string_lossy().into());
        let what = error.error_string().map_or_else(|_| String::new(), |text| text.to_string_lossy().into());
        anyhow!("{call}: {name} ({what})")
    })
}

fn handle(index: usize) -> Result<sys::CUdevice> {
    load()?;
    let ordinal = c_int::try_from(index).context("there are not so many devices")?;
    check("cuDeviceGet", result::device::get(ordinal))
}

/// Looks up the driver; may be called repeatedly.
fn load() -> Result<()> {
    // SAFETY: loads libcuda, as libtorch does, and releases it again.
    let there = unsafe { sys::is_culib_present() };
    ensure!(there, "libcuda.so cannot be loaded: install NVIDIA's driver");
    check("cuInit", result::init())
}
