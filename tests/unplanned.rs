//! Steps for which nothing is planned, and which need not move what a few operations make of something else.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use ssdtrain::plan::{
    Activation, Budgets, Course, Goal, Headroom, Observation, Outset, Placement, PlannedSave, Policy,
    Position, Recomputed, Room, Saves, Schedule, ScopeId, StepPlan, StepProfile,
};
use ssdtrain::{Auto, Held, StepReport, TensorCache, remat};
use tch::{Kind, Tensor};

use common::{assert_same_bits, direct, everything, grads, leaves, randn, staged};

const LAYERS: usize = 6;
const WIDTH: i64 = 128;
/// Bytes of four of the storages that are saved, which may be on the device at once.
const FEW: u64 = 16 * 4 * (WIDTH * WIDTH) as u64;

/// What is allocated is the process's, so the tests take turns.
static TURN: Mutex<()> = Mutex::new(());

/// Profiles all steps but the first, and shows the last profile. Something is computed again, and so many bytes of the rest may be on the
/// device.
#[derive(Clone, Debug)]
struct Unplanned(Recomputed, u64, Arc<Mutex<Option<StepProfile>>>);

impl Unplanned {
    fn computing_again() -> Unplanned {
        Unplanned(Recomputed::Pointwise, FEW, Arc::default())
    }
}

impl Policy for Unplanned {
    fn begin(&mut self, outset: &Outset<'_>) -> StepPlan {
        let Unplanned(recomputed, bytes, _) = *self;
        let budgets =
            Budgets { device_budget: bytes, backward_budget: bytes, prefetch: bytes, ..Budgets::default() };
        let room = Room::Within(budgets);
        StepPlan { profiled: outset.step > 1, recomputed, room, ..StepPlan::default() }
    }

    fn end(&mut self, _plan: &StepPlan, observed: Observation) {
        *self.2.lock() = observed.profile.map(|profile| *profile);
    }
}

/// A step, its gradients and its report.
fn run(cache: &TensorCache, sources: &[Tensor], loss: fn(&[Tensor]) -> Tensor) -> (Vec<Tensor>, StepReport) {
    let leaves = leaves(sources);
    let step = cache.step();
    let loss = loss(&leaves);
    step.backward(&loss).unwrap();
    drop(loss);
    (grads(&leaves), step.finish().unwrap())
}

fn plain(sources: &[Tensor], loss: fn(&[Tensor]) -> Tensor) -> Vec<Tensor> {
    let leaves = leaves(sources);
    loss(&leaves).backward();
    grads(&leaves)
}

/// Each product is read by GELU alone, and each GELU by the next product.
fn perceptron(leaves: &[Tensor]) -> Tensor {
    let (x, weights) = leaves.split_first().unwrap();
    weights.iter().fold(x.shallow_clone(), |y, weight| y.matmul(weight).gelu("tanh")).sum(Kind::Float)
}

fn sources(layers: usize) -> Vec<Tensor> {
    let weights = (0..layers).map(|_| randn(&[WIDTH, WIDTH]) / (WIDTH as f64).sqrt());
    [randn(&[4 * WIDTH, WIDTH])].into_iter().chain(weights).collect()
}

#[test]
fn what_is_made_of_something_saved_is_computed_again_with_the_same_bits() {
    let _turn = TURN.lock();
    let sources = sources(LAYERS);
    let expected = plain(&sources, perceptron);
    // Elsewhere, what has left before it is read cannot be.
    for (builder, is_sure) in [(everything(), false), (staged(), true), (direct(), false)] {
        let cache = builder.policy(Unplanned::computing_again()).build().unwrap();
        for _ in 0..3 {
            let (grads, report) = run(&cache, &sources, perceptron);
            assert_same_bits(&cache.io_path(), &expected, &grads);
            assert_eq!(cache.held(), Held::default());
            assert!(report.recomputed.count == LAYERS as u64 - 1 || !is_sure, "{report}");
        }
    }
}

