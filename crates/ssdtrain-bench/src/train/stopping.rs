//! When a run ends: after a number of steps, or some time.

use std::time::Duration;

use crate::common::defaults;

/// When the run ends.
pub(crate) struct StoppingRule {
    steps: Option<u64>,
    time: Option<Duration>,
    /// Number of steps taken before this run.
    from: u64,
}

impl StoppingRule {
    /// A run that ends after `steps` steps in total or after `minutes`, whichever comes first. `from` steps were taken
    /// before. Without either, it takes the default time.
    pub(crate) fn new(steps: Option<u64>, minutes: Option<f64>, from: u64) -> StoppingRule {
        let minutes = minutes.or_else(|| steps.is_none().then_some(defaults::MINUTES));
        // A time too long to count is no limit.
        let time = minutes.and_then(|minutes| Duration::try_from_secs_f64(minutes * 60.0).ok());
        StoppingRule { steps, time, from }
    }

    /// Whether the number of steps was given, rather than estimated.
    pub(crate) fn is_exact(&self) -> bool {
        self.steps.is_some()
    }

    /// The share of the run that is done.
    pub(crate) fn share(&self, step: u64, elapsed: Duration) -> f64 {
        let of_steps = self.steps.map_or(0.0, |steps| step as f64 / steps as f64);
        let of_time = self.time.map_or(0.0, |time| elapsed.div_duration_f64(time));
        of_steps.max(of_time).min(1.0)
    }

    /// Whether the run has ended.
    pub(crate) fn is_over(&self, step: u64, elapsed: Duration) -> bool {
        self.steps.is_some_and(|steps| step >= steps) || self.time.is_some_and(|time| elapsed >= time)
    }

    /// The step at which the run will end: the given one, or an estimate from the pace so far.
    pub(crate) fn total(&self, step: u64, elapsed: Duration) -> u64 {
        let expected = self.time.map(|time| {
            let pace = (step - self.from) as f64 / elapsed.as_secs_f64();
            match step - self.from {
                0 => u64::MAX,
                _ => self.from + (pace * time.as_secs_f64()).ceil() as u64,
            }
        });
        self.steps.or(expected).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_ends_after_its_steps_or_its_time_whichever_comes_first() {
        let minute = Duration::from_secs(60);
        let both = StoppingRule::new(Some(10), Some(1.0), 0);
        assert!(both.is_over(10, Duration::ZERO) && both.is_over(0, minute));
        assert!(!both.is_over(9, minute / 2));
        assert!(StoppingRule::new(None, None, 0).is_over(0, 3 * minute));
        assert!(!StoppingRule::new(Some(10), None, 0).is_over(9, 1000 * minute));
        assert_eq!(both.share(2, minute / 2), 0.5);
        assert_eq!(both.share(8, minute / 2), 0.8);
    }

    #[test]
    fn the_length_of_a_timed_run_is_expected_from_its_pace() {
        let run = StoppingRule::new(None, Some(1.0), 100);
        assert_eq!(run.total(100, Duration::ZERO), u64::MAX);
        assert_eq!(run.total(110, Duration::from_secs(6)), 200);
        assert_eq!(StoppingRule::new(Some(7), None, 0).total(3, Duration::from_secs(1)), 7);
    }
}
