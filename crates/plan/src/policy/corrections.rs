//! What steps have shown of a plan.

use super::unforeseen::Unforeseen;
use super::weighing::Weight;
use crate::Plan;

/// A plan whose steps exceed their goal is replaced by one that is to take less time or, where little time was planned, by one whose peak
/// is higher by this share, doubled each time. The lower the peak, the larger the stalls that effects outside the simulation cause.
const RAISE: f64 = 0.05;
/// How often that is done; after that everything is kept.
const LOOSENED: u32 = 4;
/// How often a plan whose steps take less time than the goal allows is replaced by one that is to take more.
const TIGHTENED: u32 = 3;
/// The share of what the goal allows that corrected plans aim for, and how much of the standard error they leave besides.
const AIM: f64 = 0.97;
const CAUTION: f64 = 0.5;
/// Steps that surely take less than this share of what the goal allows are a reason to take more.
const UNUSED: f64 = 0.85;
/// At most this many times what was allowed before is allowed at once.
const LEAP: f64 = 1.5;
/// Steps exceed their goal, or are well within it, only beyond this share of a step.
const TELLING_OVER: f64 = 0.001;
/// What a plan takes is clear if its standard error is less than this share of what the goal allows, or if it is this many standard errors
/// away from what the goal allows.
const CLOSE: f64 = 0.05;
const CLEAR: f64 = 1.5;
/// How far plans are from taking what was planned, as multiples of it: at first, and from one plan to the next. And how far they are from
/// that, as a share of a step.
const FIRST_DOUBT: f64 = 0.5;
const NEXT_DOUBT: f64 = 0.15;
const BESIDES: f64 = 0.003;

/// What steps have shown of a profile since it was taken.
#[derive(Clone, Debug, Default)]
pub(super) struct Corrections {
    /// How often it was corrected without a baseline.
    pub(super) count: u32,
    /// Whether steps that keep everything were timed.
    pub(super) is_measured: bool,
    /// What plans turned out to cost, once one was weighed.
    pub(super) cost: Option<Cost>,
    /// Steps of plans below this peak exceed the goal.
    pub(super) least_peak: u64,
    /// What plans may take of the time that the goal allows beyond a step with everything kept, as a share of it: less than all if steps
    /// take longer than planned, and more if they take less.
    allowance: Option<f64>,
    /// How often a plan's steps exceeded the goal, and how often they were well within it.
    pub(super) loosened: u32,
    pub(super) tightened: u32,
    pub(super) unforeseen: Unforeseen,
}

/// What plans take beyond a step with everything kept, as a multiple of what is planned, with its standard error.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    times: f64,
    error: f64,
}

/// Step times as multiples of the time with everything kept, less one: what the goal allows, and what was planned and measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extra {
    pub(super) allowed: f64,
    pub(super) planned: f64,
    pub(super) measured: f64,
    /// The standard error of what was measured.
    pub(super) error: f64,
}

impl Corrections {
    pub(super) fn allowance(&self) -> f64 {
        self.allowance.unwrap_or(1.0)
    }

    /// Steps under `plan` exceeded the goal.
    pub(super) fn loosen(&mut self, plan: &Plan, extra: Extra) {
        self.loosened += 1;
        if self.loosened > LOOSENED {
            self.least_peak = u64::MAX;
        } else if extra.planned > extra.measured / 2.0 {
            let less = 0.95 * extra.planned / extra.allowed;
            self.allowance = Some(extra.aim().min(less).min(0.9 * self.allowance()));
        } else {
            let higher = (1.0 + RAISE * f64::from(1 << (self.loosened - 1))) * plan.prediction.peak() as f64;
            self.least_peak = higher as u64;
        }
    }

    /// Whether steps of a plan that takes what it may have so much time left that another plan is worth trying.
    pub(super) fn may_tighten(&self, extra: Extra) -> bool {
        let takes_all = extra.planned > 0.8 * self.allowance() * extra.allowed;
        let leaves = extra.measured + extra.error < UNUSED * extra.allowed;
        takes_all && leaves && self.tightened < TIGHTENED && self.least_peak == 0
    }

