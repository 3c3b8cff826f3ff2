//! A plan: what it is made from, and its report.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::corrections::Corrections;
use super::cost::{BESIDES, Cost, Extra, FIRST_DOUBT};
use super::labels::Labels;
use super::moving::moving_doubt;
use super::objective::Objective;
use super::shown::Shown;
use super::watch::Seen;
use crate::graph::pointwise_rate;
use crate::machine::MOST_MOVING;
use crate::report::{Baseline, PlanReport, PlanRow};
use crate::schedule::Schedule;
use crate::step_profile::StepProfile;
use crate::{
    Budgets, Caps, Frontier, Goal, Handling, Machine, Placement, Plan, Prediction, Release, ScopeId, Tally,
};

/// If computing takes longer or shorter than planned by more than this share, the profile's times are corrected. A device that waits
/// between its kernels, as in a profiled step, may run faster than one that does not.
pub(super) const TELLING_PACE: f64 = 0.02;
/// Steps that take more than so many times what is planned are judged as if it were no more.
const MOST_PACE: f64 = 1e6;
/// Recomputing takes no more than so many times as long as planned, or as little of it.
const MOST_RERUNS: f64 = 4.0;
/// A plan saves at least so many times as much of the peak as it takes of the time, or this share of the peak.
const WORTH: f64 = 2.0;
const MUCH: f64 = 0.1;
/// Where a plan is not worth what it takes, one is tried next that takes at most so many times as much; no more than this number of plans is.
const LESS: f64 = 0.9;
const TRIED: u32 = 8;
/// How far a profiled step is from taking what others take, as a share of it.
const PROFILE_DOUBT: f64 = 0.05;

/// How far plans are from taking what was planned on a device, as a multiple of it, and how much farther by how far the profiled step was
/// from taking what others take.
const DEVICE_DOUBT: f64 = 0.2;
const OTHER_PACE_DOUBT: f64 = 1.5;
/// What plans may take besides what is planned, as a share of a step: on a device, so many times the square of the share by which others are
/// shorter than the profiled one, which shows how much that waits for its program; and where processors compute.
const WAITING_BESIDES: f64 = 0.2;
const PROCESSOR_BESIDES: f64 = 0.02;

/// Where steps that keep everything are shorter than the profiled one by the first of these shares, a device has always something to do, and
/// where they are so by the second, it always waits for its program.
const WAITING: [f64; 2] = [0.05, 0.3];

