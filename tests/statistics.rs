//! Running statistics of batch normalisation within what backward recomputes.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use common::{F32, assert_same_bits, calling, everything, leaf, randn};
use parking_lot::Mutex;
use ssdtrain::plan::{InTurn, Placement};
use ssdtrain::{Backward, Offload, TensorCacheBuilder, Verify, remat, segment};
use tch::{Kind, TchError, Tensor};

const RETAIN: Backward = Backward { retain_graph: true, create_graph: false };

/// How a function is run.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Plain,
    Segment,
    Remat,
}

/// The gradient and the statistics of a batch normalisation, with `then` applied to its result and the statistics.
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

/// Both are views of one buffer, as in a program that flattens its state.
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
    let cache = calling().build().unwrap();
    let x = leaf(&randn(&[64, 16]));
    let step = cache.step();
    let y = segment("eval", &(&x * 2.0), norm([&mean, &var], false)).unwrap();
    let z = norm([&mean, &var], true)(&y).unwrap();
    let error = step.backward(&z.square().sum(Kind::Float)).unwrap_err().to_string();
    assert!(error.contains("was changed in place"), "{error}");
}

#[test]
fn an_empty_batch_updates_nothing() {
    let (mean, var) = (Tensor::zeros([16], F32), Tensor::ones([16], F32));
    let run = |in_segments: bool| {
        let cache = everything().build().unwrap();
        let (x, none) = (leaf(&randn(&[64, 16]).fill_(0.5)), leaf(&Tensor::zeros([0, 16], F32)));
        let step = cache.step();
        let losses = [(&x, false), (&none, true)].map(|(x, train)| {
            let (x, norm) = (x * 2.0, norm([&mean, &var], train));
            if in_segments { segment("norm", &x, norm) } else { norm(&x) }.unwrap().sum(Kind::Float)
        });
        step.backward(&losses.into_iter().sum()).unwrap();
        step.finish().unwrap();
        [x.grad(), none.grad()]
    };
    assert_same_bits("empty", &run(false), &run(true));
}

/// Gradients of `x` and the contents of `buffer` after two micro-batches through `function`; both forward passes run
/// before both backward passes.
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
fn statistics_may_be_columns_of_one_buffer() {
    let function = |x: &Tensor, buffer: &Tensor| {
        let rows = buffer.f_narrow(0, 0, 32)?.f_view([16, 2])?;
        norm_of(x, &rows.f_select(1, 0)?, &rows.f_select(1, 1)?)
    };
    assert_same_bits("columns", &two_micro_batches(false, function), &two_micro_batches(true, function));
}

#[test]
fn statistics_may_be_one_element() {
    // Each channel updates it in turn.
    tch::set_num_threads(1);
    let function = |x: &Tensor, buffer: &Tensor| {
        norm_of(x, &buffer.f_narrow(0, 0, 1)?.f_expand([16], false)?, &buffer.f_narrow(0, 16, 16)?)
    };
    assert_same_bits("one", &two_micro_batches(false, function), &two_micro_batches(true, function));
}

#[test]
fn statistics_that_are_only_read_are_not_changed() {
    let function = |x: &Tensor, buffer: &Tensor| {
        let [mean, var] = [0, 16].map(|start| buffer.narrow(0, start, 16));
        let none = None::<&Tensor>;
        Ok(x.f_internal_native_batch_norm_legit(none, none, &mean, &var, false, 0.5, 1e-5)?.0)
    };
    assert_same_bits("read", &two_micro_batches(false, function), &two_micro_batches(true, function));
}

