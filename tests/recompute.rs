//! Segments and operations that backward recomputes: gradients have the same bits as without recomputation, and
//! failures are errors.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

use common::{
    assert_nothing_held, assert_same_bits, calling, everything, grads, leaf, leaves, parity, randn,
    same_bits, staged,
};
use parking_lot::Mutex;
use ssdtrain::plan::{Observation, Outset, Placement, Saves, StepPlan};
use ssdtrain::{
    Backward, DeviceCall, DeviceFaults, Error, KIB, Keep, MIB, Offload, Policy, StepReport, TensorCache,
    TensorCacheBuilder, Verify, remat, segment,
};
use tch::nn::{self, OptimizerConfig};
use tch::{Device, Kind, TchError, Tensor};

const RETAIN: Backward = Backward { retain_graph: true, create_graph: false };

type Outcome = Result<Tensor, TchError>;

/// Width of the model below.
const WIDTH: i64 = 32;

/// Input, and for each block two matrices, a bias and a norm's weight.
fn sources(blocks: usize) -> Vec<Tensor> {
    tch::manual_seed(11);
    let mut sources = vec![randn(&[6, 16, WIDTH])];
    for _ in 0..blocks {
        sources.extend([
            randn(&[3 * WIDTH, WIDTH]) * 0.2,
            randn(&[WIDTH, WIDTH]) * 0.2,
            randn(&[WIDTH]),
            randn(&[WIDTH]),
        ]);
    }
    sources
}

/// Attention and its surroundings, with dropout in three places.
fn block(x: &Tensor, w: &[Tensor]) -> Outcome {
    let normed = x.f_layer_norm([WIDTH], Some(&w[2]), Some(&w[3]), 1e-5, true)?;
    let qkv = normed.f_linear(&w[0], None::<&Tensor>)?.f_view([6, 16, 3, 4, WIDTH / 4])?;
    let part = |index| qkv.f_select(2, index)?.f_transpose(1, 2);
    let (q, k, v) = (part(0)?, part(1)?, part(2)?);
    let y = Tensor::f_scaled_dot_product_attention(&q, &k, &v, None::<&Tensor>, 0.1, true, None, false)?;
    let y = y.f_transpose(1, 2)?.f_reshape([6, 16, WIDTH])?.f_dropout(0.2, true)?;
    x.f_add(&y.f_linear(&w[1], Some(&w[2]))?.f_gelu("tanh")?.f_dropout(0.1, true)?)
}

/// The weights of a block, for a function to hold.
fn held(x: &[Tensor], index: usize) -> Vec<Tensor> {
    x[1 + 4 * index..5 + 4 * index].iter().map(Tensor::shallow_clone).collect()
}

fn scalar(t: &Tensor) -> Tensor {
    t.to_kind(Kind::Float).square().sum(Kind::Float)
}

/// Saves two tensors of the size of `x`, one of them twice.
fn chain(x: &Tensor) -> Outcome {
    x.f_mul_scalar(1.5)?.f_tanh()?.f_exp()?.f_sin()
}

/// One step with `forward` on a cache that moves everything; returns the outcome of backward.
fn step_of(cache: &TensorCache, forward: impl FnOnce() -> Tensor) -> ssdtrain::Result<StepReport> {
    let step = cache.step();
    let loss = forward();
    let outcome = step.backward(&loss);
    drop(loss);
    // This waits for transfers, whatever the outcome of backward.
    let report = step.finish()?;
    outcome.map(|()| report)
}

#[test]
fn a_segment_has_the_bits_of_a_plain_call() {
    let report = parity(&[randn(&[64, 64])], |x| scalar(&segment("chain", &(&x[0] * 2.0), chain).unwrap()));
    assert_eq!((report.recomputed.count, report.reruns.count), (2, 1), "{report:?}");
    assert_eq!(report.recomputed.bytes, 2 * 64 * 64 * 4, "{report:?}");
    // With what both are computed from.
    assert!(report.reruns.bytes >= report.recomputed.bytes, "{report:?}");
}

#[test]
fn segments_of_attention_with_dropout() {
    let report = parity(&sources(3), |x| {
        let blocks = (0..3).fold(x[0].tanh(), |y, index| {
            let w = held(x, index);
            segment(&format!("block.{index}"), &y, move |y| block(y, &w)).unwrap()
        });
        scalar(&blocks)
    });
    assert_eq!(report.reruns.count, 3, "{report:?}");
    assert_eq!(report.fused.count, 0, "{report:?}");
}

