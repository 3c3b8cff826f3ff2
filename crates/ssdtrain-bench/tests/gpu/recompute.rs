//! What backward recomputes has the same bits as the first computation, including random numbers and casts.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ssdtrain::plan::{InTurn, Placement};
use ssdtrain::{
    Backward, Keep, MIB, Offload, StepReport, TensorCache, TensorCacheBuilder, Verify, remat, segment,
};
use tch::{Kind, TchError, Tensor, no_grad};

use crate::lab::{Lab, assert_nothing_held, assert_same_bits, grads, leaf, leaves, same_bits};

on_both!(
    small_segments_with_dropout,
    small_operations_with_recipes,
    segments_with_dropout,
    segments_within_segments,
    segments_whose_operations_run_again,
    random_numbers_go_on_as_without,
    steps_under_autocast,
    a_retained_graph_serves_two_backwards,
    a_graph_dropped_without_backward_leaves_no_memory,
);
on_the_gpu_only!(the_peak_falls_to_the_inputs_and_one_segment);

/// Rows, sequence and width.
type Shape = [i64; 3];

const SMALL: Shape = [2, 16, 64];
const HEADS: i64 = 4;
const BLOCKS: usize = 3;

fn large(lab: &Lab) -> Shape {
    lab.suited([8, 512, 512], [2, 32, 64])
}

/// Input, and for each block two matrices and the norm's two vectors.
fn sources(lab: &Lab, [rows, sequence, width]: Shape, kind: Kind) -> Vec<Tensor> {
    tch::manual_seed(1);
    let block = [vec![3 * width, width], vec![width, width], vec![width], vec![width]];
    let weights = (0..BLOCKS).flat_map(|_| &block).map(|shape| lab.randn(shape) * 0.1);
    let sources = std::iter::once(lab.randn(&[rows, sequence, width])).chain(weights);
    sources.map(|source| source.to_kind(kind)).collect()
}

/// Attention and its surroundings, with dropout in three places; the fused kernel draws its own random numbers.
fn block(x: &Tensor, w: &[Tensor]) -> Result<Tensor, TchError> {
    let (rows, sequence, width) = x.size3()?;
    let norm = [&w[2], &w[3]].map(Tensor::shallow_clone);
    let normed =
        remat(&[x], move |x| x[0].f_layer_norm([width], Some(&norm[0]), Some(&norm[1]), 1e-5, true))?;
    let qkv = normed.f_linear(&w[0], None::<&Tensor>)?.f_view([rows, sequence, 3, HEADS, width / HEADS])?;
    drop(normed);
    let part = |index| qkv.f_select(2, index)?.f_transpose(1, 2);
    let (q, k, v) = (part(0)?, part(1)?, part(2)?);
    let y = Tensor::f_scaled_dot_product_attention(&q, &k, &v, None::<&Tensor>, 0.1, true, None, false)?;
    let y = y.f_transpose(1, 2)?.f_reshape([rows, sequence, width])?.f_dropout(0.2, true)?;
    let y = y.f_linear(&w[1], None::<&Tensor>)?;
    let y = remat(&[&y], |y| y[0].f_gelu("tanh")?.f_dropout(0.1, true))?;
    x.f_add(&y.f_mul(&y)?)
}

fn held(x: &[Tensor], index: usize) -> Vec<Tensor> {
    x[1 + 4 * index..5 + 4 * index].iter().map(Tensor::shallow_clone).collect()
}

fn with_recipes(x: &[Tensor]) -> Tensor {
    let y = (0..BLOCKS).fold(x[0].tanh(), |y, index| block(&y, &held(x, index)).unwrap());
    y.square().mean(Kind::Float)
}

fn with_segments(x: &[Tensor]) -> Tensor {
    let y = (0..BLOCKS).fold(x[0].tanh(), |y, index| {
        let w = held(x, index);
        segment(&format!("block.{index}"), &y, move |y| block(y, &w)).unwrap()
    });
    y.square().mean(Kind::Float)
}

