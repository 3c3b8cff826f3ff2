//! What a step is expected to do.

use std::time::Duration;

use serde::Serialize;

/// What a step is expected to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Prediction {
    /// From beginning to end.
    pub step: Duration,
    /// The part of the step that is spent on recomputation.
    pub recomputed: Duration,
    /// The part of that in which operations run that wait for memory rather than compute: pointwise ones, and those that move bytes about as
    /// fast. None do where no pointwise operation has told how fast that is.
    pub memory_bound: Duration,
    /// Time that the device waited, by cause.
    pub stall: Stall,
    /// The part of the step by which moving makes the program's own work longer.
    pub moving: Duration,
    /// The part of the step in which the program's own thread does the cache's work, and nothing computes meanwhile.
    pub handled: Duration,
    /// Peak bytes on the device in forward: saved storages and whatever else forward needs.
    pub forward_peak: u64,
    /// Peak bytes on the device in backward.
    pub backward_peak: u64,
    /// Peak bytes in host memory.
    pub host_peak: u64,
    /// Bytes copied off the device.
    pub copied_out: u64,
    /// Bytes copied back to the device.
    pub copied_in: u64,
    /// Bytes written to the disk.
    pub written: u64,
    /// Bytes read from the disk.
    pub read: u64,
}

/// Time that the device waited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Stall {
    /// Waiting for a copy to the host, to stay within the device budget.
    pub device_budget: Duration,
    /// Waiting for room in the host pool.
    pub host_pool: Duration,
    /// Waiting for what backward asked for.
    pub load: Duration,
}

impl Prediction {
    /// The activation peak, in bytes.
    pub fn peak(&self) -> u64 {
        self.forward_peak.max(self.backward_peak)
    }
}

impl Stall {
    /// All causes together.
    pub fn total(&self) -> Duration {
        self.device_budget + self.host_pool + self.load
    }
}
