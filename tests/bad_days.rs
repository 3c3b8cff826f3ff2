//! Failures are errors that say what happened and where, or the step is still right; gradients are never wrong.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use common::chain::{chain, input};
use common::{assert_nothing_held, everything, leaf, randn, same_bits, staged_in_memory};
use ssdtrain::store::{Blob, Direction, Fault, Faulty, Pool, Store, StoreConfig};
use ssdtrain::{BackendKind, ErrorKind, IoPath, Keep, MIB, Offload, TensorCache, TensorCacheBuilder, Verify};
use tch::{Device, Kind, Tensor};

fn forward(x: &Tensor) -> Tensor {
    (x * 1.5).tanh().exp().square().sum(Kind::Float)
}

fn expected(source: &Tensor) -> Tensor {
    let plain = leaf(source);
    forward(&plain).backward();
    plain.grad()
}

fn moving() -> TensorCacheBuilder {
    TensorCache::builder().policy(Offload::default()).min_bytes(0)
}

/// A cache over memory whose backend fails on request.
fn faulty(verify: Verify) -> (Arc<Faulty>, TensorCache) {
    let backend = Arc::new(Faulty::new(Arc::new(Pool::new(2).unwrap())));
    let config = StoreConfig { backend: BackendKind::Memory, ..StoreConfig::default() };
    let store = Store::open_with(config, Arc::clone(&backend) as _).unwrap();
    (backend, TensorCache::with_store(moving().verify(verify), store).unwrap())
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
    let error = step.backward(&loss).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ChangedInPlace);
    assert!(error.to_string().contains("modified by an inplace operation"), "{error}");
}

#[test]
fn a_change_in_place_of_a_kept_tensor_is_an_error_too() {
    let cache = TensorCache::builder().policy(Keep).build().unwrap();
    let x = leaf(&randn(&[64, 64]));
    let step = cache.step();
    let mut y = &x * 2.0;
    let loss = y.sin().sum(Kind::Float);
    let _changed = y.g_add_scalar_(1.0);
    assert_eq!(step.backward(&loss).unwrap_err().kind(), ErrorKind::ChangedInPlace);
}

