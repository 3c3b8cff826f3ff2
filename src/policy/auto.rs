//! Planned steps: when to profile, what to plan for, and when a plan is no good any more. Pure.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::script::{Line, Script};
use super::watch::{Drift, Watch};
use crate::plan::{Caps, Frontier, Goal, Leaving, Limits, Machine, Placement, Plan, Workload};
use crate::profile::{Profile, Save};
use crate::telemetry::{PlanReport, PlanRow, ScopeId, Scopes, Tally};

/// The first step pays for what later ones find ready, so the second is the first to be profiled.
const FIRST_PROFILED: u64 = 2;
/// What storages may take of the device in steps that are not planned, where they leave it by themselves. Where they leave as late as
/// they may, it is nothing: what stays shows no bandwidth.
const UNPLANNED_BYTES: u64 = 512 << 20;
/// Of the bandwidth that was measured a plan counts on so much.
const COUNTED_ON: f64 = 0.9;
/// What was computed took so much longer, or less, than was planned: the profile's times are corrected. A device that waits between its
/// kernels, as in a profiled step, may run faster than one that does not.
const TELLING_PACE: f64 = 0.02;
/// Stalls beyond those planned that are worth another plan, as a share of the step.
const TELLING_STALL: f64 = 0.002;
/// So often a profile is corrected.
const CORRECTIONS: u32 = 4;
/// A plan that stalls more than planned gives way to one whose peak is higher by this share, doubled each time: the lower the peak, the more a
/// little that the simulator does not see makes of a stall.
const RAISE: f64 = 0.05;
const SECONDS_PER_DAY: f64 = 86_400.0;

/// What a plan is for, and what it may take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Aim {
    pub(crate) goal: Goal,
    /// Host memory and disk space, in bytes.
    pub(crate) host_pool: u64,
    pub(crate) disk: u64,
    pub(crate) leaving: Leaving,
    /// Bytes that may be written to the disk in a day.
    pub(crate) written_per_day: Option<u64>,
}

/// How the next step goes.
#[derive(Clone, Debug)]
pub(crate) enum Course {
    /// Everything moves; notes are taken if `profiled`.
    Look {
        profiled: bool,
        limits: Limits,
    },
    Follow {
        script: Arc<Script>,
        limits: Limits,
    },
}

/// What a planned step did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Observed {
    pub(crate) wall: Duration,
    /// Of this, it waited for the cache.
    pub(crate) stall: Duration,
    /// It was not the step that was planned.
    pub(crate) lost: bool,
    /// Bytes per second of the disk while it was busy, if it moved enough to tell.
    pub(crate) written: Option<f64>,
    pub(crate) read: Option<f64>,
}

/// What is planned, and how steps keep to it.
#[derive(Debug)]
pub(crate) struct Auto {
    aim: Aim,
    planned: Option<Planned>,
    watch: Watch,
    plans: u64,
}

#[derive(Debug)]
struct Planned {
    profile: Profile,
    machine: Machine,
    plan: Plan,
    script: Arc<Script>,
    in_reach: bool,
    corrections: Corrections,
    /// What is told of it, once it was asked for.
    report: Option<Arc<PlanReport>>,
}

/// What steps have shown of a profile since.
#[derive(Clone, Copy, Debug, Default)]
struct Corrections {
    count: u32,
    /// Plans below this peak stall more than is planned for them.
    least_peak: u64,
    /// So often it was raised.
    raised: i32,
}

impl Auto {
    pub(crate) fn new(aim: Aim) -> Auto {
        Auto { aim, planned: None, watch: Watch::default(), plans: 0 }
    }

    /// How step `number` goes.
    pub(crate) fn course(&self, number: u64) -> Course {
        match &self.planned {
            Some(Planned { plan, script, .. }) => {
                Course::Follow { script: Arc::clone(script), limits: plan.limits }
            }
            None => {
                let bytes = match self.aim.leaving {
                    Leaving::InStreamOrder | Leaving::OnceWritten => 0,
                    Leaving::WhenStored => UNPLANNED_BYTES,
                };
                let limits = Limits {
                    device_budget: bytes,
                    backward_budget: bytes,
                    prefetch: bytes / 2,
                    ..Limits::default()
                };
                Course::Look { profiled: number >= FIRST_PROFILED, limits }
            }
        }
    }