#[test]
fn a_profile_shows_what_was_computed_again_like_what_was_kept() {
    let _turn = TURN.lock();
    let sources = sources(LAYERS);
    let profiled = |recomputed: Recomputed, room: u64| {
        let shown = Arc::new(Mutex::new(None));
        let cache = staged().policy(Unplanned(recomputed, room, Arc::clone(&shown))).build().unwrap();
        for _ in 0..2 {
            let (_, report) = run(&cache, &sources, perceptron);
            assert_eq!(report.recomputed.count > 0, recomputed != Recomputed::Nothing, "{report}");
        }
        shown.lock().take().unwrap()
    };
    let (kept, computed) = (profiled(Recomputed::Nothing, u64::MAX), profiled(Recomputed::Pointwise, FEW));
    let positions = |profile: &StepProfile| -> Vec<_> {
        let saves = profile.saves.iter();
        saves.map(|(save, activation)| (save.bytes, save.position, *activation)).collect()
    };
    assert_eq!(positions(&kept), positions(&computed));
    let facts = |profile: &StepProfile| -> Vec<_> {
        let fact = |one: &Activation| {
            let inputs = one.recompute.as_ref().map(|recompute| recompute.inputs.clone());
            (one.bytes, one.in_use_until, one.in_use_with, inputs)
        };
        profile.work.activations.iter().map(fact).collect()
    };
    assert_eq!(facts(&kept), facts(&computed));
    let extras = |profile: &StepProfile| -> Vec<u64> {
        let of_each = profile.work.activations.iter().flat_map(|one| [one.forward_extra, one.backward_extra]);
        of_each.chain([profile.work.turn_extra]).collect()
    };
    assert_eq!(extras(&kept), extras(&computed));
}

/// Each saves its result.
fn tangents(leaves: &[Tensor]) -> Tensor {
    (0..20).fold(leaves[0].shallow_clone(), |y, _| y.tanh()).sum(Kind::Float)
}

#[test]
fn of_many_in_a_row_no_more_than_four_are_made_of_each_that_is_moved() {
    let _turn = TURN.lock();
    let sources = [randn(&[4 * WIDTH, WIDTH])];
    let cache = staged().policy(Unplanned::computing_again()).build().unwrap();
    let (got, report) = run(&cache, &sources, tangents);
    assert_same_bits("tangents", &plain(&sources, tangents), &got);
    assert_eq!(report.recomputed.count, 16, "{report}");
}

/// A product is no pointwise operation.
fn products(leaves: &[Tensor]) -> Tensor {
    let (x, weights) = leaves.split_first().unwrap();
    weights.iter().fold(x.shallow_clone(), |y, weight| y.matmul(weight)).sum(Kind::Float)
}

#[test]
fn what_takes_more_than_that_is_moved() {
    let _turn = TURN.lock();
    let sources = sources(LAYERS);
    let cache = staged().policy(Unplanned::computing_again()).build().unwrap();
    let (_, report) = run(&cache, &sources, products);
    assert!(report.recomputed.count == 0 && report.offloaded.count > 0, "{report}");
}

/// The first product of each layer is four times as wide as the second.
fn wide(leaves: &[Tensor]) -> Tensor {
    let (x, weights) = leaves.split_first().unwrap();
    let layer = |y: Tensor, weight: &Tensor| y.matmul(weight).gelu("tanh").matmul(&weight.tr());
    weights.iter().fold(x.shallow_clone(), layer).sum(Kind::Float)
}

#[test]
fn products_are_computed_again_that_are_wider_than_what_they_are_made_of() {
    let _turn = TURN.lock();
    let weights = (0..LAYERS).map(|_| randn(&[WIDTH, 4 * WIDTH]) / (WIDTH as f64).sqrt());
    let sources: Vec<_> = [randn(&[4 * WIDTH, WIDTH])].into_iter().chain(weights).collect();
    let expected = plain(&sources, wide);
    let shown = Arc::new(Mutex::new(None));
    let cache =
        staged().policy(Unplanned(Recomputed::Everything, 4 * FEW, Arc::clone(&shown))).build().unwrap();
    for _ in 0..2 {
        let (got, report) = run(&cache, &sources, wide);
        assert_same_bits("wide", &expected, &got);
        assert_eq!(report.recomputed.count, 2 * LAYERS as u64, "{report}");
    }
    let profile = shown.lock().take().unwrap();
    // The weights besides, of which no two saves are of one storage.
    assert_eq!(profile.work.activations.iter().filter(|one| one.recompute.is_some()).count(), 3 * LAYERS - 1);
}