#[test]
fn operations_with_recipes() {
    let report = parity(&[randn(&[64, 64]), randn(&[64, 64])], |x| {
        let h = x[0].matmul(&x[1]);
        let y = remat(&[&h], |h| h[0].f_gelu("tanh")).unwrap();
        drop(h);
        scalar(&y.matmul(&x[1]).sin())
    });
    assert_eq!((report.recomputed.count, report.reruns.count), (1, 1), "{report:?}");
    assert_eq!(report.recomputed.bytes, 64 * 64 * 4, "{report:?}");
}

#[test]
fn an_operation_with_dropout_and_several_inputs() {
    parity(&[randn(&[64, 128]), randn(&[64, 64])], |x| {
        let gate = (&x[0] * 2.0).chunk(2, 1);
        let y = remat(&[&gate[0], &gate[1]], |x| (x[0].f_silu()? * x[1]).f_dropout(0.3, true)).unwrap();
        scalar(&y.matmul(&x[1]).dropout(0.2, true).exp())
    });
}

#[test]
fn recipes_of_recipes() {
    let report = parity(&[randn(&[64, 64])], |x| {
        let a = remat(&[&(&x[0] * 1.5)], |x| x[0].f_tanh()?.f_dropout(0.1, true)).unwrap();
        let b = remat(&[&a], |a| a[0].f_gelu("none")).unwrap();
        drop(a);
        let c = remat(&[&b], |b| b[0].f_sin()).unwrap();
        drop(b);
        scalar(&c.exp().cos())
    });
    assert!(report.reruns.count >= 3, "{report:?}");
}

#[test]
fn a_result_saved_by_several_is_computed_once() {
    let report = parity(&[randn(&[64, 64]), randn(&[64, 64])], |x| {
        let y = remat(&[&(&x[0] * 1.5)], |x| x[0].f_gelu("tanh")).unwrap();
        scalar(&(y.matmul(&x[1]) + y.transpose(0, 1).matmul(&x[1])))
    });
    assert_eq!(report.recomputed.count, 1, "{report:?}");
}

#[test]
fn a_segment_whose_input_has_a_recipe() {
    parity(&[randn(&[64, 64])], |x| {
        let y = remat(&[&(&x[0] * 1.5)], |x| x[0].f_tanh()?.f_dropout(0.1, true)).unwrap();
        scalar(&segment("chain", &y, chain).unwrap())
    });
}

#[test]
fn an_operation_within_a_segment_is_the_segments() {
    let report = parity(&[randn(&[64, 64])], |x| {
        let y = segment("outer", &(&x[0] * 2.0), |x| {
            let y = remat(&[x], |x| x[0].f_gelu("tanh"))?;
            y.f_sin()?.f_dropout(0.3, true)?.f_exp()
        });
        scalar(&y.unwrap())
    });
    assert_eq!(report.reruns.count, 1, "{report:?}");
}

#[test]
fn segments_within_segments() {
    let report = parity(&sources(2), |x| {
        let (first, second) = (held(x, 0), held(x, 1));
        let y = segment("outer", &x[0].tanh(), move |x| {
            let first = first.iter().map(Tensor::shallow_clone).collect::<Vec<_>>();
            let y = segment("inner", &x.f_sin()?, move |x| block(x, &first))?.f_dropout(0.2, true)?;
            block(&y.f_cos()?, &second)
        });
        scalar(&y.unwrap())
    });
    assert_eq!(report.reruns.count, 2, "{report:?}");
}

#[test]
fn a_segment_in_a_mixed_model() {
    parity(&sources(3), |x| {
        let [a, b, c] = [0, 1, 2].map(|index| held(x, index));
        let y = block(&x[0].tanh(), &a).unwrap();
        let y = segment("middle", &y, move |y| block(y, &b)).unwrap();
        let y = remat(&[&y], |y| y[0].f_dropout(0.1, true)?.f_gelu("tanh")).unwrap();
        scalar(&block(&y, &c).unwrap())
    });
}

#[test]
fn views_as_inputs_and_as_results() {
    parity(&[randn(&[64, 96])], |x| {
        let whole = &x[0] * 2.0;
        let part = whole.narrow(1, 8, 64).transpose(0, 1);
        let y = segment("view", &part, |x| x.f_tanh()?.f_narrow(0, 3, 50)?.f_transpose(0, 1)).unwrap();
        let z = remat(&[&part], |x| x[0].f_exp()?.f_narrow(0, 3, 50)).unwrap();
        let same = remat(&[&part], |x| x[0].f_narrow(0, 3, 50)).unwrap();
        scalar(&(y.sin() * z.transpose(0, 1).exp() * same.transpose(0, 1)))
    });
}

#[test]
fn a_segment_that_takes_tokens() {
    let tokens = Tensor::randint(40, [30], (Kind::Int64, Device::Cpu));
    parity(&[randn(&[40, 16]), tokens], |x| {
        let table = x[0].shallow_clone();
        let y = segment("embed", &(&x[1] + 0), move |ids| table.f_index_select(0, ids)?.f_tanh()?.f_exp());
        scalar(&y.unwrap())
    });
}