#[test]
fn a_failing_load_is_an_error_that_names_the_tensor_and_the_cause() {
    let (backend, cache) = faulty(Verify::Off);
    let x = leaf(&randn(&[64, 64]));
    let step = cache.step();
    let loss = {
        let _scope = ssdtrain::scope("block.3");
        forward(&x)
    };
    step.flush();
    backend.inject(Direction::Read, Fault::Errno(libc::EIO), 0, u64::MAX);
    let error = step.backward(&loss).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    let message = error.to_string();
    for part in ["block.3", "step 1", "16384 bytes", "Input/output error"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    assert!(!message.contains("frame #"), "no C++ backtrace: {message}");
    // The cause is preserved, down to the operating system's error number.
    let load = error.source().unwrap();
    assert!(message.contains(&load.to_string()), "{load}");
    let system = load.source().and_then(|system| system.downcast_ref::<io::Error>());
    assert_eq!(system.and_then(io::Error::raw_os_error), Some(libc::EIO), "{load}");
    assert_eq!(error.clone().kind(), error.kind());
    drop(loss);
    step.finish().unwrap();
    assert_nothing_held(&cache);
}

#[test]
fn a_load_that_fails_once_is_retried() {
    let (backend, cache) = faulty(Verify::Off);
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
fn a_byte_that_changes_on_the_way_is_never_served_as_long_as_checksums_are_taken() {
    for verify in [Verify::Auto, Verify::Checksums, Verify::Full] {
        let (backend, cache) = faulty(verify);
        let source = randn(&[64, 64]);
        let x = leaf(&source);
        let step = cache.step();
        let loss = forward(&x);
        step.flush();
        backend.inject(Direction::Read, Fault::FlippedBit, 0, 1);
        step.backward(&loss).unwrap();
        assert!(same_bits(&expected(&source), &x.grad()), "read again with {verify:?}");
        let report = step.finish().unwrap();
        assert!(report.checked.count > 0 && report.unchecked.count == 0, "{report:?}");

        let step = cache.step();
        let loss = forward(&x);
        step.flush();
        backend.inject(Direction::Read, Fault::FlippedBit, 0, u64::MAX);
        let error = step.backward(&loss).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{verify:?}");
        assert!(error.to_string().contains("came back changed"), "{error}");
    }
}

#[test]
fn without_checksums_the_report_says_so() {
    let (_, cache) = faulty(Verify::Off);
    let x = leaf(&randn(&[64, 64]));
    let step = cache.step();
    let loss = forward(&x);
    step.flush();
    step.backward(&loss).unwrap();
    let report = step.finish().unwrap();
    assert!(report.checked.count == 0 && report.unchecked.count > 0, "{report:?}");
    assert!(report.to_string().contains("read without checksums"), "{report}");
}

/// A cache over memory whose spill file has to grow before it has room, and the blob that fills that file.
fn full(builder: TensorCacheBuilder) -> (Arc<Faulty>, TensorCache, Arc<Blob>) {
    let backend = Arc::new(Faulty::new(Arc::new(Pool::new(2).unwrap())));
    let config = StoreConfig { backend: BackendKind::Memory, ..StoreConfig::default() };
    let store = Store::open_with(config, Arc::clone(&backend) as _).unwrap();
    let full = store.reserve(store.stats().file_bytes).unwrap();
    (backend, TensorCache::with_store(builder, store).unwrap(), full)
}

/// A file system may take seconds to grow a file.
#[test]
fn a_spill_file_that_is_slow_to_grow_holds_nobody_up() {
    let (backend, cache, _full) = full(moving());
    backend.hold_growth();
    let source = randn(&[64, 64]);
    let x = leaf(&source);
    let step = cache.step();
    let loss = forward(&x);
    backend.wait_growing();
    thread::scope(|scope| {
        let (source, cache) = (source.shallow_clone(), &cache);
        scope.spawn(move || {
            let x = leaf(&source);
            let step = cache.step();
            step.backward(&forward(&x)).unwrap();
            assert!(same_bits(&expected(&source), &x.grad()));
            assert_eq!(step.finish().unwrap().offloaded.bytes, 0);
        });
    });
    backend.release();
    step.flush();
    step.backward(&loss).unwrap();
    assert!(same_bits(&expected(&source), &x.grad()));
    let report = step.finish().unwrap();
    assert!(report.offloaded.bytes > 0 && report.kept.no_room.bytes == 0, "{report}");
}

#[test]
fn what_finds_no_room_before_a_spill_file_has_grown_goes_there_after_it() {
    let direct = || moving().simulated_device(Duration::ZERO).path(IoPath::Direct);
    let staged = || {
        moving()
            .simulated_device(Duration::ZERO)
            .host_pool(4 * MIB)
            .policy(Offload::default().device_budget(2 * MIB))
    };
    for builder in [moving(), direct(), direct().policy(Offload::default().device_budget(MIB)), staged()] {
        let (_, cache, full) = full(builder);
        let x = input();
        let step = cache.step();
        let loss = chain(&x);
        step.flush();
        assert!(cache.store_stats().unwrap().file_bytes > full.len());
        step.backward(&loss).unwrap();
        let report = step.finish().unwrap();
        assert!(report.offloaded.bytes > 0 && report.kept.no_room.bytes == 0, "{report}");
    }
}

#[test]
fn a_failing_load_keeps_its_kind_through_the_host_pool() {
    let backend = Arc::new(Faulty::new(Arc::new(Pool::new(2).unwrap())));
    let config = StoreConfig { backend: BackendKind::Memory, ..StoreConfig::default() };
    let store = Store::open_with(config, Arc::clone(&backend) as _).unwrap();
    let small =
        staged_in_memory().host_pool(4 * MIB).policy(Offload::default().device_budget(2 * MIB).prefetch(MIB));
    let cache = TensorCache::with_store(small, store).unwrap();
    let x = input();
    let step = cache.step();
    let loss = chain(&x);
    step.flush();
    backend.inject(Direction::Read, Fault::Errno(libc::EIO), 0, u64::MAX);
    let error = step.backward(&loss).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(error.to_string().contains("ssdtrain cannot load saved tensor"), "{error}");
    let system = error.source().and_then(Error::source).and_then(|system| system.downcast_ref::<io::Error>());
    assert_eq!(system.and_then(io::Error::raw_os_error), Some(libc::EIO), "{error}");
}

#[test]
fn a_gpu_that_does_not_answer_is_an_error_and_what_it_may_still_use_outlives_the_cache() {
    let source = randn(&[64, 64]);
    let all = || everything().policy(Offload::default().device_budget(1).prefetch(0));
    for builder in [all().host_pool(2 * MIB), all().verify(Verify::Off).path(IoPath::Direct)] {
        let faults = Arc::default();
        let cache = builder.simulated_device(Duration::ZERO).device_faults(&faults).build().unwrap();
        let (x, step) = (leaf(&source), cache.step());
        let loss = forward(&x);
        step.flush();
        faults.stop_after(0);
        let error = step.backward(&loss).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        assert!(error.to_string().contains("--device-timeout"), "{error}");
        drop(loss);
        step.finish().unwrap();
        drop(cache);
        // Copies go on, from and to what was kept for them.
        faults.heal();
    }
}

#[test]
fn a_gpu_that_answers_again_is_used_again() {
    let source = randn(&[64, 64]);
    let faults = Arc::default();
    let policy = Offload::default().device_budget(1).prefetch(0);
    let cache = moving().policy(policy).host_pool(2 * MIB).simulated_device(Duration::ZERO);
    let cache = cache.device_faults(&faults).build().unwrap();
    let trained = || {
        let (x, step) = (leaf(&source), cache.step());
        step.backward(&forward(&x)).unwrap();
        assert!(same_bits(&expected(&source), &x.grad()));
        step.finish().unwrap().offloaded.bytes
    };
    faults.stop_after(0);
    assert_eq!(trained(), 0, "what cannot leave stays");
    faults.heal();
    assert!(trained() > 0);
    assert_nothing_held(&cache);
}

/// The graph outlives the step that saved for it, and backward runs in a step of another cache.
#[test]
fn a_failing_load_keeps_its_kind_in_a_step_of_another_cache() {
    let (backend, cache) = faulty(Verify::Off);
    let (_, other) = faulty(Verify::Off);
    let x = leaf(&randn(&[64, 64]));
    let step = cache.step();
    let loss = forward(&x);
    step.flush();
    step.finish().unwrap();
    backend.inject(Direction::Read, Fault::Errno(libc::EIO), 0, u64::MAX);
    let error = other.step().backward(&loss).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io, "{error}");
    assert!(error.source().is_some(), "{error}");
}

#[test]
fn a_failing_load_keeps_its_kind_through_what_is_computed_again() {
    let (backend, cache) = faulty(Verify::Off);
    let x = leaf(&randn(&[64, 64]));
    let step = cache.step();
    let loss =
        ssdtrain::segment("block", &(&x * 1.0), |x: &Tensor| Ok(x.sin().exp())).unwrap().sum(Kind::Float);
    step.flush();
    backend.inject(Direction::Read, Fault::Errno(libc::EIO), 0, u64::MAX);
    let error = step.backward(&loss).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io, "{error}");
    assert!(error.to_string().contains("ssdtrain cannot run aten::sin of scope \"block\" again"), "{error}");
}

