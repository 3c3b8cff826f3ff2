//! What steps have shown of a plan.

use serde::{Deserialize, Serialize};

use super::cost::{Cost, Extra};
use super::unforeseen::Unforeseen;
use crate::Plan;
use crate::machine::MOST_MOVING;

/// A plan whose steps exceed their goal is replaced by one that is to take less time or, where less than this share of what the goal allows
/// was planned, by one whose peak is higher. The lower the peak, the larger the stalls that effects outside the simulation cause.
const LITTLE: f64 = 0.2;
/// The peak becomes higher by this share, doubled each time.
const RAISE: f64 = 0.05;
/// How often that is done; after that everything is kept.
const LOOSENED: u32 = 4;
/// How often a plan whose steps take less time than the goal allows is replaced by one that is to take more.
const TIGHTENED: u32 = 3;
/// Computing takes no longer than so many times what it took in the profiled step, less one.
const MOST_LONGER: f64 = 1e6;
/// A plan that may take less than this share more is none that is worth trying.
const TELLING_MORE: f64 = 0.02;
/// At most this many times what was allowed before is allowed at once.
const LEAP: f64 = 1.5;

/// What steps have shown of a profile since it was taken.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Corrections {
    /// How often it was corrected without a baseline.
    #[serde(skip)]
    pub(super) count: u32,
    /// How often the times of reruns were corrected.
    #[serde(skip)]
    pub(super) reruns: u32,
    /// Whether steps that keep everything were timed.
    pub(super) is_measured: bool,
    /// Whether those of other kinds tell what one takes that keeps everything, since none was timed.
    #[serde(default)]
    pub(super) is_by_others: bool,
    /// By which share of it computing takes longer than in the profiled step.
    #[serde(default)]
    pub(super) longer: f64,
    /// Whether a device was behind its program in a step that kept everything, if any such step has told.
    #[serde(default)]
    pub(super) is_behind: Option<bool>,
    /// What plans turned out to cost, once one was weighed.
    pub(super) cost: Option<Cost>,
    /// Steps of plans below this peak exceed the goal.
    pub(super) least_peak: u64,
    /// What plans may take of the time that the goal allows beyond a step with everything kept, as a share of it: less than all if steps
    /// take longer than planned, and more if they take less.
    allowance: Option<f64>,
    /// The same of a plan that was seen to keep its goal.
    #[serde(default)]
    stays: Option<f64>,
    /// The least such share that was planned where steps exceeded the goal.
    #[serde(default)]
    too_much: Option<f64>,
    /// The share that was planned before a plan was tightened, until a comparison has shown what that takes.
    #[serde(skip)]
    proven: Option<f64>,
    /// Such a share that plans hardly exceed, where no comparison has shown what they take, and none will.
    #[serde(default)]
    pub(super) unproven: Option<f64>,
    /// What the profiled step has shown moving a byte to take, if no plan is worth that. It counts once no comparison can show anything else.
    #[serde(default)]
    pub(super) doubted_moving: f64,
    /// How often a plan's steps exceeded the goal, and how often they were well within it.
    pub(super) loosened: u32,
    pub(super) tightened: u32,
    pub(super) unforeseen: Unforeseen,
}

impl Corrections {
    /// Whether steps that keep everything have told what these take, if only others of about the size.
    pub(super) fn knows_kept(&self) -> bool {
        self.is_measured || self.is_by_others
    }

    pub(super) fn allowance(&self) -> f64 {
        self.stays.or(self.allowance).unwrap_or(1.0)
    }

    /// The same where nothing has to move, so that the promise comes first.
    pub(super) fn sure_allowance(&self) -> f64 {
        let sure = self.unproven.filter(|_| self.cost.is_none());
        self.allowance().min(sure.unwrap_or(f64::INFINITY))
    }

    /// Steps under `plan` exceeded the goal. If that is explained by what moving turned out to cost, the next plan counts on it, and none is
    /// lower than what has shown to be too much.
    pub(super) fn loosen(&mut self, plan: &Plan, extra: Extra, is_explained: bool) {
        self.loosened += 1;
        let planned = extra.planned / extra.allowed;
        self.too_much = Some(self.too_much.map_or(planned, |share| share.min(planned)));
        let known = self.allowance();
        self.stays = None;
        let is_little = !is_explained && extra.planned <= LITTLE * extra.allowed;
        if self.loosened > LOOSENED || extra.leaves_nothing() {
            self.least_peak = u64::MAX;
        } else if is_little {
            let higher = (1.0 + RAISE * f64::from(1 << (self.loosened - 1))) * plan.prediction.peak() as f64;
            self.least_peak = higher as u64;
        } else if is_explained {
            self.allowance = Some(extra.aim().min(known));
            self.least_peak = self.least_peak.max(plan.prediction.peak() + 1);
        } else {
            let less = 0.95 * extra.planned / extra.allowed;
            self.allowance = Some(extra.aim().min(less).min(known));
        }
    }