#[derive(Clone, Debug)]
pub(super) struct Planned {
    pub(super) profile: StepProfile,
    pub(super) machine: Machine,
    pub(super) plan: Plan,
    pub(super) schedule: Arc<Schedule>,
    pub(super) in_reach: bool,
    pub(super) corrections: Corrections,
    kept_peak: u64,
    /// What a step of it saves.
    pub(super) saved_bytes: u64,
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
        let kept_peak = kept(&profile, &machine).prediction.peak();
        let saved_bytes = profile.saved_bytes();
        Planned {
            profile,
            machine,
            plan,
            schedule,
            in_reach,
            corrections,
            kept_peak,
            saved_bytes,
            report: None,
        }
    }

    /// What its steps have shown that says something of others.
    pub(super) fn shown(&self) -> Shown {
        Shown::new(&self.machine, &self.corrections, self.kept_step())
    }

    /// Its plans were not compared with anything, so they are taken to cost what those of others do. Where no step of it has kept
    /// everything, others of about its size show what that takes, or else the profile: computing is to it what it is for others.
    pub(super) fn takes_over(&mut self, objective: &Objective, shown: &Shown) {
        let Shown { longer, moving, exposed, kept, corrections, .. } = shown;
        if !self.corrections.is_measured {
            self.machine.exposed = *exposed;
            let pace = (1.0 + longer) / (1.0 + self.corrections.longer);
            let may_be_off = self.machine.release == Release::WhenStored;
            let by_profile = Duration::try_from_secs_f64(pace * self.kept_step().as_secs_f64()).ok();
            let by_profile = by_profile.filter(|_| may_be_off);
            let by_size = by_profile.and_then(|time| shown.kept_by_size(self.saved_bytes, time));
            match by_size {
                Some(kept) => self.paced(1.0 + beyond(kept, self.kept_step())),
                None if self.corrections.is_by_others => {}
                None => self.paced(pace),
            }
            self.corrections.is_by_others |= by_size.is_some();
        }
        if !self.corrections.is_measured || corrections.cost.is_some() {
            self.machine.moving = *moving;
        }
        let times = kept.as_secs_f64() / self.kept_step().as_secs_f64().max(f64::MIN_POSITIVE);
        // A plan need not recompute anything.
        let allowed =
            objective.most_time().map(|most| most - 1.0 - fixed(&self.profile, &self.machine, false));
        if shown.is_compared() {
            self.corrections.doubted_moving = 0.0;
        }
        self.corrections.takes_over(corrections, times, allowed);
        self.stays_unproven();
    }

    /// No comparison has shown what its plans take, and none will.
    pub(super) fn stays_unproven(&mut self) {
        self.machine.moving = self.machine.moving.max(std::mem::take(&mut self.corrections.doubted_moving));
        if self.corrections.knows_kept() {
            self.corrections.unproven = Some(self.first_cost().sure_share());
        }
    }

    /// How long computing took in steps of the plan, as a multiple of what was planned.
    pub(super) fn pace(&self, seen: Seen) -> f64 {
        let Prediction { step, stall, .. } = self.plan.prediction;
        let expected = step.saturating_sub(stall.total()) * self.profile.micro_batches.max(1);
        let computed = seen.wall.saturating_sub(seen.stall);
        // What plans have turned out to cost is no slower computing.
        let cost = self.corrections.cost.filter(|_| !self.keeps_all());
        let known = cost.map_or(0.0, |cost| cost.expected(self.extra()) - self.extra());
        let expected = expected.as_secs_f64() + (known * self.kept_step().as_secs_f64()).max(0.0);
        (computed.as_secs_f64() / expected.max(f64::MIN_POSITIVE)).min(MOST_PACE)
    }

    /// What its steps are expected to cost before any were weighed. A device whose profiled step takes what others take has shown what each
    /// operation does; one that waits for its program, or processors that move bytes besides, have not.
    pub(super) fn first_cost(&self) -> Cost {
        let longer = self.corrections.longer;
        match self.machine.release {
            Release::InStreamOrder => {
                let waits = WAITING_BESIDES * longer.min(0.0).powi(2);
                // Plans count on a part of it.
                let besides = (waits - self.fixed()).max(waits / 4.0);
                Cost::first(DEVICE_DOUBT + OTHER_PACE_DOUBT * longer.abs(), besides)
            }
            Release::WhenStored => Cost::first(FIRST_DOUBT, PROCESSOR_BESIDES),
            Release::OnceWritten => Cost::first(FIRST_DOUBT, 0.0),
        }
    }

    /// How long a step with everything kept would take, as far as is known.
    pub(super) fn kept_step(&self) -> Duration {
        self.profile.work.computed() * self.profile.micro_batches.max(1)
    }

    /// What the program's thread has to do beyond a step with everything kept, as a share of that, whatever is moved or recomputed.
    pub(super) fn fixed(&self) -> f64 {
        match self.keeps_all() {
            true => 0.0,
            false => fixed(&self.profile, &self.machine, self.plan.prediction.recomputed > Duration::ZERO),
        }
    }

    /// What the plan takes beyond that.
    pub(super) fn extra(&self) -> f64 {
        beyond(self.plan.prediction.step, self.profile.work.computed()) - self.fixed()
    }

    /// What of that is recomputing and waiting.
    pub(super) fn recomputed_and_stalled(&self) -> f64 {
        let Prediction { recomputed, stall, .. } = self.plan.prediction;
        self.share_of_kept(recomputed + stall.total())
    }

    /// What of that is memory-bound operations and waiting, if it is known which operations are.
    pub(super) fn idle(&self) -> Option<f64> {
        pointwise_rate(&self.profile.work.activations)?;
        let Prediction { memory_bound, stall, .. } = self.plan.prediction;
        Some(self.share_of_kept(memory_bound + stall.total()))
    }

    /// A part of a micro-batch's time, of one with everything kept.
    fn share_of_kept(&self, time: Duration) -> f64 {
        time.as_secs_f64() / self.profile.work.computed().as_secs_f64().max(f64::MIN_POSITIVE)
    }

    /// How many times as long as planned recomputing took, if it took `rerun`.
    pub(super) fn reruns_took(&self, rerun: Duration) -> f64 {
        let planned = self.plan.prediction.recomputed * self.profile.micro_batches.max(1);
        let times = rerun.as_secs_f64() / planned.as_secs_f64();
        if times.is_finite() { times.clamp(1.0 / MOST_RERUNS, MOST_RERUNS) } else { 1.0 }
    }

    /// Whether the time that a device takes for reruns is what steps take for them.
    pub(super) fn shows_reruns(&self) -> bool {
        self.machine.release == Release::InStreamOrder && self.corrections.is_behind == Some(true)
    }

    /// What a step that took `wall` took beyond one with everything kept, which takes `kept`, and beyond what is fixed, beside what was
    /// planned, and what a goal allows whose plans aim at `most` times that and have `spare` beyond it.
    pub(super) fn measured(&self, most: f64, spare: f64, wall: Duration, kept: Duration) -> Extra {
        let fixed = self.fixed();
        let (planned, measured) = (self.extra(), beyond(wall, kept) - fixed);
        let cost = self.corrections.cost;
        let besides = cost.map_or(0.0, |cost| cost.besides()[0]).min(measured.max(0.0));
        let slower = cost.map_or(0.0, |cost| cost.expected(planned) - cost.at_one_clock(planned));
        Extra { allowed: most - 1.0 - fixed, planned, measured, spare, besides, slower, error: 0.0 }
    }

    /// As steps of the plan show, one with everything kept takes `kept`, however that was known.
    pub(super) fn is_known_to_keep_in(&mut self, kept: Duration) {
        let Corrections { is_measured, is_by_others, .. } = self.corrections;
        self.keeps_in(kept);
        (self.corrections.is_measured, self.corrections.is_by_others) = (is_measured, is_by_others);
    }

    /// A step with everything kept takes `kept`. Returns whether that is far from what was known.
    pub(super) fn keeps_in(&mut self, kept: Duration) -> bool {
        let pace = 1.0 + beyond(kept, self.kept_step());
        self.paced(pace);
        if !self.corrections.is_measured {
            self.shows_waiting();
        }
        let Planned { profile, machine, plan, corrections, .. } = self;
        plan.prediction = profile.work.simulate(&plan.placements, machine, &plan.budgets);
        (corrections.is_measured, corrections.is_by_others, self.report) = (true, false, None);
        (pace - 1.0).abs() > TELLING_PACE
    }

    /// Computing takes `pace` times as long as was known. A profiled step takes longer than others because what is saved is recorded and
    /// moves, and a device waits for its program meanwhile. Each operation runs as fast as ever, so reruns are never quicker than they
    /// were then.
    pub(super) fn paced(&mut self, pace: f64) {
        let Planned { profile, corrections, .. } = self;
        let before = 1.0 + corrections.longer;
        let pace = pace.clamp(1.0 / MOST_PACE, MOST_PACE);
        let since = (before * pace).clamp(1.0 / MOST_PACE, MOST_PACE);
        corrections.longer = since - 1.0;
        profile.work.pace(pace, since.max(1.0) / before.max(1.0));
    }

    /// A step with everything kept takes `kept`, as the first such steps show. Where processors move the bytes, what the profiled step took
    /// beyond that is partly what moving costs. Returns whether another plan may be better now.
    pub(super) fn shows_moving(&mut self, kept: Duration) -> bool {
        let Planned { profile, machine, corrections, .. } = self;
        let is_new = !corrections.knows_kept() && corrections.count == 0;
        let is_first = is_new && profile.moved > 0 && machine.release == Release::WhenStored;
        if is_first {
            let computed = profile.work.computed() * profile.micro_batches.max(1);
            let Handling { saves, operations, .. } = profile.work.handling;
            let handled = (saves + operations) * profile.micro_batches.max(1);
            let beyond = computed.saturating_sub(kept + handled).as_secs_f64();
            let moved = profile.moved as f64;
            let saved = profile.work.activations.iter().filter(|one| one.is_saved());
            let each = profile.saved_bytes() as f64
                / f64::from(profile.micro_batches.max(1))
                / saved.count().max(1) as f64;
            let by_moving = moving_doubt(machine, moved, moved / each.max(1.0));
            let share = share_of(by_moving, PROFILE_DOUBT * kept.as_secs_f64());
            machine.moving = ((share * beyond).min(by_moving) / moved).min(MOST_MOVING);
        }
        let has_changed = self.keeps_in(kept);
        has_changed || (is_first && self.machine.moving > 0.0)
    }

    /// The more a device waited for its program in the profiled step, the more of what the program's thread does for the cache shows.
    pub(super) fn shows_waiting(&mut self) {
        let Planned { machine, corrections, .. } = self;
        if machine.release != Release::WhenStored {
            let waited = (-corrections.longer - WAITING[0]) / (WAITING[1] - WAITING[0]);
            machine.exposed = if corrections.is_behind == Some(true) { 0.0 } else { waited.clamp(0.0, 1.0) };
        }
    }

    /// Whether the device waits for its program, so that steps take as long as that does, whatever their size.
    pub(super) fn waits(&self) -> bool {
        self.machine.release != Release::WhenStored && self.corrections.is_behind == Some(false)
    }

    /// Whether what it saves of the peak is worth the time that it takes, as far as that is known.
    pub(super) fn is_worth_it(&self) -> bool {
        let Planned { profile, machine, corrections, plan, .. } = self;
        let worth = Worth { profile, machine, corrections, kept: &kept(profile, machine) };
        worth.is_worth_it(plan)
    }

    /// A comparison is to show what moving costs, rather than the profiled step.
    pub(super) fn doubt_moving(&mut self) {
        let Planned { machine, corrections, .. } = self;
        corrections.doubted_moving = corrections.doubted_moving.max(std::mem::take(&mut machine.moving));
    }

    /// Steps of the plan exceeded the goal. What was known of its cost is `before`.
    pub(super) fn loosen(&mut self, before: Cost, extra: Extra) {
        let (extra, is_explained) = self.explain(before, extra);
        self.corrections.loosen(&self.plan, extra, is_explained);
    }

    /// Steps of the plan took less time than the goal allows. What was known of its cost is `before`.
    pub(super) fn tighten(&mut self, before: Cost, extra: Extra) {
        let (extra, _) = self.explain(before, extra);
        self.corrections.tighten(extra);
    }

    /// What was measured beside what was expected is partly what moving costs, the more of it the more the plan moves. Returns the same
    /// with what would have been planned if that had been known, and whether that explains most of it.
    fn explain(&mut self, before: Cost, extra: Extra) -> (Extra, bool) {
        let (moved, kept) = (self.moved(), self.kept_step().as_secs_f64());
        let news = extra.measured - extra.slower - before.at_one_clock(extra.planned);
        if moved == 0.0 || kept == 0.0 || news == 0.0 {
            return (extra, false);
        }
        let others = extra.planned - moved * self.machine.moving / kept;
        let by_moving = moving_doubt(&self.machine, moved, self.transfers()) / kept;
        let [_, besides] = before.besides();
        let share = share_of(by_moving, (FIRST_DOUBT * others).hypot(besides).hypot(BESIDES));
        let Planned { profile, machine, plan, corrections, .. } = self;
        let known = machine.moving;
        machine.moving = (known + share * news * kept / moved).clamp(0.0, MOST_MOVING);
        plan.prediction = profile.work.simulate(&plan.placements, machine, &plan.budgets);
        let explained = (machine.moving - known) * moved / kept;
        corrections.cost = corrections.cost.map(|cost| cost.explained(before, explained / news));
        let besides = corrections.cost.map_or(extra.besides, |cost| cost.besides()[0]).min(extra.besides);
        (Extra { planned: self.extra(), besides, ..extra }, explained > news.abs() / 2.0)
    }

    /// How far what moving takes of the program's own work may be from what the plan counts on, as a share of a step, before any was
    /// weighed. Engines take so little that it is within what plans are off anyway.
    pub(super) fn doubt_of_moving(&self) -> f64 {
        match self.machine.release {
            Release::WhenStored => {
                let kept = self.kept_step().as_secs_f64().max(f64::MIN_POSITIVE);
                moving_doubt(&self.machine, self.moved(), self.transfers()) / kept
            }
            Release::InStreamOrder | Release::OnceWritten => 0.0,
        }
    }

    /// How many bytes leave the device or come back in a step of the plan.
    fn moved(&self) -> f64 {
        let Prediction { copied_out, copied_in, written, read, .. } = self.plan.prediction;
        // What is copied may go through the disk besides.
        let moved = (copied_out + copied_in).max(written + read);
        moved as f64 * f64::from(self.profile.micro_batches.max(1))
    }

    /// In how many transfers.
    fn transfers(&self) -> f64 {
        let is_moved = |placement: &&Placement| placement.keeps_bytes() == Some(false);
        let storages = self.plan.placements.iter().filter(is_moved).count();
        2.0 * storages as f64 * f64::from(self.profile.micro_batches.max(1))
    }

    /// The activation peak of a step with everything kept.
    pub(super) fn kept_peak(&self) -> u64 {
        self.kept_peak
    }

    /// The most bytes at once besides activations.
    pub(super) fn besides_activations(&self) -> u64 {
        let work = &self.profile.work;
        let extras = work.activations.iter().map(|one| one.forward_extra.max(one.backward_extra));
        extras.fold(work.turn_extra, u64::max)
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
            step: plan.prediction.step.saturating_mul(profile.micro_batches),
            kept_step: self.kept_step(),
            baseline: match self.corrections {
                Corrections { is_measured: true, .. } => Baseline::Measured,
                Corrections { is_by_others: true, .. } => Baseline::Others,
                _ => Baseline::Profile,
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

/// How much of a sum is due to the one of two, if these are their standard deviations.
fn share_of(one: f64, other: f64) -> f64 {
    let all = one.powi(2) + other.powi(2);
    if all > 0.0 && all.is_finite() { one.powi(2) / all } else { 0.0 }
}

/// What the program's thread has to do for any plan, or any that recomputes something, as a share of a step with everything kept.
fn fixed(profile: &StepProfile, machine: &Machine, recomputes: bool) -> f64 {
    let handled = profile.work.handled_anyway(recomputes, machine).as_secs_f64();
    handled / profile.work.computed().as_secs_f64().max(f64::MIN_POSITIVE)
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
    let computed = profile.work.computed();
    let caps = Caps {
        disk: objective.resources.disk,
        written: objective.daily.map_or(u64::MAX, |daily| daily.within(computed)),
    };
    let frontier = Frontier::new(&profile.work, machine, caps);
    let limited = Some(objective.most_peak()).filter(|most| *most < u64::MAX);
    let peak = limited.map(|most| most.saturating_sub(corrections.unforeseen.bytes()));
    let kept = kept(profile, machine);
    let fits_kept = kept.prediction.peak() <= peak.unwrap_or(u64::MAX);
    // Where nothing has to move, the promise comes first.
    let share = if fits_kept { corrections.sure_allowance() } else { corrections.allowance() };
    // What plans may take goes on top of what all of them do, or all that recompute something.
    let within = |recomputes: bool| {
        let fixed = fixed(profile, machine, recomputes);
        objective.step().map(|most| match most - 1.0 - fixed {
            left if left > 0.0 => 1.0 + fixed + share * left,
            _ => most,
        })
    };
    let goal = Goal { peak, step: within(profile.work.may_recompute()) };
    let plan = frontier.plan_above(goal, corrections.least_peak).and_then(|plan| {
        // One that recomputes nothing has no use for the time that recording would have taken.
        let most = within(false).filter(|_| plan.prediction.recomputed.is_zero());
        match most {
            Some(most) if plan.prediction.step.as_secs_f64() > most * computed.as_secs_f64() => {
                frontier.plan_above(Goal { peak, step: Some(most) }, corrections.least_peak)
            }
            _ => Ok(plan),
        }
    });
    let may_keep = goal.step.is_some() && fits_kept;
    match plan {
        Ok(plan) if !may_keep || objective.most_time().is_none() => return (plan, true),
        Ok(plan) => {
            let above =
                |step: f64| frontier.plan_above(Goal { peak, step: Some(step) }, corrections.least_peak).ok();
            let worth = Worth { profile, machine, corrections, kept: &kept };
            return (worth.best(plan, above).unwrap_or(kept), true);
        }
        Err(_) if may_keep && corrections.least_peak > 0 => return (kept, true),
        Err(_) => {}
    }
    // The time is out of reach, but the peak may not be.
    let within = peak.and_then(|peak| frontier.plan(Goal::budget(peak)).ok());
    let plan = within.unwrap_or_else(|| frontier.lowest());
    // It may still be within the goal if it is not within what plans aim at.
    let most = goal.step.map(|aim| (aim + objective.spare()) * computed.as_secs_f64());
    let in_time = match most {
        Some(most) => objective.spare() > 0.0 && plan.prediction.step.as_secs_f64() <= most,
        None => true,
    };
    let shown = plan.prediction.peak().saturating_add(corrections.unforeseen.bytes());
    let in_reach = in_time && shown <= objective.goal.peak.unwrap_or(u64::MAX);
    (plan, in_reach)
}

/// What plans are worth that take the place of one that keeps everything.
struct Worth<'a> {
    profile: &'a StepProfile,
    machine: &'a Machine,
    corrections: &'a Corrections,
    kept: &'a Plan,
}

impl Worth<'_> {
    /// `plan`, or else the next one `above` it that is worth it. That one gets so many times the time of a step that keeps everything.
    fn best(&self, plan: Plan, above: impl Fn(f64) -> Option<Plan>) -> Option<Plan> {
        let mut next = Some(plan);
        for _ in 0..TRIED {
            let plan = next?;
            if self.is_worth_it(&plan) {
                return Some(plan);
            }
            let (planned, takes, saves) = self.of(&plan);
            // One that saves as much is worth so much, and one that saves less is worth less.
            let less = (saves / WORTH / takes).min(LESS) * planned;
            next = if less > 0.0 { above(1.0 + less) } else { None };
        }
        None
    }

    fn is_worth_it(&self, plan: &Plan) -> bool {
        let (_, takes, saves) = self.of(plan);
        saves >= (WORTH * takes).min(MUCH)
    }

    /// What a plan is planned to take of the time of a step that keeps everything, what it does take as far as that is known, and what it
    /// saves of the peak.
    fn of(&self, plan: &Plan) -> (f64, f64, f64) {
        let planned = beyond(plan.prediction.step, self.kept.prediction.step);
        let fixed = fixed(self.profile, self.machine, !plan.prediction.recomputed.is_zero());
        let takes = match (self.corrections.cost, self.corrections.unproven) {
            (Some(cost), _) => fixed + cost.expected(planned - fixed),
            // What it may take, since no comparison has shown what it does.
            (None, Some(sure)) => planned / sure,
            (None, None) => planned,
        };
        let saves = 1.0 - plan.prediction.peak() as f64 / self.kept.prediction.peak().max(1) as f64;
        (planned, takes, saves)
    }
}

/// The plan that keeps everything.
fn kept(profile: &StepProfile, machine: &Machine) -> Plan {
    let placements = profile.work.unplanned();
    let budgets = Budgets::default();
    Plan { prediction: profile.work.simulate(&placements, machine, &budgets), placements, budgets }
}
