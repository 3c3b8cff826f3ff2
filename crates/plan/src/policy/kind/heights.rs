//! How high the peaks of steps are, and which are so small that they need not move anything.

use std::collections::BTreeMap;

/// As many sizes are told from each other.
const SIZES: f64 = 64.0;
/// Steps are as large as planned up to so many times that.
const LIKE: f64 = 1.02;
/// The highest peak is that of the last steps, at least this many and at most twice as many.
const LAST: u64 = 256;

/// The peaks of one kind of steps.
#[derive(Clone, Debug, Default)]
pub(super) struct Heights {
    /// Of the last that kept everything: by the size as one of so many, the one with the highest peak.
    kept: BTreeMap<u64, Kept>,
    /// The highest of those that went as planned, since this step, and as long before.
    since: u64,
    highest: u64,
    before: u64,
}

/// Steps of about one size that kept everything.
#[derive(Clone, Copy, Debug)]
struct Kept {
    /// The last of them.
    last: u64,
    /// The last of those with the highest peak.
    step: u64,
    size: f64,
    peak: u64,
}

impl Kept {
    fn is_of_last(self, step: u64) -> bool {
        step < self.last + 2 * LAST
    }
}

impl Heights {
    /// Step number `step` has kept everything, and at most so many times what is planned was open at once.
    pub(super) fn saw_kept(&mut self, step: u64, size: f64, peak: u64) {
        if !(0.0..=LIKE).contains(&size) {
            return;
        }
        let seen = Kept { last: step, step, size, peak };
        let highest = self.kept.entry((size * SIZES) as u64).or_insert(seen);
        if peak >= highest.peak || step >= highest.step + 2 * LAST {
            *highest = seen;
        }
        highest.last = step;
    }

    /// Step number `step` went as planned.
    pub(super) fn saw_planned(&mut self, step: u64, peak: u64) {
        self.passes(step);
        self.highest = self.highest.max(peak);
    }

    /// The highest peak of the last steps before `step` that went as planned.
    pub(super) fn highest(&mut self, step: u64) -> u64 {
        self.passes(step);
        self.highest.max(self.before)
    }

    /// Steps are planned lower from now on.
    pub(super) fn is_lowered(&mut self) {
        (self.highest, self.before) = (0, 0);
    }

    fn passes(&mut self, step: u64) {
        if step >= self.since + LAST {
            let is_next = step < self.since + 2 * LAST;
            self.before = if is_next { self.highest } else { 0 };
            (self.since, self.highest) = (step, 0);
        }
    }

    /// Up to which size the peaks of steps that keep everything are no higher than `most`, before step number `step`. One of the planned size
    /// has `kept` then, of which `besides` may be there in smaller ones too. Between sizes that were seen, a peak is taken to be no higher than
    /// the line between theirs: what does not go with the size goes with its square.
    pub(super) fn size_within(&self, step: u64, most: u64, kept: u64, besides: u64) -> f64 {
        let mut below = (0.0, besides.min(kept));
        let mut above = (1.0, kept);
        for &Kept { size, peak, .. } in self.kept.values().filter(|kept| kept.is_of_last(step)) {
            if peak > most {
                above = (size, peak);
                break;
            }
            below = (size, peak);
        }
        if above.1 <= most {
            return LIKE;
        }
        if below.1 > most {
            return 0.0;
        }
        let share = (most - below.1) as f64 / (above.1 - below.1) as f64;
        below.0 + share * (above.0 - below.0).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_go_with_the_size_leaves_less_room_until_steps_have_shown_that_it_does() {
        let mut heights = Heights::default();
        assert_eq!(heights.size_within(9, 600, 1000, 0), 0.6);
        assert_eq!(heights.size_within(9, 600, 1000, 200), 0.5);
        assert_eq!(heights.size_within(9, 600, 1000, 700), 0.0, "perhaps there is always so much");
        heights.saw_kept(1, 0.4, 400);
        assert!((heights.size_within(9, 600, 1000, 700) - 0.6).abs() < 1e-9);
        assert!((heights.size_within(9, 300, 1000, 200) - 0.2).abs() < 1e-9, "below what was seen");
    }

    #[test]
    fn the_sizes_next_to_the_limit_tell_and_the_highest_of_each() {
        let mut heights = Heights::default();
        for (size, peak) in [(0.2, 100), (0.5, 400), (0.5, 500), (0.5, 300), (0.75, 700), (1.5, 9000)] {
            heights.saw_kept(1, size, peak);
        }
        assert_eq!(heights.size_within(9, 600, 1000, 0), 0.625);
        assert_eq!(heights.size_within(9, 850, 1000, 0), 0.875);
    }

    #[test]
    fn steps_as_large_as_planned_may_keep_everything_where_others_are_higher() {
        let mut heights = Heights::default();
        assert_eq!(heights.size_within(9, 1000, 1000, 0), LIKE);
        assert!(heights.size_within(9, 999, 1000, 0) < 1.0);
        heights.saw_kept(1, 1.0, 1200);
        assert!(heights.size_within(9, 1000, 1000, 0) < 1.0, "they were higher than expected");
        let mut heights = Heights::default();
        heights.saw_kept(1, 1.01, 800);
        assert_eq!(heights.size_within(9, 900, 1000, 0), 1.01, "they were lower");
    }

    #[test]
    fn a_size_is_known_for_as_long_as_it_comes() {
        let mut heights = Heights::default();
        for step in 1..6 * LAST {
            heights.saw_kept(step, 0.4, 400);
            assert!(heights.size_within(step + 1, 600, 1000, 700) > 0.4, "after step {step}");
        }
        assert_eq!(heights.size_within(8 * LAST, 600, 1000, 700), 0.0, "it came no more");
    }

    #[test]
    fn a_peak_that_was_high_once_is_forgotten_while_others_come() {
        let mut heights = Heights::default();
        heights.saw_kept(1, 0.02, 900);
        (2..=2 * LAST + 1).for_each(|step| heights.saw_kept(step, 0.02, 20));
        assert!((heights.size_within(2 * LAST + 2, 600, 1000, 0) - 0.6).abs() < 0.01);
    }

    #[test]
    fn a_peak_that_was_high_once_is_forgotten() {
        let mut heights = Heights::default();
        heights.saw_kept(1, 0.02, 900);
        let within = |heights: &Heights, step: u64| heights.size_within(step, 600, 1000, 0);
        assert!(within(&heights, 2 * LAST) < 0.02);
        assert_eq!(within(&heights, 2 * LAST + 1), 0.6);
        heights.saw_kept(2 * LAST + 1, 0.02, 20);
        assert!((within(&heights, 2 * LAST + 2) - 0.6).abs() < 0.01);
    }

    #[test]
    fn the_highest_peak_is_forgotten_when_no_step_has_it_any_more() {
        let mut heights = Heights::default();
        heights.saw_planned(1, 900);
        let highest = |heights: &mut Heights, from: u64, to: u64| {
            (from..to)
                .map(|step| {
                    heights.saw_planned(step, 300);
                    heights.highest(step + 1)
                })
                .collect::<Vec<_>>()
        };
        assert!(highest(&mut heights, 2, LAST).iter().all(|peak| *peak == 900));
        let later = highest(&mut heights, LAST, 3 * LAST);
        assert_eq!((later[0], later[later.len() - 1]), (900, 300));
        assert_eq!(heights.highest(9 * LAST), 0, "nothing went as planned for long");
    }
}
