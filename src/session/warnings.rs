//! Warnings about a step for the user.

use std::sync::atomic::{AtomicBool, Ordering};

use bytesize::ByteSize;
use parking_lot::Mutex;
use ssdtrain_plan::Goal;

use super::steering::is_without_budget;
use crate::config::{Policy, TensorCacheBuilder};
use crate::route::Route;
use crate::telemetry::StepReport;

/// Warnings that were already issued.
#[derive(Default)]
pub(super) struct Warned {
    /// Those of the last step.
    last: Mutex<Vec<String>>,
    empty: AtomicBool,
}

impl Warned {
    /// Logs the warnings that the step before did not have.
    pub(super) fn tell(&self, report: &StepReport) {
        let last = std::mem::replace(&mut *self.last.lock(), report.warnings.clone());
        for warning in report.warnings.iter().filter(|warning| !last.contains(warning)) {
            tracing::warn!(step = report.step, "{warning}");
        }
    }

    /// Warns that a step was dropped before anything was saved in it, but only once.
    pub(super) fn tell_empty(&self, step: u64) {
        if !self.empty.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                step,
                "a step was dropped before anything was saved in it: give it a name, since `let _ = cache.step()` ends it at once"
            );
        }
    }
}

/// The warnings of a step, one line each.
pub(super) fn of(report: &StepReport, config: &TensorCacheBuilder, route: &Route) -> Vec<String> {
    let mut warnings = Vec::new();
    if report.store_failures.count > 0 {
        warnings.push(format!(
            "{} stores failed ({} bytes); their tensors stayed in memory and the step is right",
            report.store_failures.count, report.store_failures.bytes
        ));
    }
    if report.kept.no_room.count > 0 {
        warnings.push(format!(
            "{} storages ({} bytes) stayed in memory: host pool and spill files had no room for them, or stores kept failing",
            report.kept.no_room.count, report.kept.no_room.bytes
        ));
    }
    match config.chosen_policy() {
        Policy::Keep => {}
        Policy::Auto(goal) => of_goal(report, goal, &mut warnings),
        Policy::Offload | Policy::Adaptive(_) => of_moving(report, config, route, &mut warnings),
    }
    warnings
}

fn of_goal(report: &StepReport, goal: Goal, warnings: &mut Vec<String>) {
    let plan = report.plan.as_deref();
    if plan.is_some_and(|plan| !plan.in_reach) {
        warnings.push(
            "the goal of Policy::Auto is out of reach: the plan is what comes closest to it".to_owned(),
        );
    } else if goal.step.is_some() && plan.is_some_and(|plan| plan.keeps_all()) {
        warnings.push(
            "Policy::Auto moves nothing: whatever left the device would make steps longer than the goal allows"
                .to_owned(),
        );
    }
    if let Some(most) = goal.peak.filter(|most| report.act_peak_bytes > *most) {
        let (peak, most) = (ByteSize(report.act_peak_bytes), ByteSize(most));
        warnings.push(format!("the activation peak, {peak}, is beyond the goal of Policy::Auto, {most}"));
    }
}

fn of_moving(report: &StepReport, config: &TensorCacheBuilder, route: &Route, warnings: &mut Vec<String>) {
    let moved = report.offloaded.count + report.recomputed.count + report.store_failures.count;
    if moved == 0 && report.cancelled.count > 0 {
        warnings.push(
            "nothing was moved: what was saved fits the device budget, or backward asked for it first"
                .to_owned(),
        );
    } else if moved > 0 && is_without_budget(config, route) {
        warnings.push(format!(
            "no device budget: all that was saved except the last {} leaves the GPU, which waits for it as long as the stalls show; \
             set a device_budget(bytes), or use Policy::Auto",
            ByteSize(config.prefetch)
        ));
    }
}
