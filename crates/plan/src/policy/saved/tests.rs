use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::{
    Activation, Adherence, Auto, Followed, Observation, Outset, PlanReport, Policy, PolicyReport, Position,
    Recompute, Release, Resources, Role, Saves, StepPlan, Workload,
};

const MS: Duration = Duration::from_millis(1);
const LAYERS: u64 = 20;
const MB: u64 = 1_000_000;
/// Free memory in which plans fit, but not a step that keeps everything.
const TOO_LITTLE: u64 = 21 * MB;
const CPU: Resources = Resources { host_pool: 0, disk: u64::MAX, release: Release::WhenStored };
const GPU: Resources = Resources { host_pool: 100 * MB, disk: u64::MAX, release: Release::InStreamOrder };
const WHOLE: Followed = followed(Adherence::Whole(1));

const fn followed(how: Adherence) -> Followed {
    Followed::new(0, how)
}

fn at(index: u64) -> Position {
    Position { strand: 0, index }
}

/// Layers of a megabyte each, in scopes of their own, with 10 ms of forward and 20 ms of backward.
fn profile() -> StepProfile {
    let entry = Activation { bytes: MB, forward: 10 * MS, backward: 20 * MS, ..Activation::default() };
    let scope = |layer: u64| ScopeId(1 + u32::try_from(layer).unwrap());
    let save = |layer: u64| {
        (Save { entry: layer, bytes: MB, scope: scope(layer), position: at(3 * layer) }, layer as usize)
    };
    StepProfile {
        work: Workload { activations: vec![entry; LAYERS as usize], ..Workload::default() },
        saves: (0..LAYERS).map(save).collect(),
        results: [((at(3), 0), 1)].into(),
        operators: vec![Some("aten::mm".into()); LAYERS as usize],
        min_bytes: 1000,
        varying: vec![0, 2],
        micro_batches: 1,
        rates: Rates { out: Some(4e9), back: Some(4e9), written: Some(4e8), read: Some(4e8) },
        ..StepProfile::default()
    }
}

fn name(scope: ScopeId) -> String {
    format!("layer.{}", scope.0)
}

/// The scope with a path in another run, which has other numbers.
fn scope(path: &str) -> ScopeId {
    ScopeId(100 + path.strip_prefix("layer.").unwrap().parse::<u32>().unwrap())
}

/// The steps of one run.
struct Run {
    auto: Auto,
    resources: Resources,
    free: u64,
    number: u64,
}

impl Run {
    fn begin(auto: Auto, resources: Resources) -> Run {
        Run { auto, resources, free: TOO_LITTLE, number: 0 }
    }

    /// A run whose second step has shown the profile.
    fn planned(goal: Goal, resources: Resources) -> Run {
        let mut run = Run::begin(Auto::new(goal), resources);
        run.step(|_| Observation::default());
        run.step(|_| Observation { profile: Some(Box::new(profile())), ..Observation::default() });
        run
    }

    /// Takes a step that goes like `observed`. Returns what it was told, and what its report warns of.
    fn step(&mut self, observed: impl Fn(&StepPlan) -> Observation) -> (StepPlan, Vec<String>) {
        self.number += 1;
        let Run { resources, free, number: step, .. } = *self;
        let plan = self.auto.begin(&Outset {
            step,
            resources,
            today: crate::Today::default(),
            free: &|| free,
            provide: &|_| true,
            scope: &scope,
        });
        let observed = Observation { step, ..observed(&plan) };
        let warnings = self.auto.warnings(&plan, &observed);
        self.auto.end(&plan, observed);
        (plan, warnings)
    }

    /// Takes a step that goes as planned, and whose steps take `times` as long as planned.
    fn usual(&mut self, times: f64) -> (StepPlan, Vec<String>) {
        let report = report(&mut self.auto);
        self.step(|plan| {
            let kept = is_baseline(plan);
            let wall = report.as_ref().map(|report| if kept { report.kept_step } else { report.step });
            let wall = wall.unwrap_or_default().mul_f64(if kept { 1.0 } else { times });
            Observation { wall, followed: Some(WHOLE), ..Observation::default() }
        })
    }

    fn report(&mut self) -> Arc<PlanReport> {
        report(&mut self.auto).unwrap()
    }
}

