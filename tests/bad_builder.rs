//! Settings at the ends of their ranges, and beyond: a cache is refused with an error, or it works. It never panics.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use proptest::prelude::{ProptestConfig, Strategy};
use proptest::sample::{select, subsequence};
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use ssdtrain::plan::Goal;
use ssdtrain::{
    Adaptive, Auto, BackendKind, IoPath, Keep, Offload, Result, TensorCache, TensorCacheBuilder, Verify,
};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

/// Combinations of settings that are tried.
const COMBINATIONS: u32 = 300;
const NUMBERS: &[u64] =
    &[0, 1, 2, 4095, 4096, 4097, 1 << 32, 1 << 60, i64::MAX as u64, u64::MAX - 1, u64::MAX];

/// A setting, and how it is made.
#[derive(Clone)]
struct Setting {
    name: String,
    set: Arc<dyn Fn(TensorCacheBuilder) -> TensorCacheBuilder + Send + Sync>,
}

impl std::fmt::Debug for Setting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}

#[derive(Default)]
struct Settings(Vec<Setting>);

impl Settings {
    fn add(
        &mut self,
        name: impl Into<String>,
        set: impl Fn(TensorCacheBuilder) -> TensorCacheBuilder + Send + Sync + 'static,
    ) {
        self.0.push(Setting { name: name.into(), set: Arc::new(set) });
    }
}

/// Each setting with each extreme value.
fn settings(place: &Path) -> Vec<Setting> {
    let mut all = Settings::default();
    for &n in NUMBERS {
        all.add(format!("disk_cap({n})"), move |builder| builder.disk_cap(n));
        all.add(format!("disk_keep_free({n})"), move |builder| builder.disk_keep_free(n));
        // As much memory as that is never there, or it is little.
        if !(1 << 30..1 << 60).contains(&n) {
            all.add(format!("host_pool({n})"), move |builder| builder.host_pool(n));
        }
        all.add(format!("read_ahead({n})"), move |builder| builder.read_ahead(n));
        all.add(format!("min_bytes({n})"), move |builder| builder.min_bytes(n));
        all.add(format!("queue_depth({n})"), move |builder| builder.queue_depth(n as usize));
        // With a short limit, the disk is too slow now and then.
        if n == 0 || n > 1 << 36 {
            let limit = Duration::from_nanos(n);
            all.add(format!("disk_timeout({limit:?})"), move |builder| builder.disk_timeout(limit));
            all.add(format!("device_timeout({limit:?})"), move |builder| builder.device_timeout(limit));
        }
        all.add(format!("tile_bytes({n})"), move |builder| builder.tile_bytes(n));
        // With a low limit, a step takes hours, as it was asked to.
        if n == 0 || n > 1 << 30 {
            all.add(format!("disk_rate({n})"), move |builder| builder.disk_rate(n));
        }
        let keep = n as usize;
        all.add(format!("disk_endurance({n})"), move |builder| builder.disk_endurance(n));
        let offload = Offload::default().device_budget(n).prefetch(n).keep_last(keep);
        all.add(format!("{offload:?}"), move |builder| builder.policy(offload.clone()));
        let offload = Offload::default().device_budget(0).backward_budget(n).keep_last(0);
        all.add(format!("{offload:?}"), move |builder| builder.policy(offload.clone()));
        let adaptive = Adaptive::default().device_budget(n).backward_budget(n).prefetch(n).keep_last(keep);
        all.add(format!("{adaptive:?}"), move |builder| builder.policy(adaptive.clone()));
        let auto = Auto::new(Goal::budget(n)).written_per_day(n);
        all.add(format!("{auto:?}"), move |builder| builder.policy(auto.clone()));
    }
    for share in [0.0, -0.0, -1.0, 1e-320, 1e308, f64::MAX, f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
        all.add(format!("Auto({share})"), move |builder| {
            builder.policy(Auto::new(Goal { peak: Some(1), step: Some(share) }))
        });
        all.add(format!("overhead({share})"), move |builder| {
            builder.policy(Auto::new(Goal::overhead(share)))
        });
    }
    all.add("Keep", |builder| builder.policy(Keep));
    all.add("no goal", |builder| builder.policy(Auto::new(Goal { peak: None, step: None })));
    let all_directories = directories(place);
    for directory in all_directories.clone() {
        let name = format!("spill_to({:.60?})", directory.as_os_str());
        all.add(name, move |builder| builder.spill_to(&directory));
    }
    // Others would be made in the current directory.
    for directory in all_directories.into_iter().filter(|directory| directory.is_absolute()) {
        let name = format!("disk_history({:.60?})", directory.as_os_str());
        all.add(name, move |builder| builder.disk_history(&directory));
    }
    let twice = place.to_owned();
    all.add("one directory three times", move |builder| {
        builder.spill_to(&twice).spill_to(twice.join(".")).spill_to(&twice)
    });
    let often = place.to_owned();
    all.add("one directory a hundred times", move |builder| {
        (0..100).fold(builder, |builder, _| builder.spill_to(&often))
    });
    for library in ["", "nowhere.so", "a\0b", "/dev/null", "/proc/self/exe"] {
        all.add(format!("cufile_library({library:?})"), move |builder| builder.cufile_library(library));
    }
    for backend in BackendKind::ALL {
        all.add(format!("backend({backend:?})"), move |builder| builder.backend(backend));
    }
    for path in [IoPath::Auto, IoPath::Direct, IoPath::Staged] {
        all.add(format!("path({path:?})"), move |builder| builder.path(path));
        all.add(format!("require_path({path:?})"), move |builder| builder.require_path(path));
    }
    for device in [
        Device::Cpu,
        Device::Cuda(0),
        Device::Cuda(255),
        Device::Cuda(usize::MAX),
        Device::Mps,
        Device::Vulkan,
    ] {
        all.add(format!("device({device:?})"), move |builder| builder.device(device));
    }
    for _ in 0..10 {
        all.add("simulated_device", |builder| builder.simulated_device(Duration::ZERO));
    }
    all.add("parameters", |builder| builder.parameters(&VarStore::new(Device::Cpu)));
    all.add("require_direct_io", |builder| builder.require_direct_io(true));
    all.add("fail_if_nothing_offloaded", |builder| builder.fail_if_nothing_offloaded(true));
    all.add("verify", |builder| builder.verify(Verify::Full));
    all.add("trace", |builder| builder.trace(true));
    all.add("no fuse_reruns", |builder| builder.fuse_reruns(false));
    all.0
}