#[test]
fn the_input_comes_back_from_the_disk() {
    let cache = everything().policy(Offload::default().device_budget(64 * KIB).prefetch(0)).build().unwrap();
    let plain = leaf(&randn(&[256, 256]));
    let cached = leaf(&plain.detach());
    let run = |x: &Tensor| (0..4).fold(x * 1.1, |y, _| segment("chain", &y, chain).unwrap()).sum(Kind::Float);
    run(&plain).backward();
    let report = step_of(&cache, || run(&cached)).unwrap();
    assert!(same_bits(&plain.grad(), &cached.grad()));
    let mib = 256 * 256 * 4;
    assert!(report.loaded.bytes >= 3 * mib, "{report:?}");
    assert!(report.offloaded.bytes <= 4 * mib, "only the inputs: {report:?}");
    assert_eq!(report.recomputed.bytes, 4 * 2 * mib, "{report:?}");
    assert_nothing_held(&cache);
}

#[test]
fn the_simulated_device_with_segments() {
    let cache =
        staged().policy(Offload::default().device_budget(64 * KIB)).host_pool(512 * KIB).build().unwrap();
    let plain = leaf(&randn(&[256, 256]));
    let run = |x: &Tensor| (0..6).fold(x * 1.1, |y, _| segment("chain", &y, chain).unwrap()).sum(Kind::Float);
    run(&plain).backward();
    for _ in 0..3 {
        let cached = leaf(&plain.detach());
        let report = step_of(&cache, || run(&cached)).unwrap();
        assert!(same_bits(&plain.grad(), &cached.grad()), "{report:?}");
        assert!(report.loaded.count >= 4, "{report:?}");
        assert_nothing_held(&cache);
    }
}

/// Recomputes what can be recomputed, and notes what steps take the device for that.
#[derive(Clone, Debug)]
struct Noting {
    is_timed: bool,
    noted: Arc<Mutex<Vec<Observation>>>,
}

impl Policy for Noting {
    fn begin(&mut self, _outset: &Outset<'_>) -> StepPlan {
        let saves = Saves::InTurn([Placement::Recompute].into());
        StepPlan { timed: self.is_timed, saves, ..StepPlan::default() }
    }

    fn end(&mut self, _plan: &StepPlan, observed: Observation) {
        self.noted.lock().push(observed);
    }
}

/// What a cache of `builder` observes of a step with operations, or also segments, that run again. `prepare` comes before the step.
fn observed(
    builder: TensorCacheBuilder,
    is_timed: bool,
    with_segment: bool,
    prepare: impl FnOnce(),
) -> Result<Observation, Error> {
    let noted = Arc::default();
    let cache = builder.policy(Noting { is_timed, noted: Arc::clone(&noted) }).build().unwrap();
    let x = leaf(&randn(&[64, 64]));
    prepare();
    let report = step_of(&cache, || match with_segment {
        true => scalar(&segment("chain", &(&x * 2.0).tanh(), chain).unwrap().tanh()),
        false => scalar(&(&x * 2.0).tanh().exp()),
    })?;
    assert!(report.reruns.count > 0, "{report:?}");
    Ok(noted.lock().pop().unwrap())
}

#[test]
fn a_step_that_is_timed_tells_what_reruns_take_the_device() {
    let observed =
        |builder, is_timed, with_segment| observed(builder, is_timed, with_segment, || ()).unwrap();
    for with_segment in [true, false] {
        let Observation { rerun, wall, .. } = observed(staged().host_pool(4 * MIB), true, with_segment);
        assert!(rerun.is_some_and(|rerun| !rerun.is_zero() && rerun <= wall), "{rerun:?} of {wall:?}");
    }
    assert_eq!(observed(staged().host_pool(4 * MIB), false, true).rerun, None, "nobody asks");
    assert_eq!(observed(everything(), true, true).rerun, None, "there is no device");
}

#[test]
fn a_rerun_that_a_device_does_not_measure_leaves_it_unknown() {
    let faults = Arc::<DeviceFaults>::default();
    let observed = |prepare: &dyn Fn()| {
        observed(staged().host_pool(4 * MIB).device_faults(&faults), true, false, prepare)
    };
    let (calls, before) = (|| faults.calls(Some(DeviceCall::Record)), AtomicU64::default());
    observed(&|| before.store(calls(), Ordering::Relaxed)).unwrap();
    let count = calls() - before.into_inner();
    let unknown = (0..count).filter_map(|nth| {
        let observed = observed(&|| faults.inject(Some(DeviceCall::Record), nth, 1));
        observed.ok().filter(|observed| observed.rerun.is_none())
    });
    assert!(unknown.count() >= 2, "its beginning and its end");
}

