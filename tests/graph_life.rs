//! What the graph may do with what the cache holds for it: keep it, differentiate it, drop it, outlive the step and
//! the cache.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};

use common::{assert_nothing_held, everything, leaf, randn, same_bits};
use ssdtrain::Backward;
use tch::{Kind, Tensor};

const RETAIN: Backward = Backward { retain_graph: true, create_graph: false };

fn forward(x: &Tensor) -> Tensor {
    (x * 1.5).tanh().exp().square().sum(Kind::Float)
}

#[test]
fn a_retained_graph_serves_two_backwards_and_then_a_last_one() {
    let source = randn(&[256, 256]);
    let plain = leaf(&source);
    for _ in 0..3 {
        forward(&plain).backward();
    }
    let cache = everything().build().unwrap();
    let cached = leaf(&source);
    let step = cache.step();
    let loss = forward(&cached);
    step.flush();
    step.backward_with(&loss, RETAIN).unwrap();
    step.backward_with(&loss, RETAIN).unwrap();
    step.backward(&loss).unwrap();
    let report = step.finish().unwrap();
    drop(loss);
    assert!(same_bits(&plain.grad(), &cached.grad()));
    assert_eq!(report.loaded.count, 3 * report.offloaded.count, "each backward loaded all: {report:?}");
    assert_nothing_held(&cache);
}

#[test]
fn gradients_of_gradients() {
    let source = randn(&[64, 64]);
    let second = |x: &Tensor, loss: &Tensor| {
        let first = Tensor::run_backward(&[loss], &[x], true, true).pop().unwrap();
        first.square().sum(Kind::Float)
    };
    let plain = leaf(&source);
    second(&plain, &forward(&plain)).backward();

    let cache = everything().build().unwrap();
    let cached = leaf(&source);
    let step = cache.step();
    let loss = forward(&cached);
    step.flush();
    let penalty = second(&cached, &loss);
    step.flush();
    step.backward(&penalty).unwrap();
    step.finish().unwrap();
    assert!(same_bits(&plain.grad(), &cached.grad()));
    drop((loss, penalty));
    assert_nothing_held(&cache);
}

#[test]
fn what_a_backward_saves_again_is_not_stored_again() {
    let cache = everything().build().unwrap();
    let x = leaf(&randn(&[64, 64]));
    let step = cache.step();
    // tanh saves its result, and the gradient of tanh saves it once more.
    let loss = (&x * 1.5).tanh().sum(Kind::Float);
    step.flush();
    let first = Tensor::run_backward(&[&loss], &[&x], true, true);
    let report = {
        step.flush();
        drop((loss, first));
        step.finish().unwrap()
    };
    assert_eq!(report.deduplicated.count, 1, "{report:?}");
    assert_nothing_held(&cache);
}

#[test]
fn create_graph_through_the_step() {
    let source = randn(&[32, 32]);
    let plain = leaf(&source);
    forward(&plain).backward();
    let cache = everything().build().unwrap();
    let cached = leaf(&source);
    let step = cache.step();
    let loss = forward(&cached);
    step.backward_with(&loss, Backward { retain_graph: true, create_graph: true }).unwrap();
    assert!(same_bits(&plain.grad(), &cached.grad().detach()));
    assert!(cached.grad().requires_grad(), "the gradient can be differentiated");
    step.finish().unwrap();
    // Its graph holds the tensor that holds it, for ever.
    drop(cached.grad().detach_());
}

#[test]
fn a_loss_dropped_without_backward_leaves_nothing() {
    let cache = everything().build().unwrap();
    let x = leaf(&randn(&[128, 128]));
    let step = cache.step();
    drop(forward(&x));
    step.finish().unwrap();
    assert_nothing_held(&cache);
}

#[test]
fn a_panic_in_forward_leaves_nothing_and_the_next_step_is_right() {
    let cache = everything().build().unwrap();
    let source = randn(&[128, 128]);
    let x = leaf(&source);
    let caught = catch_unwind(AssertUnwindSafe(|| {
        let _step = cache.step();
        let _scope = ssdtrain::scope("block.0");
        let _half = (&x * 1.5).tanh();
        panic!("on purpose");
    }));
    assert!(caught.is_err());
    let plain = leaf(&source);
    forward(&plain).backward();
    let step = cache.step();
    step.backward(&forward(&x)).unwrap();
    let report = step.finish().unwrap();
    assert_eq!(report.scopes[0].scope, "", "the panic left its scope");
    assert!(same_bits(&plain.grad(), &x.grad()));
    assert_nothing_held(&cache);
}

#[test]
fn backward_may_run_after_the_step_and_after_the_cache() {
    let source = randn(&[128, 128]);
    let plain = leaf(&source);
    forward(&plain).backward();
    let cached = leaf(&source);
    let cache = everything().build().unwrap();
    let step = cache.step();
    let loss = forward(&cached);
    step.flush();
    step.finish().unwrap();
    drop(cache);
    loss.backward();
    assert!(same_bits(&plain.grad(), &cached.grad()));
}

#[test]
fn nothing_is_saved_through_the_cache_outside_a_step() {
    let cache = everything().build().unwrap();
    let x = leaf(&randn(&[64, 64]));
    cache.step().finish().unwrap();
    let loss = forward(&x);
    assert_eq!(cache.held().entries, 0);
    loss.backward();
}

#[test]
fn a_storage_saved_again_after_an_in_place_change_is_another_entry() {
    let source = randn(&[64, 64]);
    let run = |x: &Tensor| {
        let mut y = x * 2.0;
        let unused = y.sin();
        let _changed = y.g_add_scalar_(1.0);
        drop(unused);
        y.cos().sum(Kind::Float)
    };
    let plain = leaf(&source);
    run(&plain).backward();
    let cache = everything().build().unwrap();
    let cached = leaf(&source);
    let step = cache.step();
    let loss = run(&cached);
    step.flush();
    step.backward(&loss).unwrap();
    step.finish().unwrap();
    assert!(same_bits(&plain.grad(), &cached.grad()));
}