    /// Steps of the plan took less time than the goal allows.
    pub(super) fn tighten(&mut self, extra: Extra) {
        self.tightened += 1;
        let most = LEAP * self.allowance();
        let share = if extra.measured > 0.0 { extra.aim() } else { most };
        self.allowance = Some(share.clamp(self.allowance(), most));
    }

    /// Forgets what was learned from stalls.
    pub(super) fn forget_stalls(&mut self) {
        (self.least_peak, self.allowance, self.loosened, self.tightened) = (0, None, 0, 0);
        self.cost = None;
    }
}

impl Default for Cost {
    fn default() -> Cost {
        Cost { times: 1.0, error: FIRST_DOUBT }
    }
}

impl Cost {
    /// What a plan is expected to take, of which `planned` is planned.
    pub(super) fn expected(self, planned: f64) -> f64 {
        self.times * planned
    }

    /// The cost as known once such a plan was weighed, and what the plan takes by all that is known. What was measured counts the more, the
    /// smaller its error is beside that of what was expected.
    pub(super) fn weighed(self, planned: f64, allowed: f64, weight: Weight) -> (Cost, Extra) {
        let doubt = self.error.max(NEXT_DOUBT);
        let by_plan = (doubt * planned).powi(2);
        let expected = by_plan + BESIDES.powi(2);
        let all = expected + weight.error.powi(2);
        let news = weight.extra - self.expected(planned);
        let times = self.times + news * doubt.powi(2) * planned / all;
        let cost = Cost { times: times.max(0.0), error: doubt * (1.0 - by_plan / all).sqrt() };
        let measured = self.expected(planned) + news * expected / all;
        let error = (expected * weight.error.powi(2) / all).sqrt();
        (cost, Extra { allowed, planned, measured, error })
    }
}

impl Extra {
    pub(super) fn is_over(self) -> bool {
        self.measured > self.allowed + TELLING_OVER
    }

    /// Whether more steps would hardly tell more.
    pub(super) fn is_clear(self) -> bool {
        let apart = (self.measured - self.allowed).abs();
        self.error < CLOSE * self.allowed || apart > CLEAR * self.error
    }

    /// The share of what the goal allows that may be planned for steps to take what it allows.
    fn aim(self) -> f64 {
        AIM * self.planned / (self.measured + CAUTION * self.error)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// What was measured counts this much, if `error` is its standard error.
    fn share_of_news(error: f64) -> f64 {
        let weight = Weight { kept: Duration::from_secs(1), extra: 0.06, error };
        let (cost, extra) = Cost::default().weighed(0.02, 0.02, weight);
        assert!((1.0..=3.0).contains(&cost.times) && extra.error <= error.min(0.011), "{cost:?} {extra:?}");
        (extra.measured - 0.02) / 0.04
    }

    #[test]
    fn what_was_measured_counts_as_much_as_it_is_certain() {
        assert!((share_of_news(0.0) - 1.0).abs() < 1e-9);
        assert!(share_of_news(0.002) > 0.9);
        assert!((0.2..0.4).contains(&share_of_news(0.018)));
        assert!(share_of_news(1.0) < 0.001);
    }

    #[test]
    fn the_next_plan_is_expected_to_cost_what_the_last_one_did() {
        let weight = Weight { kept: Duration::from_secs(1), extra: 0.15, error: 0.001 };
        let (cost, _) = Cost::default().weighed(0.1, 0.1, weight);
        assert!((cost.expected(0.06) - 0.09).abs() < 0.001, "{cost:?}");
        let noise = Weight { extra: 0.14, error: 0.05, ..weight };
        let (_, extra) = cost.weighed(0.06, 0.1, noise);
        assert!(!extra.is_over() && extra.measured > 0.09, "{extra:?}");
    }

    #[test]
    fn corrected_plans_leave_time_for_what_is_uncertain() {
        let extra = Extra { allowed: 0.05, planned: 0.05, measured: 0.06, error: 0.0 };
        let uncertain = Extra { error: 0.01, ..extra };
        assert!((0.8..0.833).contains(&extra.aim()) && (0.7..0.76).contains(&uncertain.aim()));
        assert!(extra.is_clear() && !Extra { error: 0.008, ..extra }.is_clear());
    }
}