#[test]
fn a_cache_that_keeps_everything_recomputes_too() {
    let cache = TensorCache::builder().policy(Keep).min_bytes(0).build().unwrap();
    let x = leaf(&randn(&[64, 64]));
    let report = step_of(&cache, || scalar(&segment("chain", &(&x * 2.0), chain).unwrap())).unwrap();
    assert_eq!((report.recomputed.count, report.offloaded.count), (2, 0), "{report:?}");
}

#[test]
fn without_a_step_or_gradients_it_is_a_plain_call() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = |calls: &Arc<AtomicUsize>| {
        let calls = Arc::clone(calls);
        move |x: &Tensor| {
            calls.fetch_add(1, Ordering::Relaxed);
            chain(x)
        }
    };
    let cache = everything().build().unwrap();
    let x = leaf(&randn(&[64, 64]));
    scalar(&segment("plain", &x, counted(&calls)).unwrap()).backward();
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    let report = {
        let step = cache.step();
        let y = tch::no_grad(|| segment("plain", &x, counted(&calls)).unwrap());
        let z = tch::no_grad(|| remat(&[&x], |x| chain(x[0])).unwrap());
        drop((y, z));
        step.finish().unwrap()
    };
    assert_eq!(calls.load(Ordering::Relaxed), 2);
    assert_eq!((report.saved.count, report.recomputed.count), (0, 0), "{report:?}");
}

#[test]
fn each_segment_runs_again_once_per_backward() {
    let calls = Arc::new(AtomicUsize::new(0));
    let source = randn(&[64, 64]);
    let plain = leaf(&source);
    (0..3).for_each(|_| scalar(&chain(&(&plain * 2.0)).unwrap()).backward());
    let cache = calling().build().unwrap();
    let x = leaf(&source);
    let step = cache.step();
    let counting = Arc::clone(&calls);
    let loss = scalar(
        &segment("chain", &(&x * 2.0), move |x| {
            counting.fetch_add(1, Ordering::Relaxed);
            chain(x)
        })
        .unwrap(),
    );
    for (options, expected) in [(RETAIN, 2), (RETAIN, 3), (Backward::default(), 4)] {
        step.backward_with(&loss, options).unwrap();
        assert_eq!(calls.load(Ordering::Relaxed), expected);
    }
    drop(loss);
    step.finish().unwrap();
    assert!(same_bits(&plain.grad(), &x.grad()));
    assert_nothing_held(&cache);
    assert_eq!(Arc::strong_count(&calls), 1, "the function went with the graph");
}

#[test]
fn a_recipe_whose_result_no_one_saved_holds_nothing_in_backward() {
    let cache = calling().build().unwrap();
    let x = leaf(&randn(&[64, WIDTH]));
    let holding = Arc::new(());
    let (recipe, seen) = (Arc::downgrade(&holding), Arc::new(Mutex::new(Vec::new())));
    let step = cache.step();
    let loss = {
        let h = x.tanh();
        let result = remat(&[&h], move |inputs| {
            let _ = &holding;
            inputs[0].f_add_scalar(1.0)
        });
        let seen = Arc::clone(&seen);
        let looks = move |x: &Tensor| {
            seen.lock().push(recipe.upgrade().is_some());
            chain(x)
        };
        let loss = scalar(&segment("looks", &h, looks).unwrap());
        drop(result);
        loss
    };
    step.backward(&loss).unwrap();
    step.finish().unwrap();
    assert_eq!(*seen.lock(), [true, false], "in forward, and in backward");
}

#[test]
fn a_retained_graph_with_recipes_serves_two_backwards() {
    let source = randn(&[64, 64]);
    let run = |x: &Tensor| {
        let y = remat(&[&(x * 1.5)], |x| x[0].f_gelu("tanh")?.f_dropout(0.2, true)).unwrap();
        scalar(&y.sin().exp())
    };
    let plain = leaf(&source);
    let cached = leaf(&source);
    tch::manual_seed(5);
    let loss = run(&plain);
    Tensor::run_backward(&[&loss], &[&plain], true, false);
    let expected = Tensor::run_backward(&[&loss], &[&plain], false, false);
    let cache = everything().build().unwrap();
    tch::manual_seed(5);
    let step = cache.step();
    let loss = run(&cached);
    let first = Tensor::run_backward(&[&loss], &[&cached], true, false);
    let second = Tensor::run_backward(&[&loss], &[&cached], false, false);
    drop(loss);
    step.finish().unwrap();
    assert_same_bits("first", &expected, &first);
    assert_same_bits("second", &expected, &second);
    assert_nothing_held(&cache);
}

