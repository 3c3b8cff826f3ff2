//! The path of a GPU's tensors, with a device made of threads in place of the GPU: through the host pool and on to
//! the disk.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;

use std::time::Duration;

use common::chain::{ZeroGrad, chain, expected, input, step};
use common::{
    assert_nothing_held, assert_same_bits, direct, everything, grads, leaf, randn, staged, staged_in_memory,
};
use ssdtrain::{ErrorKind, MIB, Offload, TensorCache};

#[test]
fn what_the_budget_does_not_hold_goes_to_the_host_and_comes_back() {
    let cache = staged_in_memory()
        .policy(Offload::default().device_budget(4 * MIB).prefetch(2 * MIB))
        .build()
        .unwrap();
    let x = input();
    for round in 0..4 {
        x.zero_grad_if_any();
        let report = step(&cache, &x);
        assert!(report.offloaded.bytes >= 18 * MIB, "round {round}: {report}");
        assert_eq!(report.offloaded.bytes, report.loaded.bytes, "round {round}: {report}");
        assert_same_bits("the gradient", &expected(), &grads(std::slice::from_ref(&x)));
    }
    assert_nothing_held(&cache);
}

#[test]
fn from_the_second_step_on_what_stays_in_the_budget_is_not_copied() {
    let cache = staged_in_memory()
        .policy(Offload::default().device_budget(8 * MIB).prefetch(4 * MIB))
        .build()
        .unwrap();
    let x = input();
    let first = step(&cache, &x);
    let second = step(&cache, &x);
    assert!(second.offloaded.bytes < first.saved.bytes - 6 * MIB, "{second}");
    assert!(second.offloaded.bytes >= first.saved.bytes - first.deduplicated.bytes - 10 * MIB, "{second}");
}

#[test]
fn backward_may_have_a_smaller_budget() {
    let cache = staged_in_memory()
        .policy(Offload::default().device_budget(12 * MIB).backward_budget(3 * MIB))
        .build()
        .unwrap();
    let x = input();
    step(&cache, &x);
    x.zero_grad_if_any();
    let report = step(&cache, &x);
    assert!(report.loaded.bytes >= 18 * MIB, "{report}");
    assert_same_bits("the gradient", &expected(), &grads(&[x]));
}

#[test]
fn what_exceeds_the_pool_goes_to_the_disk() {
    let cache = staged()
        .host_pool(8 * MIB)
        .policy(Offload::default().device_budget(2 * MIB).prefetch(MIB))
        .build()
        .unwrap();
    let x = input();
    for _ in 0..4 {
        x.zero_grad_if_any();
        let report = step(&cache, &x);
        assert_eq!(report.kept.no_room.count, 0, "{report}");
        assert_same_bits("the gradient", &expected(), &grads(std::slice::from_ref(&x)));
    }
    let stats = cache.store_stats().unwrap();
    assert!(stats.bytes_read > 0, "{stats:?}");
    assert_nothing_held(&cache);
}

#[test]
fn memory_beyond_the_pool_stays_until_it_is_copied() {
    // Slow copies: what was read into such memory may be reclaimed before the device has it.
    let slow = staged().simulated_device(Duration::from_millis(2));
    let cache = slow
        .host_pool(2 * MIB)
        .policy(Offload::default().device_budget(8 * MIB).prefetch(4 * MIB))
        .build()
        .unwrap();
    let x = input();
    for _ in 0..4 {
        x.zero_grad_if_any();
        step(&cache, &x);
        assert_same_bits("the gradient", &expected(), &grads(std::slice::from_ref(&x)));
    }
}

#[test]
fn nothing_is_written_that_the_pool_holds() {
    let cache = staged()
        .host_pool(256 * MIB)
        .policy(Offload::default().device_budget(2 * MIB).prefetch(MIB))
        .build()
        .unwrap();
    let x = input();
    for _ in 0..3 {
        assert!(step(&cache, &x).offloaded.bytes >= 16 * MIB);
    }
    assert_eq!(cache.store_stats().unwrap().bytes_written, 0);
}

#[test]
fn the_pool_alone_keeps_on_the_device_what_it_has_no_room_for() {
    let cache = staged_in_memory()
        .host_pool(4 * MIB)
        .policy(Offload::default().device_budget(2 * MIB))
        .build()
        .unwrap();
    let x = input();
    let report = step(&cache, &x);
    assert!(report.kept.no_room.bytes >= 10 * MIB, "{report}");
    assert_eq!(report.warnings.len(), 1, "{report}");
    assert_same_bits("the gradient", &expected(), &grads(&[x]));
}

#[test]
fn a_pool_sized_by_the_first_step_pins_nothing_after_it() {
    let builder = TensorCache::builder().min_bytes(0).simulated_device(Duration::ZERO);
    let cache = builder.policy(Offload::default().device_budget(MIB).prefetch(MIB)).build().unwrap();
    let x = input();
    step(&cache, &x);
    let after_first = cache.pinned_bytes();
    assert!(after_first >= 20 * MIB, "{after_first}");
    for _ in 0..3 {
        step(&cache, &x);
    }
    assert_eq!(cache.pinned_bytes(), after_first);
}

