//! What plans cost: what was measured of a plan's steps, and how certain that is.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// No comparison has more steps of each kind.
pub(super) const MOST: usize = 8;
/// How much of the standard error corrected plans leave of what they may take.
const CAUTION: f64 = 0.5;
/// Where steps vary so much that the error is larger than plans are off anyway, this much of it counts as beyond the goal.
const DOUBT: f64 = 1.5;
/// Steps exceed their goal, or are well within it, only beyond this share of a step.
const TELLING_OVER: f64 = 0.0005;
/// What a plan takes is clear if its standard error is less than this share of what the goal allows, or if it is this many standard errors
/// away from what the goal allows.
const CLOSE: f64 = 0.1;
const CLEAR: f64 = 1.5;
/// Steps that surely take less than this share of what the goal allows leave time for more.
const UNUSED: f64 = 0.96;
/// Steps are far beyond their goal if they take so much more than it allows, as a share of that.
const FAR: f64 = 0.25;
/// What is this many standard errors away from what was expected is no chance.
const CERTAIN: f64 = 3.0;
/// How far plans are from taking what was planned, as multiples of it: at first, and from one plan to the next. And how far they are from
/// that, as a share of a step.
pub(super) const FIRST_DOUBT: f64 = 0.5;
const NEXT_DOUBT: f64 = 0.2;
/// The same of what the plan's own steps have shown to be recomputing and waiting, and of the rest.
const SHOWN_DOUBT: f64 = 0.05;
pub(super) const BESIDES: f64 = 0.003;
const MOST_BESIDES: f64 = 0.5;
/// Another clock makes what plans take no longer or shorter than by this share.
const MOST_SLOWER: f64 = 0.25;
/// So much of the standard error of what it does counts as one of the comparison. With all of it, plans left a sixth of a goal of 0.05
/// (`tests/time_goals.rs`).
const SLOWER_DOUBT: f64 = 0.5;

/// Steps are longer or shorter than expected beyond this share, or beyond this many standard deviations where they vary more.
const TELLING_CHANGE: f64 = 0.03;
const TELLING_DEVIATIONS: f64 = 3.0;
/// What steps that keep everything took once says of what they would take now, as a share of it: how far machines drift.
const DRIFT: f64 = 0.0125;
/// Steps of a plan are beyond the goal if they are so by this many standard errors.
pub(super) const SURE: f64 = 2.5;
/// A plan that was never weighed hardly takes more than what is planned and so many times how far it may be from that.
const DOUBTS: f64 = 2.0;
/// No plan takes more than this many times what was planned.
const MOST_TIMES: f64 = 1000.0;

/// What the comparison has shown.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Weight {
    /// What a step that keeps everything takes, if there were any of about the planned size.
    pub(super) kept: Option<Told>,
    /// What a planned step takes beyond that, as a share of it, and the standard error of this share; at one clock, if that is known.
    pub(super) extra: f64,
    pub(super) error: f64,
    /// What it takes still longer because the clock is slower in planned steps, and the standard error of that. `None` where the steps were
    /// compared as they are.
    pub(super) slower: Option<[f64; 2]>,
    /// The standard deviation of a single step, as a share of it, and what is left of it at one clock, if that explains any.
    pub(super) deviation: f64,
    pub(super) apart: f64,
    /// Whether planned steps were beside what those of other sizes tell.
    pub(super) is_by_others: bool,
}

impl Weight {
    /// Whether planned steps, however few, were far beyond what a goal allows.
    pub(super) fn is_far_beyond(&self, allowed: f64) -> bool {
        let over = self.extra - allowed;
        over > FAR * allowed && over > CERTAIN * self.error
    }
}

/// What steps of some size tell of how long one of the planned size takes if it keeps everything.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Told {
    pub(super) wall: Duration,
    /// Whether they have the planned size.
    pub(super) is_of_size: bool,
}

impl Told {
    /// The shorter: a first step may be cold.
    pub(super) fn better(self, other: Told) -> Told {
        std::cmp::min_by_key(self, other, |told| told.wall)
    }
}

/// What plans take beyond a step with everything kept: so many times what is planned, and something besides that does not go with it, such
/// as recording, as a share of a step; both with their standard errors, and at one clock of the device.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Cost {
    times: f64,
    error: f64,
    #[serde(default)]
    besides: f64,
    #[serde(default)]
    besides_error: f64,
    /// By which share of that a slower clock makes planned steps longer still, in the plan that was compared last.
    #[serde(default)]
    slower: f64,
    /// Which share is still unknown of what moving may take besides, of the program's own work.
    #[serde(default)]
    moving: f64,
    /// The standard deviation of a single step that was measured last, as a share of it.
    deviation: f64,
    /// The same of steps as they are compared, if that is less.
    #[serde(default)]
    apart: Option<f64>,
}

