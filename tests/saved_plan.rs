//! A plan that one cache saves is followed by another from its first step on, with the bits of steps without a cache.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;

use std::sync::Arc;

use common::{assert_nothing_held, assert_same_bits, everything, grads, leaves, randn, staged};
use ssdtrain::plan::Goal;
use ssdtrain::{Auto, Keep, MIB, PlanReport, SavedPlan, StepReport, TensorCache, TensorCacheBuilder, scope};
use tch::{Kind, Tensor};

const LAYERS: usize = 8;
const GOAL: Goal = Goal { peak: Some(4 * MIB), step: None };

/// A stack of layers, each in a scope of its own with another within it. Each saves half a megabyte.
fn loss(weights: &[Tensor], x: &Tensor) -> Tensor {
    let stack = weights.iter().enumerate().fold(x.shallow_clone(), |y, (layer, weight)| {
        let _scope = scope(&format!("layer.{layer}"));
        let y = y.matmul(weight);
        let _scope = scope("gelu");
        y.gelu("tanh")
    });
    let _scope = scope("loss");
    stack.square().mean(Kind::Float)
}

/// Takes a step of so many micro-batches, and compares its gradients with those of one without a cache.
fn step(cache: &TensorCache, sources: &[Tensor], micro_batches: usize) -> StepReport {
    let x: Vec<Tensor> = (0..micro_batches).map(|_| randn(&[256, 256])).collect();
    let plain = leaves(sources);
    x.iter().for_each(|x| loss(&plain, x).backward());
    let weights = leaves(sources);
    let step = cache.step();
    for x in &x {
        let loss = loss(&weights, x);
        step.backward(&loss).unwrap();
    }
    let report = step.finish().unwrap();
    assert_same_bits("planned", &grads(&plain), &grads(&weights));
    assert_nothing_held(cache);
    report
}

fn sources(layers: usize) -> Vec<Tensor> {
    (0..layers).map(|_| randn(&[256, 256]) / 16.0).collect()
}

/// The plan of a cache after its third step, and the same as text.
fn planned(builder: TensorCacheBuilder, goal: Goal, micro_batches: usize) -> (Arc<PlanReport>, String) {
    let cache = builder.policy(Auto::new(goal)).build().unwrap();
    let sources = sources(LAYERS);
    assert!(cache.saved_plan().is_none(), "nothing is planned yet");
    (0..3).for_each(|_| drop(step(&cache, &sources, micro_batches)));
    (cache.plan().unwrap(), serde_json::to_string(&cache.saved_plan().unwrap()).unwrap())
}

/// A cache that starts with this plan.
fn under(builder: TensorCacheBuilder, goal: Goal, saved: &str) -> TensorCache {
    let saved: SavedPlan = serde_json::from_str(saved).unwrap();
    builder.policy(Auto::new(goal).starting_with(saved)).build().unwrap()
}

#[test]
fn the_first_step_follows_a_plan_of_another_cache() {
    let ways: [(fn() -> TensorCacheBuilder, usize); 3] =
        [(everything, 1), (staged, 2), (|| everything().disk_cap(MIB / 4), 1)];
    for (builder, micro_batches) in ways {
        let (before, saved) = planned(builder(), GOAL, micro_batches);
        assert!(!before.keeps_all(), "{before}");
        let (cache, sources) = (under(builder(), GOAL, &saved), sources(LAYERS));
        let first = step(&cache, &sources, micro_batches);
        let plan = first.plan.as_ref().unwrap_or_else(|| panic!("{first}"));
        assert!(!first.left_plan && !first.to_string().contains("saved plan"), "{first}");
        assert!(first.offloaded.bytes + first.recomputed.bytes > 0, "{first}");
        assert_eq!((plan.plans, &plan.rows), (1, &before.rows), "{plan}\n{before}");
        for _ in 0..3 {
            let report = step(&cache, &sources, micro_batches);
            assert!(report.plan.is_some() && !report.left_plan, "{report}");
        }
    }
}

#[test]
fn its_peak_is_kept_from_the_first_step_on() {
    let (before, saved) = planned(everything(), GOAL, 1);
    let report = step(&under(everything(), GOAL, &saved), &sources(LAYERS), 1);
    assert!(report.act_peak_bytes <= 4 * MIB, "{report}\n{before}");
}

#[test]
fn a_plan_for_another_goal_is_made_anew_before_the_first_step() {
    let (_, saved) = planned(everything(), GOAL, 1);
    // Within it, everything may stay.
    let other = Goal::budget(64 * MIB);
    let (cache, sources) = (under(everything(), other, &saved), sources(LAYERS));
    let first = step(&cache, &sources, 1);
    let plan = first.plan.as_ref().unwrap();
    assert!(plan.keeps_all() && plan.prediction.peak() > 4 * MIB && !first.left_plan, "{first}\n{plan}");
    assert!(first.to_string().contains("another goal"), "{first}");
    assert!(!step(&cache, &sources, 1).to_string().contains("another goal"), "once");
}

#[test]
fn steps_of_another_program_are_right_and_profiled() {
    let (_, saved) = planned(everything(), GOAL, 1);
    let (cache, sources) = (under(everything(), GOAL, &saved), sources(LAYERS + 1));
    let reports: Vec<_> = (0..3).map(|_| step(&cache, &sources, 1)).collect();
    assert!(reports[0].left_plan, "{}", reports[0]);
    let told = |report: &StepReport| report.warnings.iter().any(|told| told.contains("saves something else"));
    assert_eq!(reports.iter().map(told).collect::<Vec<_>>(), [true, false, false]);
    let planned: Vec<_> = reports.iter().map(|report| report.plan.is_some()).collect();
    assert_eq!(planned, [false, false, true], "the second is profiled");
}

#[test]
fn a_cache_without_a_plan_saves_none() {
    let cache = TensorCache::builder().policy(Keep).build().unwrap();
    step(&cache, &sources(1), 1);
    assert!(cache.saved_plan().is_none());
}
