//! Tensors moved by cuFile, over a stand-in for the library and with a device made of threads: what it refuses or
//! aborts is an error that says so, or the step is still right.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;
#[expect(dead_code, reason = "shared with the tests of cuFile itself")]
#[path = "../cufile-sys/tests/stand_in/mod.rs"]
mod stand_in;

use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;
use std::{env, fs, thread};

use common::chain::{chain, expected, input, step};
use common::{assert_nothing_held, assert_same_bits, direct, grads, leaf};
use cufile_sys::sys::CUFileStringConfigParameter_t as Text;
use ssdtrain::{ErrorKind, IoPath, MIB, Offload, TensorCacheBuilder};
use stand_in::StandIn;
use tch::{Device, Kind, Tensor};

/// Not one of `cuFile`'s own: the file system is not supported.
const NOT_SUPPORTED: i32 = 5008;
/// Not a status: the stand-in ends the process with SIGKILL in the middle of the call.
const KILLED: i32 = -9;

fn builder(stand_in: &StandIn) -> TensorCacheBuilder {
    direct().cufile_library(stand_in.path()).policy(Offload::default().device_budget(2 * MIB).prefetch(MIB))
}

#[test]
fn bits_are_the_same_and_nothing_stays_registered() {
    let stand_in = StandIn::new();
    let cache = builder(&stand_in).build().unwrap();
    let x = input();
    let report = step(&cache, &x);
    assert!(report.loaded.bytes >= 16 * MIB, "{report}");
    assert!(report.io_path.contains("cuFile, GPUDirect Storage by nvidia-fs"), "{report}");
    assert_same_bits("the gradient", &expected(), &grads(&[x]));
    assert_nothing_held(&cache);
    drop(cache);
    stand_in.assert_nothing_is_left();
}

/// The path was tested with the very tier that the cache then uses, and a spill file begins with 256 MiB.
#[test]
fn a_cache_hears_that_the_file_has_grown_after_the_way_was_tried_out() {
    let stand_in = StandIn::new();
    let cache = builder(&stand_in).build().unwrap();
    let x = leaf(&Tensor::ones([4 << 20], (Kind::Float, Device::Cpu)));
    let step = cache.step();
    let y = (0..20).fold(&x * 1.0, |y, _| y.sin());
    step.backward(&y.sum(Kind::Float)).unwrap();
    let report = step.finish().unwrap();
    assert!(report.offloaded.bytes > 256 * MIB && report.kept.no_room.bytes == 0, "{report}");
}

#[test]
fn transfers_that_stop_halfway_go_on() {
    let stand_in = StandIn::new();
    stand_in.shorten(24 * 4096);
    let cache = builder(&stand_in).build().unwrap();
    let x = input();
    assert!(step(&cache, &x).loaded.count > 0);
    assert_same_bits("the gradient", &expected(), &grads(&[x]));
}

#[test]
fn a_library_that_is_not_there_is_named() {
    let error = direct().cufile_library("/nowhere/libcufile.so.0").build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unmet);
    assert!(error.to_string().contains("/nowhere/libcufile.so.0"), "{error}");
}

#[test]
fn a_library_without_a_function_is_refused_by_name() {
    let stand_in = StandIn::without(&["cuFileRead"]);
    let error = builder(&stand_in).build().unwrap_err();
    assert!(error.to_string().contains("cuFileRead"), "{error}");
}

#[test]
fn a_driver_that_does_not_open_is_refused() {
    let stand_in = StandIn::new();
    stand_in.fail("cuFileDriverOpen", 5001);
    let error = builder(&stand_in).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unmet);
    assert!(error.to_string().contains("cuFileDriverOpen"), "{error}");
}

#[test]
fn a_file_system_that_is_not_supported_is_refused_before_the_first_step() {
    let stand_in = StandIn::new();
    for status in [NOT_SUPPORTED, 5027] {
        stand_in.fail("cuFileHandleRegister", status);
        let error = builder(&stand_in).build().unwrap_err().to_string();
        assert!(error.contains("cuFileHandleRegister") && error.contains(&status.to_string()), "{error}");
    }
    stand_in.assert_nothing_is_left();
}

