//! Counters of one step, written by whichever thread does the work.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use ssdtrain_plan::Tally;

use super::events::TRANSFER;

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

    /// Adds them unless there are none.
    pub(crate) fn add_some(&self, bytes: u64) {
        if bytes > 0 {
            self.add(bytes);
        }
    }

    pub(crate) fn tally(&self) -> Tally {
        Tally { count: self.count.load(Relaxed), bytes: self.bytes.load(Relaxed) }
    }
}

/// Time spent waiting for one cause.
#[derive(Debug, Default)]
pub(crate) struct Clock(AtomicU64);

impl Clock {
    fn add(&self, time: Duration) {
        self.0.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Relaxed);
    }

    pub(crate) fn total(&self) -> Duration {
        Duration::from_nanos(self.0.load(Relaxed))
    }
}

/// A number of bytes that rises and falls: changed under a lock, so that nobody else changes it meanwhile, and read without. Clones
/// are the same number.
#[derive(Clone, Debug, Default)]
pub(crate) struct Level(Arc<AtomicU64>);

impl Level {
    pub(crate) fn now(&self) -> u64 {
        self.0.load(Relaxed)
    }

    pub(crate) fn raise(&self, bytes: u64) {
        self.0.store(self.now() + bytes, Relaxed);
    }

    pub(crate) fn lower(&self, bytes: u64) {
        self.0.store(self.now() - bytes, Relaxed);
    }
}

/// How long a device took for reruns.
#[derive(Debug, Default)]
pub(crate) struct DeviceReruns {
    count: AtomicU64,
    time: Clock,
}

/// What one step did. Each field means what the same field of `StepReport` does.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) saved: Counter,
    pub(crate) deduplicated: Counter,
    pub(crate) kept_parameters: Counter,
    pub(crate) kept_small: Counter,
    pub(crate) kept_ineligible: Counter,
    pub(crate) kept_by_policy: Counter,
    pub(crate) kept_no_room: Counter,
    pub(crate) kept_held: Counter,
    pub(crate) kept_parts: Counter,
    pub(crate) kept_written: Counter,
    pub(crate) offloaded: Counter,
    pub(crate) cancelled: Counter,
    pub(crate) discarded: Counter,
    pub(crate) pressed: Counter,
    pub(crate) forwarded: Counter,
    pub(crate) loaded: Counter,
    pub(crate) load_misses: Counter,
    pub(crate) store_failures: Counter,
    pub(crate) recomputed: Counter,
    pub(crate) reruns: Counter,
    pub(crate) fused: Counter,
    pub(crate) rerun_time: Clock,
    /// `None` if that is not measured.
    pub(crate) device_reruns: Option<DeviceReruns>,
    pub(crate) stall_budget: Clock,
    pub(crate) stall_pool: Clock,
    pub(crate) stall_load: Clock,
    pub(crate) stall_copy_in: Clock,
    pub(crate) stall_memory: Clock,
}

/// Why a computing thread, or the device's own queue, had to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StallCause {
    /// For a store to make room in the device budget.
    DeviceBudget,
    /// For room in the host pool.
    HostPool,
    /// For a load from the disk.
    Load,
    /// For a copy from the host to the device.
    CopyIn,
    /// For memory of the device: it had run out, or a limit would have been exceeded, and something had to leave first.
    Memory,
}

impl Counters {
    /// Records that a recipe was rerun for `bytes` requested bytes, which took the calling thread `time`.
    pub(crate) fn rerun(&self, bytes: u64, time: Duration) {
        self.reruns.add(bytes);
        self.rerun_time.add(time);
        tracing::trace!(target: TRANSFER, bytes, seconds = time.as_secs_f64(), "a rerun has ended");
    }

    /// Records that a device took `time` for one of the reruns.
    pub(crate) fn reran(&self, time: Duration) {
        if let Some(reruns) = &self.device_reruns {
            reruns.count.fetch_add(1, Relaxed);
            reruns.time.add(time);
        }
    }

    /// How long a device took for all reruns; `None` unless each was measured.
    pub(crate) fn device_rerun_time(&self) -> Option<Duration> {
        let measured = self.device_reruns.as_ref();
        let whole = measured.filter(|measured| measured.count.load(Relaxed) == self.reruns.tally().count);
        whole.map(|measured| measured.time.total())
    }

    /// How long threads have waited so far, and a device as far as that was counted.
    pub(crate) fn waited(&self) -> Duration {
        let Counters { stall_budget, stall_pool, stall_load, stall_copy_in, stall_memory, .. } = self;
        let clocks = [stall_budget, stall_pool, stall_load, stall_copy_in, stall_memory];
        clocks.into_iter().map(Clock::total).sum()
    }

    pub(crate) fn stalled(&self, cause: StallCause, time: Duration) {
        let clock = match cause {
            StallCause::DeviceBudget => &self.stall_budget,
            StallCause::HostPool => &self.stall_pool,
            StallCause::Load => &self.stall_load,
            StallCause::CopyIn => &self.stall_copy_in,
            StallCause::Memory => &self.stall_memory,
        };
        clock.add(time);
    }
}
