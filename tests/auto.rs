//! Planned steps: what goes where is decided for each storage, and gradients keep their bits.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;

use common::{assert_nothing_held, assert_same_bits, direct, everything, grads, leaves, randn, staged};
use ssdtrain::plan::Goal;
use ssdtrain::{MIB, Policy, StepReport, TensorCache, TensorCacheBuilder, remat, scope};
use tch::{Kind, Tensor};

const LAYERS: usize = 8;
const ROWS: i64 = 1024;

/// A stack of layers, each in a scope of its own, whose GELU can be computed again. Each saves two megabytes.
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

/// Takes a step of so many rows with each.
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
    let keep = TensorCache::builder().policy(Policy::Keep).build().unwrap();
    let kept = {
        let (weights, x) = (leaves(&sources), randn(&[ROWS, 256]));
        let step = keep.step();
        step.backward(&forward(&weights, &x, |y| y.gelu("tanh"))).unwrap();
        step.finish().unwrap().act_peak_bytes
    };
    let cache = builder.policy(Policy::Auto(goal)).build().unwrap();
    let reports = (0..steps).map(|_| step(&cache, &sources, ROWS)).collect();
    Trained { reports, kept }
}

#[test]
fn steps_are_planned_once_one_was_profiled() {
    let Trained { reports, .. } = train(everything(), Goal::overhead(0.05), 4);
    let planned: Vec<_> = reports.iter().map(|report| report.plan.is_some()).collect();
    assert_eq!(planned, [false, false, true, true]);
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
    let cache = everything().policy(Policy::Auto(Goal::budget(12 * MIB))).build().unwrap();
    for _ in 0..3 {
        step(&cache, &sources, ROWS);
    }
    assert_eq!(cache.plan().unwrap().plans, 1);
    step(&cache, &sources, ROWS / 2);
    assert!(cache.plan().is_none(), "the next step is profiled");
    step(&cache, &sources, ROWS / 2);
    let report = step(&cache, &sources, ROWS / 2);
    assert_eq!(report.plan.unwrap().plans, 2);
}
