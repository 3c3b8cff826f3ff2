//! Memory: what libtorch's allocators hold, and a CPU allocator of 4 KiB-aligned large blocks for `O_DIRECT`.

use tch::{Device, Tensor};

use crate::cuda::CudaDevice;
use crate::ffi::{self, StMemory};
use crate::memory_stats::MemoryStats;
use crate::storage::Storage;

/// Makes libtorch allocate CPU memory here from now on. Blocks it allocated before stay with their own allocator. Blocks of
/// at least 64 KiB start on a 4 KiB border and have a capacity that is a multiple of 4 KiB; what is freed serves blocks of other
/// sizes as well, and is kept as far as steps have needed it of late (see [`end_step`]).
pub fn install_cpu_allocator() {
    ffi::st_allocator_install();
}

/// What libtorch's allocator for `device` holds now: on the CPU ours (all zero before [`install_cpu_allocator`]), on CUDA
/// the caching allocator. All zero for other devices, and where there is none.
pub fn memory(device: Device) -> MemoryStats {
    let memory = match device {
        Device::Cpu => ffi::st_allocator_memory(),
        Device::Cuda(index) => match CudaDevice::new(index).and_then(CudaDevice::memory) {
            Ok(memory) => return memory,
            Err(_) => StMemory::default(),
        },
        _ => StMemory::default(),
    };
    memory.into()
}

/// Makes the `peak` of `device` start again from what is allocated now.
pub fn reset_peak(device: Device) {
    match device {
        Device::Cpu => ffi::st_allocator_reset_peak(),
        // A device that is not there has no peak.
        Device::Cuda(index) => drop(CudaDevice::new(index).and_then(CudaDevice::reset_peak)),
        _ => {}
    }
}

/// Bytes of the gradients that `parameters` have now.
pub fn gradient_bytes<'a>(parameters: impl IntoIterator<Item = &'a Tensor>) -> u64 {
    let gradients = parameters.into_iter().map(Tensor::grad).filter(Tensor::defined);
    gradients.filter_map(|gradient| Storage::of(&gradient)).map(|storage| storage.bytes()).sum()
}

/// Tells the CPU allocator that a step has ended. As far as it holds more than steps have needed at once, the latest ones above all, and
/// an eighth more, it gives free memory back to the system.
pub fn end_step() {
    ffi::st_allocator_end_step();
}

/// Gives the CPU memory that no tensor uses back to the system, but for the blocks of less than 64 KiB.
pub fn trim() {
    ffi::st_allocator_trim();
}