#[test]
fn a_parameter_that_was_changed_before_its_segment_runs_again_is_an_error_of_that_kind() {
    let cache = everything().build().unwrap();
    let (x, w) = (leaf(&randn(&[64, 64])), leaf(&randn(&[64, 64])));
    let held = w.shallow_clone();
    let step = cache.step();
    let loss =
        ssdtrain::segment("block", &x, move |x: &Tensor| Ok((x * &held).sin())).unwrap().sum(Kind::Float);
    let _changed = tch::no_grad(|| w.shallow_clone().g_add_scalar_(1.0));
    assert_eq!(step.backward(&loss).unwrap_err().kind(), ErrorKind::ChangedInPlace);
}

#[test]
fn a_full_disk_keeps_the_tensors_and_says_so_once() {
    let (backend, cache) = faulty(Verify::Off);
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
    let (backend, cache) = faulty(Verify::Off);
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

/// A factor is resized while its store waits for another one to end, or is dropped after it; then steps continue as
/// usual.
fn resized_before_its_store(to: &[i64], dropped: bool, policy: Offload) {
    let backend = Arc::new(Faulty::new(Arc::new(Pool::new(1).unwrap())));
    let config = StoreConfig { backend: BackendKind::Memory, ..StoreConfig::default() };
    let store = Store::open_with(config, Arc::clone(&backend) as _).unwrap();
    // One store of 4 MiB at a time, so that the next one waits.
    let cache =
        TensorCache::with_store(TensorCache::builder().policy(policy).min_bytes(0).queue_depth(1), store)
            .unwrap();
    backend.hold(Direction::Write);
    let (x, w) = (leaf(&randn(&[1024, 1024])), leaf(&randn(&[64, 64])));
    let mut factor = randn(&[64, 64]);
    let step = cache.step();
    let first = (&x * 2.0).sin().sum(Kind::Float);
    let second = (&w * &factor).sum(Kind::Float);
    drop(factor.resize_(to));
    backend.wait_held(1);
    if dropped {
        drop((first, second));
        backend.release();
    } else {
        backend.release();
        let loss = &first + &second;
        let message = message(step.backward(&loss));
        assert!(message.contains("modified by an inplace operation"), "{message}");
        drop((loss, first, second));
        // libtorch may hold the other branch of a failed backward until the next one.
        leaf(&randn(&[4])).sin().sum(Kind::Float).backward();
    }
    step.finish().unwrap();
    assert_nothing_held(&cache);

    let source = randn(&[512, 512]);
    let x = leaf(&source);
    let step = cache.step();
    let loss = (0..4).fold(forward(&x), |loss, _| loss + forward(&x));
    step.flush();
    step.backward(&loss).unwrap();
    drop(loss);
    let plain = leaf(&source);
    (0..4).fold(forward(&plain), |loss, _| loss + forward(&plain)).backward();
    assert!(same_bits(&plain.grad(), &x.grad()));
    let report = step.finish().unwrap();
    assert!(report.offloaded.count > 0, "nothing is stored any more: {report}");
    assert_nothing_held(&cache);
}

#[test]
fn a_tensor_resized_before_its_store_begins_is_an_error_and_stores_go_on() {
    for to in [&[128, 128][..], &[8, 8], &[0]] {
        resized_before_its_store(to, false, Offload::default());
        resized_before_its_store(to, false, Offload::default().device_budget(5 * MIB));
    }
}

#[test]
fn a_tensor_resized_before_its_store_begins_and_dropped_leaves_nothing() {
    for to in [&[128, 128][..], &[8, 8], &[0]] {
        resized_before_its_store(to, true, Offload::default());
    }
}

#[test]
fn a_tensor_resized_while_it_is_written_is_an_error_and_stays() {
    // Only a tensor that becomes larger gets other memory.
    for to in [&[512, 512][..], &[8, 8], &[0]] {
        let (backend, cache) = faulty(Verify::Full);
        backend.hold(Direction::Write);
        let w = leaf(&randn(&[256, 256]));
        let mut factor = randn(&[256, 256]);
        let step = cache.step();
        let loss = (&w * &factor).sum(Kind::Float);
        backend.wait_held(1);
        drop(factor.resize_(to));
        let others: Vec<_> = (0..4).map(|_| Tensor::zeros([256, 256], common::F32)).collect();
        backend.release();
        let message = message(step.backward(&loss));
        assert!(message.contains("modified by an inplace operation"), "{message}");
        drop((loss, others));
        let report = step.finish().unwrap();
        assert_eq!((report.offloaded.count, report.discarded.count), (0, 1), "{report:?}");
        assert_eq!(report.store_failures.count, 0, "{report:?}");
        leaf(&randn(&[4])).sin().sum(Kind::Float).backward();
        assert_nothing_held(&cache);
    }
}

#[test]
fn what_is_written_for_a_graph_that_went_is_in_the_report() {
    let (backend, cache) = faulty(Verify::Off);
    backend.hold(Direction::Write);
    let x = leaf(&randn(&[512, 512]));
    let step = cache.step();
    let loss = (&x * 2.0).sin().sum(Kind::Float);
    backend.wait_held(1);
    step.backward(&loss).unwrap();
    drop(loss);
    backend.release();
    let report = step.finish().unwrap();
    let written = cache.store_stats().unwrap().bytes_written;
    assert!(written > 0);
    assert_eq!((report.offloaded.bytes, report.discarded.bytes), (0, written), "{report}");
    assert!(report.to_string().contains("discarded 1.0 MiB"), "{report}");
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

/// A spill file begins with 256 MiB, and grows while the step runs.
#[test]
fn more_than_a_spill_file_has_at_first_goes_to_the_disk() {
    let disk = || moving().spill_to(std::env::temp_dir()).disk_cap(1 << 30);
    let device =
        || disk().simulated_device(Duration::ZERO).policy(Offload::default().device_budget(64 * MIB));
    for builder in [disk(), device().host_pool(64 * MIB), device().path(IoPath::Direct)] {
        let cache = builder.build().unwrap();
        let x = leaf(&Tensor::ones([4 << 20], (Kind::Float, Device::Cpu)));
        let step = cache.step();
        let y = (0..20).fold(&x * 1.0, |y, _| y.sin());
        step.flush();
        step.backward(&y.sum(Kind::Float)).unwrap();
        let report = step.finish().unwrap();
        assert!(report.offloaded.bytes > 256 * MIB && report.kept.no_room.bytes == 0, "{report}");
    }
}
