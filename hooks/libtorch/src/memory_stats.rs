//! The statistics of an allocator.

use crate::ffi::StMemory;

/// What an allocator holds, in bytes, and how it came by it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Requested and not yet freed.
    pub allocated: u64,
    /// Highest `allocated` since [`reset_peak`](crate::reset_peak).
    pub peak: u64,
    /// Obtained from the system: in use, or free and ready for reuse. On the CPU it is counted in huge pages of 2
    /// MiB.
    pub reserved: u64,
    /// How often a device's driver was asked for memory, which takes long and may wait for the device. 0 on the CPU,
    /// where memory is obtained page by page.
    pub requests: u64,
}

impl From<StMemory> for MemoryStats {
    fn from(StMemory { allocated, peak, reserved, requests }: StMemory) -> MemoryStats {
        MemoryStats { allocated, peak, reserved, requests }
    }
}
