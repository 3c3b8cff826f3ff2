//! Running statistics of batch normalisation within what backward computes again.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

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

/// Gradients of `x` and what `buffer` holds after two micro-batches through `function`, both forward before both backward.
fn two_micro_batches(
    in_segments: bool,
    function: fn(&Tensor, &Tensor) -> Result<Tensor, TchError>,
) -> [Tensor; 2] {
    tch::manual_seed(3);
    let buffer = Tensor::cat(&[Tensor::zeros([16], F32), Tensor::ones([32], F32)], 0);
    let cache = everything().build().unwrap();
    let x = leaf(&(randn(&[64, 16]) * 3.0));
    let step = cache.step();
    let losses = [1.0, 2.0].map(|scale| {
        let held = buffer.shallow_clone();
        let function = move |x: &Tensor| function(x, &held)?.f_sin();
        let x = &x * scale;
        let y = if in_segments { segment("norm", &x, function) } else { function(&x) };
        y.unwrap().exp().sum(Kind::Float)
    });
    for loss in losses.into_iter().rev() {
        step.backward(&loss).unwrap();
    }
    step.finish().unwrap();
    [x.grad(), buffer]
}

/// A batch normalisation that updates these statistics.
fn norm_of(x: &Tensor, mean: &Tensor, var: &Tensor) -> Result<Tensor, TchError> {
    let none = None::<&Tensor>;
    x.f_batch_norm(none, none, Some(mean), Some(var), true, 0.5, 1e-5, false)
}

#[test]
fn statistics_are_shared_by_micro_batches() {
    let function =
        |x: &Tensor, buffer: &Tensor| norm_of(x, &buffer.f_narrow(0, 0, 16)?, &buffer.f_narrow(0, 16, 16)?);
    assert_same_bits("shared", &two_micro_batches(false, function), &two_micro_batches(true, function));
}

#[test]
fn statistics_may_lie_beside_what_the_function_reads() {
    let function = |x: &Tensor, buffer: &Tensor| {
        let table = buffer.f_narrow(0, 32, 16)?;
        norm_of(x, &buffer.f_narrow(0, 0, 16)?, &buffer.f_narrow(0, 16, 16)?)?.f_mul(&table)
    };
    assert_same_bits("beside", &two_micro_batches(false, function), &two_micro_batches(true, function));
}

#[test]
fn statistics_may_overlap() {
    let function = |x: &Tensor, buffer: &Tensor| {
        let at = |start| buffer.f_narrow(0, start, 16);
        let y = norm_of(x, &at(0)?, &at(16)?)?;
        let y = norm_of(&y.f_sin()?, &at(8)?, &at(24)?)?;
        y.f_mul(&at(12)?)
    };
    assert_same_bits("overlap", &two_micro_batches(false, function), &two_micro_batches(true, function));
}

#[test]
fn statistics_may_lie_at_one_address() {
    let function = |x: &Tensor, buffer: &Tensor| {
        let at = |start| buffer.f_narrow(0, start, 16);
        let spread = buffer.f_as_strided([16], [2], 0)?;
        let y = norm_of(x, &at(0)?, &at(16)?)?;
        norm_of(&y.f_sin()?, &spread, &at(32)?)
    };
    assert_same_bits("address", &two_micro_batches(false, function), &two_micro_batches(true, function));
}

/// Each thread's rerun begins while the other's is under way.
#[test]
fn statistics_are_shared_by_threads() {
    let source = randn(&[64, 16]);
    let run = |in_segments: bool| {
        let (mean, var) = (Tensor::zeros([16], F32), Tensor::ones([16], F32));
        let cache = everything().build().unwrap();
        let step = cache.step();
        let xs = [leaf(&source), leaf(&(&source * 2.0))];
        let losses = [&xs[0], &xs[1]].map(|x| {
            let (m, v) = (mean.shallow_clone(), var.shallow_clone());
            let calls = AtomicUsize::new(0);
            let function = move |x: &Tensor| {
                let y = norm_of(x, &m, &v)?;
                if calls.fetch_add(1, Ordering::Relaxed) > 0 {
                    thread::sleep(Duration::from_millis(20));
                }
                y.f_mul(&y.f_sin()?)
            };
            let y = if in_segments { segment("norm", x, function) } else { function(x) };
            y.unwrap().sum(Kind::Float)
        });
        thread::scope(|scope| {
            for loss in losses {
                scope.spawn(move || loss.backward());
            }
        });
        step.finish().unwrap();
        [xs[0].grad(), xs[1].grad(), mean, var]
    };
    assert_same_bits("threads", &run(false), &run(true));
}

#[test]
fn an_update_by_another_thread_within_a_rerun_is_an_error() {
    let (mean, var) = (Tensor::zeros([16], F32), Tensor::ones([16], F32));
    let cache = everything().build().unwrap();
    let step = cache.step();
    let x = leaf(&randn(&[64, 16]));
    let (m, v) = (mean.shallow_clone(), var.shallow_clone());
    let calls = AtomicUsize::new(0);
    let y = segment("norm", &x, move |x| {
        let y = norm_of(x, &m, &v)?;
        if calls.fetch_add(1, Ordering::Relaxed) > 0 {
            let (x, m, v) = (x.detach(), m.shallow_clone(), v.shallow_clone());
            let update = move || norm_of(&x, &m, &v).map(drop);
            thread::scope(|scope| scope.spawn(update).join()).unwrap()?;
        }
        y.f_sin()
    });
    let error = step.backward(&y.unwrap().sum(Kind::Float)).unwrap_err().to_string();
    assert!(error.contains("another thread has updated running statistics"), "{error}");
}