fn report(auto: &mut Auto) -> Option<Arc<PlanReport>> {
    match auto.report(0, &name)? {
        PolicyReport::Plan(plan) => Some(plan),
        other => panic!("{other:?}"),
    }
}

fn saved(goal: Goal, resources: Resources) -> SavedPlan {
    Run::planned(goal, resources).auto.saved_plan(&name).unwrap()
}

fn read(text: &Value) -> Result<SavedPlan, serde_json::Error> {
    serde_json::from_str(&text.to_string())
}

fn is_baseline(plan: &StepPlan) -> bool {
    matches!(&plan.saves, Saves::Scheduled { courses, .. } if courses[0].is_baseline)
}

fn schedule(plan: &StepPlan) -> Option<Vec<(u64, ScopeId, Placement)>> {
    let Saves::Scheduled { courses, .. } = &plan.saves else { return None };
    Some(courses[0].schedule.saves().map(|save| (save.bytes, save.scope, save.placement)).collect())
}

fn warns(warnings: &[String], words: &str) -> bool {
    warnings.iter().any(|warning| warning.contains(words))
}

const GOAL: Goal = Goal { peak: Some(12 * MB), step: None };

#[test]
fn a_plan_is_followed_from_the_first_step_and_nothing_is_profiled() {
    let mut before = Run::planned(GOAL, CPU);
    let (told, _) = before.usual(1.0);
    let saved = serde_json::to_value(before.auto.saved_plan(&name).unwrap()).unwrap();
    let mut run = Run::begin(Auto::new(GOAL).starting_with(read(&saved).unwrap()), CPU);
    let (first, warnings) = run.usual(1.0);
    assert!(!first.profiled && first.room == told.room && warnings.is_empty(), "{first:?} {warnings:?}");
    let lines = schedule(&told).unwrap();
    let lines: Vec<_> =
        lines.iter().map(|(bytes, scope, place)| (*bytes, ScopeId(100 + scope.0), *place)).collect();
    assert_eq!(schedule(&first), Some(lines));
    let Saves::Scheduled { courses, .. } = &first.saves else { panic!("{first:?}") };
    let result = |made| courses[0].schedule.result(at(3), made);
    assert!(result(0).is_some() && result(1).is_none());
    for _ in 0..50 {
        let (plan, warnings) = run.usual(1.0);
        assert!(
            !plan.profiled && matches!(plan.saves, Saves::Scheduled { .. }) && warnings.is_empty(),
            "{plan:?}"
        );
    }
    assert!(run.auto.is_settled() && run.report().plans == 1);
    assert_eq!(serde_json::to_value(run.auto.saved_plan(&renamed).unwrap()).unwrap(), saved);
}

/// The path of a scope in the other run.
fn renamed(scope: ScopeId) -> String {
    name(ScopeId(scope.0 - 100))
}

#[test]
fn its_steps_are_weighed_from_the_second_on() {
    let goal = Goal::overhead(0.02);
    let run = Run::begin(Auto::new(goal).starting_with(saved(goal, CPU)), CPU);
    let mut run = Run { free: u64::MAX, ..run };
    let kept: Vec<_> = (1..=6).filter(|_| is_baseline(&run.usual(1.1).0)).collect();
    assert_eq!(kept, [5, 6], "after three steps, without the first");
    (0..60).for_each(|_| drop(run.usual(1.1)));
    assert!(run.report().loosened > 0, "{}", run.report());
}

#[test]
fn what_plans_have_cost_is_known_to_the_next_run() {
    let goal = Goal::overhead(0.1);
    let mut run = Run { free: u64::MAX, ..Run::planned(goal, CPU) };
    (0..60).for_each(|_| drop(run.usual(1.03)));
    let learnt = |run: &Run, name: &dyn Fn(ScopeId) -> String| {
        serde_json::to_value(run.auto.saved_plan(name).unwrap()).unwrap()["learnt"].clone()
    };
    let saved = run.auto.saved_plan(&name).unwrap();
    let before = learnt(&run, &name);
    assert!(before["cost"]["times"].as_f64().unwrap() > 1.0, "{before}");
    let mut next = Run::begin(Auto::new(goal).starting_with(saved.clone()), CPU);
    next.usual(1.0);
    assert_eq!(learnt(&next, &renamed), before);
    assert_eq!(next.report().loosened, run.report().loosened);
    let mut other = Run::begin(Auto::new(Goal::overhead(0.05)).starting_with(saved), CPU);
    other.usual(1.0);
    let after = learnt(&other, &renamed);
    assert_eq!((&after["cost"], &after["allowance"]), (&before["cost"], &Value::Null));
}

