//! Counters of one step, written by whichever thread does the work.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// How many tensors or storages, and how many bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// How many.
    pub count: u64,
    /// Bytes of their storages.
    pub bytes: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Counter {
    count: AtomicU64,
    bytes: AtomicU64,
}

impl Counter {
    pub(crate) fn add(&self, bytes: u64) {
        self.count.fetch_add(1, Relaxed);
        self.bytes.fetch_add(bytes, Relaxed);
    }

    pub(crate) fn tally(&self) -> Tally {
        Tally { count: self.count.load(Relaxed), bytes: self.bytes.load(Relaxed) }
    }
}

/// Time spent waiting for one cause.
#[derive(Debug, Default)]
pub(crate) struct Clock(AtomicU64);

impl Clock {
    pub(crate) fn add_since(&self, start: Instant) {
        let nanos = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.0.fetch_add(nanos, Relaxed);
    }

    pub(crate) fn total(&self) -> Duration {
        Duration::from_nanos(self.0.load(Relaxed))
    }
}

/// What one step did. The meaning of each field is that of the same field of `StepReport`.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) saved: Counter,
    pub(crate) deduplicated: Counter,
    pub(crate) kept_parameters: Counter,
    pub(crate) kept_small: Counter,
    pub(crate) kept_ineligible: Counter,
    pub(crate) kept_by_policy: Counter,
    pub(crate) kept_no_room: Counter,
    pub(crate) offloaded: Counter,
    pub(crate) cancelled: Counter,
    pub(crate) forwarded: Counter,
    pub(crate) loaded: Counter,
    pub(crate) load_misses: Counter,
    pub(crate) store_failures: Counter,
    pub(crate) stall_budget: Clock,
    pub(crate) stall_load: Clock,
}
