//! The statistics of an allocator.

use crate::ffi::StMemory;

/// What an allocator holds, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Requested and not yet freed.
    pub allocated: u64,
    /// Highest `allocated` since [`reset_peak`](crate::reset_peak).
    pub peak: u64,
    /// Obtained from the system: in use, or free and ready for reuse. On the CPU it is counted in huge pages of 2
    /// MiB.
    pub reserved: u64,
}

impl From<StMemory> for MemoryStats {
    fn from(StMemory { allocated, peak, reserved }: StMemory) -> MemoryStats {
        MemoryStats { allocated, peak, reserved }
    }
}
