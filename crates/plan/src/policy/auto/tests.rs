mod compared;
mod costs;
mod decisions;
mod disk;
mod free_memory;
mod interim;
mod other_steps;
mod peaks;
mod proven;
mod routed;
mod unseen;
mod worth;

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::policy::corrections::Corrections;
use crate::policy::objective::BY_PROCESSOR;
use crate::report::{Baseline, PlanReport};
use crate::{
    Activation, Handling, Machine, Placement, Position, Prediction, Rates, Recompute, Save, StepProfile,
    Today, Workload,
};

const MS: Duration = Duration::from_millis(1);
const LAYERS: u64 = 20;
const MB: u64 = 1_000_000;
/// Free memory in which plans of [`profile`] fit, but not a step that keeps everything.
const TOO_LITTLE: u64 = 21 * MB;
/// What a step of [`profile`] takes that keeps everything.
const KEPT: Duration = Duration::from_millis(LAYERS * 30);
const WHOLE: StepOutcome = StepOutcome::Planned(Adherence::Whole(1));
const LOST: StepOutcome = StepOutcome::Planned(Adherence::Lost);
const PART: StepOutcome = StepOutcome::Planned(Adherence::Part);

/// Layers of `bytes` bytes each, with 10 ms of forward and 20 ms of backward, on a CPU whose disk moves `disk` megabytes per second.
fn profile_of(bytes: u64, disk: f64) -> StepProfile {
    let entry = Activation { bytes, forward: 10 * MS, backward: 20 * MS, ..Activation::default() };
    let save = |entry| Save { entry, bytes, scope: ScopeId::default(), position: Position::default() };
    StepProfile {
        work: Workload { activations: vec![entry; LAYERS as usize], ..Workload::default() },
        saves: (0..LAYERS).map(|entry| (save(entry), entry as usize)).collect(),
        micro_batches: 1,
        rates: Rates { written: Some(disk * 1e6), read: Some(disk * 1e6), ..Rates::default() },
        ..StepProfile::default()
    }
}

fn profile(disk: f64) -> StepProfile {
    profile_of(MB, disk)
}

/// The same on a device that copies so many megabytes per second to the host and back.
fn profile_of_copies(speed: f64) -> StepProfile {
    let rate = Some(speed * 1e6);
    StepProfile { rates: Rates { out: rate, back: rate, ..Rates::default() }, ..profile(speed) }
}

/// The goal for which plans on a CPU aim at this overhead.
fn aiming_at(share: f64) -> Goal {
    Goal::overhead(share / BY_PROCESSOR)
}

/// How a step is run.
#[derive(Clone, Copy, Debug, PartialEq)]
enum NextStep {
    /// Everything moves.
    OffloadAll { profiled: bool, budgets: Budgets },
    /// What fits stays.
    Keep { headroom: Headroom },
    /// Everything stays, for comparison with planned steps.
    Baseline,
    /// As planned.
    Follow { headroom: Headroom },
    /// As without a cache.
    Unseen,
}

impl NextStep {
    fn of(plan: StepPlan) -> NextStep {
        match (plan.saves, plan.room) {
            (Saves::Scheduled { courses, .. }, room) if courses[0].is_baseline => {
                assert_eq!(room, Room::Within(Budgets::default()));
                NextStep::Baseline
            }
            (Saves::Scheduled { unplanned, .. }, Room::Within(_)) => NextStep::Follow { headroom: unplanned },
            (Saves::Move, Room::Within(budgets)) => NextStep::OffloadAll { profiled: plan.profiled, budgets },
            (Saves::Move, Room::Fitting(headroom)) => NextStep::Keep { headroom },
            (Saves::Leave, _) => NextStep::Unseen,
            (saves, room) => panic!("{saves:?} in {room:?}"),
        }
    }
}

/// How a step went, compared with its plan.
enum StepOutcome {
    /// Nothing was planned.
    Unplanned,
    /// It was profiled.
    Profiled(Option<Box<StepProfile>>),
    /// It kept everything.
    Baseline,
    Planned(Adherence),
}

