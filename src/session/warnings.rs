//! Warnings about a step for the user.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};

use bytesize::ByteSize;
use ssdtrain_libtorch::TorchError;
use ssdtrain_store::StoreConfig;
use ssdtrain_store::sync::Mutex;

use crate::route::Route;
use crate::telemetry::StepReport;

/// Warnings that were already issued.
#[derive(Default)]
pub(super) struct Warned {
    /// Those of reports, by their words.
    told: Mutex<HashSet<String>>,
    empty: AtomicBool,
    unrecorded: AtomicBool,
}

impl Warned {
    /// Logs each warning once, whatever its figures: a training of weeks has many steps.
    pub(super) fn tell(&self, report: &StepReport) {
        for warning in &report.warnings {
            if self.told.lock().insert(words_of(warning)) {
                tracing::warn!(step = report.step, "{warning}");
            }
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

/// A warning without its figures and their units.
fn words_of(warning: &str) -> String {
    let is_word = |part: &&str| {
        let letters = part.trim_matches(|letter: char| !letter.is_alphabetic());
        !(letters.is_empty() || letters == "B" || letters.ends_with("iB"))
    };
    warning.split_whitespace().filter(is_word).collect::<Vec<_>>().join(" ")
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

/// The warnings of a step whatever its policy, one line each. `at_ceiling` says whether what had to go did so for a limit of the peak.
pub(super) fn of(report: &StepReport, at_ceiling: bool) -> Vec<String> {
    let mut warnings = Vec::new();
    if report.store_failures.count > 0 {
        warnings.push(format!(
            "{} stores failed ({} bytes); their tensors stayed in memory and the step is right",
            report.store_failures.count, report.store_failures.bytes
        ));
    }
    if report.pressed.count > 0 {
        let (count, bytes) = (report.pressed.count, ByteSize(report.pressed.bytes));
        let (for_what, remedy) = if at_ceiling {
            (
                "the activation peak came to its limit",
                "so that an allocation did not exceed it, which takes long. Plans of Auto get lower where that goes on",
            )
        } else {
            (
                "memory ran out",
                "so that an allocation did not fail, which takes long. Give the policy less: Auto a Goal::budget, Offload a smaller \
                 device_budget; or take smaller batches",
            )
        };
        warnings.push(format!("{for_what}: {count} storages ({bytes}) had to go at once {remedy}"));
    }
    if report.kept.no_room.count > 0 {
        warnings.push(format!(
            "{} storages ({} bytes) stayed in memory: host pool and spill files had no room for them, a day's limit \
             on writes was reached, or stores kept failing",
            report.kept.no_room.count, report.kept.no_room.bytes
        ));
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_that_differ_in_figures_alone_have_the_same_words() {
        let peak =
            |peak: &str| words_of(&format!("the activation peak, {peak}, is beyond the goal of Auto, 3 MiB"));
        assert_eq!(peak("900 B"), peak("1.5 GiB"));
        assert_ne!(words_of("/mnt/nvme0 is in memory"), words_of("/mnt/nvme1 is in memory"));
        assert_ne!(words_of("3 stores failed"), words_of("memory ran out: 3 storages"));
    }
}
