//! A rerun of a segment ends when it has saved the last tensor that backward needs, however the function then ends.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;

use common::{F32, assert_nothing_held, assert_same_bits, calling, grads, leaf, randn, same_bits};
use parking_lot::Mutex;
use ssdtrain::{Backward, TensorCache, Verify, segment};
use tch::{Kind, TchError, Tensor};

const RETAIN: Backward = Backward { retain_graph: true, create_graph: false };

type Outcome = Result<Tensor, TchError>;

/// Nothing is verified, because that takes the whole function.
fn cache() -> TensorCache {
    calling().verify(Verify::Off).build().unwrap()
}

fn scalar(t: &Tensor) -> Tensor {
    t.square().sum(Kind::Float)
}

/// The gradients of a matrix and a weight after two backward passes, and the next random numbers. `function` is a segment or a plain
/// call, to which it makes no difference.
fn gradients(function: fn(&Tensor, &Tensor) -> Outcome, in_segment: bool) -> Vec<Tensor> {
    tch::manual_seed(3);
    let [x, w] = [0, 1].map(|_| leaf(&randn(&[32, 32])));
    let cache = cache();
    let step = cache.step();
    let held = w.shallow_clone();
    let function = move |x: &Tensor| function(x, &held);
    let input = &x * 2.0;
    let y = if in_segment { segment("s", &input, function) } else { function(&input) };
    let loss = scalar(&y.unwrap().sin());
    drop(input);
    step.backward_with(&loss, RETAIN).unwrap();
    step.backward(&loss).unwrap();
    drop(loss);
    step.finish().unwrap();
    assert_nothing_held(&cache);
    let mut all = grads(&[x, w]);
    all.push(randn(&[8]));
    all
}

fn is_right(function: fn(&Tensor, &Tensor) -> Outcome) {
    assert_same_bits("gradients", &gradients(function, false), &gradients(function, true));
}

/// How often `function` got past the last tensor that backward needs, which it counts, in a step with one rerun.
fn ends(
    verify: Verify,
    function: impl Fn(&Tensor, &Tensor, &AtomicUsize) -> Outcome + Send + 'static,
) -> usize {
    let ends = Arc::new(AtomicUsize::new(0));
    let (x, w) = (leaf(&randn(&[32, 32])), leaf(&randn(&[32, 32])));
    let cache = calling().verify(verify).build().unwrap();
    let step = cache.step();
    let counting = Arc::clone(&ends);
    let y = segment("s", &(&x * 2.0), move |x| function(x, &w, &counting));
    step.backward(&scalar(&y.unwrap())).unwrap();
    assert_eq!(step.finish().unwrap().reruns.count, 1);
    ends.load(Ordering::Relaxed)
}

fn count(ends: &AtomicUsize) {
    ends.fetch_add(1, Ordering::Relaxed);
}

#[test]
fn the_last_product_is_not_computed_again() {
    let fails = |x: &Tensor, w: &Tensor, ends: &AtomicUsize| {
        let y = x.f_tanh()?.f_matmul(w)?;
        count(ends);
        Ok(y)
    };
    let panics = |x: &Tensor, w: &Tensor, ends: &AtomicUsize| {
        let y = x.tanh().matmul(w);
        count(ends);
        Ok(y)
    };
    assert_eq!((ends(Verify::Off, fails), ends(Verify::Off, panics)), (1, 1));
    assert_eq!(
        (ends(Verify::Full, fails), ends(Verify::Full, panics)),
        (2, 2),
        "verifying takes the whole function"
    );
}

#[test]
fn gradients_are_the_same_for_operations_that_fail_and_that_panic() {
    is_right(|x, w| x.f_tanh()?.f_matmul(w)?.f_exp()?.f_matmul(w));
    is_right(|x, w| Ok(x.tanh().matmul(w).exp().matmul(w)));
    is_right(|x, w| Ok((x * 3.0).tanh().matmul(w) * 0.5));
    is_right(|x, w| tch::with_grad(|| x.f_tanh()?.f_matmul(w)));
}