/// The steps of one run, on a device with `free` bytes of free memory.
struct Run {
    auto: Auto,
    number: u64,
    free: u64,
    /// Whether the host memory that plans need is there.
    provided: bool,
    release: Release,
    /// What the last step was told.
    plan: StepPlan,
    today: Today,
}

impl Run {
    fn begin(goal: Goal) -> Run {
        let release = Release::WhenStored;
        Run {
            auto: Auto::new(goal),
            number: 0,
            free: TOO_LITTLE,
            provided: true,
            release,
            plan: StepPlan::default(),
            today: Today::default(),
        }
    }

    /// A run whose second step has shown `profile`.
    fn planned(goal: Goal, profile: StepProfile) -> Run {
        let mut run = Run::begin(goal);
        run.begun(profile);
        assert!(matches!(run.next_step(), NextStep::Follow { .. }));
        run
    }

    /// The same where everything fits.
    fn roomy(goal: Goal, profile: StepProfile) -> Run {
        let mut run = Run { free: u64::MAX, ..Run::begin(goal) };
        run.begun(profile);
        run
    }

    /// The same on a device of its own, whose bytes go to the host.
    fn on_device(goal: Goal, profile: StepProfile) -> Run {
        let mut run = Run { free: u64::MAX, release: Release::InStreamOrder, ..Run::begin(goal) };
        run.begun(profile);
        run
    }

    fn begun(&mut self, profile: StepProfile) {
        for is_profiled in [false, true] {
            match self.next_step() {
                NextStep::OffloadAll { profiled, .. } => assert_eq!(profiled, is_profiled),
                NextStep::Keep { .. } => {
                    assert_eq!((self.release, self.plan.profiled), (Release::InStreamOrder, is_profiled));
                }
                next => panic!("{next:?} before there is a plan"),
            }
            if !is_profiled {
                self.ended(StepOutcome::Unplanned, Observation::default());
            }
        }
        self.ended(StepOutcome::Profiled(Some(Box::new(profile))), Observation::default());
    }

    /// How the next step is run.
    fn next_step(&mut self) -> NextStep {
        let resources = match self.release {
            Release::WhenStored => Resources { host_pool: 0, disk: u64::MAX, release: self.release },
            release => Resources { host_pool: u64::MAX, disk: 0, release },
        };
        self.plan = self.auto.begin(&Outset {
            step: self.number + 1,
            resources,
            today: self.today,
            free: &|| self.free,
            provide: &|_| self.provided,
            scope: &|_| ScopeId::default(),
        });
        NextStep::of(self.plan.clone())
    }

    fn ended(&mut self, went: StepOutcome, observed: Observation) {
        self.number += 1;
        let profiled = matches!(went, StepOutcome::Profiled(_));
        let followed = |how| {
            let size = if how == Adherence::Part { 0.5 } else { 1.0 };
            let micro_batches = if let Adherence::Whole(count) = how { f64::from(count) } else { size };
            Some(Followed { micro_batches, ..Followed::new(0, how).of_size(size) })
        };
        let (profile, followed) = match went {
            StepOutcome::Unplanned => (None, None),
            StepOutcome::Profiled(profile) => (profile, None),
            StepOutcome::Baseline => (None, followed(Adherence::Whole(1))),
            StepOutcome::Planned(how) => (None, followed(how)),
        };
        let observed = Observation { step: self.number, profile, followed, ..observed };
        let plan = match (profiled, observed.followed) {
            (false, Some(_)) => self.plan.clone(),
            (false, None) if self.plan.saves == Saves::Leave => self.plan.clone(),
            _ => StepPlan { profiled, room: self.plan.room, ..StepPlan::default() },
        };
        self.auto.end(&plan, observed);
    }