#[test]
fn gradients_of_gradients() {
    let source = randn(&[32, 32]);
    let run = |x: &Tensor| {
        let y = segment("chain", &(x * 1.5), chain).unwrap();
        let y = remat(&[&y], |y| y[0].f_tanh()).unwrap();
        let loss = scalar(&y.sin());
        let first = Tensor::run_backward(&[&loss], &[x], true, true).pop().unwrap();
        first.square().sum(Kind::Float)
    };
    let plain = leaf(&source);
    run(&plain).backward();
    let cache = everything().build().unwrap();
    let cached = leaf(&source);
    step_of(&cache, || run(&cached)).unwrap();
    assert!(same_bits(&plain.grad(), &cached.grad()));
    assert_nothing_held(&cache);
}

#[test]
fn several_micro_batches_with_segments_may_be_open() {
    let inputs = [randn(&[64, 64]), randn(&[64, 64])];
    let run = |x: &Tensor| scalar(&segment("s", &(x * 2.0), |x| chain(&x.f_dropout(0.2, true)?)).unwrap());
    let plain = leaves(&inputs);
    tch::manual_seed(3);
    plain.iter().for_each(|x| run(x).backward());
    let cached = leaves(&inputs);
    let cache = everything().build().unwrap();
    tch::manual_seed(3);
    let step = cache.step();
    let losses: Vec<Tensor> = (0..2)
        .map(|index| {
            step.micro_batch(index);
            run(&cached[index])
        })
        .collect();
    losses.iter().for_each(|loss| step.backward(loss).unwrap());
    drop(losses);
    step.finish().unwrap();
    assert_same_bits("micro-batches", &grads(&plain), &grads(&cached));
    assert_nothing_held(&cache);
}

#[test]
fn random_numbers_go_on_after_a_rerun_as_without() {
    let draw = |cache: Option<&TensorCache>| {
        let x = leaf(&Tensor::ones([64, 64], common::F32));
        tch::manual_seed(9);
        let step = cache.map(TensorCache::step);
        let y = segment("drop", &(&x * 2.0), |x| x.f_dropout(0.5, true)?.f_exp()).unwrap();
        scalar(&y).backward();
        drop(step);
        randn(&[16])
    };
    let cache = everything().build().unwrap();
    assert!(same_bits(&draw(None), &draw(Some(&cache))));
}

#[test]
fn backward_on_another_thread_after_the_step_and_the_cache() {
    let source = randn(&[64, 64]);
    let plain = leaf(&source);
    let run = |x: &Tensor| {
        let y = segment("chain", &(x * 2.0), |x| chain(&x.f_dropout(0.4, true)?)).unwrap();
        scalar(&remat(&[&y], |y| y[0].f_gelu("tanh")).unwrap().sin())
    };
    tch::manual_seed(2);
    run(&plain).backward();
    let cached = leaf(&source);
    let cache = everything().build().unwrap();
    tch::manual_seed(2);
    let step = cache.step();
    let loss = run(&cached);
    step.flush();
    step.finish().unwrap();
    drop(cache);
    thread::scope(|threads| threads.spawn(move || loss.backward()).join().unwrap());
    assert!(same_bits(&plain.grad(), &cached.grad()));
}

#[test]
fn threads_with_segments_of_one_step() {
    let inputs: Vec<Tensor> = (0..4).map(|_| randn(&[64, 64])).collect();
    let run = |x: &Tensor| scalar(&segment("chain", &(x * 2.0), chain).unwrap());
    let plain = leaves(&inputs);
    plain.iter().for_each(|x| run(x).backward());
    let cached = leaves(&inputs);
    let cache = everything().build().unwrap();
    let step = cache.step();
    let handle = step.handle();
    thread::scope(|threads| {
        for x in &cached {
            let (handle, x) = (handle.clone(), x.shallow_clone());
            threads.spawn(move || {
                let _entered = handle.enter();
                run(&x).backward();
            });
        }
    });
    let report = step.finish().unwrap();
    assert_eq!(report.reruns.count, 4, "{report:?}");
    assert_same_bits("threads", &grads(&plain), &grads(&cached));
    assert_nothing_held(&cache);
}

#[test]
fn a_loss_dropped_without_backward_leaves_nothing() {
    let cache = everything().build().unwrap();
    let x = leaf(&randn(&[128, 128]));
    let step = cache.step();
    let y = segment("chain", &(&x * 2.0), chain).unwrap();
    let z = remat(&[&y], |y| y[0].f_gelu("tanh")).unwrap();
    drop(scalar(&z.sin()));
    // This one is marked, but nobody saves it.
    let unsaved = remat(&[&y], |y| y[0].f_gelu("tanh")).unwrap();
    drop((y, z, unsaved));
    step.finish().unwrap();
    assert_nothing_held(&cache);
}