#[test]
fn what_nobody_needs_any_more_is_not_computed_again() {
    let (x, calls) = (leaf(&randn(&[32, 32])), Arc::new(AtomicUsize::new(0)));
    let cache = cache();
    let step = cache.step();
    let (send, aside) = channel();
    let counting = Arc::clone(&calls);
    let y = segment("s", &(&x * 2.0), move |x| {
        let y = x.f_tanh()?.f_exp()?;
        counting.fetch_add(1, Ordering::Relaxed);
        send.send(x.f_exp()?.f_sin()?).unwrap();
        Ok(y)
    });
    let loss = scalar(&y.unwrap());
    drop(aside.recv().unwrap());
    step.backward(&loss).unwrap();
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    assert!(aside.try_recv().is_err());
}

#[test]
fn a_lock_that_the_function_holds_is_not_poisoned() {
    #[expect(clippy::disallowed_types, reason = "what a user may have")]
    let module = Arc::new(std::sync::Mutex::new(randn(&[32, 32])));
    let cache = cache();
    for _ in 0..2 {
        let x = leaf(&randn(&[32, 32]));
        let step = cache.step();
        let held = Arc::clone(&module);
        let y = segment("s", &(&x * 2.0), move |x| Ok(x.tanh().matmul(&held.lock().unwrap())));
        step.backward(&scalar(&y.unwrap())).unwrap();
        step.finish().unwrap();
    }
    assert!(!module.is_poisoned());
}

#[test]
fn a_function_that_goes_on_after_its_end_changes_nothing() {
    is_right(|x, w| {
        let y = x.f_tanh()?.f_dropout(0.5, true)?.f_matmul(w);
        // In the rerun this draws on, saves more and returns something else.
        y.or_else(|_| randn(&[9, 9]).set_requires_grad(true).f_exp()).or_else(|_| Ok(randn(&[3])))
    });
    is_right(|x, w| {
        let y = x.f_tanh()?.f_dropout(0.5, true)?;
        let product = catch_unwind(AssertUnwindSafe(|| y.matmul(w)));
        product.or_else(|_| Ok(randn(&[3])))
    });
    is_right(|x, w| {
        let y = x.f_tanh()?.f_matmul(w);
        y.map_err(|_| panic!("a consequence of the stop"))
    });
}

#[test]
fn nothing_more_is_saved_after_the_end() {
    let fails = Arc::new(Mutex::new(Vec::new()));
    let x = leaf(&randn(&[32, 32]));
    let cache = cache();
    let step = cache.step();
    let noting = Arc::clone(&fails);
    let y = segment("s", &(&x * 2.0), move |x| {
        let y = x.f_tanh();
        // The first run has saved this as well, and the graph has released it.
        noting.lock().push(x.f_exp().is_err());
        y
    });
    step.backward(&y.unwrap().sum(Kind::Float)).unwrap();
    assert_eq!(*fails.lock(), [false, true]);
}

#[test]
fn random_numbers_are_drawn_again_up_to_the_end_and_restored() {
    is_right(|x, w| x.f_tanh()?.f_dropout(0.3, true)?.f_matmul(w));
    is_right(|x, w| x.f_tanh()?.f_matmul(w)?.f_dropout(0.3, true));
    // Numbers that no one saves, before the end and after it.
    is_right(|x, w| (x.f_tanh()? + randn(&[32, 32])).f_matmul(w)?.f_add(&randn(&[32, 32])));
    is_right(|x, w| x.f_tanh()?.f_matmul(w)?.f_add(&randn(&[32, 32])));
}

#[test]
fn fewer_numbers_drawn_before_the_end_are_an_error() {
    let x = leaf(&randn(&[32, 32]));
    let cache = cache();
    let step = cache.step();
    let y = segment("s", &(&x * 2.0), |x| {
        let y = x.f_tanh()?;
        // The first run's input is no leaf.
        let noise = if x.is_leaf() { Tensor::zeros([32, 32], F32) } else { randn(&[32, 32]) };
        (y + noise).f_exp()
    });
    let error = step.backward(&scalar(&y.unwrap())).unwrap_err().to_string();
    assert!(error.contains("random numbers"), "{error}");
}

/// The mask of the first dropout is released before backward, and the rerun must get to the second one's.
#[test]
fn a_released_position_does_not_end_a_rerun_that_draws_too_early() {
    let run = |in_segment: bool| {
        tch::manual_seed(3);
        let x = leaf(&randn(&[32, 32]));
        let cache = cache();
        let step = cache.step();
        let (send, aside) = channel();
        let function = move |x: &Tensor| {
            let y = x.f_tanh()?.f_dropout(0.2, true)?;
            drop(send.send(x.f_exp()?.f_dropout(0.2, true)?));
            Ok(y)
        };
        let input = &x * 2.0;
        let y = if in_segment { segment("s", &input, function) } else { function(&input) }.unwrap();
        drop(aside);
        step.backward(&scalar(&y)).unwrap();
        [x.grad(), randn(&[4])]
    };
    assert_same_bits("released", &run(false), &run(true));
}

