//! Planned steps: the placement of each storage is decided individually, and gradients keep their bits.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;

use std::time::{Duration, Instant};
use std::{mem, thread};

use common::{assert_nothing_held, assert_same_bits, direct, everything, grads, leaves, randn, staged};
use parking_lot::Mutex;
use ssdtrain::plan::Goal;
use ssdtrain::{
    Auto, Baseline, ErrorKind, GIB, Keep, MIB, Offload, Planning, StepReport, TensorCache,
    TensorCacheBuilder, remat, scope,
};
use tch::{Kind, Tensor};

const LAYERS: usize = 8;
const ROWS: i64 = 1024;

/// A stack of layers, each in a scope of its own, whose GELU can be recomputed. Each saves two megabytes.
fn loss(weights: &[Tensor], x: &Tensor) -> Tensor {
    forward(weights, x, |y| remat(&[y], |y| y[0].f_gelu("tanh")).unwrap())
}

fn forward(weights: &[Tensor], x: &Tensor, gelu: impl Fn(&Tensor) -> Tensor) -> Tensor {
    let stack = weights.iter().enumerate().fold(x.shallow_clone(), |y, (layer, weight)| {
        let _scope = scope(&format!("layer.{layer}"));
        gelu(&y.matmul(weight))
    });
    let _scope = scope("loss");
    stack.square().mean(Kind::Float)
}

struct Trained {
    reports: Vec<StepReport>,
    /// The activation peak with everything kept.
    kept: u64,
}

/// Takes a step of this many rows with each.
fn step(cache: &TensorCache, sources: &[Tensor], rows: i64) -> StepReport {
    let x = randn(&[rows, 256]);
    let plain = leaves(sources);
    loss(&plain, &x).backward();
    let weights = leaves(sources);
    let step = cache.step();
    let loss = loss(&weights, &x);
    step.backward(&loss).unwrap();
    let report = step.finish().unwrap();
    assert_same_bits("planned", &grads(&plain), &grads(&weights));
    drop(loss);
    assert_nothing_held(cache);
    report
}

fn sources() -> Vec<Tensor> {
    (0..LAYERS).map(|_| randn(&[256, 256]) / 16.0).collect()
}

fn train(builder: TensorCacheBuilder, goal: Goal, steps: usize) -> Trained {
    let sources = sources();
    let keep = TensorCache::builder().policy(Keep).build().unwrap();
    let kept = {
        let (weights, x) = (leaves(&sources), randn(&[ROWS, 256]));
        let step = keep.step();
        step.backward(&forward(&weights, &x, |y| y.gelu("tanh"))).unwrap();
        step.finish().unwrap().act_peak_bytes
    };
    let cache = builder.policy(Auto::new(goal)).build().unwrap();
    let reports = (0..steps).map(|_| step(&cache, &sources, ROWS)).collect();
    Trained { reports, kept }
}

#[test]
fn steps_are_planned_once_one_was_profiled() {
    let Trained { reports, .. } = train(everything(), Goal::overhead(0.05), 5);
    let planning: Vec<_> = reports.iter().map(|report| report.planning.unwrap()).collect();
    let early = [Planning::Early, Planning::Profiled, Planning::Compared, Planning::Compared];
    assert_eq!(planning, [&early[..], &[Planning::Followed]].concat());
    assert!(reports[4].plan.is_some());
}

#[test]
fn a_budget_that_holds_everything_moves_nothing() {
    for builder in [everything(), staged()] {
        let Trained { reports, kept } = train(builder, Goal::budget(2 * 64 * MIB), 3);
        let report = &reports[2];
        assert_eq!((report.offloaded.bytes, report.recomputed.bytes), (0, 0), "{report}");
        let expected = report.plan.as_ref().unwrap().prediction.peak();
        assert!(expected.abs_diff(kept) < 64 << 10, "{expected} {kept}");
    }
}