/// The outcomes of backward for a segment and for an operation that run `f`.
fn failures(
    change: impl Fn(&Tensor),
    f: impl Fn(&Tensor) -> Outcome + Send + Clone + 'static,
) -> [String; 2] {
    failures_with(calling().verify(Verify::Off), change, f)
}

fn failures_with(
    builder: TensorCacheBuilder,
    change: impl Fn(&Tensor),
    f: impl Fn(&Tensor) -> Outcome + Send + Clone + 'static,
) -> [String; 2] {
    let cache = builder.build().unwrap();
    [false, true].map(|one| {
        let x = leaf(&randn(&[32, 32]));
        let step = cache.step();
        let input = &x * 2.0;
        let f = f.clone();
        let y = if one { remat(&[&input], move |x| f(x[0])) } else { segment("odd", &input, f) };
        let loss = scalar(&y.unwrap().sin());
        change(&input);
        let error = step.backward(&loss).unwrap_err().to_string();
        drop(loss);
        step.finish().unwrap();
        assert_nothing_held(&cache);
        // Nothing is broken by it.
        step_of(&cache, || scalar(&segment("fine", &(&x * 2.0), chain).unwrap())).unwrap();
        error
    })
}

fn nothing(_: &Tensor) {}

/// Whether a function that was first given a result is given it again: it then has no history.
fn is_rerun(x: &Tensor) -> bool {
    x.is_leaf()
}

#[test]
fn an_input_changed_in_place_is_an_error() {
    for error in failures(|x| drop(tch::no_grad(|| x.shallow_clone().g_add_scalar_(1.0))), chain) {
        assert!(error.contains("modified by an inplace operation"), "{error}");
    }
}

#[test]
fn a_parameter_changed_in_place_is_an_error() {
    // Nobody saves a bias, so autograd itself would not notice.
    let bias = leaf(&randn(&[32]));
    let held = Arc::new(Mutex::new(bias.shallow_clone()));
    let f = move |x: &Tensor| x.f_add(&held.lock())?.f_gelu("tanh");
    for error in failures(|_| drop(tch::no_grad(|| bias.shallow_clone().g_add_scalar_(1.0))), f) {
        assert!(error.contains("that it uses was changed in place"), "{error}");
    }
}

#[test]
fn a_function_that_saves_other_tensors_is_an_error() {
    type Odd = fn(&Tensor) -> Outcome;
    let odd: [(Odd, &str); 4] = [
        (|x| x.f_sin()?.f_cos(), "before"),
        (|x| x.f_tanh()?.f_exp()?.f_sin()?.f_cos()?.f_exp(), "more tensors"),
        (|x| x.f_narrow(0, 0, 31)?.f_tanh()?.f_exp(), "3968 bytes"),
        (|x| x.f_transpose(0, 1)?.f_tanh()?.f_exp(), "of another kind or shape"),
    ];
    for (other, expected) in odd {
        let f = move |x: &Tensor| if is_rerun(x) { other(x) } else { x.f_tanh()?.f_exp()?.f_sin() };
        let cache = calling().build().unwrap();
        let x = leaf(&randn(&[32, 32]));
        let error =
            step_of(&cache, || scalar(&segment("odd", &(&x * 2.0), f).unwrap())).unwrap_err().to_string();
        assert!(error.contains("segment \"odd\"") && error.contains(expected), "{error}");
        assert_nothing_held(&cache);
    }
}

#[test]
fn an_operation_with_another_result_is_an_error() {
    let [_, error] = failures(nothing, |x| {
        let x = if is_rerun(x) { x.f_narrow(0, 0, 9)? } else { x.shallow_clone() };
        // Its last operation must not save the result: the result could still exist, and would then not be
        // recomputed.
        x.f_exp()?.f_sin()
    });
    assert!(error.contains("another size or kind"), "{error}");
}

#[test]
fn a_function_that_fails_is_an_error() {
    for error in
        failures(
            nothing,
            |x| {
                if is_rerun(x) { Err(TchError::Torch("on purpose".to_owned())) } else { chain(x) }
            },
        )
    {
        assert!(error.contains("again: on purpose"), "{error}");
    }
}

#[test]
fn a_panic_in_a_rerun_is_an_error() {
    for error in failures(nothing, |x| if is_rerun(x) { panic!("on purpose") } else { chain(x) }) {
        assert!(error.contains("it panicked: on purpose"), "{error}");
    }
}

#[test]
fn other_random_numbers_are_an_error() {
    for error in failures(nothing, |x| {
        if is_rerun(x) {
            drop(randn(&[8]));
        }
        x.f_dropout(0.5, true)?.f_gelu("tanh")
    }) {
        assert!(error.contains("random numbers"), "{error}");
    }
}

