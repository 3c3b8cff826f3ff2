//! `cargo x gpu-test`: the tests that need a GPU, all of them or a failure.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, ensure};

use crate::process::{self, cargo, command};
use crate::{executables, libtorch};

/// Packages with tests that need a GPU, the files of these, and what their binaries are called in a bundle.
const TESTS: [(&str, &str, &str); 2] =
    [("ssdtrain-bench", "gpu", "gpu-test"), ("ssdtrain", "device_faults", "gpu-faults")];

/// Builds the tests, in the profile of the other binaries of the bundle, and returns their binaries with their names there.
pub(crate) fn build() -> Result<Vec<(&'static str, PathBuf)>> {
    let build = |(package, file, name)| {
        let mut tests = cargo(["test", "--release", "--package", package, "--test", file, "--no-run"]);
        let binary = executables::build(&mut tests, "test")?.pop().context("cargo built no test")?;
        Ok((name, binary))
    };
    TESTS.into_iter().map(build).collect()
}

pub(crate) fn run(_: &[OsString]) -> Result<()> {
    libtorch::ensure()?;
    let mut all = 0;
    for (_, tests) in build()? {
        let listed = process::output(&mut command(&tests, ["--ignored", "--list"]))?;
        let listed = listed.lines().filter(|line| line.ends_with(": test")).count();
        let passed = passed(&tests)?;
        ensure!(passed == listed && listed > 0, "of {listed} tests only {passed} have run and passed");
        all += listed;
    }
    println!("all {all} tests have run and passed");
    Ok(())
}

/// Runs the tests, shows their output, and returns how many have passed.
fn passed(tests: &Path) -> Result<usize> {
    let mut running = command(tests, ["--ignored"])
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", tests.display()))?;
    let mut passed = 0;
    for line in running.stdout.take().into_iter().flat_map(|stdout| BufReader::new(stdout).lines()) {
        let line = line.context("cannot read what the tests say")?;
        println!("{line}");
        passed = passed_of(&line).unwrap_or(passed);
    }
    let status = running.wait().context("cannot wait for the tests")?;
    ensure!(status.success(), "the tests that need a GPU failed ({status})");
    Ok(passed)
}

/// The number in libtest's last line.
fn passed_of(line: &str) -> Option<usize> {
    line.strip_prefix("test result: ok. ")?.split_once(" passed;")?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_tests_passed_is_read_from_the_summary() {
        let summary =
            "test result: ok. 32 passed; 0 failed; 0 ignored; 0 measured; 30 filtered out; finished in 1.00s";
        assert_eq!(passed_of(summary), Some(32));
        assert_eq!(passed_of("test parity::small ... ok"), None);
    }
}