#[test]
fn most_steps_of_a_plan_that_keeps_everything_go_as_without_a_cache() {
    let cache = everything().policy(Auto::new(Goal::overhead(0.0))).build().unwrap();
    let sources = sources();
    let reports: Vec<_> = (0..40).map(|_| step(&cache, &sources, ROWS / 16)).collect();
    let (seen, unseen): (Vec<_>, Vec<_>) = reports[22..].iter().partition(|report| report.saved.count > 0);
    assert!(unseen.len() > 2 * seen.len(), "{} of {}", unseen.len(), reports.len());
    for report in unseen {
        assert_eq!(report.planning, Some(Planning::Followed), "{report}");
        assert!(report.plan.as_ref().unwrap().keeps_all() && report.act_peak_bytes > 0, "{report}");
    }
}

#[test]
fn what_a_step_saves_that_goes_as_without_a_cache_is_nothing_to_one_that_is_open() {
    let sources = sources();
    let (other, cache) = (everything(), everything().policy(Auto::new(Goal::overhead(0.0))));
    let (other, cache) = (other.build().unwrap(), cache.build().unwrap());
    assert!((0..64).any(|_| step(&cache, &sources, ROWS / 16).saved.count == 0));
    let (weights, x) = (leaves(&sources), randn(&[ROWS / 16, 256]));
    let open = other.step();
    for _ in 0..8 {
        let step = cache.step();
        step.backward(&loss(&weights, &x)).unwrap();
        let report = step.finish().unwrap();
        assert!(report.plan.as_ref().unwrap().keeps_all() && report.offloaded.count == 0, "{report}");
    }
    assert_eq!(open.finish().unwrap().saved.count, 0);
}

#[test]
fn a_budget_is_kept_where_it_can_be() {
    for builder in [everything(), staged().host_pool(64 * MIB), direct()] {
        let Trained { reports, kept } = train(builder, Goal::budget(12 * MIB), 5);
        let report = &reports[4];
        let plan = report.plan.as_ref().unwrap();
        assert!(plan.in_reach && plan.prediction.peak() <= 12 * MIB, "{plan}");
        assert!(report.act_peak_bytes <= 12 * MIB && kept > 16 * MIB, "{report}\n{plan}\nkept {kept}");
    }
}

#[test]
fn where_the_disk_is_small_what_is_cheap_is_computed_again() {
    let Trained { reports, kept } = train(everything().disk_cap(MIB), Goal::budget(12 * MIB), 3);
    let report = &reports[2];
    assert!(
        report.recomputed.bytes > 0 && report.reruns.count > 0,
        "{report}\n{}",
        report.plan.as_ref().unwrap()
    );
    assert!(report.act_peak_bytes < kept, "{report}");
}

#[test]
fn a_goal_out_of_reach_gets_the_lowest_peak_there_is() {
    let Trained { reports, kept } = train(everything(), Goal::budget(MIB), 3);
    let plan = reports[2].plan.as_ref().unwrap();
    assert!(!plan.in_reach && plan.to_string().contains("out of reach"), "{plan}");
    assert!(reports[2].act_peak_bytes < kept, "{}", reports[2]);
}

#[test]
fn steps_of_another_shape_are_right_and_planned_anew() {
    let sources = sources();
    let cache = everything().policy(Auto::new(Goal::budget(12 * MIB))).build().unwrap();
    for _ in 0..3 {
        step(&cache, &sources, ROWS);
    }
    assert_eq!(cache.plan().unwrap().plans, 1);
    let report = step(&cache, &sources, 2 * ROWS);
    assert!(report.left_plan && report.plan.is_none(), "{report}");
    assert!(report.to_string().contains("something else than was planned"), "{report}");
    let report = step(&cache, &sources, 2 * ROWS);
    assert!(!report.left_plan && report.plan.is_none(), "it is profiled: {report}");
    let report = step(&cache, &sources, 2 * ROWS);
    assert_eq!(report.plan.unwrap().plans, 2);
}

