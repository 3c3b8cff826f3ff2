//! A GPU's tensors directly to the disk, with a device made of threads in place of the GPU.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::chain::{ZeroGrad, chain, expected, input, step};
use common::{assert_nothing_held, assert_same_bits, direct, grads, leaf, randn};
use ssdtrain::store::{Direction, Fault, Faulty, Pool, Store, StoreConfig};
use ssdtrain::{BackendKind, ErrorKind, IoPath, KIB, MIB, Offload, TensorCache, Verify};

/// A cache over memory whose backend fails on request.
fn faulty() -> (Arc<Faulty>, TensorCache) {
    let backend = Arc::new(Faulty::new(Arc::new(Pool::new(2).unwrap())));
    let config = StoreConfig { backend: BackendKind::Memory, ..StoreConfig::default() };
    let store = Store::open_with(config, Arc::clone(&backend) as _).unwrap();
    let builder = TensorCache::builder().min_bytes(0).simulated_device(Duration::ZERO).path(IoPath::Direct);
    (
        backend,
        TensorCache::with_store(
            builder.policy(Offload::default().device_budget(2 * MIB).prefetch(MIB)),
            store,
        )
        .unwrap(),
    )
}

#[test]
fn what_the_budget_does_not_hold_goes_to_the_disk_and_comes_back() {
    let cache = direct().policy(Offload::default().device_budget(4 * MIB).prefetch(2 * MIB)).build().unwrap();
    let x = input();
    for round in 0..4 {
        x.zero_grad_if_any();
        let report = step(&cache, &x);
        assert!(report.offloaded.bytes >= 18 * MIB, "round {round}: {report}");
        assert_eq!(report.offloaded.bytes, report.loaded.bytes, "round {round}: {report}");
        assert_same_bits("the gradient", &expected(), &grads(std::slice::from_ref(&x)));
    }
    assert_eq!(cache.pinned_bytes(), 0);
    assert_nothing_held(&cache);
}

#[test]
fn from_the_second_step_on_what_stays_in_the_budget_is_not_written() {
    let cache = direct().policy(Offload::default().device_budget(8 * MIB).prefetch(4 * MIB)).build().unwrap();
    let x = input();
    let first = step(&cache, &x);
    let second = step(&cache, &x);
    assert!(second.offloaded.bytes < first.saved.bytes - 6 * MIB, "{second}");
}

#[test]
fn storages_that_are_no_whole_blocks_keep_their_last_bytes() {
    let cache = direct().policy(Offload::default().device_budget(1)).build().unwrap();
    for elements in [1, 1023, 1025, 4095, 100_003] {
        let source = randn(&[elements]);
        let plain = leaf(&source);
        chain(&plain).backward();
        let x = leaf(&source);
        assert!(step(&cache, &x).loaded.count > 0);
        assert_same_bits("the gradient", &grads(&[plain]), &grads(&[x]));
    }
}

#[test]
fn large_storages_are_striped() {
    // Twelve megabytes each, in chunks of four over two files.
    let cache = direct()
        .spill_to(std::env::temp_dir())
        .policy(Offload::default().device_budget(MIB))
        .build()
        .unwrap();
    let x = leaf(&randn(&[3 << 20]));
    let plain = x.copy().detach().set_requires_grad(true);
    chain(&plain).backward();
    assert!(step(&cache, &x).loaded.bytes >= 12 * MIB);
    assert_same_bits("the gradient", &grads(&[plain]), &grads(&[x]));
}

#[test]
fn what_the_cap_has_no_room_for_stays_on_the_device() {
    let cache = direct().disk_cap(4 * MIB).build().unwrap();
    let x = input();
    let report = step(&cache, &x);
    assert!(report.kept.no_room.bytes >= 10 * MIB && report.warnings.len() == 1, "{report}");
    assert_same_bits("the gradient", &expected(), &grads(&[x]));
    assert_nothing_held(&cache);
}

#[test]
fn writes_that_fail_leave_the_tensors_where_they_are() {
    let (backend, cache) = faulty();
    backend.inject(Direction::Write, Fault::Errno(libc::EIO), 0, u64::MAX);
    let x = input();
    let report = step(&cache, &x);
    assert_eq!(report.offloaded.count, 0, "{report}");
    assert!(report.store_failures.count > 0, "{report}");
    assert_same_bits("the gradient", &expected(), &grads(&[x]));
    backend.heal();
    assert!(step(&cache, &input()).offloaded.count > 0, "the next step tries again");
    assert_nothing_held(&cache);
}

#[test]
fn a_load_that_fails_for_good_is_an_error_that_names_the_tensor() {
    let (backend, cache) = faulty();
    let x = input();
    let step = cache.step();
    let loss = {
        let _scope = ssdtrain::scope("block.3");
        chain(&x)
    };
    step.flush();
    backend.inject(Direction::Read, Fault::Errno(libc::EIO), 0, u64::MAX);
    let message = step.backward(&loss).unwrap_err().to_string();
    for part in ["block.3", "step 1", "1048576 bytes", "Input/output error"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    drop(loss);
    step.finish().unwrap();
    assert_nothing_held(&cache);
}

#[test]
fn backward_that_asks_while_the_store_is_under_way_is_served_from_the_device() {
    let (backend, cache) = faulty();
    backend.hold(Direction::Write);
    let x = leaf(&randn(&[16, 16]));
    let plain = x.copy().detach().set_requires_grad(true);
    chain(&plain).backward();
    let step = cache.step();
    let loss = chain(&x);
    step.backward(&loss).unwrap();
    drop(loss);
    backend.release();
    let report = step.finish().unwrap();
    assert_same_bits("the gradient", &grads(&[plain]), &grads(&[x]));
    assert!(report.loaded.count == 0 && report.forwarded.count > 0, "{report:?}");
    assert_nothing_held(&cache);
}

#[test]
fn waits_for_the_disk_are_stalls() {
    // 31 ms for each of 24 saves, which take microseconds to compute.
    let cache = direct()
        .policy(Offload::default().device_budget(16 * KIB).prefetch(0))
        .disk_rate(512 * KIB)
        .build()
        .unwrap();
    let report = step(&cache, &leaf(&randn(&[64, 64])));
    assert!(report.stall.device_budget > Duration::ZERO && report.stall.load > Duration::ZERO, "{report}");
}

#[test]
fn settings_that_contradict_it_are_refused() {
    let cases = [
        (direct().verify(Verify::Full), "verify(Full)"),
        (direct().verify(Verify::Checksums), "verify(Checksums)"),
        (TensorCache::builder().path(IoPath::Direct).simulated_device(Duration::ZERO), "spill_to"),
        (TensorCache::builder().path(IoPath::Direct).spill_to(std::env::temp_dir()), "one way only"),
    ];
    for (builder, what) in cases {
        let error = builder.build().expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains(what), "{error}");
    }
}

#[test]
fn host_memory_only_uses_no_directory() {
    let cache = common::staged().path(IoPath::HostOnly).build().unwrap();
    let report = step(&cache, &input());
    assert!(cache.store_stats().is_none() && report.offloaded.bytes >= 8 * KIB, "{report}");
}
