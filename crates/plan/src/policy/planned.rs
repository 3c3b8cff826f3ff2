//! A plan: what it is made from, and its report.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::Resources;
use super::corrections::Corrections;
use super::cost::Extra;
use super::labels::Labels;
use super::watch::Seen;
use crate::report::{Baseline, PlanReport, PlanRow};
use crate::schedule::Schedule;
use crate::step_profile::StepProfile;
use crate::{Budgets, Caps, Frontier, Goal, Machine, Placement, Plan, Prediction, ScopeId, Tally};

/// If computing takes longer or shorter than planned by more than this share, the profile's times are corrected. A device that waits
/// between its kernels, as in a profiled step, may run faster than one that does not.
pub(super) const TELLING_PACE: f64 = 0.02;
/// Steps that take more than so many times what is planned are judged as if it were no more.
const MOST_PACE: f64 = 1e6;
const SECONDS_PER_DAY: f64 = 86_400.0;

/// The goal of a plan, and the resources it may use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Objective {
    pub(super) goal: Goal,
    pub(super) resources: Resources,
    /// Bytes that may be written to the disk in a day.
    pub(super) written_per_day: Option<u64>,
}

#[derive(Clone, Debug)]
pub(super) struct Planned {
    pub(super) profile: StepProfile,
    pub(super) machine: Machine,
    pub(super) plan: Plan,
    pub(super) schedule: Arc<Schedule>,
    pub(super) in_reach: bool,
    pub(super) corrections: Corrections,
    /// Its report, once one was asked for.
    report: Option<Arc<PlanReport>>,
}

impl Planned {
    pub(super) fn new(
        objective: &Objective,
        profile: StepProfile,
        machine: Machine,
        corrections: Corrections,
    ) -> Planned {
        let (plan, in_reach) = best(objective, &profile, &machine, &corrections);
        Planned::with(plan, in_reach, profile, machine, corrections)
    }

    /// With a plan that was made from this profile.
    pub(super) fn with(
        plan: Plan,
        in_reach: bool,
        profile: StepProfile,
        machine: Machine,
        corrections: Corrections,
    ) -> Planned {
        let schedule = Arc::new(profile.schedule(&plan.placements));
        Planned { profile, machine, plan, schedule, in_reach, corrections, report: None }
    }

    /// How long computing took in steps of the plan, as a multiple of what was planned.
    pub(super) fn pace(&self, seen: Seen) -> f64 {
        let Prediction { step, stall, .. } = self.plan.prediction;
        let expected = step.saturating_sub(stall.total()) * self.profile.micro_batches.max(1);
        let computed = seen.wall.saturating_sub(seen.stall);
        (computed.as_secs_f64() / expected.as_secs_f64().max(f64::MIN_POSITIVE)).min(MOST_PACE)
    }

    /// How long a step with everything kept would take, as far as is known.
    pub(super) fn kept_step(&self) -> Duration {
        self.profile.work.computed() * self.profile.micro_batches.max(1)
    }

    /// What the plan takes beyond a step with everything kept, as a share of it.
    pub(super) fn extra(&self) -> f64 {
        beyond(self.plan.prediction.step, self.profile.work.computed())
    }

    /// What a step that took `wall` took beyond one with everything kept, which takes `kept`, beside what a goal of `most` times that
    /// allows and what was planned.
    pub(super) fn measured(&self, most: f64, wall: Duration, kept: Duration) -> Extra {
        let (planned, measured) = (self.extra(), beyond(wall, kept));
        Extra { allowed: most - 1.0, planned, measured, error: 0.0 }
    }

    /// A step with everything kept takes `kept`. Returns whether that is far from what was known.
    pub(super) fn keeps_in(&mut self, kept: Duration) -> bool {
        let pace = 1.0 + beyond(kept, self.kept_step());
        let Planned { profile, machine, plan, .. } = self;
        profile.work.pace(pace);
        plan.prediction = profile.work.simulate(&plan.placements, machine, &plan.budgets);
        (self.corrections.is_measured, self.report) = (true, None);
        (pace - 1.0).abs() > TELLING_PACE
    }

    /// The activation peak of a step with everything kept.
    pub(super) fn kept_peak(&self) -> u64 {
        kept(&self.profile, &self.machine).prediction.peak()
    }

    /// The activation peak of a step that goes as planned.
    pub(super) fn peak(&self) -> u64 {
        self.plan.prediction.peak()
    }

    /// Whether all stays on the device.
    pub(super) fn keeps_all(&self) -> bool {
        self.plan.placements == self.profile.work.unplanned()
    }