#[test]
fn what_is_written_after_it_was_saved_is_written_again() {
    is_right(|x, _| {
        let y = x.f_tanh()?;
        let z = y.f_exp()?;
        drop(y.data().fill_(0.5));
        Ok(z)
    });
    // Saved again afterwards, but that is released.
    let run = |in_segment: bool| {
        let x = leaf(&Tensor::ones([8, 8], F32));
        let cache = cache();
        let step = cache.step();
        let (send, aside) = channel();
        let function = move |x: &Tensor| {
            let y = x.f_tanh()?;
            let z = y.f_mul_scalar(2.0)?;
            drop(y.data().fill_(0.5));
            drop(send.send(y.f_sin()?));
            Ok(z)
        };
        let input = &x * 2.0;
        let y = if in_segment { segment("s", &input, function) } else { function(&input) }.unwrap();
        drop(aside);
        step.backward(&y.sum(Kind::Float)).unwrap();
        x.grad()
    };
    assert!(same_bits(&run(false), &run(true)));
}

#[test]
fn statistics_are_as_if_the_rerun_had_not_been() {
    let run = |in_segment: bool, after: bool| {
        tch::manual_seed(3);
        let statistics = [Tensor::zeros([16], F32), Tensor::ones([16], F32)];
        // Statistics and what else is small are kept, so that a rerun ends before the last of them are updated.
        let cache = calling().verify(Verify::Off).min_bytes(1024).build().unwrap();
        let x = leaf(&randn(&[64, 16]));
        let step = cache.step();
        let [mean, var] = statistics.each_ref().map(Tensor::shallow_clone);
        let norm = move |x: &Tensor| {
            let none = None::<&Tensor>;
            x.f_batch_norm(none, none, Some(&mean), Some(&var), true, 0.5, 1e-5, false)
        };
        let function = move |x: &Tensor| {
            let y = norm(&x.f_tanh()?)?;
            if after { tch::no_grad(|| norm(&y.f_exp()?)).map(|_| y) } else { norm(&y.f_exp()?) }
        };
        let input = &x * 2.0;
        let y = if in_segment { segment("s", &input, function) } else { function(&input) };
        let loss = scalar(&y.unwrap().sin());
        step.backward_with(&loss, RETAIN).unwrap();
        step.backward(&loss).unwrap();
        let [mean, var] = statistics;
        [x.grad(), mean, var]
    };
    for after in [false, true] {
        assert_same_bits("statistics", &run(false, after), &run(true, after));
    }
}

#[test]
fn segments_within_segments() {
    is_right(|x, w| {
        let held = w.shallow_clone();
        let y = segment("inner", &x.f_sin()?, move |x| x.f_tanh()?.f_matmul(&held))?;
        y.f_exp()?.f_matmul(w)
    });
    // The outer one's last wanted tensor is saved within the inner one: its input.
    is_right(|x, w| {
        let held = w.shallow_clone();
        segment("inner", &x.f_sin()?, move |x| Ok(x.tanh().matmul(&held).dropout(0.1, true).matmul(&held)))
    });
    is_right(|x, w| {
        let held = w.shallow_clone();
        Ok(segment("inner", &x.tanh(), move |x| Ok(x.matmul(&held))).unwrap().matmul(w))
    });
}

#[test]
fn gradients_of_gradients() {
    let run = |in_segment: bool| {
        tch::manual_seed(3);
        let (x, w) = (leaf(&randn(&[16, 16])), randn(&[16, 16]));
        let cache = cache();
        let step = cache.step();
        let function = move |x: &Tensor| x.f_tanh()?.f_matmul(&w)?.f_exp()?.f_matmul(&w);
        let input = &x * 0.1;
        let y = if in_segment { segment("s", &input, function) } else { function(&input) };
        let loss = scalar(&y.unwrap().sin());
        let first = Tensor::run_backward(&[&loss], &[&x], true, true).pop().unwrap();
        step.backward(&scalar(&first)).unwrap();
        x.grad()
    };
    assert!(same_bits(&run(false), &run(true)));
}
