//! Whether steps still match what a plan was made for.

use std::time::Duration;

/// This many steps, timed to their very end, show how long a plan's steps take; the plan is judged by them.
pub(super) const SETTLING: usize = 3;
/// If all that are timed differ by more than this share from those timed before, these tell nothing of them any more.
const TELLING_SHARE: f64 = 0.03;
/// If so many steps that say nothing of others come while steps are to be timed, none are until the next time.
const MOST_WAITED: u32 = 8;
/// The same of those in a row that follow no plan because they are small. There may be many to each large one.
const MOST_PASSED: u32 = 128;
/// What is usual is told by no more of a plan's steps.
const MOST_TIMED: usize = 24;
/// A step is strange if it takes this many times as long as usual, or is this many times as quick.
const STRANGE_TIME: f64 = 1.3;
/// A smaller difference than this never makes a step strange.
const TELLING_TIME: Duration = Duration::from_millis(2);
/// This many strange steps in a row count as a drift. Doubled with each drift, so that a machine that never settles is left alone.
const PATIENCE: u32 = 5;
const MOST_PATIENCE: u32 = 160;
/// So many times as many small steps in a row have changed for good: where sizes are drawn by chance, five in a row are nothing special.
const SMALL_ONES: u32 = 4;
/// After this many steps the following ones are timed again, whether or not any was strange; then after twice as many, and so on.
const REST: u32 = 16;
const MOST_REST: u32 = 1024;

/// The times of timed steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Seen {
    /// The median, and the stalls of that step.
    pub(super) wall: Duration,
    pub(super) stall: Duration,
    pub(super) quickest: Duration,
    pub(super) slowest: Duration,
    /// How many of the plan's steps were timed since it was last compared with others, what is usual for them, and the standard deviation
    /// of one, as a share of that.
    pub(super) count: usize,
    pub(super) usual: Duration,
    pub(super) deviation: f64,
    /// Whether these are the plan's first steps, and whether strange steps were the reason to time them.
    pub(super) is_first: bool,
    pub(super) is_strange: bool,
}

impl Seen {
    /// Whether they may say something new.
    pub(super) fn is_news(self) -> bool {
        self.is_first || self.is_strange
    }

    /// Whether all took longer than `usual`, or all less, by more than this share of it.
    pub(super) fn is_beyond(self, usual: Duration, share: f64) -> bool {
        let times = |wall: Duration| wall.as_secs_f64() / usual.as_secs_f64().max(f64::MIN_POSITIVE);
        times(self.quickest) > 1.0 + share || times(self.slowest) < 1.0 - share
    }
}

/// What was observed of a plan's steps so far.
#[derive(Clone, Debug)]
pub(super) struct Watch {
    /// The times and stalls of the steps being timed.
    timed: Vec<(Duration, Duration)>,
    /// In seconds, the times of these and those before, up to so many.
    all: Vec<f64>,
    settles: bool,
    /// Whether strange steps are the reason for timing.
    is_strange: bool,
    has_settled: bool,
    /// The times of the first steps that were not timed. Such a step may end before the device has finished it.
    usual: Vec<Duration>,
    rested: u32,
    /// How many steps in a row have followed no plan while steps are to be timed.
    passed: u32,
    rest: u32,
    strange: u32,
    patience: u32,
    parts: u32,
}

impl Default for Watch {
    fn default() -> Watch {
        Watch {
            timed: Vec::new(),
            all: Vec::new(),
            settles: true,
            is_strange: false,
            has_settled: false,
            usual: Vec::new(),
            rested: 0,
            passed: 0,
            rest: REST,
            strange: 0,
            patience: PATIENCE,
            parts: 0,
        }
    }
}

impl Watch {
    /// Another plan is followed from now on.
    pub(super) fn planned(&mut self) {
        *self = Watch { patience: self.patience, parts: self.parts, ..Watch::default() };
    }

    /// The plan's first steps were compared with others, which has shown how long they take.
    pub(super) fn compared(&mut self) {
        *self = Watch {
            settles: false,
            has_settled: true,
            patience: self.patience,
            parts: self.parts,
            rest: self.rest,
            ..Watch::default()
        };
    }

    /// Whether the next step is timed.
    pub(super) fn settles(&self) -> bool {
        self.settles
    }

    /// Whether the plan's first steps were timed.
    pub(super) fn has_settled(&self) -> bool {
        self.has_settled
    }

    /// A step did only a part of what was planned, and was small or not. Returns whether so many small ones in a row did that steps have
    /// changed for good.
    pub(super) fn partial(&mut self, is_small: bool) -> bool {
        self.parts = if is_small { self.parts + 1 } else { 0 };
        if self.parts < SMALL_ONES * self.patience {
            return false;
        }
        self.parts = 0;
        self.lose_patience();
        true
    }

