//! Training within small limits of its process: what the cache goes without changes no bit, and what it cannot do without is an error that
//! says which limit to raise. Each test sets limits in a process of its own, as a user whom they bind.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;
#[path = "../crates/store/tests/limited/mod.rs"]
mod limited;

use std::error::Error as _;
use std::fs;
use std::io;
use std::time::Duration;

use common::chain::{self, chain};
use common::{assert_nothing_held, assert_same_bits, direct, everything, grads, staged, staged_in_memory};
use limited::{is_alone, limit, next_file, open_files};
use ssdtrain::plan::Goal;
use ssdtrain::{Auto, Error, ErrorKind, MIB, TensorCache, TensorCacheBuilder};

/// Caches over each way of the bytes, and one that plans.
fn builders() -> [(&'static str, TensorCacheBuilder); 6] {
    [
        ("disk", everything()),
        ("encrypted disk", everything().encrypt(true)),
        ("host pool and disk", staged()),
        ("growing host pool and disk", everything().simulated_device(Duration::ZERO)),
        ("straight to the disk", direct()),
        ("planned", everything().policy(Auto::new(Goal::budget(MIB)))),
    ]
}

/// Three steps. Their gradients have the right bits.
fn train(what: &str, cache: &TensorCache) {
    for flush in [true, false, true] {
        let x = chain::input();
        let step = cache.step();
        let loss = chain(&x);
        if flush {
            step.flush();
        }
        step.backward(&loss).unwrap();
        drop(loss);
        step.finish().unwrap();
        assert_same_bits(what, &chain::expected(), &grads(&[x]));
        assert_nothing_held(cache);
    }
}

#[test]
fn a_training_that_gets_no_more_threads_goes_on_without_them() {
    if !is_alone("a_training_that_gets_no_more_threads_goes_on_without_them") {
        return;
    }
    tch::set_num_threads(1);
    for (what, builder) in builders() {
        let cache = builder.build().unwrap();
        let before = limit(libc::RLIMIT_NPROC, 0);
        train(what, &cache);
        limit(libc::RLIMIT_NPROC, before);
        train(what, &cache);
    }
}

#[test]
fn a_training_that_opens_no_more_files_goes_on_without_them() {
    if !is_alone("a_training_that_opens_no_more_files_goes_on_without_them") {
        return;
    }
    tch::set_num_threads(1);
    // The first random number takes a file.
    drop(chain::input());
    let all = open_files();
    for (what, builder) in builders() {
        let cache = builder.build().unwrap();
        let before = limit(libc::RLIMIT_NOFILE, next_file());
        train(what, &cache);
        limit(libc::RLIMIT_NOFILE, before);
        drop(cache);
        assert_eq!(open_files(), all, "{what}");
    }
}

#[test]
fn whichever_thread_is_refused_a_cache_works_or_says_which_limit_to_raise() {
    if !is_alone("whichever_thread_is_refused_a_cache_works_or_says_which_limit_to_raise") {
        return;
    }
    tch::set_num_threads(1);
    let builders = || builders().into_iter().chain([("host pool", staged_in_memory())]);
    for which in 0..builders().count() {
        let mut refused = 0;
        loop {
            let (what, builder) = builders().nth(which).unwrap();
            let threads = fs::read_dir("/proc/self/task").unwrap().count();
            let before = limit(libc::RLIMIT_NPROC, threads as u64 + refused);
            let built = builder.build();
            if let Ok(cache) = &built {
                train(what, cache);
            }
            limit(libc::RLIMIT_NPROC, before);
            let Err(error) = built else { break };
            assert_says(what, &error, "ulimit -u");
            refused += 1;
        }
        assert!((1..64).contains(&refused), "{refused} were refused");
    }
}

#[test]
fn a_cache_that_gets_no_files_is_an_error_that_says_which_limit_to_raise() {
    if !is_alone("a_cache_that_gets_no_files_is_an_error_that_says_which_limit_to_raise") {
        return;
    }
    for (what, builder) in builders() {
        let before = limit(libc::RLIMIT_NOFILE, next_file());
        let built = builder.build();
        limit(libc::RLIMIT_NOFILE, before);
        assert_says(what, &built.err().unwrap(), "ulimit -n");
    }
}

fn assert_says(what: &str, error: &Error, advice: &str) {
    assert_eq!(error.kind(), ErrorKind::Io, "{what}: {error}");
    assert!(error.to_string().contains(advice), "{what}: {error}");
    assert!(error.source().is_some_and(|cause| cause.is::<io::Error>()), "{what}: {error}");
}
