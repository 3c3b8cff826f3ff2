//! The learning rate over a run.

use std::f64::consts::PI;

use crate::error::{Error, Result};

/// Linear warm-up to a peak, then half a cosine down to a floor that it keeps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    peak: f64,
    floor: f64,
    warmup: u64,
    steps: u64,
}

impl Schedule {
    /// Rises over the first `warmup` steps to `peak`, and reaches `floor` at step `steps`.
    ///
    /// # Errors
    /// [`Error::Argument`] unless `0 <= floor <= peak`, both finite, and `warmup <= steps`.
    pub fn new(peak: f64, floor: f64, warmup: u64, steps: u64) -> Result<Schedule> {
        if !(peak.is_finite() && 0.0 <= floor && floor <= peak) {
            return Err(Error::argument(format!(
                "the learning rate falls from {peak} to {floor}; both must be finite and 0 <= floor <= peak"
            )));
        }
        if warmup > steps {
            return Err(Error::argument(format!(
                "warm-up of {warmup} steps is longer than all {steps} steps"
            )));
        }
        Ok(Schedule { peak, floor, warmup, steps })
    }

    /// The learning rate of a step, counted from 0.
    pub fn learning_rate(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / (self.warmup + 1) as f64;
        }
        if step >= self.steps {
            return self.floor;
        }
        let progress = (step - self.warmup) as f64 / (self.steps - self.warmup) as f64;
        self.floor + 0.5 * (1.0 + (PI * progress).cos()) * (self.peak - self.floor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rises_linearly_then_follows_half_a_cosine_and_stays_at_the_floor() -> Result<()> {
        let schedule = Schedule::new(1.0, 0.1, 4, 24)?;
        let near = |step, expected: f64| {
            let rate = schedule.learning_rate(step);
            assert!((rate - expected).abs() < 1e-12, "step {step}: {rate} instead of {expected}");
        };
        near(0, 0.2);
        near(3, 0.8);
        near(4, 1.0);
        near(14, 0.55);
        near(9, 0.1 + 0.45 * (1.0 + 0.5_f64.sqrt()));
        near(24, 0.1);
        near(u64::MAX, 0.1);
        Ok(())
    }

    #[test]
    fn without_warm_up_it_starts_at_the_peak() -> Result<()> {
        assert_eq!(Schedule::new(3e-4, 0.0, 0, 10)?.learning_rate(0), 3e-4);
        assert_eq!(Schedule::new(3e-4, 3e-4, 0, 0)?.learning_rate(0), 3e-4);
        Ok(())
    }

    #[test]
    fn rates_and_lengths_that_make_no_schedule_are_refused() {
        for (peak, floor, warmup, steps) in [
            (1.0, 2.0, 0, 1),
            (1.0, -0.1, 0, 1),
            (f64::NAN, 0.0, 0, 1),
            (f64::INFINITY, 0.0, 0, 1),
            (1.0, 0.0, 2, 1),
        ] {
            assert!(Schedule::new(peak, floor, warmup, steps).is_err(), "{peak} {floor} {warmup} {steps}");
        }
    }
}
