//! What goes wrong is an error that says what and where, or a step that is right all the same; never a wrong gradient.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;

use std::sync::Arc;

use common::{assert_nothing_held, everything, leaf, randn, same_bits};
use ssdtrain::store::{Direction, Fault, Faulty, Pool, Store, StoreConfig};
use ssdtrain::{BackendKind, ErrorKind, Policy, TensorCache};
use tch::{Kind, Tensor};

fn forward(x: &Tensor) -> Tensor {
    (x * 1.5).tanh().exp().square().sum(Kind::Float)
}

fn expected(source: &Tensor) -> Tensor {
    let plain = leaf(source);
    forward(&plain).backward();
    plain.grad()
}

/// A cache over memory whose backend fails on request.
fn faulty(verify: bool) -> (Arc<Faulty>, TensorCache) {
    let backend = Arc::new(Faulty::new(Arc::new(Pool::new(2).unwrap())));
    let config = StoreConfig { backend: BackendKind::Memory, verify, ..StoreConfig::default() };
    let store = Store::open_with(config, Arc::clone(&backend) as _).unwrap();
    (backend, TensorCache::with_store(TensorCache::builder().min_bytes(0), store).unwrap())
}

fn message(result: ssdtrain::Result<impl Sized>) -> String {
    result.err().expect("an error").to_string()
}

#[test]
fn a_change_in_place_after_the_save_is_an_error() {
    let cache = everything().build().unwrap();
    let x = leaf(&randn(&[64, 64]));
    let step = cache.step();
    let mut y = &x * 2.0;
    let loss = y.sin().sum(Kind::Float);
    let _changed = y.g_add_scalar_(1.0);
    let message = message(step.backward(&loss));
    assert!(message.contains("modified by an inplace operation"), "{message}");
}

#[test]
fn a_change_in_place_of_a_kept_tensor_is_an_error_too() {
    let cache = TensorCache::builder().policy(Policy::Keep).build().unwrap();
    let x = leaf(&randn(&[64, 64]));
    let step = cache.step();
    let mut y = &x * 2.0;
    let loss = y.sin().sum(Kind::Float);
    let _changed = y.g_add_scalar_(1.0);
    assert!(message(step.backward(&loss)).contains("modified by an inplace operation"));
}

