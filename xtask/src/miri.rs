//! `cargo x miri`: runs tests of pure modules in an interpreter that sees undefined behaviour, and addresses that depend on luck.

use std::ffi::OsString;

use anyhow::{Result, ensure};

use crate::process::{command, root, run as run_command, succeeds};

/// Tests that need no system call which Miri lacks, and end within minutes: it is some thousand times slower.
const TESTS: &str = "package(=ssdtrain-store) and test(/^(extent|mem::runs|stripe|day|history|path|allowance|control_groups|numa)::/) \
                     or package(=ssdtrain-plan) and test(/^(choices|graph|links|policy::attempts)::/)";
/// Of each property. A few are enough: what is looked for is not a rare value, but any wrong access.
const CASES: &str = "8";

/// These tests, or those of them that further arguments name to nextest.
pub(crate) fn run(arguments: &[OsString]) -> Result<()> {
    let rustup = |arguments: &[&str]| {
        let mut rustup = command("rustup", ["run", "nightly", "cargo"]);
        rustup.args(arguments);
        rustup
    };
    ensure!(
        succeeds(&mut rustup(&["miri", "--version"])),
        "there is no Miri; run `rustup toolchain install nightly --component miri,rust-src`"
    );
    ensure!(
        succeeds(&mut rustup(&["nextest", "--version"])),
        "there is no cargo-nextest, which runs each test in a process of its own; run `cargo install --locked cargo-nextest`"
    );
    let mut tests = rustup(&["miri", "nextest", "run", "--lib", "--filterset", TESTS]);
    tests.args(["--package", "ssdtrain-plan", "--package", "ssdtrain-store"]).args(arguments);
    tests.env("CARGO_TARGET_DIR", root().join("target/miri")).env("PROPTEST_CASES", CASES);
    // Property tests look for the file of earlier failures.
    tests.env("MIRIFLAGS", "-Zmiri-disable-isolation");
    run_command(&mut tests)
}
