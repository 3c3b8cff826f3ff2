//! What an allocator tells.

use crate::ffi::StMemory;

/// What an allocator holds, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Asked for and not yet freed.
    pub allocated: u64,
    /// Highest `allocated` since [`reset_peak`](crate::reset_peak).
    pub peak: u64,
    /// Held from the system: in use, or free and ready to be used again. The CPU's is counted in huge pages of 2 MiB.
    pub reserved: u64,
}

impl From<StMemory> for MemoryStats {
    fn from(StMemory { allocated, peak, reserved }: StMemory) -> MemoryStats {
        MemoryStats { allocated, peak, reserved }
    }
}
