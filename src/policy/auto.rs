//! Planned steps: when to profile, what to plan for, and when a plan is no good any more. Pure.

use std::num::NonZero;
use std::sync::Arc;
use std::time::Duration;

use ssdtrain_plan::{Leaving, Limits, Machine, Plan};

use super::attempts::{Attempts, FIRST_PROFILED};
use super::planned::{Aim, Corrections, Planned};
use super::script::{Followed, Script};
use super::watch::{Drift, SETTLING, Seen, Watch};
use crate::profile::Profile;
use crate::telemetry::{PlanReport, Scopes};

/// What storages may take of the device in a step that is profiled, where they leave it by themselves. Where they leave as late as
/// they may, it is nothing: what stays shows no bandwidth.
const UNPLANNED_BYTES: u64 = 512 << 20;
/// Of the bandwidth that was measured a plan counts on so much.
const COUNTED_ON: f64 = 0.9;
/// What was computed took so much longer, or less, than was planned: the profile's times are corrected. A device that waits between its
/// kernels, as in a profiled step, may run faster than one that does not.
const TELLING_PACE: f64 = 0.02;
/// Stalls beyond those planned that are worth another plan, as a share of the step.
const TELLING_STALL: f64 = 0.002;
/// By so little beyond their goal steps are not, as a share of it.
const TELLING_OVER: f64 = 0.005;
/// So often a profile is corrected without a baseline.
const CORRECTIONS: u32 = 4;
/// A baseline is the middle one of so many of the latest steps that kept everything.
const BASELINE: usize = 3 * SETTLING;
/// Of the device's free memory a step that keeps everything may take so much.
const FITTING: f64 = 0.9;

/// How the next step goes.
#[derive(Clone, Debug)]
pub(crate) enum Course {
    /// Everything moves; notes are taken if `profiled`.
    Look { profiled: bool, limits: Limits },
    /// What fits stays.
    Keep { room: Room },
    /// Everything stays, to be held beside planned steps.
    Weigh,
    /// As planned, and from the first save that is another than planned on what fits stays.
    Follow { script: Arc<Script>, limits: Limits, room: Room },
}

/// What storages may take of the device where nothing is planned for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// So many bytes.
    Bytes(u64),
    /// What is free, as far as the rest of a step does not need it.
    Free,
}

/// What a step did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Observed {
    pub(crate) wall: Duration,
    /// Of this, it waited for the cache.
    pub(crate) stall: Duration,
    /// The activation peak, in bytes.
    pub(crate) peak: u64,
    /// Bytes per second of the disk while it was busy, if it moved enough to tell.
    pub(crate) written: Option<f64>,
    pub(crate) read: Option<f64>,
}

/// How a step went.
#[derive(Clone, Debug)]
pub(crate) enum Went {
    /// Nothing was planned.
    Unplanned,
    /// Nothing was planned, and it was profiled; with what that showed, if it was enough.
    Profiled(Option<Profile>),
    /// It kept everything.
    Weighed,
    Planned(Followed),
}

/// What is planned, and how steps keep to it.
#[derive(Debug)]
pub(crate) struct Auto {
    aim: Aim,
    planned: Option<Planned>,
    watch: Watch,
    attempts: Attempts,
    weighing: Option<Weighing>,
    /// Steps have become smaller for good: a profile of them is worth more than that of larger ones.
    smaller: bool,
    /// What may stay in a step without a plan so that its peak is the goal's.
    room: u64,
    plans: u64,
}

/// Steps that keep everything are being taken, to hold those of the plan beside.
#[derive(Debug)]
struct Weighing {
    seen: Seen,
    walls: Vec<Duration>,
}

impl Auto {
    pub(crate) fn new(aim: Aim) -> Auto {
        Auto {
            aim,
            planned: None,
            watch: Watch::default(),
            attempts: Attempts::new(),
            weighing: None,
            smaller: false,
            room: aim.goal.peak.unwrap_or(u64::MAX) / 2,
            plans: 0,
        }
    }