    /// Whether how long the step takes tells more than whether it takes as long as others.
    pub(crate) fn settles(&self) -> bool {
        self.planned.is_some() && self.watch.settles()
    }

    /// Whether there is a plan that was followed for long enough to be corrected, if need be.
    pub(crate) fn is_settled(&self) -> bool {
        self.planned.is_some() && !self.watch.settles()
    }

    /// A step was profiled.
    pub(crate) fn profiled(&mut self, profile: Profile) {
        let moves = &profile.moves;
        let counted_on = |rate: Option<f64>| rate.map_or(f64::INFINITY, |rate| COUNTED_ON * rate);
        let machine = Machine {
            copy_out: counted_on(moves.out),
            copy_in: counted_on(moves.back),
            disk_write: counted_on(moves.written),
            disk_read: counted_on(moves.read.or(moves.written)),
            host_pool: self.aim.host_pool,
            leaving: self.aim.leaving,
        };
        self.make(profile, machine, Corrections::default(), None);
    }

    /// A planned step is over.
    pub(crate) fn stepped(&mut self, observed: Observed) {
        let Some(planned) = &self.planned else { return };
        let machine = planned.machine;
        let rates = [(observed.written, machine.disk_write), (observed.read, machine.disk_read)];
        let known = rates.map(|(seen, counted_on)| seen.map(|seen| seen * COUNTED_ON / counted_on));
        match self.watch.observe(observed.wall, observed.stall, observed.lost, known) {
            None => {}
            Some(Drift::Steps) => self.planned = None,
            Some(Drift::Settled { wall, stall }) => self.correct(wall, stall),
            Some(Drift::Disk([written, read])) => {
                let Some(Planned { profile, plan, corrections, .. }) = self.planned.take() else { return };
                let machine = Machine {
                    disk_write: machine.disk_write * written,
                    disk_read: machine.disk_read * read,
                    ..machine
                };
                self.watch.disk_known();
                let corrections = Corrections { count: corrections.count, ..Corrections::default() };
                self.make(profile, machine, corrections, Some(&plan));
            }
        }
    }

    /// Steps of the plan take so long, and stall so much of it: plans again if that is not what was planned.
    fn correct(&mut self, wall: Duration, stall: Duration) {
        let Some(Planned { profile, plan, corrections, .. }) = &self.planned else { return };
        if corrections.count == CORRECTIONS {
            return;
        }
        let [wall, stall] = [wall, stall].map(|time| time / profile.micro_batches.max(1));
        let expected = plan.prediction.step.saturating_sub(plan.prediction.stall.total());
        let pace = wall.saturating_sub(stall).as_secs_f64() / expected.as_secs_f64().max(f64::MIN_POSITIVE);
        let beyond = stall.saturating_sub(plan.prediction.stall.total());
        let over = self.aim.goal.step.is_some_and(|most| {
            let kept = pace * profile.work.computed().as_secs_f64();
            beyond.as_secs_f64() > TELLING_STALL * kept && wall.as_secs_f64() > most * kept
        });
        let paced = (pace - 1.0).abs() <= TELLING_PACE;
        if paced && !over {
            return;
        }
        let Some(Planned { mut profile, machine, plan, mut corrections, .. }) = self.planned.take() else {
            return;
        };
        corrections.count += 1;
        if paced {
            let higher = 1.0 + RAISE * 2_f64.powi(corrections.raised);
            corrections.least_peak = (higher * plan.prediction.peak() as f64) as u64;
            corrections.raised += 1;
        } else {
            // Stalls may be others where the times are right.
            profile.work.pace(pace);
        }
        self.make(profile, machine, corrections, None);
    }

    /// Makes a plan. One that has steps do what they did after `before` is not another.
    fn make(&mut self, profile: Profile, machine: Machine, corrections: Corrections, before: Option<&Plan>) {
        let (plan, in_reach) = self.best(&profile, &machine, corrections);
        let line = |(save, entry): &(Save, usize)| Line {
            bytes: save.bytes,
            scope: save.scope,
            placement: plan.placements[*entry],
        };
        let script = Arc::new(Script::new(profile.saves.iter().map(line).collect()));
        if before.is_none_or(|before| (&before.placements, before.limits) != (&plan.placements, plan.limits))
        {
            self.plans += 1;
            self.watch.planned();
        }
        self.planned = Some(Planned { profile, machine, plan, script, in_reach, corrections, report: None });
    }

