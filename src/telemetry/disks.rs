//! What a step, a run and all runs have written to the disks.

use std::fmt;
use std::time::Duration;

use bytesize::ByteSize;
use serde::Serialize;

/// What was written to a disk. Bytes are those that spill files caused; what the file system and other programs write is not among them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DiskReport {
    /// The kernel's name for it, such as `nvme0n1`.
    pub name: String,
    /// Bytes written since the report of the step before.
    pub written: u64,
    /// Bytes written since the cache was built.
    pub by_run: u64,
    /// Bytes that all runs have written today (in UTC), as far as they share a history of the disks. What others have written in the last
    /// minute may be missing.
    pub today: u64,
    /// Bytes that all runs have written, as far as they share a history of the disks.
    pub by_all_runs: u64,
    /// Bytes that all runs write in a day at the present rate; `None` until that has shown.
    pub per_day: Option<u64>,
    /// How long the [`disk_endurance`](crate::TensorCacheBuilder::disk_endurance) lasts at that rate, with what all runs have written left
    /// out; `None` if it is not known, or nothing is written.
    pub life: Option<Duration>,
}

impl fmt::Display for DiskReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [written, today] = [self.written, self.today].map(|bytes| ByteSize(bytes).display().si());
        write!(f, "wrote {written} to {} ({today} today)", self.name)
    }
}