/// What is given for a directory: good ones, files, nothing, and names that no file can have.
fn directories(place: &Path) -> Vec<PathBuf> {
    let file = place.join("file");
    File::create(&file).unwrap();
    let circle = place.join("circle");
    std::os::unix::fs::symlink(&circle, &circle).unwrap();
    let mut all = vec![place.to_owned(), file.clone(), file.join("below"), circle];
    let names =
        ["", "\0", "a\0b", "nowhere", "/proc", "/proc/self/fd", "/sys", "/dev/null", "/dev/full", "~", "*"];
    all.extend(names.map(PathBuf::from));
    all.push(OsStr::from_bytes(b"\xff\xfe").into());
    all.push("x".repeat(300).into());
    all.push("y/".repeat(3000).into());
    all
}

/// Builds a cache with these settings and takes two steps with it. An error is a good answer, too.
fn try_out(settings: &[Setting], place: &Path) -> Result<()> {
    // What is written here is no matter of the user's own history.
    let start = TensorCache::builder().disk_history(place.join("history"));
    let start = start.policy(Offload::default().device_budget(0).keep_last(0)).min_bytes(0);
    let builder = settings.iter().fold(start, |builder, setting| (setting.set)(builder));
    // Refused or not, with the same settings as the cache.
    drop(builder.route());
    let cache = builder.build()?;
    for _ in 0..2 {
        let step = cache.step();
        let input = Tensor::ones([64, 64], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let loss = (input.exp().sin() * &input).sum(Kind::Float);
        step.backward(&loss)?;
        step.finish()?;
    }
    // Not every cache has a trace.
    drop(cache.write_trace(place.join("trace.json")));
    cache.pause();
    Ok(())
}

/// Runs `body` and returns the panics of all threads.
fn panics(body: impl FnOnce()) -> Vec<String> {
    static SEEN: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let before = panic::take_hook();
    panic::set_hook(Box::new(|panic| SEEN.lock().push(panic.to_string())));
    // The hook has seen it.
    drop(panic::catch_unwind(AssertUnwindSafe(body)));
    panic::set_hook(before);
    std::mem::take(&mut *SEEN.lock())
}

#[test]
fn a_cache_with_any_settings_is_refused_or_works() {
    let place = tempfile::tempdir().unwrap();
    let all = settings(place.path());
    let good = all.iter().find(|setting| setting.name.starts_with("spill_to(")).unwrap().clone();
    let simulated = all.iter().find(|setting| setting.name == "simulated_device").unwrap().clone();
    let starts = [vec![], vec![good.clone()], vec![simulated.clone()], vec![good.clone(), simulated]];
    let mut cases: Vec<_> = starts
        .iter()
        .flat_map(|start| all.iter().map(|setting| [start, &[setting.clone()][..]].concat()))
        .collect();
    let mut runner =
        TestRunner::new_with_rng(ProptestConfig::default(), TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let several = (select(vec![vec![], vec![good]]), subsequence(all, 2..6));
    cases.extend((0..COMBINATIONS).map(|_| {
        let (first, then) = several.new_tree(&mut runner).unwrap().current();
        [first, then].concat()
    }));
    let (mut refused, mut wrong) = (0, Vec::new());
    for case in &cases {
        let seen = panics(|| match try_out(case, place.path()) {
            Ok(()) => {}
            Err(error) => {
                assert!(!error.to_string().is_empty(), "an error without words");
                refused += 1;
            }
        });
        wrong.extend(seen.iter().map(|panic| format!("{case:?}: {panic}")));
    }
    println!("{} caches, {refused} refused, {} panics", cases.len(), wrong.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_trace_for_no_file_is_refused() {
    let cache = TensorCache::builder().policy(Keep).trace(true).build().unwrap();
    for path in ["", "\0", "/", "nowhere/at/all", "/proc/self/mem/below"] {
        assert!(cache.write_trace(path).is_err(), "{path:?}");
    }
}

#[test]
fn more_host_memory_than_there_can_be_is_refused_as_such() {
    for bytes in [u64::MAX, u64::MAX - (2 << 20), 1 << 60] {
        let builder = TensorCache::builder().simulated_device(Duration::ZERO).host_pool(bytes);
        let error = builder.build().unwrap_err().to_string();
        assert!(error.contains("no memory for") && error.contains("host pool"), "{error}");
    }
}