/// Five wide results in a row, each of which is saved.
fn steep(leaves: &[Tensor]) -> Tensor {
    let wide = leaves[0].matmul(&leaves[1]).gelu("tanh");
    wide.tanh().sigmoid().exp().matmul(&leaves[1].tr()).sum(Kind::Float)
}

#[test]
fn of_wide_results_no_more_are_made_at_once_than_there_is_room_for() {
    let _turn = TURN.lock();
    let sources = [randn(&[4 * WIDTH, WIDTH]), randn(&[WIDTH, 4 * WIDTH]) / (WIDTH as f64).sqrt()];
    let expected = plain(&sources, steep);
    for (room, count) in [(2 * FEW, 3), (4 * FEW, 4)] {
        let cache = staged().policy(Unplanned(Recomputed::Everything, room, Arc::default())).build().unwrap();
        let (got, report) = run(&cache, &sources, steep);
        assert_same_bits("steep", &expected, &got);
        assert_eq!(report.recomputed.count, count, "{report}");
    }
}

/// The GELU is read by two products, between which everything leaves.
#[test]
fn what_is_saved_again_later_is_still_computed_again() {
    let _turn = TURN.lock();
    let sources = sources(3);
    let cache = staged().policy(Unplanned::computing_again()).build().unwrap();
    for _ in 0..2 {
        let leaves = leaves(&sources);
        let step = cache.step();
        let y = leaves[0].matmul(&leaves[1]).gelu("tanh");
        let one = y.matmul(&leaves[2]);
        step.flush();
        let loss = (one + y.matmul(&leaves[3])).sum(Kind::Float);
        drop(y);
        step.backward(&loss).unwrap();
        let report = step.finish().unwrap();
        // Weights, what goes in and the first product.
        let moved = 3 * (WIDTH * WIDTH) as u64 * 4 + 2 * FEW / 4;
        assert!(report.recomputed.count == 1 && report.offloaded.bytes <= moved, "{report}");
    }
}

/// What the sigmoid is made of is in the cache only after the sigmoid itself.
#[test]
fn what_the_cache_has_is_not_computed_again() {
    let _turn = TURN.lock();
    let sources = sources(2);
    let loss = |leaves: &[Tensor]| {
        let x = leaves[0].matmul(&leaves[1]);
        let sigmoid = x.sigmoid();
        let gelu = x.gelu("tanh");
        (sigmoid.matmul(&leaves[2]) + gelu).sum(Kind::Float)
    };
    let shown = Arc::new(Mutex::new(None));
    let cache = staged().policy(Unplanned(Recomputed::Pointwise, FEW, Arc::clone(&shown))).build().unwrap();
    for _ in 0..2 {
        let (got, report) = run(&cache, &sources, loss);
        assert_same_bits("sigmoid", &plain(&sources, loss), &got);
        assert_eq!(report.recomputed.count, 0, "{report}");
    }
    // Each has one place: the input, both weights, the product, and the sigmoid.
    assert_eq!(shown.lock().take().unwrap().work.activations.len(), 5);
}

#[test]
fn what_the_program_changes_after_it_was_saved_has_the_bits_of_autograd() {
    let _turn = TURN.lock();
    let sources = sources(1);
    let loss = |leaves: &[Tensor]| {
        let product = leaves[0].matmul(&leaves[1]);
        let kept = product.exp();
        let sum = kept.square().sum(Kind::Float);
        // What the exponentials are made of is gone, and nobody needs it but their rerun.
        let _zeros = product.detach().zero_();
        sum
    };
    let expected = plain(&sources, loss);
    for builder in [everything(), staged()] {
        let cache = builder.policy(Unplanned::computing_again()).build().unwrap();
        for _ in 0..2 {
            assert_same_bits(&cache.io_path(), &expected, &run(&cache, &sources, loss).0);
        }
    }
}