    /// How step `number` goes, on a device with so many bytes `free`.
    pub(crate) fn course(&mut self, number: u64, free: impl FnOnce() -> u64) -> Course {
        let profiled = self.attempts.is_due(number);
        if profiled || number < FIRST_PROFILED {
            return Course::Look { profiled, limits: self.looking() };
        }
        let room = self.aim.goal.peak.map_or(Room::Free, |_| Room::Bytes(self.room));
        if let (Some(Weighing { seen, .. }), Some(planned)) = (&self.weighing, &self.planned) {
            let (seen, peak) = (*seen, planned.kept_peak() + planned.corrections.unforeseen.bytes());
            if peak <= self.aim.goal.peak.unwrap_or(u64::MAX) && peak as f64 <= FITTING * free() as f64 {
                return Course::Weigh;
            }
            self.weighing = None;
            self.correct(seen);
        }
        match &self.planned {
            Some(Planned { plan, script, .. }) => {
                Course::Follow { script: Arc::clone(script), limits: plan.limits, room }
            }
            None => Course::Keep { room },
        }
    }

    /// The limits of a step in which everything moves.
    fn looking(&self) -> Limits {
        let bytes = match self.aim.leaving {
            Leaving::InStreamOrder | Leaving::OnceWritten => 0,
            Leaving::WhenStored => self.room.min(UNPLANNED_BYTES),
        };
        Limits { device_budget: bytes, backward_budget: bytes, prefetch: bytes / 2, ..Limits::default() }
    }

    /// Whether how long the step takes tells more than whether it takes as long as others.
    pub(crate) fn settles(&self) -> bool {
        self.planned.is_some() && (self.watch.settles() || self.weighing.is_some())
    }

    /// Whether there is a plan that was followed for long enough to be corrected, if need be.
    pub(crate) fn is_settled(&self) -> bool {
        self.planned.is_some() && self.watch.has_settled() && self.weighing.is_none()
    }

    /// Step `number` is over.
    pub(crate) fn ended(&mut self, number: u64, went: Went, observed: Observed) {
        let excess = self.aim.goal.peak.map_or(0, |most| observed.peak.saturating_sub(most));
        match went {
            Went::Unplanned => self.room = self.room.saturating_sub(excess),
            Went::Profiled(profile) => {
                self.room = self.room.saturating_sub(excess);
                self.attempts.made(number, profile.is_some());
                if let Some(profile) = profile {
                    self.profiled(profile);
                }
            }
            Went::Weighed => {
                let plans = self.plans;
                self.peaked(Planned::kept_peak, observed.peak);
                if self.plans == plans {
                    self.weighed(observed.wall);
                } else {
                    self.weighing = None;
                }
            }
            Went::Planned(Followed::Lost) => {
                self.room = self.room.saturating_sub(excess);
                self.attempts.want(number);
            }
            Went::Planned(Followed::Whole(micro_batches)) if self.is_whole(micro_batches) => {
                self.attempts.followed();
                self.stepped(observed);
            }
            Went::Planned(_) => {
                self.attempts.followed();
                self.peaked(Planned::peak, observed.peak);
                if self.watch.partial() {
                    self.smaller = true;
                    self.attempts.want(number);
                }
            }
        }
    }

    /// Whether a step of so many micro-batches is what was profiled.
    fn is_whole(&self, micro_batches: u32) -> bool {
        self.planned.as_ref().is_some_and(|planned| planned.profile.micro_batches == micro_batches)
    }

    fn profiled(&mut self, profile: Profile) {
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
        let planned = Planned::new(&self.aim, profile, machine, Corrections::default());
        let known = self.planned.as_ref().is_some_and(|before| before.script.covers(&planned.script));
        // A plan serves smaller steps as well, as long as there are larger ones.
        if known && !std::mem::take(&mut self.smaller) {
            return;
        }
        self.weighing = None;
        self.plans += 1;
        self.watch.planned();
        self.planned = Some(planned);
    }

    /// A planned step is over.
    fn stepped(&mut self, observed: Observed) {
        let Some(Planned { machine, .. }) = &self.planned else { return };
        let rates = [(observed.written, machine.disk_write), (observed.read, machine.disk_read)];
        let known = rates.map(|(seen, counted_on)| seen.map(|seen| seen * COUNTED_ON / counted_on));
        let (drift, plans) = (self.watch.observe(observed.wall, observed.stall, known), self.plans);
        self.peaked(Planned::peak, observed.peak);
        match drift {
            Some(Drift::Settled(seen)) if self.plans == plans => self.judge(seen),
            Some(Drift::Disk([written, read])) => {
                self.watch.disk_known();
                self.revise(|planned| {
                    planned.machine.disk_write *= written;
                    planned.machine.disk_read *= read;
                    planned.corrections.forget_stalls();
                });
            }
            Some(Drift::Settled(_)) | None => {}
        }
    }

