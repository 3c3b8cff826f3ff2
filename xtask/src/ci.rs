//! `cargo x ci`: every check that a change has to pass, quick ones first.

use std::ffi::OsString;
use std::time::Instant;

use anyhow::{Context, Result};

use crate::process::{cargo, run as run_command};
use crate::{arrows, circles, cufile, deny, fuzz, libtorch, outside, rooms, run_tests};

/// A step by its name and what it does.
type Step = (&'static str, fn() -> Result<()>);

const STEPS: &[Step] = &[
    ("formatting", || run_command(&mut cargo(["fmt", "--all", "--check"]))),
    ("dependency arrows", || arrows::check().and_then(|()| rooms::check()).and_then(|()| circles::check())),
    ("tests without libtorch", pure),
    ("licences and bans", deny::check),
    ("libtorch", libtorch::ensure),
    ("header of cuFile", || cufile::header().map(drop)),
    ("lints", lints),
    ("documentation", documentation),
    ("smoke run", smoke),
    ("a program outside", outside::check),
    ("fuzz targets", fuzz::smoke),
    ("tests", tests),
    ("tests that fail disks or take minutes", longer),
];

/// Runs all steps and stops at the first that fails.
pub(crate) fn run(_: &[OsString]) -> Result<()> {
    for (name, step) in STEPS {
        println!("==> {name}");
        let start = Instant::now();
        step().with_context(|| format!("CI step `{name}`"))?;
        println!("==> {name}: passed in {:.0} s", start.elapsed().as_secs_f64());
    }
    Ok(())
}

/// Checks the crates that do not use libtorch, on a machine that may not have it.
fn pure() -> Result<()> {
    let mut test = cargo(["test", "--package", "ssdtrain-plan", "--package", "ssdtrain-store"]);
    run_command(test.env("LIBTORCH", "/nonexistent"))
}

fn lints() -> Result<()> {
    let mut clippy = cargo(["clippy", "--workspace", "--all-targets", "--", "--deny", "warnings"]);
    run_command(&mut clippy)
}

fn documentation() -> Result<()> {
    let mut doc = cargo(["doc", "--workspace", "--no-deps"]);
    run_command(doc.env("RUSTDOCFLAGS", "--deny warnings"))
}

/// Runs all tests; with cuFile's header none of them is skipped for lack of it.
fn tests() -> Result<()> {
    run_tests(&[], &[(cufile::VARIABLE, &cufile::header()?)])
}

/// Of the tests that are ignored otherwise: disks that really fail, and what each file system does with spill files, which say why
/// where they cannot mount any, and a short endurance run.
/// They are asked for in the whole workspace, for which they are built already.
fn longer() -> Result<()> {
    let mut test = cargo(["test", "--workspace", "--test", "real_disks"]);
    test.args(["--test", "file_systems", "--test", "soak"]);
    run_command(test.args(["--", "--ignored", "--nocapture", "--test-threads", "1"]))
}

/// A tiny `compare` that checks the release binary from end to end, with gradients compared to the bit. Its times
/// mean nothing.
fn smoke() -> Result<()> {
    let mut compare = cargo(["run", "--release", "--package", "ssdtrain-bench", "--", "compare", "--check"]);
    compare.args(["--layers", "2", "--hidden", "64", "--heads", "2", "--block", "64", "--batch", "2"]);
    compare.args(["--steps", "4", "--warmup", "1", "--min-bytes", "4KiB"]);
    run_command(&mut compare)
}
