//! A plan: what it is made from, what steps have shown of it since, and its report. Pure.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use ssdtrain_plan::{Budgets, Caps, Frontier, Goal, Machine, Placement, Plan, Prediction, Release};

use super::schedule::{PlannedSave, Schedule};
use super::unforeseen::Unforeseen;
use super::watch::Seen;
use crate::profile::{Profile, Save};
use crate::telemetry::{Baseline, PlanReport, PlanRow, ScopeId, Scopes, Tally};

/// A plan whose steps exceed their goal is replaced by one whose peak is higher by this share, doubled each time. The lower the peak, the
/// larger the stalls that effects outside the simulation cause.
const RAISE: f64 = 0.05;
/// How often that is done; after that everything is kept.
const RAISES: i32 = 4;
const SECONDS_PER_DAY: f64 = 86_400.0;

/// The goal of a plan, and the resources it may use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Objective {
    pub(crate) goal: Goal,
    /// Host memory and disk space, in bytes.
    pub(crate) host_pool: u64,
    pub(crate) disk: u64,
    pub(crate) release: Release,
    /// Bytes that may be written to the disk in a day.
    pub(crate) written_per_day: Option<u64>,
}

#[derive(Debug)]
pub(super) struct Planned {
    pub(super) profile: Profile,
    pub(super) machine: Machine,
    pub(super) plan: Plan,
    pub(super) schedule: Arc<Schedule>,
    in_reach: bool,
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
    /// How often `least_peak` was raised.
    raised: i32,
    pub(super) unforeseen: Unforeseen,
}

impl Corrections {
    /// Steps under `plan` exceeded the goal.
    pub(super) fn raise(&mut self, plan: &Plan) {
        let higher = (1.0 + RAISE * 2_f64.powi(self.raised)) * plan.prediction.peak() as f64;
        self.least_peak = if self.raised < RAISES { higher as u64 } else { u64::MAX };
        self.raised += 1;
    }

    /// Forgets what was learned from stalls.
    pub(super) fn forget_stalls(&mut self) {
        (self.least_peak, self.raised) = (0, 0);
    }
}

impl Planned {
    pub(super) fn new(
        objective: &Objective,
        profile: Profile,
        machine: Machine,
        corrections: Corrections,
    ) -> Planned {
        let (plan, in_reach) = best(objective, &profile, &machine, &corrections);
        let line = |(save, entry): &(Save, usize)| PlannedSave {
            bytes: save.bytes,
            scope: save.scope,
            placement: plan.placements[*entry],
        };
        let schedule = Arc::new(Schedule::new(profile.saves.iter().map(line).collect()));
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
        self.plan.placements.iter().all(|placement| *placement == Placement::Keep)
    }

    /// Its report, as plan number `plans`.
    pub(super) fn report(&mut self, plans: u64, scopes: &Scopes) -> Arc<PlanReport> {
        let report = self.report.take().unwrap_or_else(|| Arc::new(self.new_report(plans, scopes)));
        Arc::clone(self.report.insert(report))
    }

    fn new_report(&self, plans: u64, scopes: &Scopes) -> PlanReport {
        let Planned { profile, machine, plan, in_reach, .. } = self;
        let mut rows: Vec<PlanRow> = Vec::new();
        let mut places: HashMap<ScopeId, usize> = HashMap::new();
        let mut seen = vec![false; plan.placements.len()];
        for &(save, entry) in &profile.saves {
            if std::mem::replace(&mut seen[entry], true) {
                continue;
            }
            let place = *places.entry(save.scope).or_insert_with(|| {
                rows.push(PlanRow { scope: scopes.name(save.scope), ..PlanRow::default() });
                rows.len() - 1
            });
            let (row, profiled) = (&mut rows[place], profile.work.activations[entry]);
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
            loosened: self.corrections.raised.unsigned_abs(),
            plans,
            rows,
        }
    }
}

/// The plan for the goal, or else the one that comes closest to it; and whether the goal is reached.
fn best(
    objective: &Objective,
    profile: &Profile,
    machine: &Machine,
    corrections: &Corrections,
) -> (Plan, bool) {
    let per_step =
        |per_day: u64| (per_day as f64 * profile.work.computed().as_secs_f64() / SECONDS_PER_DAY) as u64;
    let caps = Caps { disk: objective.disk, written: objective.written_per_day.map_or(u64::MAX, per_step) };
    let frontier = Frontier::new(&profile.work, machine, caps);
    let peak = objective.goal.peak.map(|peak| peak.saturating_sub(corrections.unforeseen.bytes()));
    let goal = Goal { peak, ..objective.goal };
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
fn kept(profile: &Profile, machine: &Machine) -> Plan {
    let placements = vec![Placement::Keep; profile.work.activations.len()];
    let budgets = Budgets::default();
    Plan { prediction: profile.work.simulate(&placements, machine, &budgets), placements, budgets }
}