    /// A step's peak was this. Where it is beyond the goal, plans are lower from now on by as much as it was higher than planned, until that
    /// has not come again for a while.
    fn peaked(&mut self, planned_peak: impl Fn(&Planned) -> u64, peak: u64) {
        let (Some(planned), Some(most)) = (&mut self.planned, self.aim.goal.peak) else { return };
        let expected = planned_peak(planned);
        if planned.corrections.unforeseen.saw(expected, peak, peak > most) {
            self.revise(|_| {});
        }
    }

    /// Steps of the plan take so long. Where the goal is a time and it is not clear that they keep it, some that keep everything are to tell
    /// what they have to be held beside: how long a step computes is not all that a plan may cost.
    fn judge(&mut self, seen: Seen) {
        let Some(planned) = &self.planned else { return };
        let is_paced = (planned.pace(seen) - 1.0).abs() <= TELLING_PACE;
        let is_measured = !planned.corrections.baseline.is_empty();
        match self.aim.goal.step {
            Some(_) if planned.keeps_all() && is_paced => {}
            Some(_) if planned.keeps_all() => self.weigh(seen, &[seen.wall]),
            Some(most) => {
                let over = is_over(seen, most, planned.kept_step());
                let is_news = if is_measured { seen.is_strange } else { !is_paced && seen.is_news() };
                if over || is_news {
                    self.weighing = Some(Weighing { seen, walls: Vec::new() });
                }
            }
            None if seen.is_news() => self.correct(seen),
            None => {}
        }
    }

    /// A step that kept everything took so long.
    fn weighed(&mut self, wall: Duration) {
        let Some(weighing) = &mut self.weighing else { return };
        weighing.walls.push(wall);
        if let Some(Weighing { seen, walls }) =
            self.weighing.take_if(|weighing| weighing.walls.len() == SETTLING)
        {
            self.weigh(seen, &walls);
        }
    }

    /// Steps that kept everything took so long, those of the plan as `seen`: what computing takes is known now. A plan that is beyond the
    /// goal is loosened.
    fn weigh(&mut self, seen: Seen, walls: &[Duration]) {
        let Some(planned) = &mut self.planned else { return };
        let baseline = &mut planned.corrections.baseline;
        let is_first = baseline.is_empty();
        if seen.is_strange {
            baseline.clear();
        }
        baseline.extend(walls);
        baseline.drain(..baseline.len().saturating_sub(BASELINE));
        let kept = middle(baseline);
        let pace = kept.as_secs_f64() / planned.kept_step().as_secs_f64().max(f64::MIN_POSITIVE);
        let over = !planned.keeps_all() && self.aim.goal.step.is_some_and(|most| is_over(seen, most, kept));
        if over || is_first || (pace - 1.0).abs() > TELLING_PACE {
            self.revise(|planned| {
                planned.profile.work.pace(pace);
                if over {
                    planned.corrections.raise(&planned.plan);
                }
            });
        }
    }

    /// Corrects the profile by what steps of the plan take, where nothing else tells how long they would with everything kept.
    fn correct(&mut self, seen: Seen) {
        let Some(planned) = &mut self.planned else { return };
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
        let over = self.aim.goal.step.is_some_and(|most| {
            let kept = pace * planned.profile.work.computed().as_secs_f64();
            beyond.as_secs_f64() > TELLING_STALL * kept && wall.as_secs_f64() > most * kept
        });
        let paced = (pace - 1.0).abs() <= TELLING_PACE;
        if paced && !over {
            return;
        }
        self.revise(|planned| {
            planned.corrections.count += 1;
            if paced {
                planned.corrections.raise(&planned.plan);
            } else {
                // Stalls may be others where the times are right.
                planned.profile.work.pace(pace);
            }
        });
    }

