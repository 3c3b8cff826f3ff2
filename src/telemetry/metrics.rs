//! The figures of a cache, as they are at one moment.

use std::time::Duration;

use serde::Serialize;
use ssdtrain_plan::{Decided, Planning};
use ssdtrain_store::StoreStats;

use super::activity::Activity;
use super::report::StepReport;

/// What a cache has done since it was built, and what it holds now; see [`TensorCache::metrics`](crate::TensorCache::metrics).
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Metrics {
    /// Steps that have ended.
    pub steps: StepCounts,
    /// How long the finished steps took, in all: the sum of [`StepReport::wall`](crate::StepReport::wall).
    pub step_time: Duration,
    /// The step that was finished last; `None` before the first.
    pub last_step: Option<LastStep>,
    /// What steps did: those that have ended, the one under way, and what has become of their tensors since. After a
    /// step's `finish`, a graph that is still there may add to it, so it may be more than the sum of the reports.
    pub activity: Activity,
    /// Bytes on the device that the cache holds.
    pub device_bytes: u64,
    /// Host memory pinned for a device; `None` where bytes do not go through host memory.
    pub host_pool: Option<HostPoolMetrics>,
    /// The spill files and their disks; `None` if there are none.
    pub disk: Option<StoreStats>,
    /// How often each was decided about a plan.
    pub decisions: DecisionCounts,
    /// The plan that a step followed last, and how that step went; `None` before the first, and under policies that do not
    /// plan.
    pub plan: Option<PlanMetrics>,
    /// Whether the policy has settled, as of the last step; see [`TensorCache::is_settled`](crate::TensorCache::is_settled).
    pub is_settled: bool,
}

/// Steps that have ended, by what they had to do with a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct StepCounts {
    /// Followed the plan.
    pub followed: u64,
    /// Were so small that everything stayed.
    pub small: u64,
    /// Left the plan.
    pub left: u64,
    /// Kept everything, to be compared with planned steps.
    pub compared: u64,
    /// Moved nothing while host memory was pinned for those that follow the plan.
    pub interim: u64,
    /// Were profiled.
    pub profiled: u64,
    /// Came before the first profile.
    pub early: u64,
    /// Had no plan, because no profile has shown anything to plan.
    pub without: u64,
    /// Were under a policy that does not plan.
    pub unplanned: u64,
    /// Those of all the above whose report has warnings.
    pub warned: u64,
    /// Were dropped without `finish`, after a panic or an error. They count nowhere else.
    pub dropped: u64,
}

/// The step that was finished last. Fields mean what those of [`StepReport`](crate::StepReport) do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LastStep {
    /// Its number, from 1.
    pub step: u64,
    /// How long it took; on a GPU, unless it was `awaited`, only to launch.
    pub wall: Duration,
    /// Whether everything that it computes was done by its end.
    pub awaited: bool,
    /// Activation peak.
    pub act_peak_bytes: u64,
    /// The same, plus the gradients that were there when it began.
    pub step_peak_bytes: u64,
}

/// The pool of pinned host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct HostPoolMetrics {
    /// Bytes that storages are in, those that are also on the disk included.
    pub used_bytes: u64,
    /// Bytes that are pinned.
    pub pinned_bytes: u64,
    /// Bytes that it may grow to; `None` without a limit.
    pub limit_bytes: Option<u64>,
}

/// How often each was decided about a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DecisionCounts {
    /// Made, of steps that had none.
    pub made: u64,
    /// Loosened, because steps took longer than the goal allows.
    pub loosened: u64,
    /// Tightened, because steps took less time than the goal allows.
    pub tightened: u64,
    /// Corrected, because something else is known than before.
    pub corrected: u64,
    /// Withdrawn.
    pub withdrawn: u64,
}

/// A plan beside a step that followed it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PlanMetrics {
    /// The step.
    pub step: u64,
    /// How long the step was to take.
    pub planned_step: Duration,
    /// How long it took; `None` if that is not known, because it was not awaited.
    pub measured_step: Option<Duration>,
    /// The activation peak that was planned.
    pub planned_peak_bytes: u64,
    /// The activation peak that it had.
    pub measured_peak_bytes: u64,
    /// Whether the plan reaches its goal.
    pub in_reach: bool,
}

impl Metrics {
    /// A step has ended.
    pub(super) fn ended(&mut self, report: &StepReport, is_settled: bool) {
        let steps = &mut self.steps;
        *match report.planning {
            Some(Planning::Followed) => &mut steps.followed,
            Some(Planning::Small) => &mut steps.small,
            Some(Planning::Left) => &mut steps.left,
            Some(Planning::Compared) => &mut steps.compared,
            Some(Planning::Interim) => &mut steps.interim,
            Some(Planning::Profiled) => &mut steps.profiled,
            Some(Planning::Early) => &mut steps.early,
            Some(Planning::Without) => &mut steps.without,
            // There is no other yet.
            Some(_) | None => &mut steps.unplanned,
        } += 1;
        steps.warned += u64::from(!report.warnings.is_empty());
        self.step_time += report.wall;
        self.last_step = Some(LastStep {
            step: report.step,
            wall: report.wall,
            awaited: report.awaited,
            act_peak_bytes: report.act_peak_bytes,
            step_peak_bytes: report.step_peak_bytes,
        });
        self.is_settled = is_settled;
        if let (Some(Planning::Followed), Some(plan)) = (report.planning, &report.plan) {
            self.plan = Some(PlanMetrics {
                step: report.step,
                planned_step: plan.step,
                measured_step: report.awaited.then_some(report.wall),
                planned_peak_bytes: plan.prediction.peak(),
                measured_peak_bytes: report.act_peak_bytes,
                in_reach: plan.in_reach,
            });
        }
    }

    /// Something was decided about a plan.
    pub(super) fn decided(&mut self, what: Decided) {
        let counts = &mut self.decisions;
        *match what {
            Decided::Made => &mut counts.made,
            Decided::Loosened => &mut counts.loosened,
            Decided::Tightened => &mut counts.tightened,
            Decided::Withdrawn => &mut counts.withdrawn,
            // `Corrected`: there is no other yet.
            _ => &mut counts.corrected,
        } += 1;
    }
}