/// The statistics of two norms, which are views of one buffer that each function creates for itself.
#[test]
fn statistics_may_lie_beside_those_of_others() {
    let source = randn(&[64, 16]);
    let run = |in_segments: bool| {
        let flat = Tensor::cat(&[Tensor::zeros([32], F32), Tensor::ones([32], F32)], 0);
        let cache = everything().verify(Verify::Full).build().unwrap();
        let x = leaf(&source);
        let step = cache.step();
        let mut y = &x * 2.0;
        for norm in 0..2 {
            let held = flat.shallow_clone();
            let function = move |x: &Tensor| {
                let [mean, var] = [0, 32].map(|of| held.narrow(0, of + 16 * norm, 16));
                norm_of(x, &mean, &var)?.f_sin()
            };
            y = if in_segments { segment("norm", &y, function) } else { function(&y) }.unwrap();
        }
        step.backward(&y.sum(Kind::Float)).unwrap();
        step.finish().unwrap();
        [x.grad(), flat]
    };
    assert_same_bits("others", &run(false), &run(true));
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

/// Each thread's rerun begins while the other's is in progress.
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

/// The first thread's rerun holds the statistics, and with them the buffer, when the second one's begins.
#[test]
fn what_lies_beside_statistics_is_shared_by_threads() {
    let source = randn(&[64, 16]);
    let run = |in_segments: bool| {
        let buffer = Tensor::cat(&[Tensor::zeros([16], F32), Tensor::ones([32], F32)], 0);
        let cache = everything().build().unwrap();
        let step = cache.step();
        let xs = [leaf(&source), leaf(&(&source * 2.0))];
        let (tell, told) = channel();
        let [first, second] = [&xs[0], &xs[1]].map(|x| {
            let [mean, var, table] = [0, 16, 32].map(|start| buffer.narrow(0, start, 16));
            let calls = AtomicUsize::new(0);
            let tell = tell.clone();
            let function = move |x: &Tensor| {
                let y = norm_of(x, &mean, &var)?.f_mul(&table)?;
                if calls.fetch_add(1, Ordering::Relaxed) > 0 {
                    tell.send(()).unwrap();
                    thread::sleep(Duration::from_millis(50));
                }
                y.f_sin()
            };
            let y = if in_segments { segment("norm", x, function) } else { function(x) };
            y.unwrap().sum(Kind::Float)
        });
        thread::scope(|scope| {
            scope.spawn(move || first.backward());
            if in_segments {
                told.recv().unwrap();
            }
            second.backward();
        });
        step.finish().unwrap();
        [xs[0].grad(), xs[1].grad(), buffer]
    };
    assert_same_bits("threads", &run(false), &run(true));
}

/// The other thread's update is in progress when the rerun begins.
#[test]
fn an_update_that_began_before_a_rerun_is_not_lost() {
    let x = randn(&[4, 16]);
    let large = Tensor::ones([4_000_000, 16], F32);
    let run = |in_segment: bool| {
        let (mean, var) = (Tensor::zeros([16], F32), Tensor::ones([16], F32));
        let cache = everything().build().unwrap();
        let x = leaf(&x);
        let step = cache.step();
        let function = norm([&mean, &var], true);
        let y = if in_segment { segment("norm", &x, function) } else { function(&x) };
        let others = [&large, &mean, &var].map(Tensor::shallow_clone);
        thread::scope(|scope| {
            let update = scope.spawn(move || norm_of(&others[0], &others[1], &others[2]).map(drop).unwrap());
            thread::sleep(Duration::from_millis(20));
            step.backward(&y.unwrap().sum(Kind::Float)).unwrap();
            update.join().unwrap();
        });
        step.finish().unwrap();
        [x.grad(), mean, var]
    };
    assert_same_bits("update", &run(false), &run(true));
}

/// As where a program resets a module.
#[test]
fn a_rerun_that_finds_other_statistics_is_an_error_and_leaves_them() {
    let both = || [Tensor::zeros([16], F32), Tensor::ones([16], F32)];
    let module = Arc::new(Mutex::new(both()));
    let cache = everything().build().unwrap();
    let x = leaf(&randn(&[64, 16]));
    let step = cache.step();
    let held = Arc::clone(&module);
    let y = segment("norm", &x, move |x| {
        let [mean, var] = &*held.lock();
        norm_of(x, mean, var)?.f_sin()
    });
    *module.lock() = both();
    let error = step.backward(&y.unwrap().sum(Kind::Float)).unwrap_err().to_string();
    assert!(error.contains("it updates other running statistics"), "{error}");
    assert_same_bits("others", &both(), &*module.lock());
}

/// How a kernel computes, and so its bits, may depend on how the statistics lie in memory.
#[test]
fn a_recorded_norm_has_statistics_that_lie_as_its_own() {
    let source = randn(&[64, 16]) * 3.0;
    let run = |builder: TensorCacheBuilder| {
        let rows = Tensor::stack(&[Tensor::zeros([16], F32), Tensor::ones([16], F32)], 1);
        let cache = builder.build().unwrap();
        let x = leaf(&source);
        let step = cache.step();
        let y = norm_of(&(&x * 2.0), &rows.select(1, 0), &rows.select(1, 1)).unwrap();
        step.backward(&y.sin().exp().sum(Kind::Float)).unwrap();
        [x.grad(), rows]
    };
    let again = InTurn::new(Offload::default(), vec![Placement::Recompute]);
    assert_same_bits("columns", &run(everything()), &run(everything().policy(again)));
}
