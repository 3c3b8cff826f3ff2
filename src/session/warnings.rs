//! Warnings about a step for the user.

use std::sync::atomic::{AtomicBool, Ordering};

use bytesize::ByteSize;
use parking_lot::Mutex;
use ssdtrain_libtorch::TorchError;
use ssdtrain_store::StoreConfig;

use crate::route::Route;
use crate::telemetry::StepReport;

/// Warnings that were already issued.
#[derive(Default)]
pub(super) struct Warned {
    /// Those of the last step.
    last: Mutex<Vec<String>>,
    empty: AtomicBool,
    unrecorded: AtomicBool,
}

impl Warned {
    /// Logs the warnings that the step before did not have.
    pub(super) fn tell(&self, report: &StepReport) {
        let last = std::mem::replace(&mut *self.last.lock(), report.warnings.clone());
        for warning in report.warnings.iter().filter(|warning| !last.contains(warning)) {
            tracing::warn!(step = report.step, "{warning}");
        }
    }

    /// Warns, once, that operations cannot be recorded.
    pub(super) fn tell_unrecorded(&self, error: &TorchError) {
        if !self.unrecorded.swap(true, Ordering::Relaxed) {
            tracing::warn!(%error, "operations cannot be recorded: what is not marked is not computed again");
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

/// What users should know of where saved bytes go, one line each.
pub(super) fn of_route(route: &Route) -> Vec<String> {
    let in_memory = route.store.iter().flat_map(StoreConfig::in_memory);
    in_memory
        .map(|directory| {
            format!(
                "{} is in memory (tmpfs): what is spilled there takes as much memory as before; give spill_to a directory on \
                 an SSD",
                directory.display()
            )
        })
        .collect()
}

/// The warnings of a step whatever its policy, one line each.
pub(super) fn of(report: &StepReport) -> Vec<String> {
    let mut warnings = Vec::new();
    if report.store_failures.count > 0 {
        warnings.push(format!(
            "{} stores failed ({} bytes); their tensors stayed in memory and the step is right",
            report.store_failures.count, report.store_failures.bytes
        ));
    }
    if report.pressed.count > 0 {
        warnings.push(format!(
            "memory ran out: {} storages ({}) had to go at once so that an allocation did not fail, which takes long. Give the \
             policy less: Auto a Goal::budget, Offload a smaller device_budget; or take smaller batches",
            report.pressed.count,
            ByteSize(report.pressed.bytes)
        ));
    }
    if report.kept.no_room.count > 0 {
        warnings.push(format!(
            "{} storages ({} bytes) stayed in memory: host pool and spill files had no room for them, or stores kept failing",
            report.kept.no_room.count, report.kept.no_room.bytes
        ));
    }
    warnings
}