    /// Plans again for what has changed. A plan that has steps do what they did is not another.
    fn revise(&mut self, change: impl FnOnce(&mut Planned)) {
        let Some(mut planned) = self.planned.take() else { return };
        change(&mut planned);
        let Planned { profile, machine, plan, script, corrections, .. } = planned;
        let revised = Planned::new(&self.aim, profile, machine, corrections);
        if (revised.plan.limits, &revised.script) != (plan.limits, &script) {
            self.plans += 1;
            self.watch.planned();
        }
        self.planned = Some(revised);
    }

    /// How many plans there were, and the last.
    pub(crate) fn plan(&self) -> Option<(u64, &Plan)> {
        self.planned.as_ref().map(|planned| (self.plans, &planned.plan))
    }

    /// What is planned, if anything is yet.
    pub(crate) fn report(&mut self, scopes: &Scopes) -> Option<Arc<PlanReport>> {
        self.planned.as_mut().map(|planned| planned.report(self.plans, scopes))
    }

    /// What the plan was made of, if there is one.
    pub(crate) fn profile(&self) -> Option<ssdtrain_plan::Profile> {
        let Planned { profile, machine, .. } = self.planned.as_ref()?;
        let micro_batches = NonZero::new(profile.micro_batches).unwrap_or(NonZero::<u32>::MIN);
        Some(ssdtrain_plan::Profile { workload: profile.work.clone(), micro_batches, machine: *machine })
    }
}

/// Whether steps stay beyond a goal of `most` times what they take with everything kept.
fn is_over(seen: Seen, most: f64, kept: Duration) -> bool {
    seen.quickest.as_secs_f64() > (1.0 + TELLING_OVER) * most * kept.as_secs_f64()
}