    /// The plan for the goal, or else the lowest there is; and which of the two it is.
    fn best(&self, profile: &Profile, machine: &Machine, corrections: Corrections) -> (Plan, bool) {
        let kept = profile.work.computed().as_secs_f64();
        let per_step = |per_day: u64| (per_day as f64 * kept / SECONDS_PER_DAY) as u64;
        let caps = Caps { disk: self.aim.disk, written: self.aim.written_per_day.map_or(u64::MAX, per_step) };
        let frontier = Frontier::new(&profile.work, machine, caps);
        let goal = self.aim.goal;
        match frontier.plan_above(goal, corrections.least_peak).or_else(|_| frontier.plan(goal)) {
            Ok(plan) => (plan, true),
            Err(_) => (frontier.lowest(), false),
        }
    }

    /// How many plans there were, and the last.
    pub(crate) fn plan(&self) -> Option<(u64, &Plan)> {
        self.planned.as_ref().map(|planned| (self.plans, &planned.plan))
    }

    /// What is planned, if anything is yet.
    pub(crate) fn report(&mut self, scopes: &Scopes) -> Option<Arc<PlanReport>> {
        let planned = self.planned.as_mut()?;
        if planned.report.is_none() {
            planned.report = Some(Arc::new(planned.told(self.plans, scopes)));
        }
        planned.report.clone()
    }

    /// What the plan was made of, if there is one.
    pub(crate) fn profile(&self) -> Option<(Workload, Machine)> {
        self.planned.as_ref().map(|planned| (planned.profile.work.clone(), planned.machine))
    }
}

