//! Running statistics of batch normalisation within what backward computes again.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;

use common::{F32, assert_same_bits, everything, leaf, randn};
use ssdtrain::{Backward, remat, segment};
use tch::{Kind, TchError, Tensor};

const RETAIN: Backward = Backward { retain_graph: true, create_graph: false };

/// How a function is run.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Plain,
    Segment,
    Remat,
}

/// The gradient and the statistics of a batch normalisation and what `then` makes of its result and the statistics.
fn run(way: Way, then: fn(&Tensor, [&Tensor; 2]) -> Result<Tensor, TchError>) -> [Tensor; 3] {
    tch::manual_seed(3);
    let (mean, var) = (Tensor::zeros([16], F32), Tensor::ones([16], F32));
    let cache = everything().build().unwrap();
    let x = leaf(&(randn(&[64, 16]) * 3.0));
    let step = cache.step();
    let (m, v) = (mean.shallow_clone(), var.shallow_clone());
    let norm = move |x: &Tensor| {
        let none = None::<&Tensor>;
        let y = x.f_batch_norm(none, none, Some(&m), Some(&v), true, 0.1, 1e-5, false)?;
        then(&y, [&m, &v])?.f_sin()
    };
    let y = match way {
        Way::Plain => norm(&x),
        Way::Segment => segment("norm", &x, norm),
        Way::Remat => remat(&[&x], move |x| norm(x[0])),
    };
    let loss = y.unwrap().exp().sum(Kind::Float);
    step.backward(&loss).unwrap();
    step.finish().unwrap();
    [x.grad(), mean, var]
}

#[test]
fn statistics_are_updated_once() {
    let then = |y: &Tensor, _: [&Tensor; 2]| y.f_tanh();
    for way in [Way::Segment, Way::Remat] {
        assert_same_bits("statistics", &run(Way::Plain, then), &run(way, then));
    }
}

#[test]
fn what_reads_them_after_their_update_reads_the_same_again() {
    let then = |y: &Tensor, [mean, var]: [&Tensor; 2]| y.f_mul(&var.f_sqrt()?)?.f_add(mean);
    for way in [Way::Segment, Way::Remat] {
        assert_same_bits("statistics", &run(Way::Plain, then), &run(way, then));
    }
}

/// Both are views of one buffer, as where a program flattens its state.
#[test]
fn statistics_of_one_storage_are_each_updated_once() {
    let source = randn(&[64, 16]) * 3.0;
    let run = |in_segment: bool| {
        let flat = Tensor::cat(&[Tensor::zeros([16], F32), Tensor::ones([16], F32)], 0);
        let cache = everything().build().unwrap();
        let x = leaf(&source);
        let step = cache.step();
        let function = norm([&flat.narrow(0, 0, 16), &flat.narrow(0, 16, 16)], true);
        let y = if in_segment { segment("norm", &x, function) } else { function(&x) };
        step.backward(&y.unwrap().sum(Kind::Float)).unwrap();
        step.finish().unwrap();
        [x.grad(), flat]
    };
    assert_same_bits("statistics", &run(false), &run(true));
}

/// A batch normalisation of the same statistics.
fn norm(
    [mean, var]: [&Tensor; 2],
    train: bool,
) -> impl Fn(&Tensor) -> Result<Tensor, TchError> + Send + use<> {
    let (mean, var) = (mean.shallow_clone(), var.shallow_clone());
    move |x| {
        let none = None::<&Tensor>;
        x.f_batch_norm(none, none, Some(&mean), Some(&var), train, 0.5, 1e-5, false)?.f_sin()
    }
}

#[test]
fn an_update_that_a_rerun_takes_back_is_no_change_for_others() {
    let (mean, var) = (Tensor::zeros([16], F32), Tensor::ones([16], F32));
    let cache = everything().build().unwrap();
    let x = leaf(&randn(&[64, 16]));
    let step = cache.step();
    let y = segment("train", &(&x * 2.0), norm([&mean, &var], true)).unwrap();
    let z = segment("eval", &y, norm([&mean, &var], false)).unwrap();
    let loss = z.square().sum(Kind::Float);
    step.backward_with(&loss, RETAIN).unwrap();
    let first = x.grad().copy();
    step.backward(&loss).unwrap();
    step.finish().unwrap();
    assert_same_bits("twice", &[first * 2.0], &[x.grad()]);
}

#[test]
fn a_later_update_is_a_change_for_who_reads_them() {
    let (mean, var) = (Tensor::zeros([16], F32), Tensor::ones([16], F32));
    let cache = everything().build().unwrap();
    let x = leaf(&randn(&[64, 16]));
    let step = cache.step();
    let y = segment("eval", &(&x * 2.0), norm([&mean, &var], false)).unwrap();
    let z = norm([&mean, &var], true)(&y).unwrap();
    let error = step.backward(&z.square().sum(Kind::Float)).unwrap_err().to_string();
    assert!(error.contains("was changed in place"), "{error}");
}