#[test]
fn steps_of_two_lengths_in_turn_are_planned() {
    let sources = sources();
    let cache = everything().policy(Auto::new(Goal::budget(6 * MIB))).build().unwrap();
    let rows = [ROWS / 2, 3 * ROWS / 8].into_iter().cycle();
    let reports: Vec<_> = rows.take(20).map(|rows| step(&cache, &sources, rows)).collect();
    let planned: Vec<_> = reports.iter().map(|report| report.plan.is_some()).collect();
    // The first plan is made for the shorter ones, and so is the next profile; then comes one of the others, whose
    // plan serves both.
    assert!(planned[7..].iter().all(|planned| *planned), "{planned:?}");
    assert!(reports[7..].iter().all(|report| report.act_peak_bytes <= 6 * MIB));
}

#[test]
fn steps_that_are_never_alike_keep_what_fits_between_profiles_ever_more_seldom() {
    let sources = sources();
    // With a limit on bytes, larger steps do not follow the plan of smaller ones.
    let goal = Goal { peak: Some(GIB), ..Goal::overhead(0.05) };
    let cache = everything().policy(Auto::new(goal)).build().unwrap();
    // Each is longer than all those before it.
    let reports: Vec<_> = (0..24).map(|index| step(&cache, &sources, ROWS / 8 + 16 * index)).collect();
    let moved: Vec<_> = reports.iter().filter(|report| !report.left_plan).map(|report| report.step).collect();
    assert_eq!(moved, [1, 2, 4, 7, 12, 21], "all others keep what fits");
    let kept = |report: &&StepReport| report.left_plan;
    assert!(
        reports.iter().filter(kept).all(|report| report.offloaded.bytes == 0 && report.recomputed.bytes == 0)
    );
}

#[test]
fn steps_longer_than_any_before_follow_the_plan() {
    let sources = sources();
    let cache = everything().policy(Auto::new(Goal::overhead(f64::INFINITY))).build().unwrap();
    let reports: Vec<_> = (0..24).map(|index| step(&cache, &sources, ROWS / 8 + 16 * index)).collect();
    let of = |planning| reports.iter().filter(move |report| report.planning == Some(planning));
    let profiled: Vec<_> = of(Planning::Profiled).map(|report| report.step).collect();
    assert_eq!(profiled, [2, 17], "those that are more than twice as large");
    let planned = of(Planning::Followed).count();
    assert!(planned + of(Planning::Compared).count() == 21 && planned >= 10);
    let moved = of(Planning::Followed).map(|report| report.offloaded.count + report.recomputed.count);
    assert!(moved.min() > Some(0), "{reports:?}");
}

/// A step of micro-batches with these numbers of rows, whose backward passes are run by the cache or by tch.
fn accumulate(cache: &TensorCache, sources: &[Tensor], rows: &[i64], by_tch: bool) -> StepReport {
    let inputs: Vec<Tensor> = rows.iter().map(|&rows| randn(&[rows, 256])).collect();
    let plain = leaves(sources);
    inputs.iter().for_each(|x| loss(&plain, x).backward());
    let weights = leaves(sources);
    let step = cache.step();
    for x in &inputs {
        let loss = loss(&weights, x);
        if by_tch {
            loss.backward();
        } else {
            step.backward(&loss).unwrap();
        }
    }
    let report = step.finish().unwrap();
    assert_same_bits("accumulated", &grads(&plain), &grads(&weights));
    assert_nothing_held(cache);
    report
}

#[test]
fn a_backward_that_the_cache_does_not_run_ends_a_micro_batch_as_well() {
    for rows in [&[ROWS][..], &[ROWS; 3]] {
        let sources = sources();
        let cache = everything().policy(Auto::new(Goal::budget(12 * MIB))).build().unwrap();
        let reports: Vec<_> = (0..5).map(|_| accumulate(&cache, &sources, rows, true)).collect();
        let planned = reports.iter().map(|report| report.plan.is_some());
        assert_eq!(planned.collect::<Vec<_>>(), [false, false, true, true, true], "{rows:?}");
        let (report, plan) = (&reports[4], reports[4].plan.as_ref().unwrap());
        assert!(plan.in_reach && report.act_peak_bytes <= 12 * MIB, "{report}\n{plan}");
    }
}

