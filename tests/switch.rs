//! The environment variable `SSDTRAIN` takes the cache out of a program. Each test is run again as a process with another environment.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;

use std::env;
use std::fs;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{leaf, randn};
use ssdtrain::{ErrorKind, MIB, Offload, StepReport, TensorCache, TensorCacheBuilder, segment};
use tch::{Kind, Tensor};

/// Set in the child.
const CHILD: &str = "SSDTRAIN_TEST_CHILD";

/// Whether this is the test's child; if not, runs it with `SSDTRAIN` saying this.
fn is_child_told(test: &str, told: &str) -> bool {
    if env::var_os(CHILD).is_some() {
        return true;
    }
    let mut child = Command::new(env::current_exe().unwrap());
    child.args(["--exact", test]).env(CHILD, "").env("SSDTRAIN", told);
    assert!(child.status().unwrap().success(), "{test}, SSDTRAIN={told}");
    false
}

/// A cache that moves everything, and asks much of the machine.
fn demanding(directory: &tempfile::TempDir) -> TensorCacheBuilder {
    let policy = Offload::default().device_budget(0);
    let builder = TensorCache::builder().spill_to(directory.path()).policy(policy).min_bytes(0);
    builder.require_direct_io(true).fail_if_nothing_offloaded(true).disk_cap(64 * MIB)
}

/// A step's gradient and report, and how often its segment ran.
fn step(cache: Option<&TensorCache>, x: &Tensor) -> (Tensor, Option<StepReport>, usize) {
    let (x, runs) = (leaf(x), Arc::new(AtomicUsize::new(0)));
    let step = cache.map(TensorCache::step);
    let counted = Arc::clone(&runs);
    let y = segment("s", &(&x * 2.0), move |x| {
        counted.fetch_add(1, Ordering::Relaxed);
        Ok(x.tanh().sigmoid() * 2.0)
    });
    let loss = y.unwrap().square().sum(Kind::Float);
    match &step {
        Some(step) => step.backward(&loss).unwrap(),
        None => loss.backward(),
    }
    (x.grad(), step.map(|step| step.finish().unwrap()), runs.load(Ordering::Relaxed))
}

/// A child's step, of which nothing shows, and how often its segment ran.
fn reported() -> (StepReport, usize) {
    let directory = tempfile::tempdir().unwrap();
    let cache = demanding(&directory).build().unwrap();
    let x = randn(&[64, 64]);
    let (plain, _, _) = step(None, &x);
    let (gradient, report, runs) = step(Some(&cache), &x);
    assert_eq!(gradient, plain);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "no spill file");
    let report = report.unwrap();
    let metrics = cache.metrics();
    assert_eq!((metrics.steps.unplanned, metrics.activity.saved, metrics.device_bytes), (1, report.saved, 0));
    (report, runs)
}

#[test]
fn off_is_as_without_a_cache() {
    if is_child_told("off_is_as_without_a_cache", "off") {
        let (report, runs) = reported();
        assert_eq!(runs, 1, "a segment is a part of the program like any other");
        assert_eq!((report.saved.count, report.offloaded.count), (0, 0), "{report}");
        assert!(report.warnings.iter().any(|warning| warning.contains("SSDTRAIN=off")), "{report}");
    }
}

#[test]
fn keep_keeps_everything_whatever_the_policy() {
    if is_child_told("keep_keeps_everything_whatever_the_policy", "keep") {
        let (report, _) = reported();
        assert!(report.saved.count > 0 && report.offloaded.count == 0, "{report}");
        assert!(report.warnings.iter().any(|warning| warning.contains("SSDTRAIN=keep")), "{report}");
    }
}

#[test]
fn anything_else_is_an_error_that_says_what_there_is() {
    if is_child_told("anything_else_is_an_error_that_says_what_there_is", "of") {
        let error = demanding(&tempfile::tempdir().unwrap()).build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("SSDTRAIN=of:"), "{error}");
    }
}