#[test]
fn steps_that_save_something_else_are_profiled_as_without_it() {
    let mut run = Run::begin(Auto::new(GOAL).starting_with(saved(GOAL, CPU)), CPU);
    let lost =
        |_: &StepPlan| Observation { followed: Some(followed(Adherence::Lost)), ..Observation::default() };
    let (first, warnings) = run.step(lost);
    assert!(!first.profiled && warns(&warnings, "saves something else"), "{warnings:?}");
    let mut other = profile();
    other.saves.iter_mut().for_each(|(save, _)| save.bytes *= 2);
    let (second, warnings) =
        run.step(|_| Observation { profile: Some(Box::new(other.clone())), ..Observation::default() });
    assert!(second.profiled && warnings.is_empty(), "{warnings:?}");
    let (third, warnings) = run.step(lost);
    assert_eq!(schedule(&third).unwrap()[0].0, 2 * MB);
    assert!(warnings.is_empty() && run.report().plans == 2, "{warnings:?}");
}

#[test]
fn another_goal_gets_a_plan_of_its_own_from_the_same_profile() {
    let other = Goal::budget(6 * MB);
    let expected = Run::planned(other, CPU).report();
    let daily = Auto::new(GOAL).written_per_day(144_000 * 3 * MB);
    for (auto, peak) in [(Auto::new(other), Some(expected.prediction.peak())), (daily, None)] {
        let mut run = Run::begin(auto.starting_with(saved(GOAL, CPU)), CPU);
        let (first, warnings) = run.usual(1.0);
        assert!(!first.profiled && schedule(&first).is_some(), "{first:?}");
        assert!(warns(&warnings, "another goal"), "{warnings:?}");
        match peak {
            Some(peak) => assert_eq!(run.report().prediction.peak(), peak),
            None => assert!(run.report().prediction.written <= 3 * MB),
        }
        assert!(!warns(&run.usual(1.0).1, "another goal"), "once");
    }
}

#[test]
fn goals_that_are_the_same_but_for_digits_are_the_same() {
    for goal in
        [Goal::overhead(0.07), Goal::overhead(f64::INFINITY), Goal { peak: Some(12 * MB), step: Some(1.3) }]
    {
        let saved = serde_json::to_value(saved(goal, CPU)).unwrap();
        let mut run = Run::begin(Auto::new(goal).starting_with(read(&saved).unwrap()), CPU);
        assert!(!warns(&run.usual(1.0).1, "another goal"), "{goal:?}");
    }
}

#[test]
fn less_memory_or_disk_than_the_plan_needs_gets_a_plan_of_its_own() {
    let saved = saved(GOAL, GPU);
    let start = |resources: Resources| {
        let mut run = Run::begin(Auto::new(GOAL).starting_with(saved.clone()), resources);
        let (first, warnings) = run.usual(1.0);
        assert!(schedule(&first).is_some(), "{first:?}");
        (run.report(), warns(&warnings, "more host memory or disk"))
    };
    let (before, warned) = start(GPU);
    let host = before.prediction.host_peak;
    assert!(!warned && host > 4 * MB, "{before}");
    assert!(!start(Resources { host_pool: host, ..GPU }).1, "it is enough");
    let (after, warned) = start(Resources { host_pool: 3 * MB, ..GPU });
    assert!(warned && after.prediction.host_peak <= 3 * MB && after.prediction.written > 0, "{after}");
    let nothing = Resources { host_pool: 0, disk: 0, ..GPU };
    let (after, warned) = start(nothing);
    assert!(warned && !after.in_reach && after.prediction.copied_out == 0, "{after}");
}