impl Planned {
    fn told(&self, plans: u64, scopes: &Scopes) -> PlanReport {
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
            let (row, profiled) = (&mut rows[place], profile.work.entries[entry]);
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
            kept_step: profile.work.computed() * profile.micro_batches,
            prediction: plan.prediction,
            limits: plan.limits,
            machine: *machine,
            in_reach: *in_reach,
            plans,
            rows,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Entry;
    use crate::trace::Moves;

    const MS: Duration = Duration::from_millis(1);
    const LAYERS: u64 = 20;

    /// Layers of a megabyte, 10 ms forward and 20 ms backward, on a CPU whose disk moves so many megabytes per second.
    fn profile(disk: f64) -> Profile {
        let entry = Entry { bytes: 1_000_000, forward: 10 * MS, backward: 20 * MS, ..Entry::default() };
        let save = |entry| Save { entry, bytes: 1_000_000, scope: ScopeId::default() };
        Profile {
            work: Workload { entries: vec![entry; LAYERS as usize], ..Workload::default() },
            saves: (0..LAYERS).map(|entry| (save(entry), entry as usize)).collect(),
            micro_batches: 1,
            moves: Moves { written: Some(disk * 1e6), read: Some(disk * 1e6), ..Moves::default() },
        }
    }

    fn planned(goal: Goal, disk: f64) -> Auto {
        let leaving = Leaving::WhenStored;
        let mut auto = Auto::new(Aim { goal, host_pool: 0, disk: u64::MAX, leaving, written_per_day: None });
        assert!(matches!(auto.course(1), Course::Look { profiled: false, .. }));
        assert!(matches!(auto.course(2), Course::Look { profiled: true, .. }));
        auto.profiled(profile(disk));
        assert!(matches!(auto.course(3), Course::Follow { .. }));
        auto
    }

    fn report(auto: &mut Auto) -> Arc<PlanReport> {
        auto.report(&Scopes::default()).unwrap()
    }

    /// A step as it was planned.
    fn usual(auto: &mut Auto) -> Observed {
        let report = report(auto);
        Observed { wall: report.step, stall: report.prediction.stall.total(), ..Observed::default() }
    }

    #[test]
    fn a_disk_that_becomes_faster_is_used_again_within_five_steps() {
        let unthrottled = report(&mut planned(Goal::overhead(0.02), 400.0)).prediction.peak();
        let mut auto = planned(Goal::overhead(0.02), 20.0);
        assert!(report(&mut auto).prediction.peak() > 2 * unthrottled);
        let faster = |auto: &mut Auto| Observed { written: Some(400e6), read: Some(400e6), ..usual(auto) };
        let steps = (1..=5).find(|_| {
            let observed = faster(&mut auto);
            auto.stepped(observed);
            report(&mut auto).prediction.peak() == unthrottled
        });
        assert_eq!(steps, Some(2));
        for _ in 0..100 {
            let observed = faster(&mut auto);
            auto.stepped(observed);
        }
        assert_eq!(report(&mut auto).plans, 2, "and that is that");
    }

    #[test]
    fn a_disk_of_another_speed_that_changes_no_plan_is_taken_note_of() {
        let mut auto = planned(Goal::overhead(0.02), 400.0);
        for _ in 0..3 {
            let usual = usual(&mut auto);
            auto.stepped(usual);
        }
        let before = report(&mut auto);
        for _ in 0..2 {
            let usual = usual(&mut auto);
            auto.stepped(Observed { written: Some(800e6), read: Some(800e6), ..usual });
        }
        let after = report(&mut auto);
        assert!(auto.is_settled() && after.plans == 1, "{before}\n{after}");
        assert!(
            (after.machine.disk_write / before.machine.disk_write - 2.0).abs() < 0.1,
            "{before}\n{after}"
        );
    }

    #[test]
    fn steps_that_take_longer_correct_the_times() {
        let mut auto = planned(Goal::overhead(0.02), 400.0);
        let before = report(&mut auto).kept_step;
        for _ in 0..3 {
            let usual = usual(&mut auto);
            auto.stepped(Observed { wall: 2 * usual.wall, ..usual });
        }
        assert!(report(&mut auto).kept_step.abs_diff(2 * before) < MS && report(&mut auto).plans == 2);
    }

    #[test]
    fn stalls_beyond_those_planned_are_paid_for_with_memory() {
        let mut auto = planned(Goal::overhead(0.02), 100.0);
        let before = report(&mut auto);
        for _ in 0..3 {
            let usual = usual(&mut auto);
            auto.stepped(Observed { wall: usual.wall + 30 * MS, stall: usual.stall + 30 * MS, ..usual });
        }
        let after = report(&mut auto);
        assert!(after.plans == 2 && after.step < before.step, "{before}\n{after}");
        assert!(after.prediction.peak() > before.prediction.peak(), "{before}\n{after}");
    }

    #[test]
    fn stalls_beyond_the_whole_overhead_do_not_end_moving() {
        let mut auto = planned(Goal::overhead(0.02), 100.0);
        let kept = report(&mut auto).kept_step;
        for _ in 0..3 {
            let usual = usual(&mut auto);
            auto.stepped(Observed { wall: usual.wall + kept / 20, stall: usual.stall + kept / 20, ..usual });
        }
        let after = report(&mut auto);
        assert!(
            after.prediction.written > 0 && after.step.as_secs_f64() <= 1.02 * kept.as_secs_f64(),
            "{after}"
        );
        assert!(after.prediction.peak() < LAYERS * 800_000, "{after}");
    }

    #[test]
    fn a_step_that_is_not_the_planned_one_is_profiled() {
        let mut auto = planned(Goal::overhead(0.02), 400.0);
        let usual = usual(&mut auto);
        auto.stepped(Observed { lost: true, ..usual });
        assert!(matches!(auto.course(4), Course::Look { profiled: true, .. }));
    }

    #[test]
    fn a_day_of_steps_writes_no_more_than_it_may() {
        let leaving = Leaving::WhenStored;
        let goal = Goal::overhead(0.02);
        // A step takes 600 ms: 144,000 a day.
        let written_per_day = Some(144_000 * 3_000_000);
        let mut auto = Auto::new(Aim { goal, host_pool: 0, disk: u64::MAX, leaving, written_per_day });
        auto.profiled(profile(400.0));
        let written = report(&mut auto).prediction.written;
        assert!((1..=3_000_000).contains(&written), "{written}");
    }
}