#[test]
fn what_a_micro_batch_computes_again_is_its_own() {
    let _turn = TURN.lock();
    let sources = sources(LAYERS);
    let plain = {
        let leaves = leaves(&sources);
        (0..3).for_each(|_| perceptron(&leaves).backward());
        grads(&leaves)
    };
    let shown = Arc::new(Mutex::new(None));
    let cache = staged().policy(Unplanned(Recomputed::Pointwise, FEW, Arc::clone(&shown))).build().unwrap();
    for by_cache in [true, false, true, false] {
        let leaves = leaves(&sources);
        let step = cache.step();
        for _ in 0..3 {
            let loss = perceptron(&leaves);
            if by_cache { step.backward(&loss).unwrap() } else { loss.backward() }
        }
        let report = step.finish().unwrap();
        assert_same_bits("three micro-batches", &plain, &grads(&leaves));
        assert_eq!(report.recomputed.count, 3 * (LAYERS as u64 - 1), "{report}");
        if let Some(profile) = shown.lock().take() {
            assert_eq!((profile.micro_batches, profile.saves.len()), (3, 3 * LAYERS), "{report}");
        }
    }
}

/// Once the first product was recorded with what goes into it, marks are as good as gone.
#[test]
fn what_the_program_marked_is_computed_again_without_its_mark() {
    let _turn = TURN.lock();
    let sources = sources(LAYERS);
    let loss = |leaves: &[Tensor]| {
        let (x, weights) = leaves.split_first().unwrap();
        let layer =
            |y: Tensor, weight: &Tensor| remat(&[&y.matmul(weight)], |y| y[0].f_gelu("tanh")).unwrap();
        weights.iter().fold(x.shallow_clone(), layer).sum(Kind::Float)
    };
    let cache = staged().policy(Unplanned::computing_again()).build().unwrap();
    let peaks = [perceptron as fn(&[Tensor]) -> Tensor, loss].map(|loss| {
        let leaves = leaves(&sources);
        let step = cache.step();
        // A backward of the program's own drops no recipe.
        loss(&leaves).backward();
        let report = step.finish().unwrap();
        assert_same_bits("marked", &plain(&sources, perceptron), &grads(&leaves));
        assert_eq!(report.recomputed.count, LAYERS as u64 - 1, "{report}");
        report.act_peak_bytes
    });
    assert!(peaks[1] <= peaks[0] + FEW / 4, "{peaks:?}");
}

#[test]
fn steps_before_the_first_plan_do_so_under_a_budget_alone() {
    let _turn = TURN.lock();
    let sources = sources(LAYERS);
    for (goal, computes) in [(Goal::budget(2 << 20), true), (Goal::overhead(0.1), false)] {
        let cache = staged().policy(Auto::new(goal)).build().unwrap();
        for _ in 0..2 {
            let (_, report) = run(&cache, &sources, perceptron);
            assert!(report.plan.is_none());
            assert_eq!(report.recomputed.count > 0, computes, "{report}");
        }
    }
}

/// Its schedule recomputes something, and no step saves anything like it.
#[derive(Clone, Debug)]
struct Lost(Headroom);

impl Policy for Lost {
    fn begin(&mut self, _outset: &Outset<'_>) -> StepPlan {
        let (scope, position) = (ScopeId(77), Position::default());
        let save = PlannedSave { bytes: 1, scope, placement: Placement::Recompute, position, varies: false };
        let courses = vec![Course::new(Schedule::new(vec![save], HashMap::new(), 0))];
        let saves = Saves::Scheduled { courses, unplanned: self.0 };
        StepPlan { saves, recomputed: Recomputed::PointwiseWithoutRoom, ..StepPlan::default() }
    }

    fn end(&mut self, _plan: &StepPlan, _observed: Observation) {}
}

#[test]
fn a_step_that_has_left_its_plan_computes_again_what_there_is_no_room_for() {
    let _turn = TURN.lock();
    let sources = sources(LAYERS);
    let recomputed = [FEW, 1 << 30].map(|bytes| {
        let cache = staged().policy(Lost(Headroom::Bytes(bytes))).build().unwrap();
        let (got, report) = run(&cache, &sources, perceptron);
        assert_same_bits("lost", &plain(&sources, perceptron), &got);
        assert!(report.left_plan, "{report}");
        report.recomputed.count
    });
    let [little, ample] = recomputed;
    assert!((1..LAYERS as u64 - 1).contains(&little) && ample == 0, "{recomputed:?}");
}
