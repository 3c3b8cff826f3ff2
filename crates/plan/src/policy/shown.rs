//! What steps of one kind have shown that says something of others.

use std::time::Duration;

use super::corrections::Corrections;
use crate::Machine;

/// Steps that keep everything take as many times as long as others as they save bytes, if that is at most so many times as much or as little
/// and the profile has it so, give or take the next. A profile is off by up to a fifth where processors compute.
const NEAR: f64 = 1.5;
const AGREEING: f64 = 1.4;
/// Sizes that differ by no more than this share are one.
const ALIKE: f64 = 0.01;
/// No more sizes are known. The oldest is forgotten first.
const MOST: usize = 16;

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
        let Corrections { longer, is_measured, .. } = *corrections;
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

    /// What is known with what this kind shows, beside what others have shown before.
    pub(super) fn beside(self, before: Option<Shown>) -> Shown {
        match before {
            Some(before) if before.rank() > self.rank() => before,
            before => Shown { sizes: before.map(|before| before.sizes).unwrap_or_default(), ..self },
        }
    }

    /// Steps that save so many bytes have shown that they take this if they keep everything.
    pub(super) fn sees(&mut self, bytes: u64, kept: Duration) {
        if bytes == 0 {
            return;
        }
        self.sizes.retain(|(other, _)| (*other as f64 / bytes as f64 - 1.0).abs() > ALIKE);
        self.sizes.push((bytes, kept));
        if self.sizes.len() > MOST {
            self.sizes.remove(0);
        }
    }

    /// How long a step takes that saves so many bytes and keeps everything, if those of about its size tell, and the profile has it about so.
    pub(super) fn kept_by_size(&self, bytes: u64, by_profile: Duration) -> Option<Duration> {
        let times = |other: u64| bytes as f64 / other as f64;
        let apart = |(other, _): &&(u64, Duration)| times(*other).ln().abs();
        let (nearest, kept) = *self.sizes.iter().min_by(|one, other| apart(one).total_cmp(&apart(other)))?;
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
        let mut shown = shown(true, false);
        assert_eq!(shown.kept_by_size(1000, 10 * MS), None);
        shown.sees(1000, 10 * MS);
        shown.sees(2000, 30 * MS);
        assert_eq!(shown.kept_by_size(1200, 13 * MS), Some(12 * MS));
        assert_eq!(shown.kept_by_size(1800, 22 * MS), Some(27 * MS));
        assert_eq!(shown.kept_by_size(1200, 18 * MS), None, "another kind of step");
        assert_eq!(shown.kept_by_size(600, 6 * MS), None, "too small");
        shown.sees(1001, 11 * MS);
        assert_eq!(shown.kept_by_size(1001, 11 * MS), Some(11 * MS), "the same size again");
    }

    #[test]
    fn sizes_are_known_whichever_kind_tells_the_rest() {
        for (before, now) in [(true, false), (false, true), (false, false)] {
            let mut known = shown(true, before);
            known.sees(1000, 10 * MS);
            let both = shown(true, now).beside(Some(known));
            assert_eq!(both.is_compared(), before || now);
            assert_eq!(both.kept_by_size(1000, 10 * MS), Some(10 * MS));
        }
    }
}