/// Step times as multiples of the time with everything kept, less one and less what the program's thread does for any plan: what the goal
/// allows, and what was planned and measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extra {
    pub(super) allowed: f64,
    /// What it allows besides, for what is uncertain.
    pub(super) spare: f64,
    pub(super) planned: f64,
    pub(super) measured: f64,
    /// The part of what was measured that does not go with what is planned, and the part that is due to a slower clock.
    pub(super) besides: f64,
    pub(super) slower: f64,
    /// The standard error of what was measured.
    pub(super) error: f64,
}

impl Cost {
    /// Of a plan before any was weighed, if it is as likely as not to be off by this share of what is planned, and by this share of a step
    /// besides.
    pub(super) fn first(doubt: f64, besides: f64) -> Cost {
        Cost {
            times: 1.0,
            error: doubt.min(FIRST_DOUBT),
            besides: 0.0,
            besides_error: besides.min(MOST_BESIDES),
            slower: 0.0,
            moving: 1.0,
            deviation: 0.0,
            apart: None,
        }
    }

    /// The same, with all numbers within what steps may show.
    pub(super) fn within_reason(self) -> Cost {
        Cost {
            times: self.times.clamp(0.0, MOST_TIMES),
            error: self.error.clamp(0.0, FIRST_DOUBT),
            besides: self.besides.clamp(0.0, MOST_BESIDES),
            besides_error: self.besides_error.clamp(0.0, MOST_BESIDES),
            slower: self.slower.clamp(-MOST_SLOWER, MOST_SLOWER),
            moving: self.moving.clamp(0.0, 1.0),
            deviation: self.deviation.clamp(0.0, 1.0),
            apart: self.apart.map(|apart| apart.clamp(0.0, 1.0)),
        }
    }

    /// The same, if this share of what differs from what was known before is not due to what is planned.
    pub(super) fn explained(self, before: Cost, share: f64) -> Cost {
        let of = |before: f64, now: f64| before + (1.0 - share) * (now - before);
        Cost { times: of(before.times, self.times), besides: of(before.besides, self.besides), ..self }
    }

    /// The same before a comparison of the next plan, of which `planned` is planned. Of its steps themselves is known, if anything, that
    /// recomputing and waiting take `shown`, where the first of these two was planned.
    pub(super) fn of_next(self, planned: f64, shown: Option<[f64; 2]>) -> Cost {
        let doubt = self.error.max(NEXT_DOUBT);
        let known =
            shown.filter(|[counted_on, takes]| planned > 0.0 && counted_on.is_finite() && takes.is_finite());
        let Some([counted_on, takes]) = known else {
            return Cost { error: doubt, ..self };
        };
        // Nothing is known of the rest, which is what moving takes.
        let rest = planned - counted_on;
        let times = ((takes + self.times * rest) / planned).clamp(0.0, MOST_TIMES);
        Cost { times, error: (SHOWN_DOUBT * takes).hypot(doubt * rest) / planned, ..self }
    }

    /// The same of steps that others take so many times as long as.
    pub(super) fn of_others(self, times: f64) -> Cost {
        let times = times.clamp(0.0, MOST_TIMES);
        let besides = (times * self.besides).min(MOST_BESIDES);
        Cost { besides, besides_error: (times * self.besides_error).min(MOST_BESIDES), ..self }
    }

    /// The share of what the goal allows that plans may be planned to take if they are hardly to take more, though none was weighed.
    pub(super) fn sure_share(self) -> f64 {
        1.0 / (self.times + DOUBTS * self.error)
    }

    /// Whether steps take as long as the goal allows whatever is planned.
    pub(super) fn leaves_nothing(self, allowed: f64) -> bool {
        leaves_nothing(self.besides, allowed)
    }

    /// What a plan is expected to take, of which `planned` is planned.
    pub(super) fn expected(self, planned: f64) -> f64 {
        (1.0 + self.slower) * self.at_one_clock(planned)
    }

    /// The same, at the clock of steps that keep everything.
    pub(super) fn at_one_clock(self, planned: f64) -> f64 {
        self.times * planned + self.besides
    }

