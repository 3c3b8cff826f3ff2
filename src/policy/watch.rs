//! Whether steps still are what a plan was made for. Pure.

use std::time::Duration;

/// A plan's first steps tell how long its steps take.
const SETTLING: u32 = 3;
/// A step is strange if it takes so many times as long as usual, or so much less.
const STRANGE_TIME: f64 = 1.25;
/// A disk is strange if it is so many times as fast as was counted on, or so much slower.
const STRANGE_RATE: f64 = 1.3;
/// So many strange steps in a row are a drift. Doubled with each drift of the steps' time, so that a machine that is always restless is
/// not profiled all the time.
const PATIENCE: u32 = 3;
const MOST_PATIENCE: u32 = 96;
/// The same for the disk's speed.
const DISK_PATIENCE: u32 = 2;

/// What has changed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Drift {
    /// The steps: they have to be profiled anew.
    Steps,
    /// The disk only: writes and reads are so many times as fast as was counted on.
    Disk([f64; 2]),
}

/// What was seen of a plan's steps so far.
#[derive(Clone, Debug)]
pub(crate) struct Watch {
    steps: u32,
    /// The shortest of the first steps.
    usual: Duration,
    strange: u32,
    patience: u32,
    strange_disk: u32,
}

impl Default for Watch {
    fn default() -> Watch {
        Watch { steps: 0, usual: Duration::MAX, strange: 0, patience: PATIENCE, strange_disk: 0 }
    }
}

impl Watch {
    /// Another plan is followed from now on.
    pub(crate) fn planned(&mut self) {
        *self = Watch { patience: self.patience, ..Watch::default() };
    }

    /// A step took so long; `lost`: it was not the one that was planned. `rates`: how many times as fast as was counted on the disk
    /// wrote and read, where that is known.
    pub(crate) fn observe(&mut self, wall: Duration, lost: bool, rates: [Option<f64>; 2]) -> Option<Drift> {
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
            self.usual = self.usual.min(wall);
            return None;
        }
        let ratio = wall.as_secs_f64() / self.usual.as_secs_f64().max(f64::MIN_POSITIVE);
        self.strange = if is_strange(ratio, STRANGE_TIME) { self.strange + 1 } else { 0 };
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

    /// How many steps of `millis` it takes after `settled` ordinary ones.
    fn until_drift(watch: &mut Watch, millis: u32) -> Option<usize> {
        (1..200).find(|_| watch.observe(millis * MS, false, UNKNOWN).is_some())
    }

    fn settled() -> Watch {
        let mut watch = Watch::default();
        (0..SETTLING).for_each(|_| assert_eq!(watch.observe(100 * MS, false, UNKNOWN), None));
        watch
    }

    #[test]
    fn steps_that_stay_longer_or_shorter_are_a_drift_and_a_single_one_is_none() {
        assert_eq!(until_drift(&mut settled(), 130), Some(3));
        assert_eq!(until_drift(&mut settled(), 70), Some(3));
        assert_eq!(until_drift(&mut settled(), 110), None);
        let mut watch = settled();
        for millis in [200, 200, 100].repeat(50) {
            assert_eq!(watch.observe(millis * MS, false, UNKNOWN), None);
        }
    }

    #[test]
    fn each_drift_makes_the_next_come_later() {
        let mut watch = settled();
        assert_eq!(until_drift(&mut watch, 200), Some(3));
        watch.planned();
        (0..SETTLING).for_each(|_| assert_eq!(watch.observe(100 * MS, false, UNKNOWN), None));
        assert_eq!(until_drift(&mut watch, 200), Some(6));
    }

    #[test]
    fn a_step_that_was_not_planned_is_a_drift_at_once() {
        assert_eq!(settled().observe(100 * MS, true, UNKNOWN), Some(Drift::Steps));
    }

    #[test]
    fn a_disk_of_another_speed_is_known_by_the_second_step() {
        let mut watch = Watch::default();
        assert_eq!(watch.observe(100 * MS, false, [Some(4.0), None]), None);
        assert_eq!(watch.observe(100 * MS, false, [Some(4.0), Some(1.1)]), Some(Drift::Disk([4.0, 1.1])));
        watch.planned();
        for rate in [0.5, 1.0].repeat(20) {
            assert_eq!(watch.observe(100 * MS, false, [Some(rate), None]), None);
        }
    }
}
