//! What becomes of a plan by what its steps have shown.

use std::time::Duration;

use super::super::cost::{Extra, SURE, Weight};
use super::super::decisions::Decision;
use super::super::objective::Objective;
use super::super::planned::{Planned, TELLING_PACE};
use super::super::watch::Seen;
use super::super::weighing::Weighing;
use super::{Kind, MOST_SCALE, may_compare};

/// Unplanned stalls of more than this share of the step justify another plan.
const TELLING_STALL: f64 = 0.002;
/// If recomputing takes longer or shorter than planned by more than this share, its times are corrected.
const TELLING_RERUNS: f64 = 0.05;
/// How often the times of a profile's reruns are corrected. Each time takes four of the steps in which plans are compared, and two plans that
/// are each off by something else could follow each other until none are left.
const RERUNS_CORRECTED: u32 = 2;
/// How often a profile is corrected without a baseline.
const CORRECTIONS: u32 = 4;

impl Kind {
    /// Judges a plan by the times of its steps. If the goal is a time, its first ones are compared with steps that keep everything, because
    /// a plan may cost more than its compute time shows, and later ones again if they are not what that has shown.
    pub(super) fn judge(&mut self, objective: &Objective, seen: Seen) {
        let planned = &mut self.planned;
        let is_paced = (planned.pace(seen) - 1.0).abs() <= TELLING_PACE;
        let kept = planned.kept_step();
        let is_quicker_than_kept = seen.wall < kept && seen.is_beyond(kept, TELLING_PACE);
        match objective.most_time() {
            // No plan makes steps quicker: those that kept everything were slow for another reason.
            Some(_) if !objective.compares && planned.corrections.knows_kept() && is_quicker_than_kept => {
                let pace = planned.pace(seen);
                self.kept_sizes.pace(pace);
                self.revise(objective, Decision::Baseline, |planned| {
                    planned.is_known_to_keep_in(kept.mul_f64(pace));
                });
            }
            Some(_) if planned.keeps_all() && is_paced => {}
            Some(_) if planned.keeps_all() => {
                let cost = planned.corrections.cost.unwrap_or_else(|| planned.first_cost());
                let longer = seen.usual.as_secs_f64() / kept.as_secs_f64().max(f64::MIN_POSITIVE) - 1.0;
                planned.keeps_in(seen.wall);
                self.kept_sizes.pace(seen.wall.as_secs_f64() / kept.as_secs_f64().max(f64::MIN_POSITIVE));
                if longer > SURE * cost.chance(seen.count, seen.deviation) {
                    planned.corrections.try_again();
                }
                self.revise(objective, Decision::Baseline, |_| {});
                // As everything was kept until now, it may be for comparison.
                if !self.planned.keeps_all() {
                    self.weighing = Some(Weighing::new(Some(Seen { is_strange: true, ..seen }), cost));
                }
            }
            Some(most) => {
                let is_unclear = planned.corrections.cost.is_none_or(|cost| {
                    let times = 1.0 + planned.fixed() + cost.expected(planned.extra());
                    let usual = kept.mul_f64(times.clamp(0.0, MOST_SCALE));
                    // Other plans have shown what this one takes.
                    let is_vague = cost.is_vague(planned.extra(), planned.doubt_of_moving());
                    let is_expected = seen.is_first && self.plans > 1 && !is_vague;
                    match is_expected {
                        true => planned.measured(most, objective.spare(), seen.wall, kept).is_over(),
                        false => seen.is_news() || seen.is_beyond(usual, cost.telling_change()),
                    }
                });
                let known = planned.corrections.cost.filter(|_| !seen.is_strange);
                match is_unclear {
                    true if may_compare(objective, Some(seen)) => {
                        self.weighing =
                            Some(Weighing::new(Some(seen), known.unwrap_or_else(|| planned.first_cost())));
                    }
                    true => self.judge_alone(objective, seen, most),
                    false => {}
                }
            }
            None if seen.is_news() => self.correct(objective, seen),
            None => {}
        }
    }

    /// Judges a plan for a time by its own steps, where none may keep everything any more.
    pub(super) fn judge_alone(&mut self, objective: &Objective, seen: Seen, most: f64) {
        let planned = &mut self.planned;
        if !planned.corrections.knows_kept() && self.kept_sizes.is_empty() {
            if seen.is_news() {
                self.correct(objective, seen);
            }
            return;
        }
        // Nothing that goes on with less memory takes what the goal allows: that is not the plan's fault.
        if !planned.in_reach {
            return;
        }
        // Steps that kept everything have shown what these take, and comparisons what plans do: only what is no chance tells more.
        let cost = planned.corrections.cost.unwrap_or_else(|| planned.first_cost());
        let extra = planned.measured(most, objective.spare(), seen.usual, planned.kept_step());
        if extra.measured - extra.allowed - extra.spare > SURE * cost.chance(seen.count, seen.deviation) {
            self.revise(objective, Decision::Slow, |planned| planned.loosen(cost, extra));
        }
    }

