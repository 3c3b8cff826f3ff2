//! What a store has done so far.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::sync::Mutex;
use serde::Serialize;

use super::backend::Direction;
use super::busy_time::BusyClock;

/// Counts since the store was opened, and how full it is now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct StoreStats {
    /// Payload bytes of the writes that succeeded.
    pub bytes_written: u64,
    /// Bytes that the disks, or the memory in their place, have taken for that and for writes that failed in part: whole blocks.
    pub disk_bytes_written: u64,
    /// Payload bytes of the reads that succeeded.
    pub bytes_read: u64,
    /// Writes that succeeded.
    pub writes: u64,
    /// Reads that succeeded.
    pub reads: u64,
    /// Reads among them whose bytes were compared with the checksums taken when they were written, or were decrypted, which
    /// compares them too.
    pub reads_checked: u64,
    /// Payload bytes of those.
    pub bytes_checked: u64,
    /// Operations handed to the backend; a transfer is split into one or more.
    pub operations: u64,
    /// Writes and reads that failed for good.
    pub failures: u64,
    /// Those among them that the disk did not answer in time.
    pub timed_out: u64,
    /// Times a failed read was tried again.
    pub retried: u64,
    /// Transfers that went through a bounce buffer because their memory was not aligned or not padded, or to be
    /// encrypted.
    pub bounced: u64,
    /// Time during which the backend had operations of at least one read, queued or on the disk, or what it read was decrypted.
    pub read_busy: Duration,
    /// Time during which the backend had operations of at least one write, queued or on the disk, or what it is to write was
    /// encrypted.
    pub write_busy: Duration,
    /// Time during which either was the case. Bytes moved divided by this time give the
    /// throughput while there is work.
    pub busy: Duration,
    /// Bytes of the spill files that belong to blobs now.
    pub reserved_bytes: u64,
    /// Bytes of disk space that the spill files take now.
    pub file_bytes: u64,
    /// The most bytes that the spill files may take.
    pub cap_bytes: u64,
}

/// The counters behind [`StoreStats`], shared with the transfers in flight.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) bytes_written: AtomicU64,
    pub(super) bytes_read: AtomicU64,
    pub(super) writes: AtomicU64,
    pub(super) reads: AtomicU64,
    pub(super) reads_checked: AtomicU64,
    pub(super) bytes_checked: AtomicU64,
    pub(super) operations: AtomicU64,
    pub(super) failures: AtomicU64,
    pub(super) timed_out: AtomicU64,
    pub(super) retried: AtomicU64,
    pub(super) bounced: AtomicU64,
    busy: Mutex<BusyClock>,
}

impl Counters {
    /// A transfer begins: its operations are handed to the backend, or it is encrypted first.
    pub(super) fn begin(&self, direction: Direction) {
        // The lock is taken before the time is read, so that the instants never go back.
        let mut busy = self.busy.lock();
        busy.begin(direction, Instant::now());
    }

    /// All operations of a transfer have ended, and it has been decrypted.
    pub(super) fn end(&self, direction: Direction) {
        let mut busy = self.busy.lock();
        busy.end(direction, Instant::now());
    }

    /// What was done; the spill files' own figures are the caller's.
    pub(super) fn stats(&self) -> StoreStats {
        let mut busy = self.busy.lock();
        let time = busy.time(Instant::now());
        drop(busy);
        StoreStats {
            bytes_written: self.bytes_written.load(Relaxed),
            bytes_read: self.bytes_read.load(Relaxed),
            writes: self.writes.load(Relaxed),
            reads: self.reads.load(Relaxed),
            reads_checked: self.reads_checked.load(Relaxed),
            bytes_checked: self.bytes_checked.load(Relaxed),
            operations: self.operations.load(Relaxed),
            failures: self.failures.load(Relaxed),
            timed_out: self.timed_out.load(Relaxed),
            retried: self.retried.load(Relaxed),
            bounced: self.bounced.load(Relaxed),
            read_busy: time.reads,
            write_busy: time.writes,
            busy: time.either,
            ..StoreStats::default()
        }
    }
}

/// Counts a transfer of so many bytes.
pub(super) fn count(transfers: &AtomicU64, bytes: &AtomicU64, len: u64) {
    transfers.fetch_add(1, Relaxed);
    bytes.fetch_add(len, Relaxed);
}
