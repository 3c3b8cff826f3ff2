//! What steps did with what autograd saved: the figures that reports of steps and the metrics of a cache have in common.

use std::ops::AddAssign;
use std::time::Duration;

use serde::Serialize;
use ssdtrain_plan::Tally;

use super::stats::Counters;

/// What all steps of a cache did. Each field means what the same field of [`StepReport`](crate::StepReport) does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Activity {
    /// Everything autograd saved. A storage that was saved several times counts each time.
    pub saved: Tally,
    /// Saves whose storage was in the cache already.
    pub deduplicated: Tally,
    /// What stayed in the graph, and why.
    pub kept: KeptReport,
    /// Stored below the device: in the host pool or on the disk.
    pub offloaded: Tally,
    /// Stores dropped before they began.
    pub cancelled: Tally,
    /// Stores that had begun but turned out to be useless.
    pub discarded: Tally,
    /// Released because the device had no memory left for an allocation, or because one would have exceeded a peak.
    pub pressed: Tally,
    /// Served from the device.
    pub forwarded: Tally,
    /// Loaded from the host pool or the disk.
    pub loaded: Tally,
    /// Those of `loaded` that began only when backward asked.
    pub load_misses: Tally,
    /// Storages that backward computes again.
    pub recomputed: Tally,
    /// Segments and single operations that ran again, and the bytes they returned to backward.
    pub reruns: Tally,
    /// Several operations of reruns that ran as one, and the bytes that were written.
    pub fused: Tally,
    /// Stores that failed; their tensors stayed on the device.
    pub store_failures: Tally,
    /// Time that backward's threads spent on reruns; on a GPU, the time to put them into its queue.
    pub rerun_time: Duration,
    /// Time that computing threads waited for the cache.
    pub stall: StallReport,
}

/// Saves that stayed in the graph, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct KeptReport {
    /// Parameters and views of them.
    pub parameters: Tally,
    /// Storages smaller than `min_bytes`.
    pub small: Tally,
    /// What cannot be moved: sparse tensors, wrappers, borrowed memory, other devices.
    pub ineligible: Tally,
    /// Kept by the policy: everything, the last scopes, or what the plan keeps.
    pub policy: Tally,
    /// Kept because the spill files had no room or stores had failed.
    pub no_room: Tally,
    /// Storages that the program holds besides the graph, such as a data set or a mask, as known from earlier steps.
    pub held: Tally,
    /// Storages of which only small views were saved: less than an eighth in all.
    pub parts: Tally,
    /// Storages that were written to after they were saved, such as pieces of one storage that are changed one after another.
    pub written: Tally,
}

/// Time that computing threads, or a GPU's queue, waited for the cache, by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct StallReport {
    /// Saving: waited for a store to make room in the device budget. On a GPU measured in its queue.
    pub device_budget: Duration,
    /// Saving: waited for room in the host pool.
    pub host_pool: Duration,
    /// Backward: waited for a load from the disk.
    pub load: Duration,
    /// Backward, in the GPU's queue: waited for a copy from the host.
    pub copy_in: Duration,
    /// An allocation waited until something had left the device, because memory had run out, or a peak would have been exceeded.
    pub memory: Duration,
}

impl StallReport {
    /// The sum of all causes.
    pub fn total(&self) -> Duration {
        self.device_budget + self.host_pool + self.load + self.copy_in + self.memory
    }
}

impl Activity {
    pub(crate) fn of(counters: &Counters) -> Activity {
        Activity {
            saved: counters.saved.tally(),
            deduplicated: counters.deduplicated.tally(),
            kept: KeptReport {
                parameters: counters.kept_parameters.tally(),
                small: counters.kept_small.tally(),
                ineligible: counters.kept_ineligible.tally(),
                policy: counters.kept_by_policy.tally(),
                no_room: counters.kept_no_room.tally(),
                held: counters.kept_held.tally(),
                parts: counters.kept_parts.tally(),
                written: counters.kept_written.tally(),
            },
            offloaded: counters.offloaded.tally(),
            cancelled: counters.cancelled.tally(),
            discarded: counters.discarded.tally(),
            pressed: counters.pressed.tally(),
            forwarded: counters.forwarded.tally(),
            loaded: counters.loaded.tally(),
            load_misses: counters.load_misses.tally(),
            recomputed: counters.recomputed.tally(),
            reruns: counters.reruns.tally(),
            fused: counters.fused.tally(),
            store_failures: counters.store_failures.tally(),
            rerun_time: counters.rerun_time.total(),
            stall: StallReport {
                device_budget: counters.stall_budget.total(),
                host_pool: counters.stall_pool.total(),
                load: counters.stall_load.total(),
                copy_in: counters.stall_copy_in.total(),
                memory: counters.stall_memory.total(),
            },
        }
    }
}

impl AddAssign for Activity {
    fn add_assign(&mut self, other: Activity) {
        let Activity {
            saved,
            deduplicated,
            kept,
            offloaded,
            cancelled,
            discarded,
            pressed,
            forwarded,
            loaded,
            load_misses,
            recomputed,
            reruns,
            fused,
            store_failures,
            rerun_time,
            stall,
        } = other;
        self.saved += saved;
        self.deduplicated += deduplicated;
        self.kept += kept;
        self.offloaded += offloaded;
        self.cancelled += cancelled;
        self.discarded += discarded;
        self.pressed += pressed;
        self.forwarded += forwarded;
        self.loaded += loaded;
        self.load_misses += load_misses;
        self.recomputed += recomputed;
        self.reruns += reruns;
        self.fused += fused;
        self.store_failures += store_failures;
        self.rerun_time += rerun_time;
        self.stall += stall;
    }
}

impl AddAssign for KeptReport {
    fn add_assign(&mut self, other: KeptReport) {
        let KeptReport { parameters, small, ineligible, policy, no_room, held, parts, written } = other;
        self.parameters += parameters;
        self.small += small;
        self.ineligible += ineligible;
        self.policy += policy;
        self.no_room += no_room;
        self.held += held;
        self.parts += parts;
        self.written += written;
    }
}

impl AddAssign for StallReport {
    fn add_assign(&mut self, other: StallReport) {
        let StallReport { device_budget, host_pool, load, copy_in, memory } = other;
        self.device_budget += device_budget;
        self.host_pool += host_pool;
        self.load += load;
        self.copy_in += copy_in;
        self.memory += memory;
    }
}
