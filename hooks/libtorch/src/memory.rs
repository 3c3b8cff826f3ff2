//! The CPU allocator: 4 KiB-aligned large blocks for `O_DIRECT`, and exact statistics.

use crate::ffi;

/// What the CPU allocator holds, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Asked for and not yet freed.
    pub allocated: u64,
    /// Highest `allocated` since [`reset_peak`].
    pub peak: u64,
    /// Held from the system: in use, or free and ready to be used again.
    pub reserved: u64,
}

/// Makes libtorch allocate CPU memory here from now on. Blocks it allocated before stay with their own allocator. Blocks of
/// at least 64 KiB start on a 4 KiB border and have a capacity that is a multiple of 4 KiB; freed ones are kept for reuse.
pub fn install_cpu_allocator() {
    ffi::st_allocator_install();
}

/// What the allocator holds now. All zero before [`install_cpu_allocator`].
pub fn cpu_memory() -> MemoryStats {
    let memory = ffi::st_allocator_memory();
    MemoryStats { allocated: memory.allocated, peak: memory.peak, reserved: memory.reserved }
}

/// Makes `peak` start again from what is allocated now.
pub fn reset_peak() {
    ffi::st_allocator_reset_peak();
}

/// Gives the free blocks back to the system.
pub fn trim() {
    ffi::st_allocator_trim();
}