    /// A planned step took `wall`, of which it waited `stall`. Returns how long steps take once that is known.
    pub(super) fn observe(&mut self, wall: Duration, stall: Duration) -> Option<Seen> {
        if self.settles {
            return self.time(wall, stall);
        }
        self.rested += 1;
        if self.usual.len() < SETTLING {
            self.usual.push(wall);
            self.usual.sort_unstable();
            return None;
        }
        let usual = self.usual[SETTLING / 2];
        let ratio = wall.as_secs_f64() / usual.as_secs_f64().max(f64::MIN_POSITIVE);
        let strange = is_strange(ratio, STRANGE_TIME) && wall.abs_diff(usual) > TELLING_TIME;
        self.strange = if strange { self.strange + 1 } else { 0 };
        if self.strange >= self.patience {
            self.lose_patience();
            self.settle(true);
        } else {
            self.rises();
        }
        None
    }

    /// A planned step took a time that says nothing of others.
    pub(super) fn rests(&mut self) {
        self.rested += 1;
        if !self.settles {
            return self.rises();
        }
        if self.rested >= MOST_WAITED {
            (self.settles, self.rested) = (false, 0);
        }
    }

    /// A step has followed no plan.
    pub(super) fn passes(&mut self) {
        if !self.settles {
            return self.rests();
        }
        self.passed += 1;
        if self.passed >= MOST_PASSED {
            (self.settles, self.rested, self.passed) = (false, 0, 0);
        }
    }

    /// Has the next steps timed once it has rested for long enough.
    fn rises(&mut self) {
        if self.rested >= self.rest {
            self.rest = (2 * self.rest).min(MOST_REST);
            self.settle(false);
        }
    }

    fn time(&mut self, wall: Duration, stall: Duration) -> Option<Seen> {
        self.passed = 0;
        self.timed.push((wall, stall));
        self.all.push(wall.as_secs_f64());
        if self.timed.len() < SETTLING {
            return None;
        }
        self.timed.sort_unstable_by_key(|(wall, _)| *wall);
        let (wall, stall) = self.timed[SETTLING / 2];
        let (is_first, is_strange) = (!self.has_settled, self.is_strange);
        let [quickest, slowest] = [0, SETTLING - 1].map(|place| self.timed[place].0);
        let before = self.all.len() - SETTLING;
        let known = usual(self.all[..before].to_vec());
        let [least, most] = [1.0 - TELLING_SHARE, 1.0 + TELLING_SHARE].map(|times| times * known);
        let has_changed = before > 0 && (quickest.as_secs_f64() > most || slowest.as_secs_f64() < least);
        self.all.drain(..if has_changed { before } else { self.all.len().saturating_sub(MOST_TIMED) });
        let (count, typical) = (self.all.len(), usual(self.all.clone()));
        let deviation =
            deviation(self.all.iter().map(|wall| (wall / typical.max(f64::MIN_POSITIVE) - 1.0).abs()));
        let typical = Duration::try_from_secs_f64(typical).unwrap_or(wall);
        let seen =
            Seen { wall, stall, quickest, slowest, count, usual: typical, deviation, is_first, is_strange };
        self.timed.clear();
        (self.settles, self.is_strange, self.has_settled) = (false, false, true);
        Some(seen)
    }

    /// Times the next steps. Unless steps are strange now, those count that were timed when it was given up, and so does the reason.
    fn settle(&mut self, is_strange: bool) {
        if is_strange {
            (self.timed, self.usual, self.all) = Default::default();
        }
        self.is_strange |= is_strange;
        (self.settles, self.rested, self.passed, self.strange) = (true, 0, 0, 0);
    }

    fn lose_patience(&mut self) {
        self.patience = (2 * self.patience).min(MOST_PATIENCE);
    }
}

/// The mean without the least and the greatest quarter.
pub(super) fn usual(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_unstable_by(f64::total_cmp);
    let aside = numbers.len() / 4;
    let middle = &numbers[aside..numbers.len() - aside];
    middle.iter().sum::<f64>() / middle.len().max(1) as f64
}

/// The standard deviation of what is so far from what is usual: two of three are within it.
pub(super) fn deviation(apart: impl Iterator<Item = f64>) -> f64 {
    let mut apart: Vec<f64> = apart.collect();
    apart.sort_unstable_by(f64::total_cmp);
    apart.get(2 * apart.len() / 3).copied().unwrap_or_default()
}