#[test]
fn a_pool_without_a_size_grows_with_what_steps_ask_for() {
    let builder = everything().simulated_device(Duration::ZERO);
    let cache = builder.policy(Offload::default().device_budget(MIB).prefetch(MIB)).build().unwrap();
    let small = leaf(&randn(&[512, 512]));
    step(&cache, &small);
    let after_small = cache.pinned_bytes();
    assert!(after_small >= 20 * MIB, "{after_small}");
    let large = leaf(&randn(&[1024, 2048]));
    for _ in 0..2 {
        large.zero_grad_if_any();
        let report = step(&cache, &large);
        assert_eq!(report.kept.no_room.count, 0, "{report}");
    }
    assert!(
        cache.pinned_bytes() >= 180 * MIB && cache.pinned_bytes() > after_small,
        "{}",
        cache.pinned_bytes()
    );
    assert_eq!(cache.store_stats().unwrap().bytes_written, 0, "the pool had room for all");
    let plain = leaf(&large.detach());
    chain(&plain).backward();
    assert_same_bits("the gradient", &grads(&[plain]), &grads(&[large]));
}

#[test]
fn nothing_is_pinned_where_nothing_leaves() {
    for builder in [TensorCache::builder(), everything(), staged().host_pool(0)] {
        let cache = builder
            .simulated_device(Duration::ZERO)
            .min_bytes(0)
            .policy(Offload::default().device_budget(64 * MIB))
            .build()
            .unwrap();
        let x = input();
        for _ in 0..3 {
            assert_eq!(step(&cache, &x).offloaded.count, 0);
        }
        assert_eq!(cache.pinned_bytes(), 0);
    }
}

#[test]
fn what_neither_pool_nor_disk_has_room_for_stays_on_the_device() {
    let cache = staged()
        .host_pool(8 * MIB)
        .policy(Offload::default().device_budget(MIB))
        .disk_cap(2 * MIB)
        .build()
        .unwrap();
    let x = input();
    let report = step(&cache, &x);
    assert!(report.kept.no_room.bytes > 0, "{report}");
    assert_same_bits("the gradient", &expected(), &grads(&[x]));
    assert_nothing_held(&cache);
}

#[test]
fn a_graph_dropped_at_any_moment_leaves_nothing() {
    for builder in [staged().host_pool(8 * MIB), direct()] {
        let cache = builder.policy(Offload::default().device_budget(2 * MIB)).build().unwrap();
        let x = input();
        for flush in [false, true] {
            let step = cache.step();
            let loss = chain(&x);
            if flush {
                step.flush();
            }
            drop(loss);
            step.finish().unwrap();
            assert_nothing_held(&cache);
        }
    }
}

#[test]
fn a_retained_graph_serves_two_backwards() {
    for builder in [staged().host_pool(8 * MIB), direct()] {
        let cache = builder.policy(Offload::default().device_budget(2 * MIB)).build().unwrap();
        let x = input();
        let step = cache.step();
        let loss = chain(&x);
        let retained = ssdtrain::Backward { retain_graph: true, ..Default::default() };
        step.backward_with(&loss, retained).unwrap();
        let once = grads(std::slice::from_ref(&x)).remove(0).copy();
        step.backward(&loss).unwrap();
        step.finish().unwrap();
        assert_same_bits("twice", &[once * 2.0], &grads(&[x]));
    }
}

#[test]
fn a_host_pool_of_nothing_without_a_disk_is_refused() {
    let error = staged_in_memory().host_pool(0).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("host_pool(0)"), "{error}");
}

#[test]
fn a_pause_gives_pinned_memory_back_and_the_next_step_takes_it_again() {
    let policy = Offload::default().device_budget(4 * MIB).prefetch(2 * MIB);
    let fixed = staged().host_pool(16 * MIB).policy(policy.clone());
    let learned =
        TensorCache::builder().policy(policy).min_bytes(0).simulated_device(Duration::from_micros(50));
    for (builder, least) in [(learned, MIB), (fixed, 16 * MIB)] {
        let cache = builder.build().unwrap();
        let x = input();
        for round in 0..3 {
            x.zero_grad_if_any();
            let report = step(&cache, &x);
            assert!(report.offloaded.bytes > 0, "round {round}: {report}");
            assert_same_bits("the gradient", &expected(), &grads(std::slice::from_ref(&x)));
            let pinned = cache.pinned_bytes();
            assert!(pinned >= least, "round {round}: {pinned}");
            let given_back = cache.pause();
            assert_eq!((given_back.pinned_bytes, cache.pinned_bytes()), (pinned, 0), "round {round}");
        }
        assert_nothing_held(&cache);
    }
}

#[test]
fn what_a_graph_still_needs_outlives_a_pause() {
    let policy = Offload::default().device_budget(0).prefetch(MIB);
    let cache = staged().host_pool(64 * MIB).policy(policy).build().unwrap();
    let x = input();
    let step = cache.step();
    let loss = chain(&x);
    step.flush();
    cache.pause();
    assert!(cache.pinned_bytes() > 0);
    step.backward(&loss).unwrap();
    drop(loss);
    assert_same_bits("the gradient", &expected(), &grads(&[x]));
    step.finish().unwrap();
    assert!(cache.pause().pinned_bytes > 0 && cache.pinned_bytes() == 0);
}

#[test]
fn a_pause_gives_the_space_of_the_spill_files_back_and_the_next_step_takes_it_again() {
    for builder in [everything(), staged().host_pool(2 * MIB), direct()] {
        let cache = builder.build().unwrap();
        let x = input();
        for round in 0..3 {
            x.zero_grad_if_any();
            let report = step(&cache, &x);
            let size = || cache.store_stats().unwrap().file_bytes;
            let before = size();
            assert!(before > 0 && report.loaded.bytes > 0, "round {round}: {report}");
            assert_same_bits("the gradient", &expected(), &grads(std::slice::from_ref(&x)));
            assert_eq!((cache.pause().spill_bytes, size()), (before, 0), "round {round}");
        }
        assert_nothing_held(&cache);
    }
}
