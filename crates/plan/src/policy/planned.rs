//! A plan: what it is made from, what steps have shown of it since, and its report.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::Resources;
use super::labels::Labels;
use super::unforeseen::Unforeseen;
use super::watch::Seen;
use crate::report::{Baseline, PlanReport, PlanRow};
use crate::schedule::Schedule;
use crate::step_profile::StepProfile;
use crate::{Budgets, Caps, Frontier, Goal, Machine, Placement, Plan, Prediction, ScopeId, Tally};

/// A plan whose steps exceed their goal is replaced by one that is to take less time or, where little time was planned, by one whose peak
/// is higher by this share, doubled each time. The lower the peak, the larger the stalls that effects outside the simulation cause.
const RAISE: f64 = 0.05;
/// How often that is done; after that everything is kept.
const LOOSENED: u32 = 4;
/// How often a plan whose steps take less time than the goal allows is replaced by one that is to take more.
const TIGHTENED: u32 = 3;
/// The share of what the goal allows that corrected plans aim for.
const AIM: f64 = 0.97;
/// Steps that take less than this share of what the goal allows are a reason to take more.
const UNUSED: f64 = 0.7;
/// At most this many times what was allowed before is allowed at once.
const LEAP: f64 = 1.5;
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

/// What steps have shown of a profile since it was taken.
#[derive(Clone, Debug, Default)]
pub(super) struct Corrections {
    /// How often it was corrected without a baseline.
    pub(super) count: u32,
    /// The times of the latest steps that kept everything, if any did.
    pub(super) baseline: Vec<Duration>,
    /// Steps of plans below this peak exceed the goal.
    least_peak: u64,
    /// What plans may take of the time that the goal allows beyond a step with everything kept, as a share of it: less than all if steps
    /// take longer than planned, and more if they take less.
    allowance: Option<f64>,
    /// How often a plan's steps exceeded the goal, and how often they were well within it.
    loosened: u32,
    tightened: u32,
    pub(super) unforeseen: Unforeseen,
}

/// Step times as multiples of the time with everything kept, less one: what the goal allows, and what was planned and measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extra {
    pub(super) allowed: f64,
    pub(super) planned: f64,
    pub(super) measured: f64,
}

impl Corrections {
    fn allowance(&self) -> f64 {
        self.allowance.unwrap_or(1.0)
    }

    /// Steps under `plan` exceeded the goal.
    pub(super) fn loosen(&mut self, plan: &Plan, extra: Extra) {
        self.loosened += 1;
        if self.loosened > LOOSENED {
            self.least_peak = u64::MAX;
        } else if extra.planned > extra.measured / 2.0 {
            let share = AIM * extra.planned / extra.measured;
            let less = 0.95 * extra.planned / extra.allowed;
            self.allowance = Some(share.min(less).min(0.9 * self.allowance()));
        } else {
            let higher = (1.0 + RAISE * f64::from(1 << (self.loosened - 1))) * plan.prediction.peak() as f64;
            self.least_peak = higher as u64;
        }
    }

    /// Whether steps of a plan that takes what it may have so much time left that another plan is worth trying.
    pub(super) fn may_tighten(&self, extra: Extra) -> bool {
        let takes_all = extra.planned > 0.8 * self.allowance() * extra.allowed;
        let leaves = extra.measured < UNUSED * extra.allowed;
        takes_all && leaves && self.tightened < TIGHTENED && self.least_peak == 0
    }

    /// Steps of the plan took less time than the goal allows.
    pub(super) fn tighten(&mut self, extra: Extra) {
        self.tightened += 1;
        let most = LEAP * self.allowance();
        let share = if extra.measured > 0.0 { AIM * extra.planned / extra.measured } else { most };
        self.allowance = Some(share.clamp(self.allowance(), most));
    }

    /// Forgets what was learned from stalls.
    pub(super) fn forget_stalls(&mut self) {
        (self.least_peak, self.allowance, self.loosened, self.tightened) = (0, None, 0, 0);
    }
}

impl Planned {
    pub(super) fn new(
        objective: &Objective,
        profile: StepProfile,
        machine: Machine,
        corrections: Corrections,
    ) -> Planned {
        let (plan, in_reach) = best(objective, &profile, &machine, &corrections);
        let schedule = Arc::new(profile.schedule(&plan.placements));
        Planned { profile, machine, plan, schedule, in_reach, corrections, report: None }
    }

    /// How long computing took in steps of the plan, as a multiple of what was planned.
    pub(super) fn pace(&self, seen: Seen) -> f64 {
        let Prediction { step, stall, .. } = self.plan.prediction;
        let expected = step.saturating_sub(stall.total()) * self.profile.micro_batches.max(1);
        let computed = seen.wall.saturating_sub(seen.stall);
        computed.as_secs_f64() / expected.as_secs_f64().max(f64::MIN_POSITIVE)
    }

    /// How long a step with everything kept would take, as far as is known.
    pub(super) fn kept_step(&self) -> Duration {
        self.profile.work.computed() * self.profile.micro_batches.max(1)
    }

    /// What a step that took `wall` took beyond one with everything kept, which takes `kept`, beside what a goal of `most` times that
    /// allows and what was planned.
    pub(super) fn extra(&self, most: f64, wall: Duration, kept: Duration) -> Extra {
        let beyond = |time: Duration, kept: Duration| {
            time.as_secs_f64() / kept.as_secs_f64().max(f64::MIN_POSITIVE) - 1.0
        };
        let planned = beyond(self.plan.prediction.step, self.profile.work.computed());
        Extra { allowed: most - 1.0, planned, measured: beyond(wall, kept) }
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
            baseline: match self.corrections.baseline[..] {
                [] => Baseline::Profile,
                _ => Baseline::Measured,
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