#[test]
fn a_disk_that_was_not_needed_before_is_not_taken_for_infinitely_fast() {
    let mut text = serde_json::to_value(saved(GOAL, GPU)).unwrap();
    let machine = &mut text["profile"]["machine"];
    (machine["disk_write"], machine["disk_read"]) = (Value::Null, Value::Null);
    let little = Resources { host_pool: 3 * MB, ..GPU };
    let mut run = Run::begin(Auto::new(GOAL).starting_with(read(&text).unwrap()), little);
    for _ in 0..5 {
        run.step(|_| Observation { written: Some(2e8), followed: Some(WHOLE), ..Observation::default() });
    }
    let written = run.report().machine.disk_write;
    assert!((1.7e8..1.9e8).contains(&written), "{written}");
}

#[test]
fn a_plan_of_another_kind_of_device_is_not_followed() {
    for (of, on) in [(CPU, GPU), (GPU, CPU), (GPU, Resources { release: Release::OnceWritten, ..GPU })] {
        let mut run = Run::begin(Auto::new(GOAL).starting_with(saved(GOAL, of)), on);
        let (first, warnings) = run.step(|_| Observation::default());
        assert!(first.saves == Saves::Move && !first.profiled, "{first:?}");
        assert!(warns(&warnings, "another kind of device"), "{warnings:?}");
        let (second, warnings) = run.step(|_| Observation::default());
        assert!(second.profiled && warnings.is_empty(), "{warnings:?}");
    }
}

#[test]
fn a_file_that_cannot_be_a_plan_is_refused_with_the_reason() {
    let whole = serde_json::to_value(saved(GOAL, CPU)).unwrap();
    assert!(read(&whole).is_ok());
    for (place, value, why) in [
        ("/format", json!(2), "format 2, and this release reads 1"),
        ("/placements", json!(["keep"]), "for each activation"),
        ("/operators", json!([]), "for each activation"),
        ("/saves/3/scope", json!(LAYERS), "save 3 is of a scope"),
        ("/saves/4/activation", json!(LAYERS), "save 4 is of"),
        ("/saves/5/bytes", json!(u64::MAX), "2^60"),
        ("/varying", json!([LAYERS]), "a save that varies does not exist"),
        ("/results/0/activation", json!(LAYERS), "activation 20, which does not exist"),
        ("/from_segments", json!([77]), "activation 77, which does not exist"),
        ("/profile/workload/rest/secs", json!(2_000_000), "10^6 seconds"),
        ("/profile/micro_batches", json!(1 << 20), "65536"),
        ("/profile/machine/disk_read", json!(0.5), "byte per second"),
    ] {
        let mut odd = whole.clone();
        *odd.pointer_mut(place).unwrap() = value;
        let error = read(&odd).unwrap_err().to_string();
        assert!(error.contains(why), "{place}: {error}");
    }
    // What comes after the format is not looked at.
    assert!(
        serde_json::from_str::<SavedPlan>(r#"{"format":3}"#).unwrap_err().to_string().contains("format 3")
    );
}

/// Numbers of a file, small ones and those at the limits.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0..4_u64, Just(MB), Just(1 << 59), Just(u64::MAX)]
}

