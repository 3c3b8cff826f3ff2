//! When a step is profiled.

/// The first step does work that later ones need not repeat, so the second is the first to be profiled.
pub(super) const FIRST_PROFILED: u64 = 2;
/// After this many planned steps in a row a profile has paid off, and the next one may follow at once.
const WORTH_IT: u64 = 1000;

/// Profiled steps are slow, so each waits longer after the reason for it than the one before. Steps that are never alike are thus
/// profiled now and then, but not all the time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attempts {
    due: Option<u64>,
    /// Steps from the reason for a profile to the profile, a power of two. If steps of a few kinds alternate, the profiled step is of the
    /// kind that gave the reason once this is a multiple of the number of kinds.
    wait: u64,
    /// Planned steps in a row.
    followed: u64,
}

impl Attempts {
    pub(super) fn new() -> Attempts {
        Attempts { due: Some(FIRST_PROFILED), wait: 1, followed: 0 }
    }

    /// There is a plan before any step was profiled.
    pub(super) fn spare(&mut self) {
        self.due = None;
    }

    pub(super) fn is_due(&self, number: u64) -> bool {
        self.due.is_some_and(|due| number >= due)
    }

    /// Step `number` was profiled; `shown` says whether enough was seen.
    pub(super) fn made(&mut self, number: u64, shown: bool) {
        self.due = None;
        if !shown {
            self.want(number);
        }
    }

    /// Step `number` gave a reason for a profile.
    pub(super) fn want(&mut self, number: u64) {
        self.followed = 0;
        if self.due.is_none() {
            self.due = Some(number + self.wait);
            self.wait = self.wait.saturating_mul(2);
        }
    }

    /// A step followed its plan.
    pub(super) fn followed(&mut self) {
        self.followed += 1;
        if self.followed >= WORTH_IT {
            self.wait = 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of the profiled ones among `steps` steps. `is_strange` gets a step's number and that of the last profiled one, and
    /// says whether the step gives a reason for a profile.
    fn profiled(steps: u64, is_strange: impl Fn(u64, u64) -> bool) -> Vec<u64> {
        let mut attempts = Attempts::new();
        let mut made = Vec::new();
        for number in 1..=steps {
            if attempts.is_due(number) {
                made.push(number);
                attempts.made(number, true);
            } else if is_strange(number, made.last().copied().unwrap_or_default()) {
                attempts.want(number);
            } else {
                attempts.followed();
            }
        }
        made
    }

    #[test]
    fn steps_that_are_never_alike_are_profiled_ever_more_seldom() {
        assert_eq!(profiled(100, |number, _| number > 1), [2, 4, 7, 12, 21, 38, 71]);
    }

    #[test]
    fn the_next_profile_of_steps_that_stay_another_kind_comes_at_once() {
        assert_eq!(profiled(20, |number, last| number >= 10 && last < 10), [2, 11]);
    }

    #[test]
    fn of_two_kinds_in_turn_the_second_profile_is_of_the_other_kind() {
        assert_eq!(
            profiled(100, |number, last| number % 2 != last % 2 && last % 2 == 0 && number > 1),
            [2, 4, 7]
        );
    }

    #[test]
    fn steps_that_show_nothing_are_tried_ever_more_seldom() {
        let mut attempts = Attempts::new();
        let mut tried = Vec::new();
        for number in 1..100 {
            if attempts.is_due(number) {
                tried.push(number);
                attempts.made(number, false);
            }
        }
        assert_eq!(tried, [2, 3, 5, 9, 17, 33, 65]);
    }

    #[test]
    fn a_plan_that_was_followed_for_long_is_made_anew_at_once() {
        let strange = [2, 4, 6, 1200];
        let made = profiled(2000, |number, _| strange.contains(&(number - 1)));
        assert_eq!(made.last(), Some(&1202), "{made:?}");
    }
}