    /// Its report, as plan number `plans`.
    pub(super) fn report(&mut self, plans: u64, name: &dyn Fn(ScopeId) -> String) -> Arc<PlanReport> {
        let report = self.report.take().unwrap_or_else(|| Arc::new(self.new_report(plans, name)));
        Arc::clone(self.report.insert(report))
    }

    fn new_report(&self, plans: u64, name: &dyn Fn(ScopeId) -> String) -> PlanReport {
        let Planned { profile, machine, plan, in_reach, .. } = self;
        let mut rows: Vec<PlanRow> = Vec::new();
        let mut places: HashMap<ScopeId, usize> = HashMap::new();
        let mut seen = vec![false; plan.placements.len()];
        for &(save, entry) in &profile.saves {
            if std::mem::replace(&mut seen[entry], true) {
                continue;
            }
            let place = *places.entry(save.scope).or_insert_with(|| {
                rows.push(PlanRow { scope: name(save.scope), ..PlanRow::default() });
                rows.len() - 1
            });
            let (row, profiled) = (&mut rows[place], &profile.work.activations[entry]);
            row.forward += profiled.forward;
            row.backward += profiled.backward;
            let tally = match plan.placements[entry] {
                Placement::Keep => &mut row.keep,
                Placement::Host => &mut row.host,
                Placement::Disk => &mut row.disk,
                Placement::Recompute => &mut row.recompute,
            };
            *tally = Tally { count: tally.count + 1, bytes: tally.bytes + save.bytes };
        }
        let labels = Labels::new(profile, name);
        let explain =
            |placements: &[Placement], budgets: &Budgets| profile.work.explain(placements, machine, budgets);
        let explanation = explain(&plan.placements, &plan.budgets);
        let kept_peak = (!self.keeps_all()).then(|| {
            let kept = explain(&profile.work.unplanned(), &Budgets::default());
            labels.peak(&kept.peak)
        });
        PlanReport {
            step: plan.prediction.step * profile.micro_batches,
            kept_step: self.kept_step(),
            baseline: match self.corrections.is_measured {
                true => Baseline::Measured,
                false => Baseline::Profile,
            },
            prediction: plan.prediction,
            budgets: plan.budgets,
            machine: *machine,
            in_reach: *in_reach,
            loosened: self.corrections.loosened,
            tightened: self.corrections.tightened,
            plans,
            rows,
            operations: labels.operations(&explanation),
            peak: labels.peak(&explanation.peak),
            kept_peak,
        }
    }
}

/// What `time` is beyond `kept`, as a share of that.
fn beyond(time: Duration, kept: Duration) -> f64 {
    time.as_secs_f64() / kept.as_secs_f64().max(f64::MIN_POSITIVE) - 1.0
}

/// The plan for the goal, or else the one that comes closest to it; and whether the goal is reached.
fn best(
    objective: &Objective,
    profile: &StepProfile,
    machine: &Machine,
    corrections: &Corrections,
) -> (Plan, bool) {
    let per_step =
        |per_day: u64| (per_day as f64 * profile.work.computed().as_secs_f64() / SECONDS_PER_DAY) as u64;
    let caps = Caps {
        disk: objective.resources.disk,
        written: objective.written_per_day.map_or(u64::MAX, per_step),
    };
    let frontier = Frontier::new(&profile.work, machine, caps);
    let peak = objective.goal.peak.map(|peak| peak.saturating_sub(corrections.unforeseen.bytes()));
    let step = objective.goal.step.map(|most| 1.0 + corrections.allowance() * (most - 1.0));
    let goal = Goal { peak, step };
    if let Ok(plan) = frontier.plan_above(goal, corrections.least_peak) {
        return (plan, true);
    }
    let kept = kept(profile, machine);
    if corrections.least_peak > 0 && kept.prediction.peak() <= peak.unwrap_or(u64::MAX) {
        return (kept, true);
    }
    // The time is out of reach, but the peak may not be.
    let within = peak.and_then(|peak| frontier.plan(Goal::budget(peak)).ok());
    let in_reach = within.is_some() && goal.step.is_none();
    (within.unwrap_or_else(|| frontier.lowest()), in_reach)
}

/// The plan that keeps everything.
fn kept(profile: &StepProfile, machine: &Machine) -> Plan {
    let placements = profile.work.unplanned();
    let budgets = Budgets::default();
    Plan { prediction: profile.work.simulate(&placements, machine, &budgets), placements, budgets }
}