#[test]
fn a_failing_load_is_an_error_that_names_the_tensor_and_the_cause() {
    let (backend, cache) = faulty(false);
    let x = leaf(&randn(&[64, 64]));
    let step = cache.step();
    let loss = {
        let _scope = ssdtrain::scope("block.3");
        forward(&x)
    };
    step.flush();
    backend.inject(Direction::Read, Fault::Errno(libc::EIO), 0, u64::MAX);
    let message = message(step.backward(&loss));
    for part in ["block.3", "step 1", "16384 bytes", "Input/output error"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    assert!(!message.contains("frame #"), "no C++ backtrace: {message}");
    drop(loss);
    step.finish().unwrap();
    assert_nothing_held(&cache);
}

#[test]
fn a_load_that_fails_once_is_retried() {
    let (backend, cache) = faulty(false);
    let source = randn(&[64, 64]);
    let x = leaf(&source);
    let step = cache.step();
    let loss = forward(&x);
    step.flush();
    backend.inject(Direction::Read, Fault::Errno(libc::EIO), 0, 1);
    step.backward(&loss).unwrap();
    assert!(same_bits(&expected(&source), &x.grad()));
}

#[test]
fn a_flipped_bit_is_never_served_when_verifying() {
    let (backend, cache) = faulty(true);
    let x = leaf(&randn(&[64, 64]));
    let step = cache.step();
    let loss = forward(&x);
    step.flush();
    backend.inject(Direction::Read, Fault::FlippedBit, 0, u64::MAX);
    let message = message(step.backward(&loss));
    assert!(message.contains("came back changed"), "{message}");
}

#[test]
fn a_full_disk_keeps_the_tensors_and_says_so_once() {
    let (backend, cache) = faulty(false);
    let source = randn(&[64, 64]);
    backend.inject(Direction::Write, Fault::Errno(libc::ENOSPC), 0, u64::MAX);
    let x = leaf(&source);
    let step = cache.step();
    let loss = forward(&x);
    step.flush();
    step.backward(&loss).unwrap();
    let report = step.finish().unwrap();
    assert!(same_bits(&expected(&source), &x.grad()));
    assert_eq!(report.offloaded.count, 0);
    assert!(report.store_failures.count > 0);
    assert_eq!(report.warnings.iter().filter(|w| w.contains("stores failed")).count(), 1, "{report:?}");

    backend.heal();
    let x = leaf(&source);
    let step = cache.step();
    let loss = forward(&x);
    step.flush();
    step.backward(&loss).unwrap();
    assert!(step.finish().unwrap().offloaded.count > 0, "the next step tries again");
    drop(loss);
    assert_nothing_held(&cache);
}

#[test]
fn what_does_not_fit_under_the_cap_stays_in_memory() {
    let cache = everything().disk_cap(20 << 10).build().unwrap();
    let source = randn(&[64, 64]);
    let x = leaf(&source);
    let step = cache.step();
    let loss = forward(&x);
    step.flush();
    step.backward(&loss).unwrap();
    let report = step.finish().unwrap();
    assert!(same_bits(&expected(&source), &x.grad()));
    assert!(report.offloaded.count > 0 && report.kept.no_room.count > 0, "{report:?}");
}

#[test]
fn backward_that_asks_while_the_store_is_under_way_is_served_from_the_device() {
    let (backend, cache) = faulty(false);
    let source = randn(&[64, 64]);
    backend.hold(Direction::Write);
    let x = leaf(&source);
    let step = cache.step();
    let loss = forward(&x);
    step.backward(&loss).unwrap();
    drop(loss);
    backend.release();
    let report = step.finish().unwrap();
    assert!(same_bits(&expected(&source), &x.grad()));
    assert_eq!(report.loaded.count, 0, "{report:?}");
    assert!(report.forwarded.count > 0, "{report:?}");
    assert_nothing_held(&cache);
}

#[test]
fn a_tensor_resized_before_its_store_begins_is_an_error_and_nothing_hangs() {
    let backend = Arc::new(Faulty::new(Arc::new(Pool::new(1).unwrap())));
    let config = StoreConfig { backend: BackendKind::Memory, ..StoreConfig::default() };
    let store = Store::open_with(config, Arc::clone(&backend) as _).unwrap();
    // One store of a mebibyte at a time, so that the next one waits.
    let cache = TensorCache::with_store(TensorCache::builder().min_bytes(0).queue_depth(1), store).unwrap();
    backend.hold(Direction::Write);
    let (x, w) = (leaf(&randn(&[512, 512])), leaf(&randn(&[64, 64])));
    let mut factor = randn(&[64, 64]);
    let step = cache.step();
    let first = (&x * 2.0).sin().sum(Kind::Float);
    let second = (&w * &factor).sum(Kind::Float);
    drop(factor.resize_([128, 128]));
    backend.release();
    let loss = &first + &second;
    let message = message(step.backward(&loss));
    assert!(message.contains("modified by an inplace operation"), "{message}");
    drop((loss, first, second));
    step.finish().unwrap();
    // libtorch may hold the other branch of a failed backward until the next one, so entries may be left, but no bytes.
    assert_eq!(cache.held().device_bytes, 0);
}

#[test]
fn unusable_directories_are_named() {
    let file = tempfile::NamedTempFile::new().unwrap();
    for directory in ["/no/such/directory".into(), file.path().to_owned()] {
        let error = TensorCache::builder().spill_to(&directory).build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Directory);
        assert!(error.to_string().contains(directory.to_str().unwrap()), "{error}");
    }
}

#[test]
fn a_cache_without_a_directory_says_what_is_missing() {
    let error = TensorCache::builder().build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("spill_to"), "{error}");
}

#[test]
fn a_first_step_that_offloads_nothing_can_be_an_error() {
    let cache = everything().min_bytes(1 << 30).fail_if_nothing_offloaded(true).build().unwrap();
    let x = leaf(&randn(&[64, 64]));
    let step = cache.step();
    step.backward(&forward(&x)).unwrap();
    let error = step.finish().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unmet);
    assert!(error.to_string().contains("offloaded nothing"), "{error}");
}

#[test]
fn memory_that_is_not_direct_io_can_be_refused() {
    let error = everything().backend(BackendKind::Memory).require_direct_io(true).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unmet);
}