#[test]
fn an_error_in_the_first_run_is_the_callers() {
    let cache = everything().build().unwrap();
    let x = leaf(&randn(&[32, 32]));
    let step = cache.step();
    let failed = segment("bad", &(&x * 2.0), |x| x.f_exp()?.f_view([7]));
    assert!(failed.is_err());
    let loss = scalar(&(&x * 3.0).sin());
    step.backward(&loss).unwrap();
    drop(loss);
    step.finish().unwrap();
    assert_nothing_held(&cache);
}

#[test]
fn a_backward_within_a_segment_is_an_error() {
    let cache = everything().build().unwrap();
    let x = leaf(&randn(&[32, 32]));
    let _step = cache.step();
    let outcome = segment("penalty", &(&x * 2.0), |x| {
        let y = x.f_exp()?.f_sin()?.f_sum(Kind::Float)?;
        Ok(Tensor::f_run_backward(&[&y], &[x], true, true)?.remove(0))
    });
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("backward ran within segment \"penalty\""), "{error}");
}

#[test]
fn a_result_changed_in_place_is_saved_as_it_is() {
    let report = parity(&[randn(&[64, 64])], |x| {
        let mut y = remat(&[&(&x[0] * 1.5)], |x| x[0].f_sin()).unwrap();
        let _changed = y.g_add_scalar_(1.0);
        scalar(&y.exp().sin())
    });
    assert_eq!(report.recomputed.count, 0, "{report:?}");
}

#[test]
fn what_stands_at_the_address_of_a_marked_result_is_not_taken_for_it() {
    let cache = everything().build().unwrap();
    let x = leaf(&randn(&[64, 64]));
    let step = cache.step();
    let input = &x * 2.0;
    drop(remat(&[&input], |x| x[0].f_gelu("tanh")).unwrap());
    for _ in 0..64 {
        drop((&x + 1.0).sin());
    }
    let report = step.finish().unwrap();
    assert_eq!(report.recomputed.count, 0, "{report:?}");
    drop(input);
    assert_nothing_held(&cache);
}

#[test]
fn an_input_that_hands_no_gradient_on_hands_none_on_again() {
    let cache = everything().build().unwrap();
    let x = leaf(&randn(&[2, 64, 64]));
    let step = cache.step();
    let view = tch::no_grad(|| x.view([2, 64, 64]));
    assert!(view.requires_grad(), "libtorch says that it does, and hands none on");
    let y = segment("s", &view, |x| {
        drop(x.f_feature_dropout(0.5, true)?);
        x.f_pow_tensor_scalar(3.0)?.f_sigmoid()
    });
    step.backward(&(y.unwrap().sum(Kind::Float) + x.sum(Kind::Float))).unwrap();
    assert_same_bits("no share of the segment's", &[x.ones_like()], &[x.grad()]);
}

/// Views of several results that were changed in place: asking for their function is an error.
#[test]
fn an_input_that_nobody_may_use_may_be_given() {
    let cache = everything().build().unwrap();
    let x = leaf(&randn(&[64, 64]));
    let _step = cache.step();
    let pieces = (&x * 2.0).chunk(2, 0);
    drop(pieces[0].detach().f_mul_scalar_(2.0).unwrap());
    drop(segment("s", &pieces[1], |x| Ok(x.shallow_clone())).unwrap());
    drop(remat(&[&x, &pieces[1]], |x| Ok(x[1].shallow_clone())).unwrap());
}

// ---- what a function reads besides its inputs ----

/// A function that reads `held`, as a segment and as a single operation; returns the outcomes of backward when
/// `change` runs before it.
fn captured(held: &Tensor, mut change: impl FnMut()) -> [Result<Tensor, String>; 2] {
    let source = randn(&[64, 64]);
    [false, true].map(|single| {
        let cache = calling().build().unwrap();
        let x = leaf(&source);
        let step = cache.step();
        let loss = {
            let held = held.shallow_clone();
            let y = if single {
                remat(&[&x], move |x| (x[0] + &held).f_sin()).unwrap().square()
            } else {
                segment("s", &x, move |x| (x + &held).f_sin()).unwrap()
            };
            y.sum(Kind::Float)
        };
        change();
        step.backward(&loss).map(|()| x.grad()).map_err(|error| error.to_string())
    })
}

#[test]
fn a_tensor_without_gradient_that_changes_before_backward_is_an_error() {
    let mask = randn(&[64, 64]);
    for outcome in captured(&mask, || drop(mask.shallow_clone().fill_(0.0))) {
        let error = outcome.unwrap_err();
        assert!(error.contains("[64, 64]") && error.contains("was changed in place"), "{error}");
    }
}