#[test]
fn writes_that_fail_leave_the_tensors_where_they_are() {
    let stand_in = StandIn::new();
    let cache = builder(&stand_in).build().unwrap();
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

/// The error of backward if `happens` runs once everything is stored.
fn refused_if(stand_in: &StandIn, happens: impl FnOnce()) -> String {
    let cache = builder(stand_in).build().unwrap();
    let x = input();
    let step = cache.step();
    let loss = chain(&x);
    step.flush();
    happens();
    step.backward(&loss).unwrap_err().to_string()
}

#[test]
fn reads_that_fail_are_an_error_of_backward() {
    let stand_in = StandIn::new();
    let error = refused_if(&stand_in, || stand_in.fail_with("cuFileRead", -1, libc::EIO));
    assert!(error.contains("Input/output error") && error.contains("saved tensor"), "{error}");
}

#[test]
fn a_driver_closed_under_it_is_an_error_and_not_a_wrong_tensor() {
    let stand_in = StandIn::new();
    let error = refused_if(&stand_in, || stand_in.close());
    assert!(error.contains("cuFileRead"), "{error}");
}

#[test]
fn slow_transfers_are_waited_for() {
    let stand_in = StandIn::new();
    let cache = builder(&stand_in).build().unwrap();
    let x = input();
    let step = cache.step();
    let loss = chain(&x);
    step.flush();
    stand_in.hold();
    thread::scope(|scope| {
        // Backward waits for the first load until it is released.
        let released = scope.spawn(|| {
            stand_in.wait_held(1);
            let loaded = stand_in.count("cuFileRead");
            stand_in.release();
            loaded
        });
        step.backward(&loss).unwrap();
        assert!(released.join().unwrap() > 0);
    });
    assert_same_bits("the gradient", &expected(), &grads(&[x]));
}

#[test]
fn writes_that_nobody_wants_any_more_are_dropped_before_their_turn() {
    let stand_in = StandIn::new();
    let cache = builder(&stand_in)
        .policy(Offload::default().device_budget(64 * MIB).backward_budget(1))
        .queue_depth(1)
        .build()
        .unwrap();
    let before = stand_in.count("cuFileWrite");
    stand_in.hold();
    let step = cache.step();
    let loss = chain(&input());
    stand_in.wait_held(1);
    drop(loss);
    stand_in.release();
    step.finish().unwrap();
    // Four megabytes are written at once.
    let written = stand_in.count("cuFileWrite") - before;
    assert!((1..=8).contains(&written), "{written} of some 24");
    assert_nothing_held(&cache);
}

#[test]
fn the_faster_way_is_taken_where_the_pool_leaves_a_choice() {
    let stand_in = StandIn::new();
    let cache = builder(&stand_in).host_pool(0).path(IoPath::Auto).build().unwrap();
    let x = input();
    step(&cache, &x);
    assert!(cache.io_path().contains("chosen: "), "{}", cache.io_path());
    assert_same_bits("the gradient", &expected(), &grads(&[x]));
}

#[test]
fn a_way_straight_to_the_disk_that_does_not_work_is_not_taken() {
    let stand_in = StandIn::new();
    stand_in.fail("cuFileHandleRegister", NOT_SUPPORTED);
    let cache = builder(&stand_in).host_pool(0).path(IoPath::Auto).build().unwrap();
    assert!(cache.io_path().contains("not straight to the disk: "), "{}", cache.io_path());
    assert!(cache.io_path().contains("5008"), "{}", cache.io_path());
    stand_in.assert_nothing_is_left();
}

#[test]
fn a_way_may_be_required() {
    let stand_in = StandIn::new();
    let cache = builder(&stand_in).path(IoPath::Auto).require_path(IoPath::Direct).build().unwrap();
    assert!(cache.io_path().contains("cuFile, GPUDirect Storage"), "{}", cache.io_path());
    let staged = builder(&stand_in).path(IoPath::Staged).require_path(IoPath::Direct).build().unwrap_err();
    assert_eq!(staged.kind(), ErrorKind::Unmet);
    stand_in.fail("cuFileDriverOpen", 5001);
    drop(cache);
    let refused = builder(&stand_in).require_path(IoPath::Direct).build().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unmet);
}

/// Where others may write to the temporary folder, they could place a link under the known name of a log.
#[test]
fn the_log_goes_to_a_private_folder_that_goes_with_the_process() {
    const CHILD: &str = "SSDTRAIN_TEST_LOG";
    if let Some(told) = env::var_os(CHILD) {
        let stand_in = StandIn::new();
        let cache = builder(&stand_in).build().unwrap();
        let folder = PathBuf::from(stand_in.open().parameter_string(Text::CUFILE_PARAM_LOG_DIR).unwrap());
        assert_eq!(fs::metadata(&folder).unwrap().permissions().mode() & 0o7777, 0o700);
        fs::write(folder.join("cufile.log"), "what cuFile says").unwrap();
        fs::write(told, folder.to_str().unwrap()).unwrap();
        drop(cache);
        return;
    }
    let below = tempfile::tempdir().unwrap();
    let told = below.path().join("told");
    let temporary = below.path().join("temporary");
    fs::create_dir(&temporary).unwrap();
    let mut child = Command::new(env::current_exe().unwrap());
    child.args(["--exact", "the_log_goes_to_a_private_folder_that_goes_with_the_process"]);
    child.env(CHILD, &told).env("TMPDIR", &temporary).env_remove("CUFILE_LOGFILE_PATH");
    assert!(child.status().unwrap().success());
    let folder = PathBuf::from(fs::read_to_string(told).unwrap());
    assert_eq!(folder.parent(), Some(temporary.as_path()));
    assert!(!folder.exists(), "{folder:?}");
}