    /// Whether steps of a plan that takes what it may have so much time left that another plan is worth trying.
    pub(super) fn may_tighten(&self, extra: Extra) -> bool {
        let takes_all = extra.planned > 0.8 * self.allowance() * extra.allowed;
        let has_room = self.more(extra) > (1.0 + TELLING_MORE) * self.allowance();
        takes_all && has_room && extra.leaves_time() && self.tightened < TIGHTENED && self.least_peak == 0
    }

    /// What the next plan may take if steps of this one leave time.
    fn more(&self, extra: Extra) -> f64 {
        let most = self.most().max(self.allowance());
        let share = if extra.measured > 0.0 { extra.aim() } else { most };
        share.clamp(self.allowance(), most)
    }

    /// The most that the next plan may take of the time that the goal allows: half as much again, or midway to what was too much.
    fn most(&self) -> f64 {
        let midway = self.too_much.map_or(f64::INFINITY, |share| f64::midpoint(self.allowance(), share));
        midway.min(LEAP * self.allowance())
    }

    /// Steps of the plan took less time than the goal allows.
    pub(super) fn tighten(&mut self, extra: Extra) {
        self.tightened += 1;
        self.proven = Some(share_of(extra));
        self.allowance = Some(self.more(extra));
        self.stays = None;
    }

    /// A comparison has shown what the plan takes. If it is to stay, no later one for the same goal takes more or less.
    pub(super) fn compared(&mut self, extra: Extra, stays: bool) {
        self.forget_proven();
        self.doubted_moving = 0.0;
        let is_known = stays && extra.allowed > 0.0 && self.least_peak == 0;
        self.stays = is_known.then(|| share_of(extra).min(LEAP));
    }

    /// There is no reason any more to return to the plan before one that was tightened.
    pub(super) fn forget_proven(&mut self) {
        self.proven = None;
    }

    /// Plans may take again what was planned before one was tightened, if nothing has shown what that takes. Returns whether that is so.
    pub(super) fn returns_to_proven(&mut self) -> bool {
        let proven = self.proven.take();
        self.allowance = proven.or(self.allowance);
        proven.is_some()
    }

    /// Steps have become longer though everything is kept, so plans may not have been to blame: one more is tried. If its steps exceed the
    /// goal, everything is kept for good.
    pub(super) fn try_again(&mut self) {
        let is_limited = self.least_peak > 0 || self.allowance.is_some_and(|share| share < 1.0);
        if is_limited && self.loosened <= LOOSENED {
            (self.least_peak, self.allowance, self.stays, self.too_much) = (0, None, None, None);
            self.loosened = LOOSENED;
        }
    }

    /// What remains of them for another goal.
    pub(super) fn of_any_goal(self) -> Corrections {
        Corrections {
            allowance: None,
            stays: None,
            too_much: None,
            proven: None,
            unproven: None,
            count: 0,
            least_peak: 0,
            loosened: 0,
            tightened: 0,
            ..self
        }
    }

    /// What they say of steps of another profile.
    pub(super) fn of_other_steps(&self) -> Corrections {
        // That they may be planned with more than the goal allows, only their own comparison can tell.
        let allowance = self.allowance.filter(|share| *share > 0.0).map(|share| share.min(1.0));
        Corrections { cost: self.cost, allowance, ..Corrections::default() }
    }

    /// What they do not tell themselves is what `others` tell, which take so many times as long. If that leaves nothing of what the goal
    /// allows, everything is kept.
    pub(super) fn takes_over(&mut self, others: &Corrections, times: f64, allowed: Option<f64>) {
        self.cost = self.cost.or_else(|| others.cost.map(|cost| cost.of_others(times)));
        self.allowance = self.allowance.or(others.allowance);
        let leaves_nothing = |allowed| self.cost.is_some_and(|cost| cost.leaves_nothing(allowed));
        if allowed.is_some_and(leaves_nothing) {
            self.least_peak = u64::MAX;
        }
    }

