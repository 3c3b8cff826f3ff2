//! The report of a step: what moved, what it cost, and which I/O path was used.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytesize::ByteSize;
use serde::Serialize;
use ssdtrain_plan::{AdaptiveReport, Baseline, PlanReport, Planning, Tally};

use super::activity::{Activity, KeptReport, StallReport};
use super::disks::DiskReport;
use super::stats::Counters;

/// What one step did. Bytes are those of whole storages, the unit of movement.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct StepReport {
    /// Number of the step, from 1.
    pub step: u64,
    /// Host time from [`step`](crate::TensorCache::step) to [`finish`](crate::Step::finish). A GPU may still be computing then: unless
    /// the step was `awaited`, this is only the time to launch it.
    pub wall: Duration,
    /// Whether everything the step computes was done by its end. Always so on the CPU. On a GPU only when
    /// [`Auto`](crate::Auto) times a step, because the cache does not wait for the device otherwise.
    pub awaited: bool,
    /// Activation peak: the highest number of allocated bytes in forward and backward, minus those allocated when the step began.
    /// Gradients count only if they did not exist at that point, so the figure depends on whether a program frees them before the step or
    /// within it.
    pub act_peak_bytes: u64,
    /// Step peak: the activation peak plus the gradients that the [`parameters`](crate::TensorCacheBuilder::parameters) had when the step
    /// began. Unlike the activation peak, it does not depend on where a program frees its gradients.
    pub step_peak_bytes: u64,
    /// Everything autograd saved. A storage that was saved several times counts each time.
    pub saved: Tally,
    /// Saves whose storage was in the cache already.
    pub deduplicated: Tally,
    /// What stayed in the graph, and why.
    pub kept: KeptReport,
    /// Stored below the device: in the host pool or on the disk.
    pub offloaded: Tally,
    /// Stores dropped before they began, because backward asked for the storage or the graph released it first, or because it was
    /// resized.
    pub cancelled: Tally,
    /// Stores that had begun but turned out to be useless, because the graph released the storage first or it was resized. What was
    /// written for them does not count in `offloaded`.
    pub discarded: Tally,
    /// Released because the device had no memory left for an allocation, or because one would have exceeded the peak that the policy told:
    /// stored although they were to stay, earlier than planned, or given up after they had been loaded ahead. With none, memory was never
    /// short.
    pub pressed: Tally,
    /// Served from the device, because the tensor had not left it or was still alive elsewhere.
    pub forwarded: Tally,
    /// Loaded from the host pool or the disk.
    pub loaded: Tally,
    /// Those of `loaded` that began only when backward asked.
    pub load_misses: Tally,
    /// Read from the disk while the step ran, and compared with the checksums taken when it was written, or with the tags of its
    /// encryption.
    pub checked: Tally,
    /// Read from the disk while the step ran, without checksums; see [`verify`](crate::TensorCacheBuilder::verify).
    pub unchecked: Tally,
    /// Storages that backward computes again: neither the graph nor the cache holds their bytes.
    pub recomputed: Tally,
    /// Segments and single operations that ran again, and the bytes that functions returned to backward, or that recorded operations made.
    pub reruns: Tally,
    /// Several operations of reruns that ran as one, as a kernel on a GPU or in tiles on the CPU, and the bytes that were written.
    pub fused: Tally,
    /// Time that backward's threads spent on reruns; on a GPU, the time to put them into its queue.
    pub rerun_time: Duration,
    /// Stores that failed; their tensors stayed on the device.
    pub store_failures: Tally,
    /// Time that computing threads waited for the cache.
    pub stall: StallReport,
    /// What each named scope saved, in the order of first use.
    pub scopes: Vec<ScopeReport>,
    /// What the step had to do with a plan; `None` under policies that do not plan.
    pub planning: Option<Planning>,
    /// The plan of [`Auto`](crate::Auto) for this step, if the step followed it or was too small to need it
    /// ([`Planning::Small`]). `None` if it did not or was not planned, and under other policies.
    pub plan: Option<Arc<PlanReport>>,
    /// Whether the step saved something other than planned; from that save on it kept what fits.
    pub left_plan: bool,
    /// The decision of [`Adaptive`](crate::Adaptive); `None` before it is made, and under other policies.
    pub adaptive: Option<AdaptiveReport>,
    /// What was written to each disk of the spill files.
    pub disks: Vec<DiskReport>,
    /// The I/O path that was used.
    pub io_path: String,
    /// Warnings for the user, one line each.
    pub warnings: Vec<String>,
}

/// What one scope saved.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ScopeReport {
    /// The scope's path; empty outside every scope.
    pub scope: String,
    /// Saves that the cache took over to move.
    pub moved: Tally,
    /// Saves that the policy kept on the device: by scope, or by the plan.
    pub kept: Tally,
}

impl StepReport {
    pub(crate) fn of(counters: &Counters) -> StepReport {
        let done = Activity::of(counters);
        StepReport {
            saved: done.saved,
            deduplicated: done.deduplicated,
            kept: done.kept,
            offloaded: done.offloaded,
            cancelled: done.cancelled,
            discarded: done.discarded,
            pressed: done.pressed,
            forwarded: done.forwarded,
            loaded: done.loaded,
            load_misses: done.load_misses,
            recomputed: done.recomputed,
            reruns: done.reruns,
            fused: done.fused,
            rerun_time: done.rerun_time,
            store_failures: done.store_failures,
            stall: done.stall,
            ..StepReport::default()
        }
    }
}

