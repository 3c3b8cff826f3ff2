//! Segments in steps whose plan decides what is computed again: they are one more way to have what no recorded operation makes.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{assert_nothing_held, assert_same_bits, everything, grads, leaves, randn};
use ssdtrain::plan::{Goal, InTurn, Placement};
use ssdtrain::{Auto, ErrorKind, KIB, MIB, Offload, StepReport, TensorCache, Verify, remat, scope, segment};
use tch::{Kind, TchError, Tensor};

const WIDTH: i64 = 32;

/// An input and weights.
fn sources(rows: i64, weights: usize) -> Vec<Tensor> {
    tch::manual_seed(5);
    let weights = (0..weights).map(|_| randn(&[WIDTH, WIDTH]) / 6.0);
    std::iter::once(randn(&[rows, WIDTH])).chain(weights).collect()
}

/// Dropout is not recorded, and its result goes into a product, which saves it.
fn dropped(x: &Tensor, weight: &Tensor) -> Result<Tensor, TchError> {
    x.f_tanh()?.f_dropout(0.5, true)?.f_matmul(weight)?.f_dropout(0.5, true)
}

/// A block as the function of a segment.
fn block(x: &Tensor, weight: &Tensor) -> Tensor {
    let weight = weight.shallow_clone();
    segment("block", x, move |x| x.f_add(&dropped(x, &weight)?)).unwrap()
}

fn expected(sources: &[Tensor], f: impl Fn(&[Tensor]) -> Tensor) -> Vec<Tensor> {
    let plain = leaves(sources);
    tch::manual_seed(7);
    f(&plain).backward();
    grads(&plain)
}

fn step(
    cache: &TensorCache,
    sources: &[Tensor],
    f: impl Fn(&[Tensor]) -> Tensor,
) -> (Vec<Tensor>, StepReport) {
    let inputs = leaves(sources);
    tch::manual_seed(7);
    let step = cache.step();
    let loss = f(&inputs);
    step.flush();
    step.backward(&loss).unwrap();
    drop(loss);
    (grads(&inputs), step.finish().unwrap())
}

/// Everything is to be computed again that can be.
fn recomputing() -> TensorCache {
    let policy = InTurn::new(Offload::default(), vec![Placement::Recompute]);
    everything().policy(policy).build().unwrap()
}

/// One step in which everything is to be computed again has the bits of one without a cache.
fn assert_same(sources: &[Tensor], f: impl Fn(&[Tensor]) -> Tensor) -> StepReport {
    let expected = expected(sources, &f);
    let cache = recomputing();
    let (got, report) = step(&cache, sources, &f);
    assert_same_bits("gradients", &expected, &got);
    assert_nothing_held(&cache);
    report
}

#[test]
fn what_no_recorded_operation_makes_comes_from_the_segment() {
    let sources = sources(16, 2);
    let within = |x: &[Tensor]| block(&block(&x[0], &x[1]), &x[2]).square().sum(Kind::Float);
    let outside = |x: &[Tensor]| {
        let y = dropped(&x[0], &x[1]).unwrap();
        dropped(&y, &x[2]).unwrap().square().sum(Kind::Float)
    };
    let (within, outside) = (assert_same(&sources, within), assert_same(&sources, outside));
    assert!(within.recomputed.bytes > outside.recomputed.bytes, "{within}\n{outside}");
    // The masks and what they are multiplied with have to be saved without a segment.
    assert!(outside.offloaded.bytes > within.offloaded.bytes, "{within}\n{outside}");
}

#[test]
fn what_is_to_be_kept_of_a_segment_is_kept() {
    let sources = sources(16, 2);
    let f = |x: &[Tensor]| block(&block(&x[0], &x[1]), &x[2]).square().sum(Kind::Float);
    let expected = expected(&sources, f);
    for placements in [
        vec![Placement::Keep],
        vec![Placement::Disk],
        vec![Placement::Recompute, Placement::Keep],
        vec![Placement::Keep, Placement::Recompute, Placement::Recompute],
        vec![Placement::Disk, Placement::Recompute, Placement::Keep],
    ] {
        let cache = everything().policy(InTurn::new(Offload::default(), placements.clone())).build().unwrap();
        let (got, report) = step(&cache, &sources, f);
        assert_same_bits(&format!("{placements:?}"), &expected, &got);
        assert_eq!(report.recomputed.count > 0, placements.contains(&Placement::Recompute), "{report}");
        assert_nothing_held(&cache);
    }
}

