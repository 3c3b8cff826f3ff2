//! What the graph may do with what the cache holds for it; afterwards nothing is left in the cache or on the device.

use std::panic::{AssertUnwindSafe, catch_unwind};

use ssdtrain::{Backward, KIB, MIB, Offload, TensorCache};
use tch::{Kind, Tensor};

use crate::lab::{Lab, assert_nothing_held, leaf, plain_gradient, same_bits};

on_both!(
    small_retained_graph_serves_several_backwards,
    gradients_of_gradients,
    create_graph_through_the_step,
    a_loss_dropped_without_backward,
    a_panic_in_forward,
    backward_after_the_step_and_after_the_cache,
);

const RETAIN: Backward = Backward { retain_graph: true, create_graph: false };
const CREATE: Backward = Backward { retain_graph: true, create_graph: true };

/// Saves a dozen storages of 256 KiB.
fn forward(x: &Tensor) -> Tensor {
    (0..6).fold(x * 1.5, |y, _| (y * 1.01).tanh().exp() * 0.3).sum(Kind::Float)
}

fn source(lab: &Lab) -> Tensor {
    lab.randn(&[256, 256])
}

/// A cache with room on the device for two of them.
fn tight(lab: &Lab) -> TensorCache {
    lab.cache()
        .host_pool(16 * MIB)
        .policy(Offload::default().device_budget(512 * KIB).prefetch(256 * KIB))
        .build()
        .unwrap()
}

fn small_retained_graph_serves_several_backwards(lab: &Lab) {
    let (source, cache) = (source(lab), tight(lab));
    let plain = leaf(&source);
    (0..3).for_each(|_| forward(&plain).backward());
    lab.leaves_no_memory(|| {
        let x = leaf(&source);
        let step = cache.step();
        let loss = forward(&x);
        step.backward_with(&loss, RETAIN).unwrap();
        step.backward_with(&loss, RETAIN).unwrap();
        step.backward(&loss).unwrap();
        let report = step.finish().unwrap();
        drop(loss);
        assert!(report.loaded.bytes > 2 * report.offloaded.bytes, "each backward loaded: {report:?}");
        assert!(same_bits(&plain.grad(), &x.grad()));
        assert_nothing_held(&cache);
    });
}

fn gradients_of_gradients(lab: &Lab) {
    let (source, cache) = (source(lab), tight(lab));
    let penalty = |x: &Tensor| {
        let first = Tensor::run_backward(&[forward(x)], &[x], true, true).pop().unwrap();
        first.square().sum(Kind::Float)
    };
    let expected = plain_gradient(&source, penalty);
    lab.leaves_no_memory(|| {
        let x = leaf(&source);
        let step = cache.step();
        step.backward(&penalty(&x)).unwrap();
        step.finish().unwrap();
        assert!(same_bits(&expected, &x.grad()));
        assert_nothing_held(&cache);
    });
}

fn create_graph_through_the_step(lab: &Lab) {
    let (source, cache) = (source(lab), tight(lab));
    let expected = plain_gradient(&source, forward);
    lab.leaves_no_memory(|| {
        let mut x = leaf(&source);
        let step = cache.step();
        step.backward_with(&forward(&x), CREATE).unwrap();
        step.finish().unwrap();
        assert!(x.grad().requires_grad(), "the gradient can be differentiated");
        assert!(same_bits(&expected, &x.grad()));
        // The gradient's graph holds the leaf that holds the gradient; this breaks the cycle.
        x.zero_grad();
        assert_nothing_held(&cache);
    });
}

fn a_loss_dropped_without_backward(lab: &Lab) {
    let (source, cache) = (source(lab), tight(lab));
    lab.leaves_no_memory(|| {
        let step = cache.step();
        drop(forward(&leaf(&source)));
        step.finish().unwrap();
        assert_nothing_held(&cache);
    });
}

fn a_panic_in_forward(lab: &Lab) {
    let (source, cache) = (source(lab), tight(lab));
    let expected = plain_gradient(&source, forward);
    lab.leaves_no_memory(|| {
        let x = leaf(&source);
        let caught = catch_unwind(AssertUnwindSafe(|| {
            let _step = cache.step();
            let _half = forward(&x);
            panic!("on purpose");
        }));
        assert!(caught.is_err());
        assert_nothing_held(&cache);
        let step = cache.step();
        step.backward(&forward(&x)).unwrap();
        step.finish().unwrap();
        assert!(same_bits(&expected, &x.grad()), "the next step is right");
        assert_nothing_held(&cache);
    });
}

fn backward_after_the_step_and_after_the_cache(lab: &Lab) {
    let source = source(lab);
    let expected = plain_gradient(&source, forward);
    lab.leaves_no_memory(|| {
        let (x, cache) = (leaf(&source), tight(lab));
        let step = cache.step();
        let loss = forward(&x);
        step.flush();
        step.finish().unwrap();
        drop(cache);
        loss.backward();
        assert!(same_bits(&expected, &x.grad()));
    });
}