    /// Steps of the plan are being compared with steps that keep everything, so the time of computing is known now, and what the plan
    /// costs. If that is clear, or if no more are compared, a plan that exceeds the goal is loosened, and one that leaves time is tightened.
    pub(super) fn weigh(&mut self, objective: &Objective, weight: Weight, is_last: bool) {
        let Some(most) = objective.step() else { return };
        let Some(mut weighing) = self.weighing.take() else { return };
        weighing.last = Some(weight);
        self.kept_sizes = weighing.kept_sizes();
        let kept = weight.kept.and_then(|told| self.kept_by(told));
        let planned = &mut self.planned;
        if let Some(kept) = kept {
            planned.keeps_in(kept);
        }
        let (extra, doubt) = (planned.extra(), planned.doubt_of_moving());
        let fixed = planned.fixed();
        let beyond = Weight { extra: weight.extra - fixed, ..weight };
        let shown = weighing.shown().filter(|_| planned.shows_reruns());
        let before =
            weighing.cost.of_next(extra, shown.map(|takes| [planned.recomputed_and_stalled(), takes]));
        let (cost, extra) = before.weighed(extra, doubt, most - 1.0 - fixed, beyond);
        let extra = Extra { spare: objective.spare(), ..extra };
        let is_new = planned.corrections.cost.replace(cost).is_none();
        let is_over = extra.is_over();
        // Another plan that takes more has to be compared, too, and only steps of its size tell enough for that.
        let may_compare = objective.compares && !is_last && !weight.is_by_others;
        let may_tighten = may_compare && !is_over && planned.corrections.may_tighten(extra);
        // Two steps of each kind are enough where they are far beyond the goal, or where other plans have shown about the same, or the clock
        // explains what they vary by, but not for a plan that takes more.
        let is_told_little =
            (weighing.is_short() && (is_new || is_over)) || (weighing.has_few() && may_tighten);
        // One disturbance is not enough to keep everything for good.
        let is_far_over = extra.is_far_over() && !extra.leaves_nothing();
        let is_done =
            is_last || weighing.is_long() || if is_told_little { is_far_over } else { extra.is_clear() };
        if !is_done {
            self.weighing = Some(weighing);
            return;
        }
        self.watch.compared();
        // What has been shown to be within the goal stays, unless that leaves time or is not worth it.
        let is_close = !extra.leaves_time() || !may_compare;
        let stays = !is_over && is_close && self.planned.is_worth_it();
        self.planned.corrections.compared(extra, stays);
        if stays {
            return;
        }
        let why = match () {
            () if is_over => Decision::Slow,
            () if may_tighten => Decision::Quick,
            () => Decision::Baseline,
        };
        // Even a plan that meets the goal may take more than it is worth.
        self.revise(objective, why, |planned| match () {
            () if is_over => planned.loosen(before, extra),
            () if may_tighten => planned.tighten(before, extra),
            () => {}
        });
        if self.weighing.is_none() {
            // What is known tells enough of it.
            self.planned.corrections.forget_proven();
        }
    }

    /// In planned steps, recomputing took the device so long. If that is not what was planned, the times are corrected. Returns whether there
    /// is another plan.
    pub(super) fn reruns_took(&mut self, objective: &Objective, rerun: Duration) -> bool {
        let (times, plans) = (self.planned.reruns_took(rerun), self.plans);
        // Not all reruns are off by as much, so each plan may be off by something else.
        let may_correct = self.planned.corrections.reruns < RERUNS_CORRECTED;
        if may_correct && (times - 1.0).abs() > TELLING_RERUNS {
            self.revise(objective, Decision::Reruns, |planned| {
                planned.corrections.reruns += 1;
                planned.profile.work.pace(1.0, times);
            });
            if self.weighing.is_none() {
                self.returns_to_proven(objective);
            }
        }
        self.plans > plans
    }

    /// Corrects the profile by the times of the plan's steps, when nothing else shows how long a step with everything kept would take.
    pub(super) fn correct(&mut self, objective: &Objective, seen: Seen) {
        let planned = &mut self.planned;
        let Planned { profile, plan, corrections, .. } = planned;
        if seen.is_strange {
            corrections.count = 0;
        }
        if corrections.count == CORRECTIONS {
            return;
        }
        let [wall, stall] = [seen.wall, seen.stall].map(|time| time / profile.micro_batches.max(1));
        let beyond = stall.saturating_sub(plan.prediction.stall.total());
        let pace = planned.pace(seen);
        let kept = planned.profile.work.computed().mul_f64(pace);
        let extra = objective.step().map(|most| planned.measured(most, objective.spare(), wall, kept));
        let over = extra
            .filter(|extra| beyond.as_secs_f64() > TELLING_STALL * kept.as_secs_f64() && extra.is_over());
        let paced = (pace - 1.0).abs() <= TELLING_PACE;
        if paced && over.is_none() {
            return;
        }
        let why = if over.is_some() && paced { Decision::Slow } else { Decision::Pace };
        self.revise(objective, why, |planned| {
            planned.corrections.count += 1;
            match over {
                Some(extra) if paced => planned.corrections.loosen(&planned.plan, extra, false),
                // With corrected times, the stalls may differ too.
                _ => {
                    planned.paced(pace);
                    planned.shows_waiting();
                }
            }
        });
    }
}

/// A new plan for a time is compared from its first step on, unless the plans before it tell more of what it takes.
pub(super) fn first_weighing(objective: &Objective, planned: &Planned) -> Option<Weighing> {
    let cost = planned.corrections.cost;
    let is_vague = cost.is_none_or(|cost| cost.is_vague(planned.extra(), planned.doubt_of_moving()));
    let is_compared =
        objective.compares && objective.most_time().is_some() && is_vague && !planned.keeps_all();
    let known = cost.unwrap_or_else(|| planned.first_cost());
    is_compared.then(|| match planned.corrections.is_measured {
        true => Weighing::again(known),
        false => Weighing::new(None, known),
    })
}
