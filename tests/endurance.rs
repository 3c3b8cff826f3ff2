//! What is written to disks is counted day by day, by all runs together, and a limit of a day holds.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, UNIX_EPOCH};

use common::chain::{self, chain};
use common::{assert_nothing_held, assert_same_bits, everything, grads};
use ssdtrain::plan::Goal;
use ssdtrain::store::{Clock, History, HistoryFile};
use ssdtrain::{Auto, MIB, Offload, StepReport, TensorCache, TensorCacheBuilder};

const DAY: u64 = 86_400;

/// A time of day that the test sets.
#[derive(Clone)]
struct Time(Arc<AtomicU64>);

impl Time {
    fn new() -> Time {
        Time(Arc::new(AtomicU64::new(20_000 * DAY + DAY / 2)))
    }

    fn passes(&self, seconds: u64) {
        self.0.fetch_add(seconds, Relaxed);
    }

    fn clock(&self) -> Clock {
        let told = self.clone();
        Clock::new(move || UNIX_EPOCH + Duration::from_secs(told.0.load(Relaxed)))
    }
}

fn moving(state: &Path) -> TensorCacheBuilder {
    everything().policy(Offload::default().device_budget(0)).disk_history(state)
}

/// A step whose stores all end before backward begins. Its gradients have the right bits.
fn step(cache: &TensorCache) -> StepReport {
    tch::set_num_threads(1);
    let x = chain::input();
    let step = cache.step();
    let loss = chain(&x);
    step.flush();
    step.backward(&loss).unwrap();
    drop(loss);
    let report = step.finish().unwrap();
    assert_same_bits("a step", &chain::expected(), &grads(&[x]));
    assert_nothing_held(cache);
    report
}

/// Whether spill files of tests are on a disk: what is in memory is not counted.
fn is_on_disk(report: &StepReport) -> bool {
    if report.disks.is_empty() {
        eprintln!("skipped: the temporary directory is in memory");
    }
    !report.disks.is_empty()
}

fn history(state: &Path) -> History {
    HistoryFile::within(state).read().unwrap()
}

fn written(report: &StepReport) -> u64 {
    report.disks.iter().map(|disk| disk.written).sum()
}

#[test]
fn each_report_names_the_disks_and_all_runs_add_up() {
    let place = tempfile::tempdir().unwrap();
    let (state, time) = (place.path().join("state"), Time::new());
    let build = || moving(&state).clock(time.clock()).build().unwrap();
    let (one, other) = (build(), build());
    let (first, second) = (step(&one), step(&one));
    if !is_on_disk(&first) {
        return;
    }
    let stats = one.store_stats().unwrap();
    assert!(first.offloaded.bytes > 0 && written(&first) >= first.offloaded.bytes, "{first}");
    // The shares of an array are rounded.
    assert!(written(&first) + written(&second) + 64 >= stats.disk_bytes_written);
    assert!(stats.disk_bytes_written >= stats.bytes_written && !state.exists(), "within a minute");
    time.passes(60);
    let third = step(&one);
    let mine = &third.disks[0];
    let theirs = step(&other).disks[0].clone();
    // The file has what was written until the third step began.
    let all = theirs.by_run + mine.by_run - mine.written;
    assert_eq!((theirs.by_all_runs, theirs.today), (all, all));
    let all = theirs.by_run + mine.by_run;
    drop((one, other));
    let text = fs::read_to_string(HistoryFile::within(&state).path()).unwrap();
    assert!(!text.contains(std::env::temp_dir().to_str().unwrap()), "{text}");
    let later = step(&build());
    assert_eq!(later.disks[0].by_all_runs, later.disks[0].by_run + all);
    assert_ne!(history(&state), History::default());
}

#[test]
fn a_limit_holds_for_all_runs_of_a_day_and_is_told_of() {
    let place = tempfile::tempdir().unwrap();
    let (state, time) = (place.path().join("state"), Time::new());
    let most = 12 * MIB;
    let build = || {
        let policy = Auto::new(Goal::budget(MIB)).written_per_day(most);
        moving(&state).policy(policy).clock(time.clock()).build().unwrap()
    };
    for _day in 0..2 {
        let mut of_day = 0;
        for run in 0..2 {
            let cache = build();
            for number in 0..2 {
                let report = step(&cache);
                if !is_on_disk(&report) {
                    return;
                }
                of_day += written(&report);
                assert!(of_day <= most, "{of_day} in run {run}: {report}");
                let is_told = report.warnings.iter().any(|warning| warning.contains("written_per_day"));
                assert!(run == 0 || is_told, "run {run}, step {number}: {report}");
            }
        }
        assert!(of_day > most / 2, "{of_day}");
        time.passes(DAY);
    }
}

#[test]
fn a_short_life_is_a_warning_that_names_the_disk() {
    let place = tempfile::tempdir().unwrap();
    let time = Time::new();
    let cache = moving(place.path()).clock(time.clock()).disk_endurance(1 << 40).build().unwrap();
    let mut last = step(&cache);
    for _ in 0..4 {
        assert!(last.warnings.is_empty(), "the rate is not known yet: {last}");
        time.passes(30);
        last = step(&cache);
    }
    if !is_on_disk(&last) {
        return;
    }
    let disk = &last.disks[0];
    let is_short = disk.life.is_some_and(|life| life < Duration::from_secs(365 * DAY));
    assert!(disk.per_day > Some(0) && is_short, "{disk:?}");
    let [warning] = last.warnings.as_slice() else { panic!("{last}") };
    assert!(warning.starts_with(&disk.name) && warning.contains("1.1 TB"), "{warning}");
    time.passes(3600);
    assert_eq!(&step(&cache).warnings, &last.warnings);
}

#[test]
fn a_history_that_cannot_be_kept_is_a_warning_and_training_goes_on() {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("file");
    fs::write(&file, "").unwrap();
    let time = Time::new();
    let cache = moving(&file).clock(time.clock()).build().unwrap();
    let first = step(&cache);
    if !is_on_disk(&first) {
        return;
    }
    assert_eq!(first.warnings, Vec::<String>::new());
    time.passes(60);
    let warned = step(&cache);
    assert!(warned.warnings.len() == 1 && warned.warnings[0].contains("SSDTRAIN_STATE"), "{warned}");
    assert_eq!((step(&cache).warnings, warned.disks[0].by_all_runs > 0), (warned.warnings, true));
}

#[test]
fn ratings_of_nothing_are_refused() {
    let place = tempfile::tempdir().unwrap();
    let error = moving(place.path()).disk_endurance(0).build().unwrap_err();
    assert!(error.to_string().contains("disk_endurance(0)"), "{error}");
}