#[test]
fn plans_know_of_the_gradients_that_micro_batches_leave() {
    let predicted = |rows: &[i64]| {
        let builder = TensorCache::builder().min_bytes(0).simulated_device(Duration::ZERO);
        let cache = builder.policy(Auto::new(Goal::budget(64 * MIB))).build().unwrap();
        let sources = sources();
        let reports: Vec<_> = (0..3).map(|_| accumulate(&cache, &sources, rows, false)).collect();
        let plan = reports[2].plan.as_ref().unwrap();
        assert!(plan.keeps_all(), "{plan}");
        (reports[2].act_peak_bytes as i64, plan.prediction.peak() as i64)
    };
    let (once, thrice) = (predicted(&[ROWS]), predicted(&[ROWS; 3]));
    assert!(thrice.0 > once.0, "the gradients of eight layers");
    assert!((thrice.1 - once.1).abs_diff(thrice.0 - once.0) <= MIB / 2, "{once:?} {thrice:?}");
}

#[test]
fn a_smaller_last_micro_batch_keeps_to_the_plan() {
    for by_tch in [false, true] {
        let sources = sources();
        let cache = everything().policy(Auto::new(Goal::budget(12 * MIB))).build().unwrap();
        let rows = [ROWS, ROWS, ROWS / 4];
        let reports: Vec<_> = (0..4).map(|_| accumulate(&cache, &sources, &rows, by_tch)).collect();
        let planned = reports.iter().map(|report| report.plan.is_some());
        assert_eq!(planned.collect::<Vec<_>>(), [false, false, true, true], "{by_tch}");
    }
}

#[test]
fn each_thread_of_a_step_follows_what_is_planned_for_it() {
    let (sources, x) = (sources(), randn(&[ROWS / 4, 256]));
    let cache = everything().policy(Auto::new(Goal::overhead(f64::INFINITY))).build().unwrap();
    let rows = [ROWS / 4, ROWS / 8];
    let expected = rows.map(|rows| {
        let plain = leaves(&sources);
        loss(&plain, &x.narrow(0, 0, rows)).backward();
        grads(&plain)
    });
    let step = || {
        let step = cache.step();
        thread::scope(|threads| {
            for (rows, expected) in rows.iter().zip(&expected) {
                let (handle, sources, x) = (step.handle(), leaves(&sources), x.narrow(0, 0, *rows));
                let expected: Vec<_> = expected.iter().map(Tensor::shallow_clone).collect();
                threads.spawn(move || {
                    let _entered = handle.enter();
                    loss(&sources, &x).backward();
                    assert_same_bits("threads", &expected, &grads(&sources));
                });
            }
        });
        step.finish().unwrap()
    };
    let reports: Vec<_> = (0..16).map(|_| step()).collect();
    assert!(reports.iter().all(|report| !report.left_plan), "{reports:?}");
    let planned = reports.iter().filter_map(|report| report.plan.as_ref());
    assert!(planned.clone().count() >= 4 && planned.clone().all(|plan| plan.plans <= 5), "{reports:?}");
}

// ---- promises ----

#[test]
fn steps_that_are_not_planned_yet_keep_to_a_budget() {
    for builder in [everything(), staged().host_pool(64 * MIB), direct()] {
        let Trained { reports, kept } = train(builder, Goal::budget(12 * MIB), 4);
        assert!(kept > 16 * MIB);
        for report in &reports {
            assert!(report.act_peak_bytes <= 12 * MIB && report.warnings.is_empty(), "{report}");
        }
    }
}

#[test]
fn a_goal_out_of_reach_is_warned_of() {
    let Trained { reports, .. } = train(everything(), Goal::budget(MIB), 3);
    let warnings = reports[2].warnings.join("\n");
    assert!(warnings.contains("out of reach") && warnings.contains("beyond the goal"), "{warnings}");
    // The peak of steps before there is a plan is checked nevertheless.
    assert!(reports[0].warnings.join("\n").contains("beyond the goal"), "{}", reports[0]);
}

