//! Planned steps and steps that keep everything, in turn, for comparison.

use std::time::Duration;

use super::cost::{Cost, Weight};
use super::watch::Seen;

/// Two steps that keep everything come between two planned ones, and so on: a machine that becomes faster or slower meanwhile does so for
/// both. The first result comes after this many of each kind, and the last after that many.
const FEWEST: usize = 4;
const MOST: usize = 8;

/// Steps of a plan are being compared with steps that keep everything.
#[derive(Clone, Debug)]
pub(super) struct Weighing {
    /// The steps that were the reason.
    pub(super) seen: Seen,
    /// What was known before.
    pub(super) cost: Cost,
    planned: Vec<Duration>,
    kept: Vec<Duration>,
}

impl Weighing {
    pub(super) fn new(seen: Seen, cost: Cost) -> Weighing {
        Weighing { seen, cost, planned: vec![seen.wall], kept: Vec::new() }
    }

    /// Whether the next step keeps everything.
    pub(super) fn wants_kept(&self) -> bool {
        !self.planned.len().is_multiple_of(2) && self.kept.len() <= self.planned.len()
    }

    /// A step that kept everything took `wall`.
    pub(super) fn kept(&mut self, wall: Duration) {
        self.kept.push(wall);
    }

    /// A planned step took `wall`. Returns the result, if there is a new one.
    pub(super) fn planned(&mut self, wall: Duration) -> Option<Weight> {
        self.planned.push(wall);
        let count = self.planned.len();
        let is_enough = count >= FEWEST && self.kept.len() >= FEWEST;
        (count.is_multiple_of(2) && is_enough).then(|| self.weight())
    }

    /// Whether there were as many steps as there may be.
    pub(super) fn is_long(&self) -> bool {
        self.planned.len() >= MOST
    }

    fn weight(&self) -> Weight {
        let [planned, kept] = [&self.planned, &self.kept].map(|walls| usual(walls));
        let deviations = |walls: &[Duration], usual: f64| -> Vec<f64> {
            walls.iter().map(|wall| (wall.as_secs_f64() / usual.max(f64::MIN_POSITIVE) - 1.0).abs()).collect()
        };
        let mut deviations = [deviations(&self.planned, planned), deviations(&self.kept, kept)].concat();
        deviations.sort_unstable_by(f64::total_cmp);
        // Two of three are within the standard deviation.
        let deviation = deviations.get(2 * deviations.len() / 3).copied().unwrap_or_default();
        let error = deviation * (2.0 / self.kept.len() as f64).sqrt();
        let extra = planned / kept.max(f64::MIN_POSITIVE) - 1.0;
        Weight { kept: Duration::from_secs_f64(kept), extra, error, deviation }
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

    fn weighing() -> Weighing {
        let (wall, quickest, slowest) = (103 * MS, 103 * MS, 103 * MS);
        let seen = Seen { wall, stall: MS, quickest, slowest, is_first: true, is_strange: false };
        Weighing::new(seen, Cost::default())
    }

    /// The results of a whole weighing. The step with this number, which keeps everything or not, takes so long.
    fn weigh(wall: impl Fn(u32, bool) -> Duration) -> Vec<Weight> {
        let mut weighing = weighing();
        let mut weights = Vec::new();
        for number in 1.. {
            match weighing.wants_kept() {
                true => weighing.kept(wall(number, true)),
                false => weights.extend(weighing.planned(wall(number, false))),
            }
            if weighing.is_long() {
                break;
            }
        }
        weights
    }

    fn wall(kept: bool) -> Duration {
        if kept { 100 * MS } else { 103 * MS }
    }

    #[test]
    fn two_steps_that_keep_everything_come_between_two_planned_ones() {
        let mut weighing = weighing();
        let kept = (0..11).map(|_| {
            let kept = weighing.wants_kept();
            if kept {
                weighing.kept(100 * MS);
            } else {
                let _ = weighing.planned(103 * MS);
            }
            kept
        });
        let (k, p) = (true, false);
        assert_eq!(kept.collect::<Vec<_>>(), [k, k, p, p, k, k, p, p, k, k, p]);
    }

    #[test]
    fn there_is_a_result_with_every_second_planned_step() {
        let weights = weigh(|_, kept| wall(kept));
        assert_eq!(weights.len(), 3);
        for Weight { kept, extra, error, .. } in weights {
            assert!(kept == 100 * MS && (extra - 0.03).abs() < 1e-9 && error < 1e-9);
        }
    }

    #[test]
    fn a_machine_that_becomes_faster_says_nothing_of_the_plan() {
        let weights = weigh(|number, kept| wall(kept).mul_f64(1.0 - 0.001 * f64::from(number)));
        assert!(weights.iter().all(|weight| (weight.extra - 0.03).abs() < 2e-4), "{weights:?}");
    }

    #[test]
    fn a_step_that_was_disturbed_does_not_count() {
        for disturbed in 1..12 {
            let weights = weigh(|number, kept| wall(kept) * if number == disturbed { 2 } else { 1 });
            assert!(weights.iter().all(|weight| (weight.extra - 0.03).abs() < 1e-9), "{weights:?}");
        }
    }

    #[test]
    fn the_more_steps_vary_the_larger_is_the_error() {
        let error = |varies: f64| {
            weigh(|number, kept| wall(kept).mul_f64(1.0 + varies * f64::from(number % 3)))[2].error
        };
        assert!(error(0.01) > 0.003 && (3.0..5.0).contains(&(error(0.04) / error(0.01))));
    }
}