fn middle(times: &[Duration]) -> Duration {
    let mut times = times.to_vec();
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Save;
    use crate::telemetry::{Baseline, ScopeId};
    use crate::trace::Moves;
    use ssdtrain_plan::{Entry, Goal, Workload};

    const MS: Duration = Duration::from_millis(1);
    const LAYERS: u64 = 20;
    const MB: u64 = 1_000_000;
    const WHOLE: Went = Went::Planned(Followed::Whole(1));

    /// Layers of so many bytes, 10 ms forward and 20 ms backward, on a CPU whose disk moves so many megabytes per second.
    fn profile_of(bytes: u64, disk: f64) -> Profile {
        let entry = Entry { bytes, forward: 10 * MS, backward: 20 * MS, ..Entry::default() };
        let save = |entry| Save { entry, bytes, scope: ScopeId::default() };
        Profile {
            work: Workload { entries: vec![entry; LAYERS as usize], ..Workload::default() },
            saves: (0..LAYERS).map(|entry| (save(entry), entry as usize)).collect(),
            micro_batches: 1,
            moves: Moves { written: Some(disk * 1e6), read: Some(disk * 1e6), ..Moves::default() },
        }
    }

    fn profile(disk: f64) -> Profile {
        profile_of(MB, disk)
    }

    /// Steps of one run, on a device with so many bytes free.
    struct Run {
        auto: Auto,
        number: u64,
        free: u64,
    }

    impl Run {
        fn begin(goal: Goal) -> Run {
            let leaving = Leaving::WhenStored;
            let aim = Aim { goal, host_pool: 0, disk: u64::MAX, leaving, written_per_day: None };
            Run { auto: Auto::new(aim), number: 0, free: 0 }
        }

        /// One whose second step has shown that.
        fn planned(goal: Goal, profile: Profile) -> Run {
            let mut run = Run::begin(goal);
            assert!(matches!(run.course(), Course::Look { profiled: false, .. }));
            run.ended(Went::Unplanned, Observed::default());
            assert!(matches!(run.course(), Course::Look { profiled: true, .. }));
            run.ended(Went::Profiled(Some(profile)), Observed::default());
            assert!(matches!(run.course(), Course::Follow { .. }));
            run
        }

        /// How the next step goes.
        fn course(&mut self) -> Course {
            self.auto.course(self.number + 1, || self.free)
        }

        fn ended(&mut self, went: Went, observed: Observed) {
            self.number += 1;
            self.auto.ended(self.number, went, observed);
        }

        /// A step that keeps to its course and takes so long where everything is kept, and so many times as long otherwise.
        fn step(&mut self, kept: Duration, times: f64) {
            match self.course() {
                Course::Look { .. } => panic!("a profile"),
                Course::Keep { .. } => panic!("there is a plan"),
                Course::Weigh => self.ended(Went::Weighed, Observed { wall: kept, ..Observed::default() }),
                Course::Follow { .. } => {
                    let keeps_all = self.auto.planned.as_ref().unwrap().keeps_all();
                    let wall = if keeps_all { kept } else { kept.mul_f64(times) };
                    self.ended(WHOLE, Observed { wall, ..Observed::default() });
                }
            }
        }

        fn report(&mut self) -> Arc<PlanReport> {
            self.auto.report(&Scopes::default()).unwrap()
        }

        /// A step as it was planned.
        fn usual(&mut self) -> Observed {
            let report = self.report();
            Observed { wall: report.step, stall: report.prediction.stall.total(), ..Observed::default() }
        }

        /// So many steps that are not quite as they were planned.
        fn steps(&mut self, count: usize, change: impl Fn(Observed) -> Observed) {
            for _ in 0..count {
                let observed = change(self.usual());
                self.ended(WHOLE, observed);
            }
            self.course();
        }
    }

    // ---- the disk ----

    #[test]
    fn a_disk_that_becomes_faster_is_used_again_within_five_steps() {
        let goal = Goal::overhead(0.02);
        let unthrottled = Run::planned(goal, profile(400.0)).report().prediction.peak();
        let mut run = Run::planned(goal, profile(20.0));
        assert!(run.report().prediction.peak() > 2 * unthrottled);
        let faster = |observed| Observed { written: Some(400e6), read: Some(400e6), ..observed };
        let steps = (1..=5).find(|_| {
            run.steps(1, faster);
            run.report().prediction.peak() == unthrottled
        });
        assert_eq!(steps, Some(2));
        run.steps(100, faster);
        assert_eq!(run.report().plans, 2, "and that is that");
    }

    #[test]
    fn a_disk_of_another_speed_that_changes_no_plan_is_taken_note_of() {
        let mut run = Run::planned(Goal::overhead(0.02), profile(400.0));
        run.steps(3, |usual| usual);
        let before = run.report();
        run.steps(2, |usual| Observed { written: Some(800e6), read: Some(800e6), ..usual });
        let after = run.report();
        assert!(run.auto.is_settled() && after.plans == 1, "{before}\n{after}");
        assert!(
            (after.machine.disk_write / before.machine.disk_write - 2.0).abs() < 0.1,
            "{before}\n{after}"
        );
    }

    #[test]
    fn a_day_of_steps_writes_no_more_than_it_may() {
        let mut run = Run::begin(Goal::overhead(0.02));
        // A step takes 600 ms: 144,000 a day.
        run.auto.aim.written_per_day = Some(144_000 * 3 * MB);
        run.auto.profiled(profile(400.0));
        let written = run.report().prediction.written;
        assert!((1..=3 * MB).contains(&written), "{written}");
    }

    // ---- times, where not everything can be kept for once ----

    #[test]
    fn steps_that_take_longer_correct_the_times() {
        let mut run = Run::planned(Goal::overhead(0.02), profile(400.0));
        let before = run.report().kept_step;
        run.steps(3, |usual| Observed { wall: 2 * usual.wall, ..usual });
        let after = run.report();
        assert!(after.kept_step.abs_diff(2 * before) < MS && after.baseline == Baseline::Profile, "{after}");
    }

    #[test]
    fn stalls_beyond_those_planned_are_paid_for_with_memory() {
        let mut run = Run::planned(Goal::overhead(0.02), profile(100.0));
        let before = run.report();
        run.steps(3, |usual| Observed { wall: usual.wall + 30 * MS, stall: usual.stall + 30 * MS, ..usual });
        let after = run.report();
        assert!(after.plans == 2 && after.step < before.step, "{before}\n{after}");
        assert!(after.prediction.peak() > before.prediction.peak(), "{before}\n{after}");
    }

    #[test]
    fn stalls_beyond_the_whole_overhead_do_not_end_moving() {
        let mut run = Run::planned(Goal::overhead(0.02), profile(100.0));
        let kept = run.report().kept_step;
        run.steps(3, |usual| Observed {
            wall: usual.wall + kept / 20,
            stall: usual.stall + kept / 20,
            ..usual
        });
        let after = run.report();
        assert!(
            after.prediction.written > 0 && after.step.as_secs_f64() <= 1.02 * kept.as_secs_f64(),
            "{after}"
        );
        assert!(after.prediction.peak() < LAYERS * 800_000, "{after}");
    }

    // ---- times, beside those of steps that keep everything ----

    const KEPT: Duration = Duration::from_millis(LAYERS * 30);

    #[test]
    fn what_a_plan_costs_beside_its_stalls_is_told_by_steps_that_keep_everything() {
        let mut run = Run { free: u64::MAX, ..Run::planned(Goal::overhead(0.02), profile(400.0)) };
        let before = run.report();
        // A plan as low as the first takes a tenth more than it should, without a stall; one that is not as low does not.
        let mut weighed = 0;
        for _ in 0..30 {
            let low = run.report().prediction.peak() <= before.prediction.peak();
            weighed += usize::from(matches!(run.course(), Course::Weigh));
            run.step(KEPT, if low { 1.1 } else { 1.01 });
        }
        let after = run.report();
        assert_eq!((weighed, after.loosened, after.baseline), (3, 1, Baseline::Measured), "{after}");
        assert!(after.kept_step == KEPT && !after.keeps_all(), "{after}");
        assert!(after.prediction.peak() > before.prediction.peak(), "{before}\n{after}");
    }

    #[test]
    fn a_plan_that_stays_beyond_its_goal_is_loosened_until_everything_is_kept() {
        let mut run = Run { free: u64::MAX, ..Run::planned(Goal::overhead(0.02), profile(400.0)) };
        for _ in 0..60 {
            run.step(KEPT, 1.2);
        }
        let report = run.report();
        assert!(report.keeps_all() && report.in_reach && report.loosened == 5, "{report}");
        assert!(report.to_string().contains("everything is kept"), "{report}");
    }

    #[test]
    fn a_plan_that_keeps_its_goal_is_left_alone() {
        let mut run = Run { free: u64::MAX, ..Run::planned(Goal::overhead(0.02), profile(400.0)) };
        let before = run.report();
        for _ in 0..200 {
            assert!(matches!(run.course(), Course::Follow { .. }), "nothing to weigh");
            run.step(KEPT, 1.015);
        }
        assert_eq!(run.report(), before);
    }

    #[test]
    fn a_machine_of_another_speed_is_no_reason_to_loosen_a_plan_or_to_profile() {
        let mut run = Run { free: u64::MAX, ..Run::planned(Goal::overhead(0.02), profile(400.0)) };
        for kept in [KEPT, 2 * KEPT, KEPT / 3] {
            for _ in 0..50 {
                run.step(kept, 1.01);
            }
            let report = run.report();
            assert!(report.loosened == 0 && report.kept_step.abs_diff(kept) < 9 * MS, "{kept:?}: {report}");
        }
    }

    #[test]
    fn what_does_not_fit_is_not_kept_to_be_held_beside() {
        for (free, goal) in [
            (LAYERS * MB, Goal::overhead(0.02)),
            (u64::MAX, Goal { peak: Some(12 * MB), ..Goal::overhead(0.02) }),
        ] {
            let mut run = Run { free, ..Run::planned(goal, profile(400.0)) };
            for _ in 0..30 {
                assert!(matches!(run.course(), Course::Follow { .. }), "{goal:?}");
                run.step(KEPT, 1.2);
            }
        }
    }

    #[test]
    fn of_a_peak_and_a_time_that_cannot_both_be_kept_the_peak_is() {
        let goal = Goal { peak: Some(8 * MB), ..Goal::overhead(0.02) };
        let report = Run::planned(goal, profile(1.0)).report();
        assert!(!report.in_reach && report.prediction.peak() <= 8 * MB, "{report}");
        assert!(report.prediction.peak() > 4 * MB, "the quickest within it\n{report}");
    }

    // ---- peaks ----

    #[test]
    fn a_peak_beyond_the_budget_makes_a_lower_plan() {
        let mut run = Run::planned(Goal::budget(12 * MB), profile(400.0));
        let before = run.report().prediction.peak();
        run.steps(1, |usual| Observed { peak: 16 * MB, ..usual });
        let after = run.report();
        assert!(after.prediction.peak() <= 8 * MB && before > 8 * MB && after.plans == 2, "{after}");
    }

    #[test]
    fn a_peak_beyond_the_budget_by_little_makes_a_plan_that_is_lower_by_what_was_not_foreseen() {
        let mut run = Run::planned(Goal::budget(12 * MB), profile(400.0));
        let before = run.report().prediction.peak();
        assert!(before + MB <= 12 * MB, "{before}");
        run.steps(1, |usual| Observed { peak: 12 * MB + 8, ..usual });
        assert!(run.report().prediction.peak() <= before - 8, "{}", run.report());
    }

    #[test]
    fn a_peak_beyond_the_budget_counts_when_steps_show_something_else_as_well() {
        let mut run = Run::planned(Goal::budget(12 * MB), profile(400.0));
        let before = run.report().prediction.peak();
        run.steps(4, |usual| usual);
        let over = |usual| Observed { peak: 16 * MB, ..usual };
        // The second of two that wait as long for the disk makes known that it is another.
        let slower = |usual| Observed { written: Some(200e6), read: Some(200e6), ..usual };
        run.steps(1, slower);
        run.steps(1, |usual| over(slower(usual)));
        let after = run.report();
        assert!(after.machine.disk_write < 200e6 && before > 8 * MB, "{after}");
        assert!(after.prediction.peak() <= 8 * MB, "{after}");
    }

    #[test]
    fn steps_that_are_not_planned_may_take_what_has_shown_to_leave_them_within_the_budget() {
        let mut run = Run::begin(Goal::budget(12 * MB));
        let room = |run: &mut Run| match run.course() {
            Course::Look { limits, .. } => limits.device_budget,
            course => panic!("{course:?}"),
        };
        assert_eq!(room(&mut run), 6 * MB);
        run.ended(Went::Unplanned, Observed { peak: 14 * MB, ..Observed::default() });
        assert_eq!(room(&mut run), 4 * MB);
        run.ended(Went::Profiled(None), Observed { peak: 20 * MB, ..Observed::default() });
        run.ended(Went::Profiled(None), Observed::default());
        assert!(matches!(run.course(), Course::Keep { room: Room::Bytes(0) }));
    }

    #[test]
    fn a_peak_beyond_the_budget_counts_in_steps_of_other_micro_batches_and_in_parts() {
        for followed in [Followed::Whole(3), Followed::Part] {
            let mut run = Run::planned(Goal::budget(12 * MB), profile(400.0));
            let over = Observed { peak: 16 * MB, ..run.usual() };
            run.ended(Went::Planned(followed), over);
            assert!(run.report().prediction.peak() <= 8 * MB, "{followed:?}: {}", run.report());
        }
    }

    #[test]
    fn a_peak_that_does_not_come_again_lowers_plans_for_a_while() {
        let mut run = Run::planned(Goal::budget(12 * MB), profile(400.0));
        let before = run.report().prediction.peak();
        run.steps(1, |usual| Observed { peak: 40 * MB, ..usual });
        assert!(run.report().prediction.peak() < before);
        run.steps(16, |usual| usual);
        assert_eq!(run.report().prediction.peak(), before);
    }

    #[test]
    fn each_peak_beyond_the_budget_counts() {
        let mut run = Run::planned(Goal::budget(18 * MB), profile(400.0));
        let over = (0..110_u64).filter(|number| {
            let peak = run.report().prediction.peak() + number / 8 * MB;
            run.steps(1, |usual| Observed { peak, ..usual });
            // From then on it is more than the lowest plan leaves.
            peak > 18 * MB && *number < 80
        });
        assert!(over.count() < 10);
    }

    #[test]
    fn what_is_known_to_be_beyond_the_peak_is_not_kept_to_be_held_beside() {
        let goal = Goal { peak: Some(22 * MB), ..Goal::overhead(0.02) };
        let mut run = Run { free: u64::MAX, ..Run::planned(goal, profile(20.0)) };
        let mut over = 0;
        for _ in 0..40 {
            // 5 MB more than planned, whatever the plan.
            let (went, wall, planned) = match run.course() {
                Course::Weigh => (Went::Weighed, KEPT, run.auto.planned.as_ref().unwrap().kept_peak()),
                Course::Follow { .. } => (WHOLE, KEPT.mul_f64(1.2), run.report().prediction.peak()),
                course => panic!("{course:?}"),
            };
            let peak = planned + 5 * MB;
            over += usize::from(peak > 22 * MB);
            run.ended(went, Observed { wall, peak, ..Observed::default() });
        }
        assert_eq!(over, 1);
    }

    // ---- other steps ----

    const LOST: Went = Went::Planned(Followed::Lost);
    const PART: Went = Went::Planned(Followed::Part);

    #[test]
    fn steps_that_stay_another_kind_are_profiled_and_planned() {
        let mut run = Run::planned(Goal::overhead(0.02), profile(400.0));
        run.ended(LOST, Observed::default());
        assert!(matches!(run.course(), Course::Look { profiled: true, .. }));
        run.ended(Went::Profiled(Some(profile_of(2 * MB, 400.0))), Observed::default());
        assert_eq!(run.report().plans, 2);
    }

    #[test]
    fn between_profiles_that_come_to_nothing_the_last_plan_is_tried() {
        let mut run = Run::planned(Goal::overhead(0.02), profile(400.0));
        let mut profiled = 0;
        for number in 3..=200 {
            match run.course() {
                Course::Look { .. } => {
                    profiled += 1;
                    run.ended(Went::Profiled(Some(profile_of(MB + number, 400.0))), Observed::default());
                }
                Course::Follow { room, .. } => {
                    assert_eq!(room, Room::Free);
                    run.ended(LOST, Observed::default());
                }
                course => panic!("{course:?}"),
            }
        }
        assert_eq!(profiled, 7, "of 198");
    }

    #[test]
    fn a_plan_of_larger_steps_serves_those_in_turn_with_them() {
        let mut run = Run::planned(Goal::overhead(0.02), profile(400.0));
        let before = run.report();
        for _ in 0..50 {
            let usual = run.usual();
            run.ended(WHOLE, usual);
            run.ended(PART, Observed { wall: usual.wall / 2, ..usual });
            assert!(matches!(run.course(), Course::Follow { .. }));
        }
        assert_eq!(run.report(), before);
        // A profile of a smaller one changes nothing either.
        run.ended(LOST, Observed::default());
        run.ended(Went::Profiled(Some(profile_of(MB / 2, 400.0))), Observed::default());
        assert_eq!(run.report(), before);
    }

    #[test]
    fn steps_that_stay_smaller_are_planned_anew() {
        let mut run = Run::planned(Goal::budget(12 * MB), profile(400.0));
        let profiled = (1..20).find(|_| {
            run.ended(PART, Observed::default());
            matches!(run.course(), Course::Look { profiled: true, .. })
        });
        assert_eq!(profiled, Some(5));
        run.ended(Went::Profiled(Some(profile_of(MB / 2, 400.0))), Observed::default());
        assert!(run.report().keeps_all(), "{}", run.report());
    }

    #[test]
    fn steps_of_other_micro_batches_tell_nothing_of_times() {
        let mut run = Run::planned(Goal::overhead(0.02), profile(400.0));
        let usual = run.usual();
        for _ in 0..3 {
            run.ended(Went::Planned(Followed::Whole(2)), Observed { wall: 2 * usual.wall, ..usual });
        }
        assert!(run.report().plans == 1 && !run.auto.is_settled());
    }

    #[test]
    fn steps_that_show_nothing_keep_what_fits() {
        let mut run = Run::begin(Goal::overhead(0.02));
        let mut profiled = Vec::new();
        for number in 1..=40 {
            match run.course() {
                Course::Look { profiled: false, .. } => run.ended(Went::Unplanned, Observed::default()),
                Course::Look { profiled: true, .. } => {
                    profiled.push(number);
                    run.ended(Went::Profiled(None), Observed::default());
                }
                Course::Keep { room: Room::Free } => {
                    run.ended(Went::Unplanned, Observed::default());
                }
                course => panic!("{course:?}"),
            }
        }
        assert_eq!(profiled, [2, 3, 5, 9, 17, 33]);
    }
}
