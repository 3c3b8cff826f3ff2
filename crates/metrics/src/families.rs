//! Which metrics there are: their names, what they mean, and where their figures come from.

use std::fmt;
use std::time::Duration;

use ssdtrain::store::StoreStats;
use ssdtrain::{HostPoolMetrics, LastStep, Metrics, PlanMetrics, StepCounts};

/// A metric.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct Family {
    /// Its name, which ends with its unit, and with `_total` if it only grows.
    pub name: &'static str,
    /// Its type.
    pub kind: Kind,
    /// What it means, in a line.
    pub help: &'static str,
    read: fn(&Metrics) -> Vec<Sample>,
}

/// The type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// Only grows, from 0 on when the cache is built.
    Counter,
    /// Rises and falls.
    Gauge,
}

/// A figure of a metric.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sample {
    /// Tells it from others of its metric.
    pub(crate) label: Option<(&'static str, &'static str)>,
    pub(crate) value: Value,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Value {
    Integer(u64),
    /// In seconds.
    Time(Duration),
}

impl Family {
    const fn counter(name: &'static str, help: &'static str, read: fn(&Metrics) -> Vec<Sample>) -> Family {
        Family { name, kind: Kind::Counter, help, read }
    }

    const fn gauge(name: &'static str, help: &'static str, read: fn(&Metrics) -> Vec<Sample>) -> Family {
        Family { name, kind: Kind::Gauge, help, read }
    }

    /// The figures of a cache; none where there is nothing of the kind.
    pub(crate) fn samples(&self, metrics: &Metrics) -> Vec<Sample> {
        (self.read)(metrics)
    }
}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Family").field("name", &self.name).field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
        })
    }
}

impl From<u64> for Value {
    fn from(value: u64) -> Value {
        Value::Integer(value)
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Value {
        Value::Integer(value.into())
    }
}

impl From<Duration> for Value {
    fn from(time: Duration) -> Value {
        Value::Time(time)
    }
}

/// A single figure.
fn one(value: impl Into<Value>) -> Vec<Sample> {
    vec![Sample { label: None, value: value.into() }]
}

/// A figure that there may be.
fn some(value: Option<impl Into<Value>>) -> Vec<Sample> {
    value.map(one).unwrap_or_default()
}

/// A figure for each value of the label `name`.
fn by<V: Into<Value>, const N: usize>(name: &'static str, values: [(&'static str, V); N]) -> Vec<Sample> {
    values
        .into_iter()
        .map(|(label, value)| Sample { label: Some((name, label)), value: value.into() })
        .collect()
}

fn last(metrics: &Metrics) -> Option<LastStep> {
    metrics.last_step
}

fn plan(metrics: &Metrics) -> Option<PlanMetrics> {
    metrics.plan
}

fn pool(metrics: &Metrics) -> Option<HostPoolMetrics> {
    metrics.host_pool
}

fn disk(metrics: &Metrics) -> Option<StoreStats> {
    metrics.disk
}

fn steps(
    StepCounts { followed, small, left, compared, interim, profiled, early, without, unplanned, .. }: &StepCounts,
) -> Vec<Sample> {
    let counts = [
        ("followed", *followed),
        ("small", *small),
        ("left", *left),
        ("compared", *compared),
        ("interim", *interim),
        ("profiled", *profiled),
        ("early", *early),
        ("without", *without),
        ("unplanned", *unplanned),
    ];
    by("planning", counts)
}

/// What is where.
fn tiers(metrics: &Metrics) -> Vec<Sample> {
    let tiers = [
        ("device", Some(metrics.device_bytes)),
        ("host", pool(metrics).map(|pool| pool.used_bytes)),
        ("disk", disk(metrics).map(|disk| disk.reserved_bytes)),
    ];
    let there = tiers.into_iter().filter_map(|(tier, bytes)| Some((tier, bytes?)));
    there.flat_map(|tier| by("tier", [tier])).collect()
}