fn is_strange(ratio: f64, most: f64) -> bool {
    ratio > most || ratio < 1.0 / most
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn see(watch: &mut Watch, millis: u32) -> Option<Seen> {
        watch.observe(millis * MS, MS)
    }

    fn settle(watch: &mut Watch, is_strange: bool) {
        let is_first = !watch.has_settled();
        let seen = [130, 90, 100].map(|millis| see(watch, millis));
        let (quickest, slowest) = (90 * MS, 130 * MS);
        let Some(told) = seen[2] else { panic!("{seen:?}") };
        assert_eq!((seen[0], seen[1], told.wall, told.stall), (None, None, 100 * MS, MS));
        assert_eq!((told.quickest, told.slowest), (quickest, slowest));
        assert_eq!((told.is_first, told.is_strange), (is_first, is_strange));
    }

    /// A watch whose usual step takes 100 ms.
    fn settled() -> Watch {
        let mut watch = Watch::default();
        settle(&mut watch, false);
        for millis in [150, 100, 90] {
            assert_eq!(see(&mut watch, millis), None);
        }
        watch
    }

    /// How many steps of `millis` it takes until steps are timed again because of them.
    fn until_timed(watch: &mut Watch, millis: u32) -> Option<usize> {
        (1..200)
            .find(|_| {
                assert_eq!(see(watch, millis), None);
                watch.settles()
            })
            .filter(|_| watch.is_strange)
    }

    #[test]
    fn steps_that_stay_longer_or_shorter_are_timed_again_and_a_single_one_is_not() {
        assert_eq!(until_timed(&mut settled(), 135), Some(5));
        assert_eq!(until_timed(&mut settled(), 70), Some(5));
        assert_eq!(until_timed(&mut settled(), 120), None);
        let mut watch = settled();
        watch.rest = u32::MAX;
        for millis in [200, 200, 200, 200, 100].repeat(50) {
            assert_eq!(see(&mut watch, millis), None);
        }
        assert!(!watch.settles());
    }

    #[test]
    fn what_is_usual_is_told_by_steps_that_are_not_timed_either() {
        let mut watch = Watch::default();
        settle(&mut watch, false);
        // The thread finishes them long before the device does.
        assert_eq!(until_timed(&mut watch, 20), None);
    }

    #[test]
    fn steps_too_short_to_tell_are_never_strange() {
        let mut watch = Watch { rest: u32::MAX, ..Watch::default() };
        for wall in [MS / 2; 2 * SETTLING].into_iter().chain([2 * MS; 100]) {
            watch.observe(wall, MS / 9);
        }
        assert!(!watch.settles());
    }

    #[test]
    fn each_drift_makes_the_next_come_later() {
        let mut watch = settled();
        assert_eq!(until_timed(&mut watch, 200), Some(5));
        settle(&mut watch, true);
        assert_eq!([100; 3].map(|millis| see(&mut watch, millis)), [None; 3]);
        watch.rest = u32::MAX;
        assert_eq!(until_timed(&mut watch, 200), Some(10));
    }

    #[test]
    fn steps_are_timed_again_at_doubling_intervals() {
        let mut watch = Watch::default();
        settle(&mut watch, false);
        for rest in [16, 32, 64] {
            assert_eq!((1..2000).find(|_| see(&mut watch, 100).is_none() && watch.settles()), Some(rest));
            settle(&mut watch, false);
        }
    }

    #[test]
    fn steps_that_vary_by_more_than_they_take_are_not_beyond_anything() {
        let seen = Seen {
            wall: MS,
            stall: MS,
            quickest: MS,
            slowest: MS,
            count: 3,
            usual: MS,
            deviation: 0.0,
            is_first: true,
            is_strange: false,
        };
        assert!(!seen.is_beyond(2 * MS, 1.5) && seen.is_beyond(2 * MS, 0.4));
    }

    #[test]
    fn the_longer_a_plan_is_followed_the_more_of_its_steps_tell_what_is_usual() {
        let mut watch = Watch::default();
        let mut seen: Vec<Seen> = Vec::new();
        for number in 0..500 {
            seen.extend(see(&mut watch, 100 + number % 2));
        }
        let counts: Vec<usize> = seen.iter().map(|seen| seen.count).collect();
        assert_eq!(counts[..4], [3, 6, 9, 12]);
        let last = seen[counts.len() - 1];
        assert!(last.usual >= 100 * MS && last.usual <= 101 * MS && last.deviation < 0.01, "{last:?}");
        watch.compared();
        assert!(watch.all.is_empty());
    }

    #[test]
    fn a_change_is_noticed_that_comes_while_steps_are_timed() {
        let mut watch = settled();
        while !watch.settles() {
            see(&mut watch, 100);
        }
        settle(&mut watch, false);
        assert_eq!(until_timed(&mut watch, 20), Some(5));
    }

    #[test]
    fn steps_that_come_rarely_are_timed_all_the_same() {
        for between in [30, 70, 100, 200] {
            let mut watch = settled();
            let large = |watch: &mut Watch, millis| {
                (0..between).for_each(|_| watch.passes());
                see(watch, millis)
            };
            let seen = (1..100).find_map(|nth| large(&mut watch, 200).map(|seen| (nth, seen)));
            let Some((nth, seen)) = seen else { panic!("not one of 100, {between} apart") };
            assert!(seen.wall == 200 * MS && nth <= 40, "{between} apart: the {nth}th");
        }
    }

    #[test]
    fn only_parts_in_a_row_are_another_kind_of_step() {
        let mut watch = settled();
        for _ in 0..20 {
            assert!(!(1..SMALL_ONES * PATIENCE).any(|_| watch.partial(true)));
            assert!(!watch.partial(false));
        }
        assert_eq!((1..100).find(|_| watch.partial(true)), Some(SMALL_ONES * PATIENCE));
        assert_eq!((1..100).find(|_| watch.partial(true)), Some(2 * SMALL_ONES * PATIENCE));
    }
}