impl fmt::Display for StepReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "step {}: {}{:.1} ms, activation peak {}, with gradients {}; saved {}, offloaded {}, discarded {}, recomputed {}, deduplicated {}, forwarded {}, loaded {}; stalled {:.1} ms; {}",
            self.step,
            if self.awaited { "" } else { "launched in " },
            self.wall.as_secs_f64() * 1e3,
            ByteSize(self.act_peak_bytes),
            ByteSize(self.step_peak_bytes),
            ByteSize(self.saved.bytes),
            ByteSize(self.offloaded.bytes),
            ByteSize(self.discarded.bytes),
            ByteSize(self.recomputed.bytes),
            ByteSize(self.deduplicated.bytes),
            ByteSize(self.forwarded.bytes),
            ByteSize(self.loaded.bytes),
            self.stall.total().as_secs_f64() * 1e3,
            self.io_path,
        )?;
        self.disks.iter().filter(|disk| disk.written > 0).try_for_each(|disk| write!(f, "; {disk}"))?;
        let read = self.checked.bytes + self.unchecked.bytes;
        match (self.checked.bytes, read) {
            (_, 0) => {}
            (0, _) => write!(f, "; read without checksums")?,
            (checked, read) if checked == read => write!(f, "; checksums compared")?,
            (checked, read) => {
                write!(f, "; checksums compared of {} of {}", ByteSize(checked), ByteSize(read))?
            }
        }
        match (self.planning, &self.plan) {
            (Some(Planning::Followed), Some(plan)) => {
                let baseline = match plan.baseline {
                    Baseline::Measured => "a measured baseline",
                    Baseline::Others => "the baseline of other kinds of steps",
                    _ => "the baseline of its profile",
                };
                write!(f, "; plan {} (against {baseline})", plan.plans)?;
            }
            (Some(planning), _) => write!(f, "; {planning}")?,
            (None, _) if self.left_plan => write!(f, "; {}", Planning::Left)?,
            (None, _) => {}
        }
        self.warnings.iter().try_for_each(|warning| write!(f, "\n  warning: {warning}"))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_report_is_saved_by_the_names_of_its_fields() {
        let stall = StallReport { load: Duration::from_millis(1500), ..StallReport::default() };
        let report = StepReport { saved: Tally { count: 2, bytes: 3 }, stall, ..StepReport::default() };
        let saved = serde_json::to_value(report).unwrap();
        assert_eq!(saved["saved"], json!({ "count": 2, "bytes": 3 }));
        assert_eq!(saved["stall"]["load"], json!({ "secs": 1, "nanos": 500_000_000 }));
        assert_eq!(saved["kept"]["no_room"]["bytes"], 0);
    }

    #[test]
    fn what_a_step_had_to_do_with_a_plan_is_told_and_saved() {
        let report = |planning| StepReport { planning, ..StepReport::default() };
        assert!(report(Some(Planning::Profiled)).to_string().ends_with("; profiled"));
        let left = StepReport { left_plan: true, ..report(Some(Planning::Left)) };
        assert!(left.to_string().contains("not planned: it saved something else"), "{left}");
        let silent = report(None).to_string();
        assert!(!silent.contains("plan"), "{silent}");
        let saved = serde_json::to_value(report(Some(Planning::Without))).unwrap();
        assert_eq!(saved["planning"], json!("without"));
    }

    #[test]
    fn a_disk_that_was_written_to_is_named() {
        let disk = |name: &str, written| DiskReport {
            name: name.to_owned(),
            written,
            today: 3_000_000_000,
            ..DiskReport::default()
        };
        let report =
            StepReport { disks: vec![disk("nvme0n1", 1_500_000), disk("sda", 0)], ..StepReport::default() };
        let text = report.to_string();
        assert!(text.contains("wrote 1.5 MB to nvme0n1 (3.0 GB today)") && !text.contains("sda"), "{text}");
    }

    #[test]
    fn a_report_says_whether_checksums_were_compared() {
        let report = |checked, unchecked| {
            let [checked, unchecked] = [checked, unchecked].map(|bytes| Tally { count: 1, bytes });
            StepReport { checked, unchecked, ..StepReport::default() }.to_string()
        };
        assert!(!report(0, 0).contains("checksums"), "nothing was read");
        assert!(report(0, 4096).ends_with("; read without checksums"));
        assert!(report(4096, 0).ends_with("; checksums compared"));
        assert!(report(1024, 1024).ends_with("; checksums compared of 1.0 KiB of 2.0 KiB"));
    }

    #[test]
    fn the_time_of_a_step_that_was_not_awaited_is_called_that_of_its_launch() {
        let text = |awaited| StepReport { awaited, ..StepReport::default() }.to_string();
        assert!(
            text(true).starts_with("step 0: 0.0 ms") && text(false).starts_with("step 0: launched in 0.0 ms")
        );
    }
}
