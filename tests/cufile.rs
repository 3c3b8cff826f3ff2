//! Tensors that cuFile moves, over a stand-in for the library and with a device made of threads: what it refuses, and what it
//! breaks off, is an error that says so, or a step that is right all the same.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;
#[expect(dead_code, reason = "shared with the tests of cuFile itself")]
#[path = "../cufile-sys/tests/stand_in/mod.rs"]
mod stand_in;

use common::chain::{chain, expected, input, step};
use common::{assert_nothing_held, assert_same_bits, direct, grads};
use ssdtrain::{BackendKind, ErrorKind, IoPath, MIB, TensorCacheBuilder};
use stand_in::StandIn;

/// Not one of `cuFile`'s own: the file system is not supported.
const NOT_SUPPORTED: i32 = 5008;

/// Makes `stand_in` the library that the process finds.
fn install(stand_in: &StandIn) {
    // SAFETY: each test is a process of its own, and no other thread of it reads the environment yet.
    unsafe { std::env::set_var("SSDTRAIN_CUFILE", stand_in.path()) };
}

fn builder() -> TensorCacheBuilder {
    direct().backend(BackendKind::CuFile).device_budget(2 * MIB).prefetch(MIB)
}

#[test]
fn bits_are_the_same_and_nothing_stays_registered() {
    let stand_in = StandIn::new();
    install(&stand_in);
    let cache = builder().build().unwrap();
    let x = input();
    let report = step(&cache, &x);
    assert!(report.loaded.bytes >= 16 * MIB, "{report}");
    assert!(report.io_path.contains("cuFile, GPUDirect Storage by nvidia-fs"), "{report}");
    assert_same_bits("the gradient", &expected(), &grads(&[x]));
    assert_nothing_held(&cache);
    drop(cache);
    stand_in.assert_nothing_is_left();
}

#[test]
fn transfers_that_stop_halfway_go_on() {
    let stand_in = StandIn::new();
    install(&stand_in);
    stand_in.shorten(24 * 4096);
    let cache = builder().build().unwrap();
    let x = input();
    assert!(step(&cache, &x).loaded.count > 0);
    assert_same_bits("the gradient", &expected(), &grads(&[x]));
}

#[test]
fn a_library_that_is_not_there_is_named() {
    // SAFETY: as in `install`.
    unsafe { std::env::set_var("SSDTRAIN_CUFILE", "/nowhere/libcufile.so.0") };
    let error = builder().build().err();
    // Where cuFile is installed it is found all the same.
    if let Some(error) = error {
        assert_eq!(error.kind(), ErrorKind::Unmet);
        assert!(error.to_string().contains("/nowhere/libcufile.so.0"), "{error}");
    }
}

#[test]
fn a_library_without_a_function_is_refused_by_name() {
    let stand_in = StandIn::without(&["cuFileRead"]);
    install(&stand_in);
    let error = builder().build().unwrap_err();
    assert!(error.to_string().contains("cuFileRead"), "{error}");
}

#[test]
fn a_driver_that_does_not_open_is_refused() {
    let stand_in = StandIn::new();
    install(&stand_in);
    stand_in.fail("cuFileDriverOpen", 5001);
    let error = builder().build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unmet);
    assert!(error.to_string().contains("cuFileDriverOpen"), "{error}");
}

#[test]
fn a_file_system_that_is_not_supported_is_refused_before_the_first_step() {
    let stand_in = StandIn::new();
    install(&stand_in);
    for status in [NOT_SUPPORTED, 5027] {
        stand_in.fail("cuFileHandleRegister", status);
        let error = builder().build().unwrap_err().to_string();
        assert!(error.contains("cuFileHandleRegister") && error.contains(&status.to_string()), "{error}");
    }
    stand_in.assert_nothing_is_left();
}

#[test]
fn writes_that_fail_leave_the_tensors_where_they_are() {
    let stand_in = StandIn::new();
    install(&stand_in);
    let cache = builder().build().unwrap();
    for (status, detail) in [(-1, libc::EIO), (5030, 0)] {
        stand_in.fail_with("cuFileWrite", status, detail);
        let x = input();
        let report = step(&cache, &x);
        assert!(report.store_failures.count > 0 && report.offloaded.count == 0, "{report}");
        assert_same_bits("the gradient", &expected(), &grads(&[x]));
    }
    stand_in.fail("cuFileWrite", 0);
    assert!(step(&cache, &input()).offloaded.count > 0, "the next step tries again");
}

#[test]
fn reads_that_fail_are_an_error_of_backward() {
    let stand_in = StandIn::new();
    install(&stand_in);
    let cache = builder().build().unwrap();
    let x = input();
    let step = cache.step();
    let loss = chain(&x);
    step.flush();
    stand_in.fail_with("cuFileRead", -1, libc::EIO);
    let error = step.backward(&loss).unwrap_err().to_string();
    assert!(error.contains("Input/output error") && error.contains("saved tensor"), "{error}");
}

#[test]
fn a_driver_closed_under_it_is_an_error_and_not_a_wrong_tensor() {
    let stand_in = StandIn::new();
    install(&stand_in);
    let cache = builder().build().unwrap();
    let x = input();
    let step = cache.step();
    let loss = chain(&x);
    step.flush();
    stand_in.close();
    let error = step.backward(&loss).unwrap_err().to_string();
    assert!(error.contains("cuFileRead"), "{error}");
}

#[test]
fn slow_transfers_are_waited_for() {
    let stand_in = StandIn::new();
    install(&stand_in);
    let cache = builder().build().unwrap();
    stand_in.hold();
    let x = input();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            stand_in.wait_held(1);
            stand_in.release();
        });
        assert!(step(&cache, &x).loaded.count > 0);
    });
    assert_same_bits("the gradient", &expected(), &grads(&[x]));
}

#[test]
fn the_way_may_be_chosen_and_required() {
    let stand_in = StandIn::new();
    install(&stand_in);
    let auto = || builder().host_pool(0).path(IoPath::Auto);
    let cache = auto().build().unwrap();
    assert!(cache.io_path().contains("chosen: "), "{}", cache.io_path());
    let x = input();
    step(&cache, &x);
    assert_same_bits("the gradient", &expected(), &grads(&[x]));
    let required = auto().require_path(IoPath::Direct).build().unwrap();
    assert!(required.io_path().contains("cuFile"), "{}", required.io_path());
    let error = auto().path(IoPath::Staged).backend(BackendKind::Auto).require_path(IoPath::Direct).build();
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Unmet);
}
