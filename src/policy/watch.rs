//! Whether steps still are what a plan was made for. Pure.

use std::time::Duration;

/// A plan's first steps tell how long its steps take.
const SETTLING: u32 = 3;
/// A step is strange if it takes so many times as long as usual, or so much less.
const STRANGE_TIME: f64 = 1.3;
/// By so little longer or shorter no step is strange.
const TELLING_TIME: Duration = Duration::from_millis(2);
/// A disk is strange if it is so many times as fast as was counted on, or so much slower.
const STRANGE_RATE: f64 = 1.3;
/// So many strange steps in a row are a drift. Doubled with each drift of the steps' time, so that a machine that is always restless is
/// not profiled all the time.
const PATIENCE: u32 = 5;
const MOST_PATIENCE: u32 = 160;
/// The same for the disk's speed.
const DISK_PATIENCE: u32 = 2;

/// What has changed, or is known now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Drift {
    /// The plan's first steps are over: what the middle one of them did.
    Settled { wall: Duration, stall: Duration },
    /// The steps: they have to be profiled anew.
    Steps,
    /// The disk only: writes and reads are so many times as fast as was counted on.
    Disk([f64; 2]),
}

/// What was seen of a plan's steps so far.
#[derive(Clone, Debug)]
pub(crate) struct Watch {
    steps: u32,
    /// How long the first steps took, and what they stalled.
    first: [(Duration, Duration); SETTLING as usize],
    strange: u32,
    patience: u32,
    strange_disk: u32,
}

impl Default for Watch {
    fn default() -> Watch {
        Watch { steps: 0, first: Default::default(), strange: 0, patience: PATIENCE, strange_disk: 0 }
    }
}

impl Watch {
    /// Another plan is followed from now on.
    pub(crate) fn planned(&mut self) {
        *self = Watch { patience: self.patience, ..Watch::default() };
    }

    /// What the disk does now is counted on.
    pub(crate) fn disk_known(&mut self) {
        self.strange_disk = 0;
    }

    /// The middle one of the first steps.
    fn usual(&self) -> (Duration, Duration) {
        self.first[self.first.len() / 2]
    }

    /// Whether the next step is one of the plan's first.
    pub(crate) fn settles(&self) -> bool {
        self.steps < SETTLING
    }

    /// A step took so long, `stall` of it waiting; `lost`: it was not the one that was planned. `rates`: how many times as fast as was counted on the disk
    /// wrote and read, where that is known.
    pub(crate) fn observe(
        &mut self,
        wall: Duration,
        stall: Duration,
        lost: bool,
        rates: [Option<f64>; 2],
    ) -> Option<Drift> {
        if lost {
            return Some(Drift::Steps);
        }
        let is_strange = |ratio: f64, most: f64| ratio > most || ratio < 1.0 / most;
        let strange = rates.iter().flatten().any(|rate| is_strange(*rate, STRANGE_RATE));
        self.strange_disk = if strange { self.strange_disk + 1 } else { 0 };
        if self.strange_disk >= DISK_PATIENCE {
            return Some(Drift::Disk(rates.map(|rate| rate.unwrap_or(1.0))));
        }
        self.steps += 1;
        if self.steps <= SETTLING {
            self.first[self.steps as usize - 1] = (wall, stall);
            self.first.sort_unstable_by_key(|(wall, _)| std::cmp::Reverse(*wall));
            let (wall, stall) = self.usual();
            return (self.steps == SETTLING).then_some(Drift::Settled { wall, stall });
        }
        let (usual, _) = self.usual();
        let ratio = wall.as_secs_f64() / usual.as_secs_f64().max(f64::MIN_POSITIVE);
        let strange = is_strange(ratio, STRANGE_TIME) && wall.abs_diff(usual) > TELLING_TIME;
        self.strange = if strange { self.strange + 1 } else { 0 };
        if self.strange < self.patience {
            return None;
        }
        self.patience = (2 * self.patience).min(MOST_PATIENCE);
        Some(Drift::Steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const UNKNOWN: [Option<f64>; 2] = [None, None];

    fn see(watch: &mut Watch, millis: u32) -> Option<Drift> {
        watch.observe(millis * MS, MS, false, UNKNOWN)
    }

    /// How many steps of `millis` it takes.
    fn until_drift(watch: &mut Watch, millis: u32) -> Option<usize> {
        (1..200).find(|_| see(watch, millis).is_some())
    }

    fn settle(watch: &mut Watch) {
        let seen = [130, 90, 100].map(|millis| see(watch, millis));
        assert_eq!(seen, [None, None, Some(Drift::Settled { wall: 100 * MS, stall: MS })]);
    }

    fn settled() -> Watch {
        let mut watch = Watch::default();
        settle(&mut watch);
        watch
    }

    #[test]
    fn steps_that_stay_longer_or_shorter_are_a_drift_and_a_single_one_is_none() {
        assert_eq!(until_drift(&mut settled(), 135), Some(5));
        assert_eq!(until_drift(&mut settled(), 70), Some(5));
        assert_eq!(until_drift(&mut settled(), 120), None);
        let mut watch = settled();
        for millis in [200, 200, 200, 200, 100].repeat(50) {
            assert_eq!(see(&mut watch, millis), None);
        }
    }

    #[test]
    fn steps_too_short_to_tell_are_never_strange() {
        let mut watch = Watch::default();
        for wall in [MS / 2; SETTLING as usize].into_iter().chain([2 * MS; 100]) {
            assert!(!matches!(watch.observe(wall, MS / 9, false, UNKNOWN), Some(Drift::Steps)));
        }
    }

    #[test]
    fn each_drift_makes_the_next_come_later() {
        let mut watch = settled();
        assert_eq!(until_drift(&mut watch, 200), Some(5));
        watch.planned();
        settle(&mut watch);
        assert_eq!(until_drift(&mut watch, 200), Some(10));
    }

    #[test]
    fn a_step_that_was_not_planned_is_a_drift_at_once() {
        assert_eq!(settled().observe(100 * MS, MS, true, UNKNOWN), Some(Drift::Steps));
    }

    #[test]
    fn a_disk_of_another_speed_is_known_by_the_second_step() {
        let mut watch = Watch::default();
        assert_eq!(watch.observe(100 * MS, MS, false, [Some(4.0), None]), None);
        assert_eq!(watch.observe(100 * MS, MS, false, [Some(4.0), Some(1.1)]), Some(Drift::Disk([4.0, 1.1])));
        let mut watch = settled();
        for rate in [0.5, 1.0].repeat(20) {
            assert_eq!(watch.observe(100 * MS, MS, false, [Some(rate), None]), None);
        }
    }
}