#[test]
fn a_plan_that_takes_longer_than_its_goal_is_loosened() {
    /// How long each function sleeps in forward: most of the step, so that steps vary little.
    const ASLEEP: Duration = Duration::from_millis(8);
    /// How long the next function sleeps. The first in backward takes so long that no plan with one of them keeps the goal.
    static NEXT: Mutex<Duration> = Mutex::new(ASLEEP);
    // Something that is cheap to compute at first is not so in backward, which no profile shows.
    let gelu = |y: &Tensor| {
        let compute = |y: &[&Tensor]| {
            let asleep = mem::replace(&mut *NEXT.lock(), ASLEEP);
            thread::sleep(asleep);
            y[0].f_gelu("tanh")
        };
        remat(&[y], compute).unwrap()
    };
    // The disk has no room: recomputation is all that is possible.
    let goal = Auto::new(Goal::overhead(1.0));
    let cache = everything().policy(goal).disk_cap(64 << 10).build().unwrap();
    let (weights, x) = (leaves(&sources()), randn(&[128, 256]));
    let step = || {
        let step = cache.step();
        let start = Instant::now();
        // What was written in place is not computed again, so only GELU is.
        let loss = forward(&weights, &x, |y| gelu(&y.g_mul_scalar(1.0).g_mul_scalar_(1.0)));
        // However slow the machine is.
        *NEXT.lock() = 4 * start.elapsed();
        step.backward(&loss).unwrap();
        *NEXT.lock() = ASLEEP;
        step.finish().unwrap()
    };
    let mut planned = (0..10).map(|_| step()).filter(|report| report.plan.is_some());
    let first = planned.next().expect("a planned step");
    assert!(first.recomputed.bytes > 0, "{first}");
    let loosened =
        (0..100).map(|_| step()).find(|report| report.plan.is_some() && report.recomputed.bytes == 0);
    let plan = loosened.expect("a plan that keeps its goal").plan.unwrap();
    assert!(plan.keeps_all() && plan.loosened > 0 && plan.baseline == Baseline::Measured, "{plan}");
    let told = plan.to_string();
    assert!(told.contains("loosened") && told.contains("as measured"), "{told}");
}

// ---- the default ----

#[test]
fn a_gpus_steps_are_planned_by_default_with_no_directory() {
    let builder = || TensorCache::builder().min_bytes(0).simulated_device(Duration::ZERO);
    let cache = builder().build().unwrap();
    let sources = sources();
    let reports: Vec<_> = (0..5).map(|_| step(&cache, &sources, ROWS)).collect();
    // The first two keep what fits, and the second shows what there is to plan.
    for (report, expected) in reports.iter().zip([Planning::Early, Planning::Profiled]) {
        assert_eq!((report.planning, report.offloaded.bytes), (Some(expected), 0), "{report}");
    }
    let plan = cache.plan().unwrap();
    let planning: Vec<_> = reports[2..].iter().map(|report| report.planning.unwrap()).collect();
    assert!(planning.iter().all(|planning| matches!(planning, Planning::Compared | Planning::Followed)));
    assert!(plan.in_reach && plan.step.as_secs_f64() <= 1.02 * plan.kept_step.as_secs_f64(), "{plan}");
    // A plan must not change a budget that was set by hand.
    let cache = builder().policy(Offload::default().device_budget(2 * MIB)).build().unwrap();
    let reports = (0..3).map(|_| step(&cache, &sources, ROWS));
    assert!(reports.into_iter().all(|report| report.plan.is_none() && report.offloaded.bytes > 0));
}

#[test]
fn goals_that_no_step_can_have_are_refused() {
    let nan = Goal { peak: None, step: Some(f64::NAN) };
    for (goal, what) in [
        (Goal::overhead(-1.0), "Goal::overhead(-1)"),
        (Goal::overhead(f64::NAN), "Goal::overhead(NaN)"),
        (nan, "0 or more"),
        (Goal::budget(0), "Goal::budget(0)"),
    ] {
        let error = everything().policy(Auto::new(goal)).build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains(what), "{error}");
    }
    everything().policy(Auto::new(Goal::overhead(0.0))).build().unwrap();
    everything().policy(Auto::new(Goal::overhead(f64::INFINITY))).build().unwrap();
}
