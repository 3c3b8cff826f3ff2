//! Steps that keep everything and planned ones, in turn, for comparison.

use std::time::Duration;

use super::cost::{Cost, MOST, Weight};
use super::watch::Seen;

/// The first step of each kind does not count: it has to find its memory. Of every four others, the first and the last keep everything: a
/// machine that becomes faster or slower meanwhile does so for both kinds. There is a result whenever as many steps of both kinds count, an
/// even number of each, and these many at least.
const FEWEST: usize = 2;

/// Steps of a plan are being compared with steps that keep everything.
#[derive(Clone, Debug)]
pub(super) struct Weighing {
    /// The steps that were the reason, if it is not that the plan is new.
    pub(super) seen: Option<Seen>,
    /// What was known before.
    pub(super) cost: Cost,
    first_kept: First,
    /// Whether there was a planned step.
    is_begun: bool,
    planned: Vec<Duration>,
    kept: Vec<Duration>,
}

/// The first step that keeps everything.
#[derive(Clone, Copy, Debug, PartialEq)]
enum First {
    /// There is none yet.
    Due,
    /// It took so long.
    Took(Duration),
    /// There were others not long ago.
    Spared,
}

impl Weighing {
    pub(super) fn new(seen: Option<Seen>, cost: Cost) -> Weighing {
        Weighing {
            seen,
            cost,
            first_kept: First::Due,
            is_begun: false,
            planned: Vec::new(),
            kept: Vec::new(),
        }
    }

    /// Steps of a new plan, after those of another one were compared.
    pub(super) fn again(cost: Cost) -> Weighing {
        Weighing { first_kept: First::Spared, ..Weighing::new(None, cost) }
    }

    /// Whether the next step keeps everything.
    pub(super) fn wants_kept(&self) -> bool {
        self.first_kept == First::Due || matches!((self.planned.len() + self.kept.len()) % 4, 0 | 3)
    }

    /// A step that kept everything took `wall`. Returns the result, if there is a new one.
    pub(super) fn kept(&mut self, wall: Duration) -> Option<Weight> {
        if self.first_kept == First::Due {
            self.first_kept = First::Took(wall);
            return None;
        }
        self.kept.push(wall);
        self.weight()
    }

    /// A planned step took `wall`. Returns the result, if there is a new one.
    pub(super) fn planned(&mut self, wall: Duration) -> Option<Weight> {
        if !std::mem::replace(&mut self.is_begun, true) {
            return None;
        }
        self.planned.push(wall);
        self.weight()
    }

    /// The time of a step that keeps everything, once the first ones have shown it, before any planned step.
    pub(super) fn begins_with(&self) -> Option<Duration> {
        let second = self.kept.first().filter(|_| !self.is_begun)?;
        match self.first_kept {
            First::Took(first) => Some(first.min(*second)),
            First::Due | First::Spared => None,
        }
    }

    /// Whether so few steps were timed that they tell little of how much steps vary.
    pub(super) fn is_short(&self) -> bool {
        self.planned.len() <= FEWEST
    }

    /// Whether there were as many steps as there may be.
    pub(super) fn is_long(&self) -> bool {
        self.planned.len() >= MOST
    }

    fn weight(&self) -> Option<Weight> {
        let count = self.planned.len();
        if count < FEWEST || !count.is_multiple_of(2) || self.kept.len() != count {
            return None;
        }
        let [planned, kept] = [&self.planned, &self.kept].map(|walls| usual(walls));
        let deviations = |walls: &[Duration], usual: f64| -> Vec<f64> {
            walls.iter().map(|wall| (wall.as_secs_f64() / usual.max(f64::MIN_POSITIVE) - 1.0).abs()).collect()
        };
        let mut deviations = [deviations(&self.planned, planned), deviations(&self.kept, kept)].concat();
        deviations.sort_unstable_by(f64::total_cmp);
        // Two of three are within the standard deviation.
        let deviation = deviations.get(2 * deviations.len() / 3).copied().unwrap_or_default();
        let error = deviation * (2.0 / count as f64).sqrt();
        let extra = planned / kept.max(f64::MIN_POSITIVE) - 1.0;
        Some(Weight { kept: Duration::from_secs_f64(kept), extra, error, deviation })
    }
}

/// The mean, in seconds, without the quickest and the slowest quarter.
fn usual(walls: &[Duration]) -> f64 {
    let mut walls = walls.to_vec();
    walls.sort_unstable();
    let aside = walls.len() / 4;
    let middle = &walls[aside..walls.len() - aside];
    middle.iter().sum::<Duration>().as_secs_f64() / middle.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// The results of a whole weighing. The step with this number, which keeps everything or not, takes so long.
    fn weigh(wall: impl Fn(u32, bool) -> Duration) -> Vec<Weight> {
        let mut weighing = Weighing::new(None, Cost::default());
        let mut weights = Vec::new();
        for number in 0..18 {
            weights.extend(match weighing.wants_kept() {
                true => weighing.kept(wall(number, true)),
                false => weighing.planned(wall(number, false)),
            });
            assert_eq!(weighing.is_long(), number >= 16);
        }
        weights
    }

    fn wall(kept: bool) -> Duration {
        if kept { 100 * MS } else { 103 * MS }
    }

    #[test]
    fn steps_that_keep_everything_come_first_and_last() {
        let mut weighing = Weighing::new(None, Cost::default());
        let kept = (0..18).map(|number| {
            let is_kept = weighing.wants_kept();
            let _ = if is_kept { weighing.kept((110 - number) * MS) } else { weighing.planned(103 * MS) };
            assert_eq!(weighing.begins_with(), (number == 1).then_some(109 * MS));
            is_kept
        });
        let (k, p) = (true, false);
        assert_eq!(kept.collect::<Vec<_>>(), [k, k, p, p, p, k, k, p, p, k, k, p, p, k, k, p, p, k]);
    }

    #[test]
    fn there_is_a_result_after_as_many_steps_of_both_kinds() {
        let weights = weigh(|_, kept| wall(kept));
        assert_eq!(weights.len(), 4);
        for Weight { kept, extra, error, .. } in weights {
            assert!(kept == 100 * MS && (extra - 0.03).abs() < 1e-9 && error < 1e-9);
        }
    }

    #[test]
    fn a_machine_that_becomes_faster_says_nothing_of_the_plan() {
        let weights = weigh(|number, kept| wall(kept).mul_f64(1.0 - 0.001 * f64::from(number)));
        // The step that does not count comes between, which is half a step's change.
        assert!(weights.iter().all(|weight| (weight.extra - 0.03).abs() < 6e-4), "{weights:?}");
    }

    #[test]
    fn a_step_that_was_disturbed_does_not_count() {
        for disturbed in 0..18 {
            let weights = weigh(|number, kept| wall(kept) * if number == disturbed { 2 } else { 1 });
            assert!(weights[1..].iter().all(|weight| (weight.extra - 0.03).abs() < 1e-9), "{weights:?}");
            let Weight { extra, error, .. } = weights[0];
            assert!((extra - 0.03).abs() <= 2.0 * error + 1e-9, "{weights:?}");
        }
    }

    #[test]
    fn the_more_steps_vary_the_larger_is_the_error() {
        let error = |varies: f64| {
            weigh(|number, kept| wall(kept).mul_f64(1.0 + varies * f64::from(number % 3)))[3].error
        };
        assert!(error(0.01) > 0.003 && (3.0..5.0).contains(&(error(0.04) / error(0.01))));
    }
}