    /// A step that goes as decided. It takes `kept` if everything is kept, and `times` as long otherwise.
    fn step(&mut self, kept: Duration, times: f64) {
        match self.next_step() {
            NextStep::OffloadAll { .. } => panic!("a profile"),
            NextStep::Keep { .. } => panic!("there is a plan"),
            NextStep::Baseline => {
                self.ended(StepOutcome::Baseline, Observation { wall: kept, ..Observation::default() })
            }
            NextStep::Unseen => {
                self.ended(StepOutcome::Unplanned, Observation { wall: kept, ..Observation::default() });
            }
            NextStep::Follow { .. } => {
                let keeps_all = self.auto.kinds[0].planned.keeps_all();
                let wall = if keeps_all { kept } else { kept.mul_f64(times) };
                self.ended(WHOLE, Observation { wall, ..Observation::default() });
            }
        }
    }

    /// The same of a step of `size` times the planned size, which takes so many times as long, whatever it keeps, on a device that is behind.
    fn step_of(&mut self, size: impl Fn(bool) -> f64, kept: Duration, times: f64) {
        let next = self.next_step();
        let is_kept = next == NextStep::Baseline || self.auto.kinds[0].planned.keeps_all();
        let size = size(is_kept);
        let wall = kept.mul_f64(if is_kept { size } else { size * times });
        self.number += 1;
        let followed = Followed::new(0, Adherence::Part).of_size(size);
        let followed = (next != NextStep::Unseen).then_some(followed);
        let (step, behind) = (self.number, wall / 10);
        let observed = Observation { step, wall, behind, followed, ..Observation::default() };
        self.auto.end(&self.plan.clone(), observed);
    }

    fn report(&mut self) -> Arc<PlanReport> {
        match self.auto.report(0, &|_| String::new()) {
            Some(PolicyReport::Plan(plan)) => plan,
            other => panic!("{other:?}"),
        }
    }

    /// A step that goes exactly as planned.
    fn usual(&mut self) -> Observation {
        let report = self.report();
        Observation { wall: report.step, stall: report.prediction.stall.total(), ..Observation::default() }
    }

    /// `count` steps that differ from the plan by `change`.
    fn steps(&mut self, count: usize, change: impl Fn(Observation) -> Observation) {
        for _ in 0..count {
            self.next_step();
            let observed = change(self.usual());
            self.ended(WHOLE, observed);
        }
        self.next_step();
    }
}

// ---- times, without steps that keep everything ----

#[test]
fn steps_that_take_longer_correct_the_times() {
    let mut run = Run::planned(Goal::overhead(0.02), profile(400.0));
    let before = run.report().kept_step;
    run.steps(3, |usual| Observation { wall: 2 * usual.wall, ..usual });
    let after = run.report();
    assert!(after.kept_step.abs_diff(2 * before) < MS && after.baseline == Baseline::Profile, "{after}");
}

#[test]
fn stalls_beyond_those_planned_are_paid_for_with_memory() {
    let mut run = Run::planned(aiming_at(0.02), profile(100.0));
    let before = run.report();
    run.steps(3, |usual| Observation { wall: usual.wall + 30 * MS, stall: usual.stall + 30 * MS, ..usual });
    let after = run.report();
    assert!(after.plans == 2 && after.step < before.step, "{before}\n{after}");
    assert!(after.prediction.peak() > before.prediction.peak(), "{before}\n{after}");
}

#[test]
fn stalls_beyond_the_whole_overhead_do_not_end_moving() {
    let mut run = Run::planned(Goal::overhead(0.02), profile(100.0));
    let kept = run.report().kept_step;
    run.steps(3, |usual| Observation {
        wall: usual.wall + kept / 20,
        stall: usual.stall + kept / 20,
        ..usual
    });
    let after = run.report();
    assert!(after.prediction.written > 0 && after.step.as_secs_f64() <= 1.02 * kept.as_secs_f64(), "{after}");
    assert!(after.prediction.peak() < LAYERS * 800_000, "{after}");
}

// ---- times, compared with steps that keep everything ----

/// A run of a goal of a tenth, whose steps wait `factor` times as long as is planned.
fn run_of_plans_that_cost(factor: f64) -> Run {
    let mut run = Run::roomy(aiming_at(0.1), profile(50.0));
    for _ in 0..60 {
        let waits = run.report().prediction.stall.total();
        run.step(KEPT, 1.0 + factor * waits.as_secs_f64() / KEPT.as_secs_f64());
    }
    run
}