    /// What a plan is expected to take besides what is planned, and the standard error of that.
    pub(super) fn besides(self) -> [f64; 2] {
        [self.besides, self.besides_error]
    }

    /// Whether a comparison would tell more of what a plan takes than is known, of which `planned` is planned, and `moving` is what moving
    /// may take besides.
    pub(super) fn is_vague(self, planned: f64, moving: f64) -> bool {
        let doubt =
            (self.error.max(NEXT_DOUBT) * planned).hypot(self.moving * moving).hypot(self.besides_error);
        doubt > self.apart.unwrap_or(self.deviation) * (2.0 / MOST as f64).sqrt()
    }

    /// The standard error of what steps take beyond those that kept everything, if so many tell it, and one of them varies so much by itself.
    pub(super) fn chance(self, count: usize, deviation: f64) -> f64 {
        let deviation = self.deviation.max(deviation);
        DRIFT.hypot(deviation * (1.0 / count.max(1) as f64 + 2.0 / MOST as f64).sqrt())
    }

    /// By which share steps differ from what is expected that are not taken for chance.
    pub(super) fn telling_change(self) -> f64 {
        TELLING_CHANGE.max(TELLING_DEVIATIONS * self.deviation)
    }

    /// The cost as known once such a plan was weighed, and what the plan takes by all that is known. What was measured counts the more, the
    /// smaller its error is beside that of what was expected: how far plans are from what is planned, what they take besides, and `moving`,
    /// which is what moving may take, as a share of a step. If it clearly is not what was expected, all of that was as wrong as this shows.
    pub(super) fn weighed(self, planned: f64, moving: f64, allowed: f64, weight: Weight) -> (Cost, Extra) {
        let doubt = self.error;
        let [_, besides] = self.besides();
        let [by_plan, by_moving, by_besides, by_chance] =
            [doubt * planned, self.moving * moving, besides, BESIDES].map(|doubt| doubt.powi(2));
        // Steps that were compared as they are had another clock, as others before them.
        let steadied = if weight.slower.is_some() { 1.0 } else { 1.0 / (1.0 + self.slower) };
        let [extra, error] = [weight.extra, weight.error].map(|share| steadied * share);
        let news = extra - self.at_one_clock(planned);
        let is_shown = news.abs() > CERTAIN * error;
        let shown = if is_shown { news.powi(2) - error.powi(2) } else { 0.0 };
        let known = by_plan + by_moving + by_besides + by_chance;
        let worse = (shown / known).max(1.0);
        let all = worse * known + error.powi(2);
        // How much of the news is due to one of them.
        let share = |by: f64| worse * by / all;
        let less = |by: f64| (1.0 - share(by)).max(0.0).sqrt();
        let times = if planned > 0.0 { self.times + news * share(by_plan) / planned } else { self.times };
        let at_one_clock = self.at_one_clock(planned) + news * share(known);
        let [slower, slower_error] = weight.slower.unwrap_or([self.slower * at_one_clock, 0.0]);
        let by_clock = if at_one_clock > 0.0 { slower / at_one_clock } else { 0.0 };
        let cost = Cost {
            times: times.max(0.0),
            error: doubt * less(by_plan),
            besides: (self.besides + news * share(by_besides)).max(0.0),
            besides_error: besides * less(by_besides),
            slower: by_clock.clamp(-MOST_SLOWER, MOST_SLOWER),
            moving: self.moving * less(by_moving),
            deviation: weight.deviation,
            apart: Some(weight.apart),
        };
        let error = (share(known) * error.powi(2)).sqrt().hypot(SLOWER_DOUBT * slower_error);
        let measured = at_one_clock + slower;
        (cost, Extra { allowed, planned, measured, spare: 0.0, besides: cost.besides, slower, error })
    }
}

impl Extra {
    /// Whether steps exceed the goal.
    pub(super) fn is_over(self) -> bool {
        self.measured + self.doubt() > self.allowed + self.spare + TELLING_OVER
    }

    /// Whether steps surely leave some of what the goal allows.
    pub(super) fn leaves_time(self) -> bool {
        self.measured + self.error < UNUSED * self.allowed
    }

    /// Whether few steps are enough to tell that they take too long.
    pub(super) fn is_far_over(self) -> bool {
        let over = self.measured - self.allowed;
        over > FAR * self.allowed && over > CERTAIN * self.error
    }

    /// Whether more steps would hardly tell more.
    pub(super) fn is_clear(self) -> bool {
        let apart = (self.measured - self.allowed).abs();
        self.error < CLOSE * self.allowed || apart > CLEAR * self.error
    }