/// Of reads and writes.
fn ways<V: Into<Value>>(
    metrics: &Metrics,
    read: fn(&StoreStats) -> V,
    written: fn(&StoreStats) -> V,
) -> Vec<Sample> {
    let ways = |disk| by("direction", [("read", read(&disk)), ("write", written(&disk))]);
    disk(metrics).map(ways).unwrap_or_default()
}

fn kept<V: Into<Value>>(metrics: &Metrics, of: fn(ssdtrain::plan::Tally) -> V) -> Vec<Sample> {
    let kept = &metrics.activity.kept;
    let reasons = [
        ("parameters", of(kept.parameters)),
        ("small", of(kept.small)),
        ("ineligible", of(kept.ineligible)),
        ("policy", of(kept.policy)),
        ("no_room", of(kept.no_room)),
        ("held", of(kept.held)),
        ("parts", of(kept.parts)),
        ("written", of(kept.written)),
    ];
    by("reason", reasons)
}

/// All metrics, in the order of [`text`](crate::text).
pub const FAMILIES: &[Family] = &[
    Family::counter(
        "ssdtrain_steps_total",
        "Steps that were finished, by what they had to do with a plan",
        |all| steps(&all.steps),
    ),
    Family::counter("ssdtrain_steps_warned_total", "Finished steps whose report has warnings", |all| {
        one(all.steps.warned)
    }),
    Family::counter("ssdtrain_steps_dropped_total", "Steps that were dropped before their end", |all| {
        one(all.steps.dropped)
    }),
    Family::counter(
        "ssdtrain_step_seconds_total",
        "Time of finished steps; on a GPU, of steps that were not awaited, the time to launch them",
        |all| one(all.step_time),
    ),
    Family::gauge("ssdtrain_last_step", "Number of the step that was finished last, from 1", |all| {
        some(last(all).map(|last| last.step))
    }),
    Family::gauge(
        "ssdtrain_last_step_seconds",
        "Time of the step that was finished last; on a GPU, if it was not awaited, the time to launch it",
        |all| some(last(all).map(|last| last.wall)),
    ),
    Family::gauge(
        "ssdtrain_last_step_activation_peak_bytes",
        "Activation peak of the step that was finished last",
        |all| some(last(all).map(|last| last.act_peak_bytes)),
    ),
    Family::gauge(
        "ssdtrain_last_step_peak_bytes",
        "The same, plus the gradients that were there when the step began",
        |all| some(last(all).map(|last| last.step_peak_bytes)),
    ),
    Family::gauge(
        "ssdtrain_activation_bytes",
        "Bytes of saved tensors by where they are; what is in the host pool may also be on the disk",
        tiers,
    ),
    Family::gauge(
        "ssdtrain_host_pool_bytes",
        "Host memory pinned for the device; tier host of ssdtrain_activation_bytes is what is used of it",
        |all| some(pool(all).map(|pool| pool.pinned_bytes)),
    ),
    Family::gauge("ssdtrain_host_pool_limit_bytes", "Host memory that may be pinned for the device", |all| {
        some(pool(all).and_then(|pool| pool.limit_bytes))
    }),
    Family::gauge(
        "ssdtrain_spill_file_bytes",
        "Disk space of the spill files; tier disk of ssdtrain_activation_bytes is what is used of it",
        |all| some(disk(all).map(|disk| disk.file_bytes)),
    ),
    Family::gauge("ssdtrain_spill_file_limit_bytes", "Disk space that the spill files may take", |all| {
        some(disk(all).map(|disk| disk.cap_bytes))
    }),
    Family::counter(
        "ssdtrain_stall_seconds_total",
        "Time that computing threads or the GPU's queue waited for the cache, by cause",
        |all| {
            let stall = &all.activity.stall;
            by(
                "cause",
                [
                    ("device_budget", stall.device_budget),
                    ("host_pool", stall.host_pool),
                    ("load", stall.load),
                    ("copy_in", stall.copy_in),
                    ("memory", stall.memory),
                ],
            )
        },
    ),
    Family::counter(
        "ssdtrain_saved_storages_total",
        "Saves by autograd; a storage that was saved several times counts each time",
        |all| one(all.activity.saved.count),
    ),
    Family::counter(
        "ssdtrain_saved_bytes_total",
        "Bytes of saves by autograd; a storage that was saved several times counts each time",
        |all| one(all.activity.saved.bytes),
    ),
    Family::counter("ssdtrain_kept_storages_total", "Saves that stayed in the graph, by reason", |all| {
        kept(all, |tally| tally.count)
    }),
    Family::counter(
        "ssdtrain_kept_bytes_total",
        "Bytes of saves that stayed in the graph, by reason",
        |all| kept(all, |tally| tally.bytes),
    ),
    Family::counter(
        "ssdtrain_deduplicated_storages_total",
        "Saves whose storage was in the cache already",
        |all| one(all.activity.deduplicated.count),
    ),
    Family::counter(
        "ssdtrain_deduplicated_bytes_total",
        "Bytes of saves whose storage was in the cache already",
        |all| one(all.activity.deduplicated.bytes),
    ),
    Family::counter(
        "ssdtrain_offloaded_storages_total",
        "Storages stored in the host pool or on the disk",
        |all| one(all.activity.offloaded.count),
    ),
    Family::counter(
        "ssdtrain_offloaded_bytes_total",
        "Bytes stored in the host pool or on the disk",
        |all| one(all.activity.offloaded.bytes),
    ),
    Family::counter(
        "ssdtrain_cancelled_storages_total",
        "Stores dropped before they began, because nobody needed them any more",
        |all| one(all.activity.cancelled.count),
    ),
    Family::counter("ssdtrain_cancelled_bytes_total", "Bytes of stores dropped before they began", |all| {
        one(all.activity.cancelled.bytes)
    }),
    Family::counter(
        "ssdtrain_discarded_storages_total",
        "Stores that had begun and turned out to be useless",
        |all| one(all.activity.discarded.count),
    ),
    Family::counter(
        "ssdtrain_discarded_bytes_total",
        "Bytes of stores that had begun and turned out to be useless",
        |all| one(all.activity.discarded.bytes),
    ),
    Family::counter(
        "ssdtrain_pressed_storages_total",
        "Storages that had to leave because an allocation found no memory, or came to the peak of the goal",
        |all| one(all.activity.pressed.count),
    ),
    Family::counter(
        "ssdtrain_pressed_bytes_total",
        "Bytes that had to leave because an allocation found no memory, or came to the peak of the goal",
        |all| one(all.activity.pressed.bytes),
    ),
    Family::counter(
        "ssdtrain_forwarded_storages_total",
        "Storages served from the device without a load",
        |all| one(all.activity.forwarded.count),
    ),
    Family::counter("ssdtrain_forwarded_bytes_total", "Bytes served from the device without a load", |all| {
        one(all.activity.forwarded.bytes)
    }),
    Family::counter(
        "ssdtrain_loaded_storages_total",
        "Storages loaded from the host pool or the disk",
        |all| one(all.activity.loaded.count),
    ),
    Family::counter("ssdtrain_loaded_bytes_total", "Bytes loaded from the host pool or the disk", |all| {
        one(all.activity.loaded.bytes)
    }),
    Family::counter("ssdtrain_load_misses_total", "Loads that began only when backward asked", |all| {
        one(all.activity.load_misses.count)
    }),
    Family::counter(
        "ssdtrain_load_miss_bytes_total",
        "Bytes of loads that began only when backward asked",
        |all| one(all.activity.load_misses.bytes),
    ),
    Family::counter("ssdtrain_recomputed_storages_total", "Storages that backward computes again", |all| {
        one(all.activity.recomputed.count)
    }),
    Family::counter("ssdtrain_recomputed_bytes_total", "Bytes that backward computes again", |all| {
        one(all.activity.recomputed.bytes)
    }),
    Family::counter("ssdtrain_reruns_total", "Segments and single operations that ran again", |all| {
        one(all.activity.reruns.count)
    }),
    Family::counter("ssdtrain_rerun_bytes_total", "Bytes that reruns returned to backward", |all| {
        one(all.activity.reruns.bytes)
    }),
    Family::counter("ssdtrain_fused_reruns_total", "Several operations of reruns that ran as one", |all| {
        one(all.activity.fused.count)
    }),
    Family::counter(
        "ssdtrain_fused_rerun_bytes_total",
        "Bytes written by several operations of reruns that ran as one",
        |all| one(all.activity.fused.bytes),
    ),
    Family::counter(
        "ssdtrain_rerun_seconds_total",
        "Time that backward's threads spent on reruns; on a GPU, to put them into its queue",
        |all| one(all.activity.rerun_time),
    ),
    Family::counter(
        "ssdtrain_store_failures_total",
        "Stores that failed; their tensors stayed on the device",
        |all| one(all.activity.store_failures.count),
    ),
    Family::counter(
        "ssdtrain_store_failure_bytes_total",
        "Bytes of stores that failed; their tensors stayed on the device",
        |all| one(all.activity.store_failures.bytes),
    ),
    Family::counter("ssdtrain_disk_bytes_total", "Bytes moved from and to the spill files", |all| {
        ways(all, |disk| disk.bytes_read, |disk| disk.bytes_written)
    }),
    Family::counter(
        "ssdtrain_disk_transfers_total",
        "Transfers from and to the spill files that succeeded",
        |all| ways(all, |disk| disk.reads, |disk| disk.writes),
    ),
    Family::counter(
        "ssdtrain_disk_busy_seconds_total",
        "Time in which at least one transfer of the direction was under way",
        |all| ways(all, |disk| disk.read_busy, |disk| disk.write_busy),
    ),
    Family::counter(
        "ssdtrain_disk_active_seconds_total",
        "Time in which at least one transfer of any direction was under way",
        |all| some(disk(all).map(|disk| disk.busy)),
    ),
    Family::counter("ssdtrain_disk_operations_total", "Operations that transfers were split into", |all| {
        some(disk(all).map(|disk| disk.operations))
    }),
    Family::counter(
        "ssdtrain_disk_failures_total",
        "Transfers that failed for good, those not answered in time included",
        |all| some(disk(all).map(|disk| disk.failures)),
    ),
    Family::counter(
        "ssdtrain_disk_timeouts_total",
        "Transfers that the disk did not answer in time",
        |all| some(disk(all).map(|disk| disk.timed_out)),
    ),
    Family::counter("ssdtrain_disk_retries_total", "Reads that failed and were tried again", |all| {
        some(disk(all).map(|disk| disk.retried))
    }),
    Family::counter(
        "ssdtrain_disk_bounced_total",
        "Transfers that went through a buffer because their memory was not aligned, or to be encrypted",
        |all| some(disk(all).map(|disk| disk.bounced)),
    ),
    Family::counter(
        "ssdtrain_plan_changes_total",
        "How often a plan was made, or changed in this way",
        |all| {
            let counts = &all.decisions;
            by(
                "change",
                [
                    ("made", counts.made),
                    ("loosened", counts.loosened),
                    ("tightened", counts.tightened),
                    ("corrected", counts.corrected),
                    ("withdrawn", counts.withdrawn),
                ],
            )
        },
    ),
    Family::gauge("ssdtrain_plan_settled", "1 if the plan has settled, or else 0", |all| {
        some(plan(all).map(|_| all.is_settled))
    }),
    Family::gauge(
        "ssdtrain_plan_in_reach",
        "1 if the plan of the last planned step reaches its goal, or else 0",
        |all| some(plan(all).map(|plan| plan.in_reach)),
    ),
    Family::gauge("ssdtrain_planned_step_seconds", "Time that the last planned step was to take", |all| {
        some(plan(all).map(|plan| plan.planned_step))
    }),
    Family::gauge(
        "ssdtrain_measured_step_seconds",
        "Time that the last planned step took, if it was awaited",
        |all| some(plan(all).and_then(|plan| plan.measured_step)),
    ),
    Family::gauge(
        "ssdtrain_planned_peak_bytes",
        "Activation peak that the last planned step was to have",
        |all| some(plan(all).map(|plan| plan.planned_peak_bytes)),
    ),
    Family::gauge("ssdtrain_measured_peak_bytes", "Activation peak of the last planned step", |all| {
        some(plan(all).map(|plan| plan.measured_peak_bytes))
    }),
];