/// The spill directory of [`trains_in_a_process_of_its_own`], and a function in which it is killed.
const TRAINS: &str = "SSDTRAIN_TEST_TRAINS";
const DIES_IN: &str = "SSDTRAIN_TEST_DIES_IN";

/// What is killed.
#[test]
fn trains_in_a_process_of_its_own() {
    let Some(directory) = env::var_os(TRAINS) else { return };
    let stand_in = StandIn::new();
    if let Ok(function) = env::var(DIES_IN) {
        stand_in.fail(&function, KILLED);
    }
    let cache = builder(&stand_in).spill_to(directory).build().unwrap();
    let log = stand_in.open().parameter_string(Text::CUFILE_PARAM_LOG_DIR).unwrap();
    fs::write(Path::new(&log).join("cufile.log"), "what cuFile says").unwrap();
    for _ in 0..2 {
        step(&cache, &input());
    }
}

/// A training that spills to `spill` in `below` and has its log in `temporary` there.
fn training(below: &Path) -> Command {
    let mut child = Command::new(env::current_exe().unwrap());
    child.args(["--exact", "trains_in_a_process_of_its_own"]).env_remove("CUFILE_LOGFILE_PATH");
    child.env(TRAINS, below.join("spill")).env("TMPDIR", below.join("temporary"));
    child
}

fn place() -> tempfile::TempDir {
    let below = tempfile::tempdir().unwrap();
    ["spill", "temporary"].iter().for_each(|folder| fs::create_dir(below.path().join(folder)).unwrap());
    below
}

/// The spill files and then the folders of logs that are there. The folder of the stand-in itself is none of these.
fn left(below: &Path) -> Vec<PathBuf> {
    let entries = ["spill", "temporary"].map(|folder| fs::read_dir(below.join(folder)).unwrap());
    let paths = entries.into_iter().flatten().map(|entry| entry.unwrap().path());
    let is_ours = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().contains("ssdtrain-");
    let mut paths: Vec<_> = paths.filter(is_ours).collect();
    paths.sort_unstable_by_key(|path| path.is_dir());
    paths
}

/// cuFile opens a spill file by its name, and writes a log.
#[test]
fn what_a_killed_process_has_left_goes_with_the_next_one() {
    let place = place();
    let below = place.path();
    let killed = training(below).env(DIES_IN, "cuFileHandleRegister").status().unwrap();
    assert_eq!(killed.signal(), Some(libc::SIGKILL));
    let [file, folder] = <[PathBuf; 2]>::try_from(left(below)).unwrap();
    assert_eq!((fs::metadata(file).unwrap().len(), folder.is_dir()), (0, true));
    assert!(training(below).status().unwrap().success());
    assert_eq!(left(below), Vec::<PathBuf>::new());
}

/// Kills trainings at moments that are spread over their length, and looks for what is left once another one has ended.
fn kill(count: u32) {
    let place = place();
    let below = place.path();
    let start = Instant::now();
    assert!(training(below).status().unwrap().success());
    let whole = start.elapsed();
    let (mut killed, mut left_something) = (0, 0);
    for number in 0..=count {
        let mut child = training(below).spawn().unwrap();
        if number < count {
            // Any moment will do, so this is not a wait for something to happen.
            let drawn = RandomState::new().build_hasher().finish() as f64 / u64::MAX as f64;
            thread::sleep(whole.mul_f64((f64::from(number) + drawn) / f64::from(count)));
        } else {
            // The last one has its log's folder, however busy the processors are.
            let before = left(below);
            while left(below).iter().all(|path| before.contains(path)) {
                assert!(child.try_wait().unwrap().is_none(), "it ended before its folder was seen");
            }
        }
        child.kill().unwrap();
        killed += u32::from(!child.wait().unwrap().success());
        left_something += u32::from(!left(below).is_empty());
    }
    assert!(training(below).status().unwrap().success());
    assert_eq!(left(below), Vec::<PathBuf>::new());
    println!(
        "{killed} killed, {left_something} of them left something to the next one, in runs of {whole:?}"
    );
}

#[test]
fn trainings_that_are_killed_leave_nothing_that_the_next_one_does_not_remove() {
    kill(3);
}

#[test]
#[ignore = "takes minutes"]
fn a_hundred_trainings_that_are_killed_leave_nothing_that_the_next_one_does_not_remove() {
    kill(100);
}