    /// The share of what plans aim at that may be planned for steps to take that; 0 if they take as much whatever is planned. What is uncertain
    /// counts as far as there is nothing to spare for it.
    pub(super) fn aim(self) -> f64 {
        let uncertain = CAUTION * self.error + self.doubt();
        let by_plan = self.measured - self.besides + (uncertain - self.spare).max(0.0);
        let left = 1.0 - self.besides / self.allowed.max(f64::MIN_POSITIVE);
        (left * self.planned / by_plan.max(f64::MIN_POSITIVE)).max(0.0)
    }

    /// Whether steps take as long as the goal allows whatever is planned.
    pub(super) fn leaves_nothing(self) -> bool {
        leaves_nothing(self.besides, self.allowed)
    }

    /// How much longer than measured steps may be, as far as that matters.
    fn doubt(self) -> f64 {
        DOUBT * (self.error - BESIDES).max(0.0)
    }
}

/// Whether what steps take besides what is planned is all that the goal allows.
fn leaves_nothing(besides: f64, allowed: f64) -> bool {
    allowed < 0.0 || (besides > 0.0 && besides >= allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What was measured counts this much, if `error` is its standard error.
    fn share_of_news(error: f64) -> f64 {
        let weight = Weight {
            kept: Some(Told { wall: Duration::from_secs(1), is_of_size: true }),
            extra: 0.06,
            error,
            slower: None,
            deviation: error,
            apart: error,
            is_by_others: false,
        };
        let (cost, extra) = Cost::first(FIRST_DOUBT, 0.0).weighed(0.02, 0.0, 0.02, weight);
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
    fn what_clearly_takes_longer_than_planned_is_not_passed_for_chance() {
        let weight = |extra| Weight {
            kept: Some(Told { wall: Duration::from_secs(1), is_of_size: true }),
            extra,
            error: 0.05,
            slower: None,
            deviation: 0.1,
            apart: 0.1,
            is_by_others: false,
        };
        let (_, extra) = Cost::first(FIRST_DOUBT, 0.0).weighed(0.01, 0.0, 0.1, weight(1.0));
        assert!(extra.is_over() && extra.measured > 0.9, "{extra:?}");
        let (_, extra) = Cost::first(FIRST_DOUBT, 0.0).weighed(0.1, 0.0, 0.1, weight(0.3));
        assert!(extra.is_over() && (0.27..0.3).contains(&extra.measured), "{extra:?}");
        let (_, extra) = Cost::first(FIRST_DOUBT, 0.0).weighed(0.01, 0.0, 0.1, weight(0.07));
        assert!(!extra.is_over() && extra.measured < 0.02, "{extra:?}");
    }

    #[test]
    fn a_plan_that_moves_is_believed_to_be_free_only_once_that_was_measured() {
        let weight = Weight {
            kept: Some(Told { wall: Duration::from_secs(1), is_of_size: true }),
            extra: 0.15,
            error: 0.05,
            slower: None,
            deviation: 0.07,
            apart: 0.07,
            is_by_others: false,
        };
        let of_first = |moving| Cost::first(FIRST_DOUBT, 0.0).weighed(0.001, moving, 0.1, weight);
        let (cost, extra) = of_first(0.15);
        assert!(extra.measured > 0.12 && extra.is_over(), "{extra:?}");
        assert!(of_first(0.0).1.measured < 0.01);
        let again = Weight { extra: 0.05, ..weight };
        let (_, later) = cost.weighed(0.12, 0.15, 0.1, again);
        assert!((0.06..0.11).contains(&later.measured), "what was learned counts: {later:?}");
        assert!(cost.is_vague(0.0, 1.0) && !cost.is_vague(0.0, 0.0));
    }

    #[test]
    fn the_next_plan_is_expected_to_cost_what_the_last_one_did() {
        let weight = Weight {
            kept: Some(Told { wall: Duration::from_secs(1), is_of_size: true }),
            extra: 0.15,
            error: 0.001,
            slower: None,
            deviation: 0.001,
            apart: 0.001,
            is_by_others: false,
        };
        let (cost, _) = Cost::first(FIRST_DOUBT, 0.0).weighed(0.1, 0.0, 0.1, weight);
        assert!((cost.expected(0.06) - 0.09).abs() < 0.001, "{cost:?}");
        let noise = Weight { extra: 0.14, error: 0.05, ..weight };
        let (_, extra) = cost.of_next(0.055, None).weighed(0.055, 0.0, 0.1, noise);
        assert!(!extra.is_over() && extra.measured > 0.08, "{extra:?}");
        let (_, extra) = cost.of_next(0.062, None).weighed(0.062, 0.0, 0.1, noise);
        assert!(
            extra.is_over() && extra.measured < 0.1,
            "what is uncertain counts as beyond the goal: {extra:?}"
        );
    }

    #[test]
    fn what_steps_show_of_themselves_counts_more_than_a_comparison_that_is_uncertain() {
        let first = Cost::first(0.2, 0.0);
        let weight = |extra| Weight {
            kept: Some(Told { wall: Duration::from_secs(1), is_of_size: true }),
            extra,
            error: 0.008,
            slower: None,
            deviation: 0.01,
            apart: 0.01,
            is_by_others: false,
        };
        // Of 0.018, 0.015 were to be recomputing and waiting, and moving was to take the rest.
        let weighed =
            |shown, extra| first.of_next(0.018, shown).weighed(0.018, 0.0, 0.02, weight(extra)).1.measured;
        let [untold, told] = [None, Some([0.015, 0.015])].map(|shown| weighed(shown, 0.035));
        assert!((0.018..0.021).contains(&told) && untold > told + 0.001, "{told} {untold}");
        assert!((0.021..0.026).contains(&weighed(Some([0.015, 0.021]), 0.024)));
        assert!((0.009..0.015).contains(&weighed(Some([0.015, 0.008]), 0.012)));
        // A plan that takes nothing has nothing to show.
        assert!(first.of_next(0.0, Some([0.0, 0.01])).times.is_finite());
    }

    #[test]
    fn what_a_slower_clock_takes_comes_on_top_of_what_plans_show_of_themselves() {
        let first = Cost::first(0.2, 0.0).of_next(0.09, Some([0.08, 0.08]));
        let weight = |slower| Weight {
            kept: None,
            extra: 0.09,
            error: 0.01,
            slower: Some([slower, 0.004]),
            deviation: 0.01,
            apart: 0.002,
            is_by_others: false,
        };
        let [(alike, without), (slower, with)] =
            [0.0, 0.009].map(|slower| first.weighed(0.09, 0.0, 0.1, weight(slower)));
        assert!((with.measured - without.measured - 0.009).abs() < 1e-9, "{with:?} {without:?}");
        assert!((slower.expected(0.09) - with.measured).abs() < 0.002, "later steps are as slow: {slower:?}");
        assert_eq!(slower.at_one_clock(0.05), alike.at_one_clock(0.05));
        assert!(without.error > 0.002, "{without:?}");
    }

    #[test]
    fn steps_that_are_compared_as_they_are_have_another_clock_as_those_before_them() {
        let weight = |extra, error, slower| Weight {
            kept: None,
            extra,
            error,
            slower,
            deviation: 0.01,
            apart: 0.01,
            is_by_others: false,
        };
        let (cost, _) =
            Cost::first(0.2, 0.0).weighed(0.09, 0.0, 0.1, weight(0.09, 0.001, Some([0.009, 0.0])));
        let expected = cost.expected(0.09);
        for error in [0.004, 0.012] {
            let (after, extra) =
                cost.of_next(0.09, None).weighed(0.09, 0.0, 0.1, weight(expected, error, None));
            assert!((extra.measured - expected).abs() < 1e-9, "{extra:?}, and not {expected}");
            assert!((after.expected(0.09) - expected).abs() < 1e-9, "{after:?}");
        }
    }

    #[test]
    fn corrected_plans_leave_time_for_what_is_uncertain() {
        let extra = Extra {
            allowed: 0.05,
            planned: 0.05,
            measured: 0.06,
            spare: 0.0,
            besides: 0.0,
            slower: 0.0,
            error: 0.0,
        };
        let uncertain = Extra { error: 0.01, ..extra };
        assert!((0.83..0.84).contains(&extra.aim()) && (0.6..0.7).contains(&uncertain.aim()));
        assert!(extra.is_clear() && !Extra { error: 0.008, ..extra }.is_clear());
        let [exact, covered] = [0.0, 0.002].map(|error| Extra { spare: 0.0015, error, ..extra }.aim());
        assert!(exact == covered && exact == extra.aim(), "there is something to spare for that");
        assert!(Extra { spare: 0.0015, ..uncertain }.aim() < exact);
    }
}
