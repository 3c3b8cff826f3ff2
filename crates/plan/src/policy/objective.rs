//! What plans are made for.

use super::Resources;
use super::daily::DailyLimit;
use crate::{Goal, Release};

/// A goal that allows so many times the time of a step that keeps everything is kept by any plan.
const UNLIMITED: f64 = 100.0;
/// The share of what the goal allows that plans may take where processors compute. These also run the cache, and what that takes from the
/// program is not all seen in comparisons: steps that keep everything take more, too, than those without a cache. And the steps of such
/// machines vary by more than what they are compared with tells.
pub(super) const BY_PROCESSOR: f64 = 0.5;
/// The same on a device. There comparisons tell what plans take to 0.4 % of a step, and half of those that aim at all of it would take more.
pub(super) const BY_DEVICE: f64 = 0.97;

/// The goal of a plan, and the resources it may use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Objective {
    pub(super) goal: Goal,
    pub(super) resources: Resources,
    /// What may be written to the disks in a day.
    pub(super) daily: Option<DailyLimit>,
    /// Whether steps may keep everything to be compared with planned ones.
    pub(super) compares: bool,
    /// The highest activation peak that there is memory for, as far as steps have shown lately.
    pub(super) room: u64,
    /// The same as far as it was looked where plans had more than is free.
    pub(super) free: u64,
}

impl Objective {
    /// The highest activation peak that a plan may have.
    pub(super) fn most_peak(&self) -> u64 {
        self.goal.peak.unwrap_or(u64::MAX).min(self.room).min(self.free)
    }

    /// The time that plans aim at, as a multiple of a step that keeps everything, if the goal has one.
    pub(super) fn step(&self) -> Option<f64> {
        let share = if self.is_by_processor() { BY_PROCESSOR } else { BY_DEVICE };
        self.goal.step.map(|most| 1.0 + share * (most - 1.0))
    }

    /// How much longer than that steps may take before they exceed the goal, as far as comparisons show what they take.
    pub(super) fn spare(&self) -> f64 {
        let spare = self.goal.step.zip(self.step()).map(|(most, aim)| most - aim);
        spare.filter(|_| !self.is_by_processor()).unwrap_or(0.0)
    }

    fn is_by_processor(&self) -> bool {
        self.resources.release == Release::WhenStored
    }

    /// The same, if that is a limit.
    pub(super) fn most_time(&self) -> Option<f64> {
        self.step().filter(|most| *most < UNLIMITED)
    }
}