/// A plan of three layers, the last two of which can be recomputed, with some numbers replaced.
fn odd() -> impl Strategy<Value = Value> {
    let places = [
        "/goal/peak",
        "/budgets/device_budget",
        "/budgets/backward_budget",
        "/budgets/prefetch",
        "/min_bytes",
        "/saves/0/bytes",
        "/saves/1/activation",
        "/saves/2/scope",
        "/results/0/operation",
        "/learnt/cost/times",
        "/learnt/cost/error",
        "/learnt/cost/deviation",
        "/learnt/least_peak",
        "/learnt/allowance",
        "/learnt/loosened",
        "/learnt/tightened",
        "/learnt/unforeseen/bytes",
        "/profile/micro_batches",
        "/profile/machine/disk_write",
        "/profile/machine/host_pool",
        "/profile/machine/moving",
        "/profile/machine/exposed",
        "/profile/workload/handling/operations/secs",
        "/profile/workload/rest/secs",
        "/profile/workload/turn_extra",
        "/profile/workload/activations/0/bytes",
        "/profile/workload/activations/0/forward/secs",
        "/profile/workload/activations/1/backward/nanos",
        "/profile/workload/activations/2/recompute/time/secs",
        "/profile/workload/activations/2/in_use_until",
    ];
    let changes = proptest::collection::vec((proptest::sample::select(places.to_vec()), number()), 0..4);
    let placement = proptest::sample::select(vec!["keep", "host", "disk", "recompute"]);
    (changes, proptest::collection::vec(placement, 3), any::<bool>()).prop_map(
        |(changes, placements, gpu)| {
            let mut text = serde_json::to_value(saved(GOAL, if gpu { GPU } else { CPU })).unwrap();
            for list in ["/placements", "/operators", "/saves", "/scopes", "/profile/workload/activations"] {
                text.pointer_mut(list).unwrap().as_array_mut().unwrap().truncate(3);
            }
            text["placements"] = json!(placements);
            let cost = json!({ "times": 1.0, "error": 0.1, "deviation": 0.01 });
            (text["learnt"]["cost"], text["learnt"]["allowance"]) = (cost, json!(1.0));
            for layer in 1..3 {
                let recompute = Recompute { time: 3 * MS, inputs: vec![layer - 1] };
                text["profile"]["workload"]["activations"][layer]["recompute"] = json!(recompute);
            }
            text["profile"]["workload"]["activations"][1]["role"] = json!(Role::Spare);
            for (place, number) in changes {
                *text.pointer_mut(place).unwrap() = json!(number);
            }
            text
        },
    )
}

#[test]
fn a_plan_that_takes_longer_than_any_clock_runs_is_reported() {
    let mut text = serde_json::to_value(saved(GOAL, CPU)).unwrap();
    for (place, number) in [
        ("/profile/workload/activations/0/bytes", 1_u64 << 59),
        ("/profile/machine/disk_write", 1),
        ("/profile/machine/disk_read", 1),
        ("/profile/micro_batches", 65_536),
    ] {
        *text.pointer_mut(place).unwrap() = json!(number);
    }
    text["placements"] = json!(vec!["disk"; LAYERS as usize]);
    let mut run = Run::begin(Auto::new(GOAL).starting_with(read(&text).unwrap()), CPU);
    run.usual(1.0);
    assert_eq!(run.report().step, Duration::MAX);
}

#[test]
fn plans_of_releases_that_did_not_know_of_it_count_on_what_the_programs_thread_does() {
    for (resources, exposed) in [(CPU, 1.0), (GPU, 0.0)] {
        let mut text = serde_json::to_value(saved(GOAL, resources)).unwrap();
        text["profile"]["machine"].as_object_mut().unwrap().remove("exposed");
        let mut run = Run::begin(Auto::new(GOAL).starting_with(read(&text).unwrap()), resources);
        run.usual(1.0);
        assert_eq!(run.report().machine.exposed, exposed, "{resources:?}");
    }
}

proptest! {
    #[test]
    fn whatever_a_file_contains_it_is_refused_or_followed(
        text in odd(),
        goal in prop_oneof![Just(GOAL), Just(Goal::overhead(0.1)), Just(Goal::overhead(0.0)), Just(Goal::budget(1))],
        less in any::<bool>(),
        walls in proptest::collection::vec((0..100_000_u64, number(), 0..8_u32), 40),
    ) {
        let Ok(saved) = read(&text) else { return Ok(()) };
        let resources = match saved.machine().release {
            Release::WhenStored => CPU,
            _ if less => Resources { host_pool: MB, ..GPU },
            _ => GPU,
        };
        let run = Run::begin(Auto::new(goal).starting_with(saved), resources);
        let mut run = Run { free: u64::MAX, ..run };
        for (wall, peak, went) in walls {
            let wall = Duration::from_millis(wall);
            run.step(|plan| {
                let how = match went {
                    0 => Adherence::Lost,
                    1 => Adherence::Part,
                    _ => Adherence::Whole(1),
                };
                let followed = schedule(plan).map(|_| followed(how));
                let profile = plan.profiled.then(|| Box::new(profile()));
                let rate = Some(1e3 * f64::from(1 + went));
                let stall = wall / 3;
                Observation { wall, stall, peak, written: rate, read: rate, followed, profile, ..Observation::default() }
            });
            drop(report(&mut run.auto));
        }
    }
}
