//! Training within small limits of its process: what the cache goes without changes no bit, and what it cannot do without is an error that
//! says which limit to raise. Each test sets limits in a process of its own, as a user whom they bind.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;
#[path = "../crates/store/tests/limited/mod.rs"]
mod limited;

use std::env;
use std::error::Error as _;
use std::fs;
use std::io;
use std::thread;
use std::time::Duration;

use common::chain::{self, chain};
use common::{
    assert_nothing_held, assert_same_bits, direct, everything, grads, leaf, soon, staged, staged_in_memory,
};
use limited::{is_alone, limit, next_file, open_files};
use ssdtrain::plan::Goal;
use ssdtrain::{Auto, BackendKind, Error, ErrorKind, MIB, TensorCache, TensorCacheBuilder};
use tch::Tensor;

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
        assert!(soon(|| open_files() == all), "{what}: {} files are open, {all} were", open_files());
    }
}

/// io_uring's ring counts as locked memory on some kernels.
#[test]
fn a_training_that_may_lock_no_memory_goes_on_without() {
    if !is_alone("a_training_that_may_lock_no_memory_goes_on_without") {
        return;
    }
    tch::set_num_threads(1);
    for (what, builder) in builders() {
        let before = limit(libc::RLIMIT_MEMLOCK, 0);
        let cache = builder.build().unwrap();
        train(what, &cache);
        limit(libc::RLIMIT_MEMLOCK, before);
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

/// The most that docs/design.md says.
#[test]
fn a_cache_has_no_more_threads_and_files_however_many_threads_train() {
    if !is_alone("a_cache_has_no_more_threads_and_files_however_many_threads_train") {
        return;
    }
    // Of a store with io_uring and with threads, and of a device.
    const URING: usize = 7;
    const POOL: usize = 22;
    const DEVICE: usize = 4;
    // The ring and what wakes it; spill files come to that.
    const RING: usize = 2;
    tch::set_num_threads(1);
    let two_files = || everything().spill_to(env::temp_dir().join("."));
    let device = Duration::from_micros(50);
    let builders = [
        ("disk", everything(), URING, RING + 1),
        ("two spill files", two_files(), URING, RING + 2),
        ("threads", everything().backend(BackendKind::Pool), POOL, 1),
        ("two spill files and threads", two_files().backend(BackendKind::Pool), POOL, 2),
        ("memory", everything().backend(BackendKind::Memory), POOL, 1),
        ("host pool", staged_in_memory(), DEVICE, 0),
        ("host pool and disk", staged().encrypt(true), URING + DEVICE, RING + 1),
        ("growing host pool", everything().simulated_device(device), URING + DEVICE, RING + 1),
        ("straight to the disk", direct(), URING + DEVICE, RING + 1),
    ];
    let source = chain::input();
    for (what, builder, threads, files) in builders {
        let before = open_files();
        let cache = builder.build().unwrap();
        for _ in 0..2 {
            let cache = &cache;
            let inputs: Vec<Tensor> = (0..8).map(|_| leaf(&source)).collect();
            thread::scope(|scope| inputs.into_iter().for_each(|x| drop(scope.spawn(|| one_step(cache, x)))));
            let seen = (threads_of_caches(), open_files() - before);
            assert!((1..=threads).contains(&seen.0) && seen.1 <= files, "{what}: {seen:?}");
        }
        // Or the next cache would be counted with what this one still has.
        drop(cache);
        assert!(soon(|| open_files() == before && threads_of_caches() == 0), "{what}: something is left");
    }
}

fn one_step(cache: &TensorCache, x: Tensor) {
    let step = cache.step();
    let loss = chain(&x);
    step.flush();
    step.backward(&loss).unwrap();
}

/// Threads of this process that the library has started.
fn threads_of_caches() -> usize {
    let names = fs::read_dir("/proc/self/task").unwrap().map(|thread| thread.unwrap().path().join("comm"));
    // One may have ended meanwhile.
    names
        .filter_map(|name| fs::read_to_string(name).ok())
        .filter(|name| name.starts_with("ssdtrain-"))
        .count()
}

fn assert_says(what: &str, error: &Error, advice: &str) {
    assert_eq!(error.kind(), ErrorKind::Io, "{what}: {error}");
    assert!(error.to_string().contains(advice), "{what}: {error}");
    assert!(error.source().is_some_and(|cause| cause.is::<io::Error>()), "{what}: {error}");
}