#[test]
fn segments_within_segments_and_marked_operations_belong_to_the_outer_one() {
    let sources = sources(16, 3);
    assert_same(&sources, |x| {
        let weights: Vec<Tensor> = x[1..].iter().map(Tensor::shallow_clone).collect();
        let y = segment("outer", &x[0], move |x| {
            let inner = weights[0].shallow_clone();
            let y = segment("inner", x, move |x| dropped(x, &inner))?;
            let y = remat(&[&y], |y| y[0].f_gelu("tanh")?.f_dropout(0.3, true))?;
            let inner = weights[1].shallow_clone();
            let y = segment("inner", [&y, x], move |[y, x]| dropped(y, &inner)?.f_add(x))?;
            dropped(&y, &weights[2])
        });
        y.unwrap().square().sum(Kind::Float)
    });
}

#[test]
fn an_input_that_its_function_changes_is_not_computed_from() {
    let sources = sources(16, 2);
    assert_same(&sources, |x| {
        let weight = x[1].shallow_clone();
        let y = segment("block", &(&x[0] * 2.0), move |x| {
            let mut x = x.shallow_clone();
            dropped(&x.f_add_scalar_(1.0)?, &weight)
        });
        y.unwrap().square().sum(Kind::Float)
    });
}

#[test]
fn an_input_that_is_changed_afterwards_is_an_error() {
    let sources = sources(16, 2);
    let inputs = leaves(&sources);
    let cache = recomputing();
    let step = cache.step();
    let mut y = &inputs[0] * 2.0;
    let weight = inputs[1].shallow_clone();
    let z = segment("block", &y, move |y| dropped(y, &weight)).unwrap();
    drop(y.g_mul_scalar_(3.0));
    let error = step.backward(&z.sum(Kind::Float)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ChangedInPlace, "{error}");
}

#[test]
fn a_plan_computes_a_segment_again_where_nothing_else_can() {
    let sources = sources(1024, 6);
    let f = |x: &[Tensor]| {
        let y = x[1..].iter().enumerate().fold(x[0].shallow_clone(), |y, (index, weight)| {
            let _scope = scope(&format!("layer.{index}"));
            block(&y, weight)
        });
        y.square().sum(Kind::Float)
    };
    let expected = expected(&sources, f);
    let lowest = Goal::overhead(f64::INFINITY);
    // Little of it fits the disk.
    let cache =
        everything().verify(Verify::Off).disk_cap(256 * KIB).policy(Auto::new(lowest)).build().unwrap();
    let mut last = None;
    for _ in 0..4 {
        let (got, report) = step(&cache, &sources, f);
        assert_same_bits("gradients", &expected, &got);
        assert!(!report.left_plan, "{report}");
        last = Some(report);
    }
    let plan = cache.plan().unwrap();
    assert!(plan.operations.iter().any(|row| row.operation == "segment" && row.reruns > 0), "{plan}");
    let last = last.unwrap();
    assert!(last.recomputed.bytes > MIB, "{last}\n{plan}");
    assert_nothing_held(&cache);
}

#[test]
fn a_plan_without_recomputation_leaves_segments() {
    let sources = sources(64, 2);
    let runs = Arc::new(AtomicUsize::new(0));
    let f = |x: &[Tensor]| {
        let (weight, runs) = (x[1].shallow_clone(), Arc::clone(&runs));
        let y = segment("block", &x[0], move |x| {
            runs.fetch_add(1, Ordering::Relaxed);
            dropped(x, &weight)
        });
        (y.unwrap() * &x[2].sum(Kind::Float)).square().sum(Kind::Float)
    };
    let cache = everything().policy(Auto::new(Goal::budget(64 * MIB))).build().unwrap();
    for steps in 1..=4 {
        step(&cache, &sources, f);
        assert_eq!(runs.load(Ordering::Relaxed), steps);
    }
}

#[test]
fn a_segment_that_changes_what_it_did_not_make_is_no_candidate() {
    let sources = sources(64, 2);
    let counter = Tensor::zeros([1], (Kind::Float, tch::Device::Cpu));
    let f = |x: &[Tensor]| {
        let (weight, counter) = (x[1].shallow_clone(), counter.shallow_clone());
        let y = segment("block", &x[0], move |x| {
            let mut counter = counter.shallow_clone();
            drop(counter.f_add_(&Tensor::ones_like(&counter))?);
            dropped(x, &weight)
        });
        (y.unwrap() * &x[2].sum(Kind::Float)).square().sum(Kind::Float)
    };
    let expected = expected(&sources, f);
    let policy = Auto::new(Goal::overhead(f64::INFINITY));
    let cache = everything().min_bytes(KIB).policy(policy).build().unwrap();
    for _ in 0..4 {
        let (got, _) = step(&cache, &sources, f);
        assert_same_bits("gradients", &expected, &got);
    }
    assert_eq!(f64::try_from(&counter).unwrap(), 5.0);
}
