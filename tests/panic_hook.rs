//! A rerun that ends early within an operation that panics reports no panic. Panic hooks are the whole process's, so this file has one
//! test.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;

use std::panic::{catch_unwind, set_hook};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{calling, leaf, randn};
use ssdtrain::{TensorCache, Verify, segment};
use tch::Kind;

/// A step with a segment that panics where it is stopped.
fn step(cache: &TensorCache) {
    let (x, w) = (leaf(&randn(&[32, 32])), randn(&[32, 32]));
    let step = cache.step();
    let y = segment("s", &(&x * 2.0), move |x| Ok(x.tanh().matmul(&w) * 2.0)).unwrap();
    step.backward(&y.square().sum(Kind::Float)).unwrap();
    assert_eq!(step.finish().unwrap().reruns.count, 1);
}

fn counting_hook() -> Arc<AtomicUsize> {
    let reports = Arc::new(AtomicUsize::new(0));
    let counting = Arc::clone(&reports);
    set_hook(Box::new(move |_| {
        counting.fetch_add(1, Ordering::Relaxed);
    }));
    reports
}

#[test]
fn only_panics_that_are_none_of_ours_are_reported() {
    let cache = calling().verify(Verify::Off).build().unwrap();
    let reports = counting_hook();
    (0..3).for_each(|_| step(&cache));
    assert_eq!(reports.load(Ordering::Relaxed), 0);
    drop(catch_unwind(|| panic!("the program's own")).unwrap_err());
    assert_eq!(reports.load(Ordering::Relaxed), 1);

    // A hook that replaces ours is replaced in turn, once it has been called in vain.
    let reports = counting_hook();
    (0..3).for_each(|_| step(&cache));
    assert_eq!(reports.load(Ordering::Relaxed), 1);
    drop(catch_unwind(|| panic!("the program's own")).unwrap_err());
    assert_eq!(reports.load(Ordering::Relaxed), 2);
}
