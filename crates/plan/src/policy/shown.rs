//! What steps of one kind have shown that says something of others.

use std::time::Duration;

use super::corrections::Corrections;
use crate::Machine;

/// Where processors compute, steps that keep everything take as many times as long as others as they save bytes, if that is at most so many
/// times as much or as little and the profile has it so, give or take the next: it is off by up to a fifth there.
const NEAR: f64 = 1.5;
const AGREEING: f64 = 1.25;

/// What steps of a plan have shown that says something of other steps.
#[derive(Clone, Debug)]
pub(super) struct Shown {
    /// By which share of it computing takes longer than in the profiled step.
    pub(super) longer: f64,
    /// What moving a byte takes, and how much of the work on the program's thread shows.
    pub(super) moving: f64,
    pub(super) exposed: f64,
    /// How long one takes that keeps everything, and whether one has shown it.
    pub(super) kept: Duration,
    is_measured: bool,
    pub(super) corrections: Corrections,
    /// The same of all kinds that have shown it, by the bytes that their steps save.
    sizes: Vec<(u64, Duration)>,
}

impl Shown {
    /// By a plan for this machine whose steps take `kept` if they keep everything.
    pub(super) fn new(machine: &Machine, corrections: &Corrections, kept: Duration) -> Shown {
        let Machine { moving, exposed, .. } = *machine;
        let Corrections { longer, is_measured, doubted_moving, .. } = *corrections;
        let moving = if corrections.cost.is_some() { moving } else { moving.max(doubted_moving) };
        let corrections = corrections.of_other_steps();
        Shown { longer, moving, exposed, kept, is_measured, corrections, sizes: Vec::new() }
    }

    /// Plans that were compared tell more than steps that kept everything, and these more than a profile.
    fn rank(&self) -> u8 {
        u8::from(self.is_measured) + 2 * u8::from(self.is_compared())
    }

    /// Whether plans were compared.
    pub(super) fn is_compared(&self) -> bool {
        self.corrections.cost.is_some()
    }

    /// The same, or what was shown before if that tells more.
    pub(super) fn or(self, before: Option<Shown>) -> Shown {
        before.filter(|before| before.rank() > self.rank()).unwrap_or(self)
    }

    /// The same, if steps that kept everything took this, by the bytes that they saved.
    pub(super) fn with_sizes(self, sizes: Vec<(u64, Duration)>) -> Shown {
        Shown { sizes, ..self }
    }

    /// How long a step takes that saves so many bytes and keeps everything, if those of about its size tell, and the profile has it about so.
    /// Of those of one size, the last one counts.
    pub(super) fn kept_by_size(&self, bytes: u64, by_profile: Duration) -> Option<Duration> {
        let times = |other: u64| bytes as f64 / other as f64;
        let apart = |(other, _): &&(u64, Duration)| times(*other).ln().abs();
        let known = self.sizes.iter().rev().filter(|(other, _)| *other > 0);
        let (nearest, kept) = *known.min_by(|one, other| apart(one).total_cmp(&apart(other)))?;
        let kept = kept.mul_f64(Some(times(nearest)).filter(|times| is_within(*times, NEAR))?);
        let agrees = is_within(by_profile.as_secs_f64() / kept.as_secs_f64(), AGREEING);
        agrees.then_some(kept)
    }
}

fn is_within(times: f64, most: f64) -> bool {
    (1.0 / most..=most).contains(&times)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::cost::Cost;

    const MS: Duration = Duration::from_millis(1);

    fn shown(is_measured: bool, is_compared: bool) -> Shown {
        let mut corrections = Corrections::default();
        corrections.cost = is_compared.then(|| Cost::first(0.5, 0.0));
        Shown {
            longer: 0.0,
            moving: 0.0,
            exposed: 0.0,
            kept: MS,
            is_measured,
            corrections,
            sizes: Vec::new(),
        }
    }

    #[test]
    fn the_nearest_size_tells_what_one_takes_if_the_profile_has_it_about_so() {
        assert_eq!(shown(true, false).kept_by_size(1000, 10 * MS), None);
        let sizes = vec![(0, MS), (1000, 9 * MS), (2000, 30 * MS), (1000, 10 * MS)];
        let shown = shown(true, false).with_sizes(sizes);
        assert_eq!(shown.kept_by_size(1000, 11 * MS), Some(10 * MS));
        assert_eq!(shown.kept_by_size(1200, 13 * MS), Some(12 * MS));
        assert_eq!(shown.kept_by_size(1800, 22 * MS), Some(27 * MS));
        assert_eq!(shown.kept_by_size(1200, 16 * MS), None, "another kind of step");
        assert_eq!(shown.kept_by_size(700, 7 * MS), Some(7 * MS));
        assert_eq!(shown.kept_by_size(600, 6 * MS), None, "too small");
        assert_eq!(shown.kept_by_size(0, Duration::ZERO), None);
    }

    #[test]
    fn what_tells_less_does_not_replace_what_was_known() {
        for [before, now] in [[true, false], [false, true], [false, false]] {
            let known = shown(true, now).or(Some(Shown { kept: 2 * MS, ..shown(true, before) }));
            assert_eq!(known.kept, if before { 2 * MS } else { MS });
        }
    }
}
