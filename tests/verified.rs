//! What `Verify::Full` compares with the original: calling that `segment` and `remat` return when they recompute
//! it.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;

use std::sync::mpsc::channel;

use common::{F32, assert_same_bits, calling, leaf, randn};
use ssdtrain::{MIB, Verify, remat, segment};
use tch::{Kind, TchError, Tensor};

type Outcome = Result<Tensor, TchError>;
type Function = fn(&Tensor) -> Outcome;

/// Inputs of the first run are no leaves, and those of a rerun are.
fn is_rerun(x: &Tensor) -> bool {
    x.is_leaf()
}

#[test]
fn a_value_within_a_segment_counts_where_its_result_is_the_same() {
    let cache = calling().build().unwrap();
    let (x, zeros) = (leaf(&randn(&[32, 32])), leaf(&Tensor::zeros([32, 32], F32)));
    let step = cache.step();
    let held = zeros.shallow_clone();
    // The gradient of `zeros` depends on `h`, but the result does not.
    let y = segment("adapter", &(&x * 2.0), move |x| {
        let h = (x * 3.0).f_gelu(if is_rerun(x) { "none" } else { "tanh" })?;
        x.f_add(&h.f_matmul(&held)?)
    });
    let error = step.backward(&y.unwrap().square().sum(Kind::Float)).unwrap_err().to_string();
    assert!(error.contains("4096 bytes of another value, which verify(Verify::Full) has shown"), "{error}");
}

#[test]
fn so_does_a_value_that_leaves_it_by_a_side_way() {
    let cache = calling().build().unwrap();
    let x = leaf(&randn(&[64, 64]));
    let step = cache.step();
    let (send, balance) = channel();
    let y = segment("experts", &(&x * 2.0), move |x| {
        let gate = (x * if is_rerun(x) { 2.0 } else { 3.0 }).f_softmax(-1, Kind::Float)?;
        send.send(gate.square().sum(Kind::Float)).unwrap();
        (x * 1.5).f_tanh()?.f_sin()
    });
    let loss = y.unwrap().sum(Kind::Float) + balance.recv().unwrap();
    let error = step.backward(&loss).unwrap_err().to_string();
    assert!(error.contains("which verify(Verify::Full) has shown"), "{error}");
}

/// The gradient is the same with the function in a segment or a single operation as without, verified or not.
fn is_right(after: fn(&Tensor) -> Tensor, function: Function) {
    let source = randn(&[32, 32]);
    let gradient = |verify: Verify, way: fn(&Tensor, Function) -> Outcome| {
        let cache = calling().verify(verify).build().unwrap();
        let x = leaf(&source);
        let step = cache.step();
        let y = way(&(&x * 2.0), function).unwrap();
        step.backward(&after(&y).square().sum(Kind::Float)).unwrap();
        step.finish().unwrap();
        x.grad()
    };
    let expected = gradient(Verify::Off, |x, function| function(x));
    for verify in [Verify::Off, Verify::Full] {
        let in_segment = gradient(verify, |x, function| segment("s", x, function));
        let marked = gradient(verify, |x, function| remat(&[x], move |x| function(x[0])));
        let what = format!("verify({verify:?})");
        assert_same_bits(&what, &[&expected, &expected].map(Tensor::shallow_clone), &[in_segment, marked]);
    }
}

#[test]
fn sparse_results_are_right() {
    let dense: fn(&Tensor) -> Tensor = |y| y.to_dense(None, false);
    is_right(dense, |x| (x * 3.0).f_gelu("tanh")?.f_to_sparse_csr(None::<i64>));
    is_right(dense, |x| (x * 3.0).f_gelu("tanh")?.f_to_sparse_sparse_dim(2));
}

#[test]
fn results_of_onednn_are_right() {
    is_right(|y| y.to_dense(None, false), |x| (x * 3.0).f_gelu("tanh")?.f_to_mkldnn(None::<Kind>));
}

#[test]
fn nested_results_are_right() {
    let nested = |x: &Tensor| {
        let sizes = Tensor::from_slice(&[8_i64, 32]).reshape([1, 2]);
        let padded = (x * 3.0).f_gelu("tanh")?.f_reshape([1, 32, 32])?;
        Tensor::f_internal_nested_from_padded(&padded, &sizes, false)
    };
    is_right(|y| y.to_padded_tensor(0.0, None::<&[i64]>), nested);
}

#[test]
fn a_result_that_repeats_its_elements_takes_no_memory_for_them() {
    let peak = |verify: Verify| {
        let cache = calling().verify(verify).build().unwrap();
        let x = leaf(&randn(&[1024, 1024]));
        let step = cache.step();
        let y = segment("s", &(&x * 2.0), |x| {
            (x * 3.0).f_gelu("tanh")?.f_sum(Kind::Float)?.f_expand([1 << 13, 1 << 13], false)
        });
        let loss = y.unwrap().sum(Kind::Float);
        step.backward(&loss).unwrap();
        step.finish().unwrap().act_peak_bytes
    };
    let (plain, verified) = (peak(Verify::Off), peak(Verify::Full));
    assert!(verified <= plain + 2 * MIB, "{verified} bytes, and {plain} without verifying");
}