#[test]
fn so_it_is_if_it_is_given_other_data() {
    let mask = randn(&[64, 64]);
    for outcome in captured(&mask, || mask.shallow_clone().set_data(&mask.zeros_like())) {
        assert!(outcome.unwrap_err().contains("was changed in place"));
    }
}

/// Two rows of different lengths.
fn nested() -> Tensor {
    let sizes = Tensor::from_slice(&[32_i64, 64, 64, 64]).view([2, 2]);
    Tensor::f_internal_nested_from_padded(&randn(&[2, 64, 64]), &sizes, false).unwrap()
}

#[test]
fn so_it_is_of_tensors_of_other_layouts() {
    type Dense = fn(&Tensor) -> Result<Tensor, TchError>;
    let padded: Dense = |t| t.f_nested_to_padded_tensor(0.0, None::<&[i64]>)?.f_select(0, 0);
    let dense: Dense = |t| t.f_to_dense(None::<Kind>, false);
    let eye = Tensor::eye(64, (Kind::Float, Device::Cpu));
    let others =
        [(nested(), padded), (eye.to_sparse_sparse_dim(2), dense), (eye.to_sparse_csr(None::<i64>), dense)];
    for (held, dense) in others {
        let cache = everything().build().unwrap();
        let x = leaf(&randn(&[64, 64]));
        let step = cache.step();
        let mut after = held.shallow_clone();
        let y = segment("s", &x, move |x| x.f_mul(&dense(&held)?.f_exp()?)?.f_sin()).unwrap();
        drop(after.f_mul_scalar_(2.0).unwrap());
        let error = step.backward(&y.sum(Kind::Float)).unwrap_err().to_string();
        assert!(error.contains("was changed in place"), "{error}");
    }
}

#[test]
fn a_function_that_changes_a_nested_tensor_is_an_error() {
    let held = nested();
    let cache = everything().build().unwrap();
    let x = leaf(&randn(&[64, 64]));
    let _step = cache.step();
    let changed = segment("s", &x, move |x| {
        let padded =
            held.shallow_clone().f_mul_scalar_(2.0)?.f_nested_to_padded_tensor(0.0, None::<&[i64]>)?;
        x.f_mul(&padded.f_select(0, 0)?)?.f_sin()
    });
    assert!(changed.unwrap_err().to_string().contains("a nested tensor that it did not make"));
}

#[test]
fn so_it_is_where_no_version_says_so() {
    let mask = randn(&[64, 64]);
    for outcome in captured(&mask, || drop(mask.data().fill_(0.0))) {
        assert!(outcome.unwrap_err().contains("was changed in place"));
    }
    // libtorch's own optimizers change parameters through `data()`.
    let vs = nn::VarStore::new(Device::Cpu);
    let weight = vs.root().ones("weight", &[64, 64]);
    let mut optimizer = nn::Sgd::default().build(&vs, 0.1).unwrap();
    (&weight * 2.0).sum(Kind::Float).backward();
    let outcomes = captured(&weight, || optimizer.step());
    for outcome in outcomes {
        assert!(outcome.unwrap_err().contains("was changed in place"));
    }
}

/// The result is as large as before and saves as much: only its bytes tell.
#[test]
fn another_result_that_nothing_else_shows_is_an_error_when_verifying() {
    let gelu = |x: &Tensor| (x * 3.0).f_gelu(if is_rerun(x) { "none" } else { "tanh" });
    let errors = failures_with(calling(), nothing, gelu);
    for error in errors {
        assert!(error.contains("its result is another than before"), "{error}");
    }
}

#[test]
fn what_changes_that_no_function_reads_is_no_error() {
    let (mask, other) = (randn(&[64, 64]), randn(&[64, 64]));
    for outcome in captured(&mask, || drop(other.data().fill_(0.0))) {
        drop(outcome.unwrap());
    }
}

#[test]
fn a_function_that_changes_what_it_did_not_make_is_an_error() {
    let cache = everything().build().unwrap();
    let (x, counter) = (leaf(&randn(&[64, 64])), Tensor::zeros([3], common::F32));
    let _step = cache.step();
    let error = segment("s", &x, move |x| {
        let count = tch::no_grad(|| counter.shallow_clone().f_add_scalar_(1.0))?;
        (x * count.sum(Kind::Float)).f_sin()
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("segment \"s\" changes a tensor of shape [3]"), "{error}");
}

#[test]
fn what_a_segment_saved_and_is_changed_after_it_is_an_error() {
    let cache = calling().build().unwrap();
    let x = leaf(&randn(&[64, 64]));
    let step = cache.step();
    let y = segment("s", &x, Tensor::f_tanh).unwrap();
    drop(y.data().fill_(0.0));
    let error = step.backward(&y.sum(Kind::Float)).unwrap_err().to_string();
    assert!(error.contains("was changed in place after it"), "{error}");
}
