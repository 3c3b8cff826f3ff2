//! Memory that is available at present.

use ssdtrain_libtorch as torch;
use ssdtrain_libtorch::CudaDevice;
use ssdtrain_store::HostMemory;
use tch::Device;

/// Bytes of memory that are available at present: what the kernel calls available, but no more than the limits of the process's control
/// groups leave. Unlimited if the kernel does not say.
pub(crate) fn available_memory() -> u64 {
    HostMemory::now().available().unwrap_or(u64::MAX)
}

/// Bytes of the device's memory that are available at present.
pub(crate) fn free_memory(device: Device) -> u64 {
    match device {
        Device::Cuda(index) => CudaDevice::new(index).and_then(CudaDevice::free).unwrap_or(0),
        _ => available_memory().saturating_add(idle_memory()),
    }
}

/// Bytes that the CPU allocator holds but nobody uses.
fn idle_memory() -> u64 {
    let held = torch::memory(Device::Cpu);
    held.reserved.saturating_sub(held.allocated)
}