    /// The same, with all numbers within what steps may show.
    pub(super) fn within_reason(self) -> Corrections {
        Corrections {
            longer: self.longer.clamp(-1.0, MOST_LONGER),
            cost: self.cost.map(Cost::within_reason),
            allowance: self.allowance.map(|share| share.clamp(0.0, LEAP.powi(TIGHTENED as i32))),
            stays: self.stays.map(|share| share.clamp(0.0, LEAP)),
            too_much: self.too_much.filter(|share| *share >= 0.0),
            unproven: self.unproven.map(|share| share.clamp(0.0, 1.0)),
            doubted_moving: self.doubted_moving.clamp(0.0, MOST_MOVING),
            loosened: self.loosened.min(LOOSENED + 1),
            tightened: self.tightened.min(TIGHTENED),
            unforeseen: self.unforeseen.within_reason(),
            ..self
        }
    }

    /// Forgets what was learned from stalls.
    pub(super) fn forget_stalls(&mut self) {
        (self.least_peak, self.allowance, self.stays, self.too_much) = (0, None, None, None);
        (self.loosened, self.tightened, self.cost) = (0, 0, None);
    }
}

/// The share of what the goal allows that was planned, and hardly more, so that it is enough for the same plan.
fn share_of(extra: Extra) -> f64 {
    (1.0 + 1e-9) * extra.planned / extra.allowed.max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Budgets, Prediction};

    /// Of a goal of 0.02, a plan that was to take all that plans may has taken so much.
    fn extra(corrections: &Corrections, measured: f64) -> Extra {
        let planned = 0.02 * corrections.allowance();
        Extra { allowed: 0.02, planned, measured, spare: 0.0, besides: 0.0, slower: 0.0, error: 0.0 }
    }

    #[test]
    fn a_plan_that_leaves_time_is_no_reason_for_one_that_was_too_much() {
        let plan =
            Plan { placements: vec![], budgets: Budgets::default(), prediction: Prediction::default() };
        let mut corrections = Corrections::default();
        corrections.loosen(&plan, extra(&corrections, 0.024), false);
        let loosened = corrections.allowance();
        assert!((0.82..0.84).contains(&loosened), "{loosened}");
        let leaves = extra(&corrections, 0.015);
        assert!(corrections.may_tighten(leaves));
        corrections.tighten(leaves);
        let tightened = corrections.allowance();
        assert!(tightened > loosened && tightened < f64::midpoint(loosened, 1.0) + 1e-9, "{tightened}");
        let too_much = extra(&corrections, 0.021);
        corrections.loosen(&plan, too_much, false);
        let again = extra(&corrections, 0.012);
        corrections.tighten(again);
        assert!(corrections.allowance() < tightened, "{corrections:?}");
    }

    #[test]
    fn a_plan_that_is_hardly_over_its_goal_is_loosened_by_a_twentieth() {
        let plan =
            Plan { placements: vec![], budgets: Budgets::default(), prediction: Prediction::default() };
        let mut corrections = Corrections::default();
        for loosened in [0.95, 0.95 * 0.95] {
            corrections.loosen(&plan, extra(&corrections, 0.0206), false);
            assert!((corrections.allowance() - loosened).abs() < 1e-9, "{corrections:?}");
        }
        let before = corrections.allowance();
        let beyond = Extra { planned: 0.03, ..extra(&corrections, 0.0206) };
        corrections.loosen(&plan, beyond, false);
        assert_eq!(
            corrections.allowance(),
            before,
            "one that was planned with more is no reason to allow more"
        );
    }

    #[test]
    fn a_plan_that_may_take_hardly_more_is_not_tried() {
        let close = Corrections { allowance: Some(0.97), too_much: Some(1.0), ..Corrections::default() };
        assert!(!close.may_tighten(extra(&close, 0.015)));
        let apart = Corrections { too_much: None, ..close };
        assert!(apart.may_tighten(extra(&apart, 0.015)));
        assert!(!apart.may_tighten(extra(&apart, 0.0197)), "it would be allowed 2 % more");
    }

    #[test]
    fn a_plan_that_stays_is_no_sign_that_plans_were_limited() {
        let mut corrections = Corrections::default();
        let takes_less = Extra { planned: 0.018, ..extra(&corrections, 0.019) };
        corrections.compared(takes_less, true);
        assert!(
            (corrections.allowance() - 0.9).abs() < 1e-6 && corrections.of_other_steps().allowance() == 1.0
        );
        corrections.try_again();
        assert_eq!(corrections.loosened, 0);
        corrections.compared(takes_less, false);
        assert_eq!(corrections.allowance(), 1.0);
    }
}
