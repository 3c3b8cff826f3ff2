//! Memory: what libtorch's allocators hold, and a CPU allocator whose large blocks are 4 KiB-aligned for `O_DIRECT`.

use tch::{Device, Tensor};

use crate::cuda::CudaDevice;
use crate::ffi::{self, StMemory};
use crate::huge_pages;
use crate::memory_stats::MemoryStats;

/// Makes libtorch allocate CPU memory here from now on. Blocks allocated before that stay with their own allocator.
/// Blocks of at least 64 KiB are aligned to 4 KiB and have a capacity that is a multiple of 4 KiB. Freed memory is
/// reused for blocks of other sizes too, and is kept to the extent that recent steps have needed it (see
/// [`end_step`]).
pub fn install_cpu_allocator() {
    ffi::st_allocator_install(huge_pages::are_safe());
}

/// What libtorch's allocator for `device` holds now: on the CPU ours (all zero before [`install_cpu_allocator`]), on
/// CUDA the caching allocator. All zero for other devices, and for CUDA devices that do not exist.
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

/// Restarts the `peak` of `device` from what is allocated now.
pub fn reset_peak(device: Device) {
    match device {
        Device::Cpu => ffi::st_allocator_reset_peak(),
        // A device that does not exist has no peak.
        Device::Cuda(index) => drop(CudaDevice::new(index).and_then(CudaDevice::reset_peak)),
        _ => {}
    }
}

/// Bytes of the gradients that `parameters` hold now.
pub fn gradient_bytes<'a>(parameters: impl IntoIterator<Item = &'a Tensor>) -> u64 {
    // SAFETY: the tensor is borrowed, so its pointer is valid.
    let bytes = |of: &Tensor| unsafe { ffi::st_tensor_gradient_bytes(of.as_ptr()) };
    parameters.into_iter().map(bytes).sum()
}

/// Tells the CPU allocator that a step has ended. The allocator keeps as much as recent steps have needed at once
/// (the latest weigh most), plus an eighth, and returns free memory beyond that to the system.
pub fn end_step() {
    ffi::st_allocator_end_step();
}

/// Returns CPU memory that no tensor uses to the system, and whole pages that are free in the C library's allocator, where blocks
/// of less than 64 KiB and everything else come from.
pub fn trim() {
    ffi::st_allocator_trim();
}
