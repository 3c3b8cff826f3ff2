//! Adaptive offloading moves whatever is back in time, and gradients keep their bits.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;

use common::{assert_nothing_held, assert_same_bits, everything, grads, leaves, randn, staged};
use ssdtrain::{Adaptive, GIB, StepReport, TensorCache, TensorCacheBuilder, scope};
use tch::{Kind, Tensor};

const LAYERS: usize = 6;

/// A stack of layers, each in a scope of its own.
fn loss(weights: &[Tensor], x: &Tensor) -> Tensor {
    let stack = weights.iter().enumerate().fold(x.shallow_clone(), |y, (layer, weight)| {
        let _scope = scope(&format!("layer.{layer}"));
        y.matmul(weight).gelu("tanh")
    });
    let _scope = scope("loss");
    stack.square().mean(Kind::Float)
}

/// Takes steps through the cache, compares each one's gradients with those without a cache, and returns the reports.
fn train(builder: TensorCacheBuilder, policy: Adaptive, steps: usize) -> Vec<StepReport> {
    train_waiting(builder, policy, steps, false)
}

/// The same; with `flush`, backward begins only after everything that has to be stored has been.
fn train_waiting(
    builder: TensorCacheBuilder,
    policy: Adaptive,
    steps: usize,
    flush: bool,
) -> Vec<StepReport> {
    let cache = builder.policy(policy).build().unwrap();
    let sources: Vec<_> = (0..LAYERS).map(|_| randn(&[256, 256]) / 16.0).collect();
    let x = randn(&[512, 256]);
    let plain = leaves(&sources);
    loss(&plain, &x).backward();
    let take = |_| {
        let weights = leaves(&sources);
        let step = cache.step();
        let loss = loss(&weights, &x);
        if flush {
            step.flush();
        }
        step.backward(&loss).unwrap();
        let report = step.finish().unwrap();
        assert_same_bits("adaptive", &grads(&plain), &grads(&weights));
        drop(loss);
        assert_nothing_held(&cache);
        report
    };
    (0..steps).map(take).collect()
}

#[test]
fn a_disk_that_is_too_slow_gets_nothing_once_a_step_has_shown_it() {
    // A step saves about 8 MiB and takes a few milliseconds, or a few hundred if the machine is busy.
    let reports = train_waiting(everything().disk_rate(8 << 20), Adaptive::default(), 3, true);
    assert!(reports[..2].iter().all(|report| report.adaptive.is_none() && report.offloaded.bytes > 0));
    let decided = reports[2].adaptive.as_ref().unwrap();
    assert!(decided.measured_bytes_per_s < 9e6, "{decided:?}");
    assert!(
        decided.offloaded < decided.scopes && decided.required_bytes_per_s <= decided.measured_bytes_per_s
    );
    assert!(reports[2].kept.policy.bytes > 0, "{}", reports[2]);
}

#[test]
fn what_the_device_budget_has_no_room_for_moves_all_the_same() {
    // Room for about two of the layers' megabyte.
    let policy = Adaptive::default().device_budget(3 << 20).prefetch(1 << 20);
    let reports = train(everything().disk_rate(40 << 20), policy, 3);
    let report = &reports[2];
    let decided = report.adaptive.as_ref().unwrap();
    assert!(decided.scopes - decided.offloaded <= 3, "{decided:?}");
    assert!(report.kept.policy.bytes <= 2 << 20, "{report}");
}

#[test]
fn it_works_the_way_a_gpus_tensors_take() {
    let reports = train(staged(), Adaptive::default().device_budget(4 << 20), 4);
    assert!(reports[3].adaptive.is_some(), "{}", reports[3]);
}

#[test]
fn without_a_backward_nothing_is_decided() {
    let cache = everything().policy(Adaptive::default()).build().unwrap();
    let (weights, x) = (leaves(&[randn(&[64, 64])]), randn(&[64, 64]));
    for _ in 0..4 {
        let step = cache.step();
        drop(loss(&weights, &x));
        assert!(step.finish().unwrap().adaptive.is_none());
    }
    assert_nothing_held(&cache);
}

#[test]
fn a_trace_is_written_only_if_it_was_asked_for() {
    let adaptive = || everything().policy(Adaptive::default()).disk_cap(GIB);
    let file = tempfile::NamedTempFile::new().unwrap();
    let written = |cache: &TensorCache| cache.write_trace(file.path());
    assert!(written(&adaptive().build().unwrap()).unwrap_err().to_string().contains("trace(true)"));
    written(&adaptive().trace(true).build().unwrap()).unwrap();
}