fn caches(lab: &Lab) -> [(&'static str, TensorCacheBuilder); 4] {
    let pool = |prefetch| {
        lab.cache().host_pool(256 * MIB).policy(Offload::default().device_budget(1).prefetch(prefetch))
    };
    // Marks are one way of several to have again what is to be computed again.
    let planned = InTurn::new(Offload::default().device_budget(1), [Placement::Recompute]);
    [
        ("keep", TensorCache::builder().device(lab.device).min_bytes(0).policy(Keep)),
        ("host pool", pool(0)),
        ("host pool, ahead", pool(4 * MIB)),
        ("planned", lab.cache().host_pool(256 * MIB).policy(planned)),
    ]
}

/// One step with gradients, on leaves of its own.
fn step(
    cache: &TensorCache,
    sources: &[Tensor],
    f: impl Fn(&[Tensor]) -> Tensor,
) -> (Vec<Tensor>, StepReport) {
    let inputs = leaves(sources);
    tch::manual_seed(7);
    let step = cache.step();
    let loss = f(&inputs);
    step.backward(&loss).unwrap();
    drop(loss);
    (grads(&inputs), step.finish().unwrap())
}

fn parity(lab: &Lab, shape: Shape, f: fn(&[Tensor]) -> Tensor) {
    for kind in [Kind::Float, Kind::BFloat16] {
        let sources = sources(lab, shape, kind);
        let plain = leaves(&sources);
        tch::manual_seed(7);
        f(&plain).backward();
        for (way, cache) in caches(lab) {
            let cache = cache.build().unwrap();
            for round in 0..3 {
                let (gradients, report) = step(&cache, &sources, f);
                assert_same_bits(&format!("{way}, {kind:?}, round {round}"), &grads(&plain), &gradients);
                assert!(
                    report.recomputed.count > 0 && report.reruns.count >= BLOCKS as u64,
                    "{way}: {report}"
                );
                assert_nothing_held(&cache);
            }
        }
    }
}

fn small_segments_with_dropout(lab: &Lab) {
    parity(lab, SMALL, with_segments);
}

fn small_operations_with_recipes(lab: &Lab) {
    parity(lab, SMALL, with_recipes);
}

fn segments_with_dropout(lab: &Lab) {
    parity(lab, large(lab), with_segments);
    parity(lab, large(lab), with_recipes);
}

fn segments_within_segments(lab: &Lab) {
    parity(lab, large(lab), |x| {
        let all: Vec<_> = (0..BLOCKS).map(|index| parking_lot::Mutex::new(held(x, index))).collect();
        let y = segment("outer", &x[0].tanh(), move |x| {
            all.iter().try_fold(x.shallow_clone(), |y, w| {
                let w: Vec<_> = w.lock().iter().map(Tensor::shallow_clone).collect();
                segment("inner", &y.f_sin()?, move |y| block(y, &w))?.f_dropout(0.1, true)
            })
        });
        y.unwrap().square().mean(Kind::Float)
    });
}

/// Attention of all kinds and lengths, a norm and products, with each result compared.
fn segments_whose_operations_run_again(lab: &Lab) {
    let cases = [(128, true), (100, true), (257, false)];
    for (kind, (sequence, causal)) in
        [Kind::Float, Kind::BFloat16].into_iter().flat_map(|kind| cases.map(|case| (kind, case)))
    {
        let sources = sources(lab, [2, sequence, 256], kind);
        let calls = Arc::new(AtomicUsize::new(0));
        let forward = |x: &[Tensor], is_segment: bool| {
            let (w, counting) = (held(x, 0), Arc::clone(&calls));
            let function = move |x: &Tensor| {
                counting.fetch_add(1, Ordering::Relaxed);
                let normed = x.f_layer_norm([256], Some(&w[2]), Some(&w[3]), 1e-5, true)?;
                let qkv = normed.f_linear(&w[0], None::<&Tensor>)?.f_view([2, sequence, 3, HEADS, 64])?;
                let part = |index| qkv.f_select(2, index)?.f_transpose(1, 2);
                let (q, k, v, none) = (part(0)?, part(1)?, part(2)?, None::<&Tensor>);
                let y = Tensor::f_scaled_dot_product_attention(&q, &k, &v, none, 0.0, causal, None, false)?;
                let y = y.f_transpose(1, 2)?.f_reshape([2, sequence, 256])?.f_linear(&w[1], none)?;
                y.f_gelu("tanh")?.f_mul(x)?.f_matmul(&w[1])
            };
            let input = x[0].tanh();
            let y = if is_segment { segment("block", &input, function) } else { function(&input) };
            y.unwrap().square().mean(Kind::Float)
        };
        let plain = leaves(&sources);
        forward(&plain, false).backward();
        let cache = lab.cache().policy(Keep).min_bytes(1024).verify(Verify::Full).build().unwrap();
        // Kernels are compiled meanwhile.
        for _ in 0..4 {
            let inputs = leaves(&sources);
            calls.store(0, Ordering::Relaxed);
            let step = cache.step();
            let loss = forward(&inputs, true);
            step.backward(&loss).unwrap();
            drop(loss);
            assert!(step.finish().unwrap().reruns.count > 0);
            assert_same_bits(&format!("{kind:?}, {sequence}"), &grads(&plain[..5]), &grads(&inputs[..5]));
            // The efficient kernel, which the GPU has for 32 bits, leaves a part of its sums unwritten.
            let again = lab.suited(usize::from(kind == Kind::Float), 0);
            assert_eq!(calls.load(Ordering::Relaxed), 1 + again, "{kind:?}, {sequence}");
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        assert_nothing_held(&cache);
    }
}

fn random_numbers_go_on_as_without(lab: &Lab) {
    let sources = sources(lab, SMALL, Kind::Float);
    let draw = |cache: Option<&TensorCache>| {
        tch::manual_seed(5);
        let step = cache.map(TensorCache::step);
        let inputs = leaves(&sources);
        with_segments(&inputs).backward();
        with_recipes(&inputs).backward();
        drop(step);
        lab.randn(&[64])
    };
    let cache = lab.cache().host_pool(64 * MIB).build().unwrap();
    assert!(same_bits(&draw(None), &draw(Some(&cache))));
}

/// Cast weights are cached while an autocast region lasts, and no longer.
fn steps_under_autocast(lab: &Lab) {
    let train = |cache: Option<&TensorCache>| {
        tch::manual_seed(3);
        let (x, w) = (lab.randn(&[64, 64]), leaf(&lab.randn(&[64, 64])));
        for _ in 0..3 {
            let step = cache.map(TensorCache::step);
            let loss = tch::autocast(true, || {
                let held = w.shallow_clone();
                let f = move |x: &Tensor| {
                    x.f_matmul(&held)?.f_gelu("tanh")?.f_matmul(&held)?.f_dropout(0.1, true)
                };
                let y = segment("cast", &(&x * 2.0), f).unwrap();
                let held = w.shallow_clone();
                let z = remat(&[&y], move |y| y[0].f_matmul(&held)?.f_tanh()).unwrap();
                drop(y);
                z.sin().to_kind(Kind::Float).mean(Kind::Float)
            });
            match &step {
                Some(step) => step.backward(&loss).unwrap(),
                None => loss.backward(),
            }
            drop(loss);
            no_grad(|| drop(w.shallow_clone().f_sub_(&w.grad()).unwrap()));
            w.shallow_clone().zero_grad();
        }
        w.detach()
    };
    let cache = lab.cache().host_pool(64 * MIB).policy(Offload::default().device_budget(1)).build().unwrap();
    assert!(same_bits(&train(None), &train(Some(&cache))));
    assert_nothing_held(&cache);
}

fn a_retained_graph_serves_two_backwards(lab: &Lab) {
    let sources = sources(lab, SMALL, Kind::Float);
    let cache = lab.cache().host_pool(64 * MIB).policy(Offload::default().device_budget(1)).build().unwrap();
    let (once, _) = step(&cache, &sources, with_segments);
    let inputs = leaves(&sources);
    tch::manual_seed(7);
    let step = cache.step();
    let loss = with_segments(&inputs);
    step.backward_with(&loss, Backward { retain_graph: true, create_graph: false }).unwrap();
    step.backward(&loss).unwrap();
    drop(loss);
    step.finish().unwrap();
    let twice: Vec<_> = once.iter().map(|gradient| gradient * 2.0).collect();
    assert_same_bits("twice", &twice, &grads(&inputs));
    assert_nothing_held(&cache);
}

fn a_graph_dropped_without_backward_leaves_no_memory(lab: &Lab) {
    let sources = sources(lab, SMALL, Kind::Float);
    let cache = lab.cache().host_pool(64 * MIB).policy(Offload::default().device_budget(1)).build().unwrap();
    lab.leaves_no_memory(|| {
        let inputs = leaves(&sources);
        let step = cache.step();
        drop((with_segments(&inputs), with_recipes(&inputs)));
        step.finish().unwrap();
        assert_nothing_held(&cache);
    });
}

fn the_peak_falls_to_the_inputs_and_one_segment(lab: &Lab) {
    let sources = sources(lab, large(lab), Kind::Float);
    let (_, cache) = caches(lab).into_iter().next().unwrap();
    let cache = cache.build().unwrap();
    let (_, recipes) = step(&cache, &sources, with_recipes);
    let (_, segments) = step(&cache, &sources, with_segments);
    assert!(segments.act_peak_bytes < recipes.act_peak_bytes / 10 * 9, "{segments}\n{recipes}");
}
