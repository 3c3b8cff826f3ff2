//! `cargo x sanitize`: runs tests under a sanitizer, which sees what they do not: memory used wrongly or never freed, races,
//! undefined behaviour in C++.

use std::env::consts::ARCH;
use std::ffi::OsString;

use anyhow::{Result, bail, ensure};

use crate::libtorch;
use crate::process::{command, root, run as run_command, succeeds};

#[derive(Debug)]
struct Sanitizer {
    name: &'static str,
    /// Flags for Rust. Its runtime serves the C++ as well.
    rust: &'static str,
    /// Flags for the C++ of the workspace and of torch-sys. libtorch is as it was built.
    cpp: &'static str,
    cargo: &'static [&'static str],
    packages: &'static [&'static str],
}

const SANITIZERS: &[Sanitizer] = &[
    Sanitizer {
        name: "address",
        rust: "-Zsanitizer=address",
        // libtorch does not export what `vptr` compares.
        cpp: "-g1 -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined",
        cargo: &[],
        packages: &[
            "ssdtrain-cufile-sys",
            "ssdtrain-plan",
            "ssdtrain-store",
            "ssdtrain-malloc-hook",
            "ssdtrain-libtorch",
            "ssdtrain",
        ],
    },
    // Without what uses libtorch, whose own atomics it would not see.
    Sanitizer {
        name: "thread",
        rust: "-Zsanitizer=thread",
        cpp: "-g1 -fsanitize=thread",
        // It has to see those of the standard library. Some tests look at every byte of a file, which is slow enough as it is.
        cargo: &["-Zbuild-std", "--config", "profile.dev.opt-level=1"],
        packages: &["ssdtrain-cufile-sys", "ssdtrain-store", "ssdtrain-malloc-hook"],
    },
];

/// All but those that preload the hook into programs of C, which have no runtime for it, and those that explore orders of threads,
/// which would take hours.
const TESTS: &str = "not binary(preload) and not (package(=ssdtrain) and test(/(waits|model|explored)::/))";

/// The tests of one sanitizer, or those of them that further arguments name to nextest.
pub(crate) fn run(arguments: &[OsString]) -> Result<()> {
    let (sanitizer, rest) = parse(arguments)?;
    let rustup = |arguments: &[&str]| {
        let mut rustup = command("rustup", ["run", "nightly", "cargo"]);
        rustup.args(arguments);
        rustup
    };
    ensure!(
        succeeds(&mut rustup(&["--version"])),
        "there is no nightly compiler; run `rustup toolchain install nightly --component rust-src`"
    );
    ensure!(
        succeeds(&mut rustup(&["nextest", "--version"])),
        "there is no cargo-nextest, which runs each test in a process of its own; run `cargo install --locked cargo-nextest`"
    );
    if sanitizer.packages.contains(&"ssdtrain-libtorch") {
        libtorch::ensure()?;
    }
    let mut tests = rustup(&["nextest", "run", "--lib", "--tests", "--filterset", TESTS]);
    // With a target of its own, build scripts and procedural macros are as ever.
    tests.arg("--target").arg(format!("{ARCH}-unknown-linux-gnu")).args(sanitizer.cargo);
    tests.args(sanitizer.packages.iter().flat_map(|package| ["--package", package])).args(rest);
    tests.env("RUSTFLAGS", sanitizer.rust).env("CXXFLAGS", sanitizer.cpp);
    tests.env("CARGO_TARGET_DIR", root().join("target/sanitize").join(sanitizer.name));
    tests.env("ASAN_OPTIONS", "detect_stack_use_after_return=1");
    tests.env("LSAN_OPTIONS", format!("suppressions={}", root().join("xtask/leaks.txt").display()));
    // Processes that are forked off start threads.
    tests.env("TSAN_OPTIONS", "die_after_fork=0");
    run_command(&mut tests)
}

fn parse(arguments: &[OsString]) -> Result<(&'static Sanitizer, &[OsString])> {
    let chosen = arguments
        .split_first()
        .and_then(|(name, rest)| Some((SANITIZERS.iter().find(|sanitizer| name == sanitizer.name)?, rest)));
    let Some(chosen) = chosen else {
        let names: Vec<_> = SANITIZERS.iter().map(|sanitizer| sanitizer.name).collect();
        bail!("`cargo x sanitize` needs the name of a sanitizer first: {}", names.join(" or "));
    };
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sanitizer_is_named_first_and_the_rest_is_for_the_runner() {
        let of = |line: &str| {
            let words: Vec<_> = line.split_whitespace().map(OsString::from).collect();
            parse(&words)
                .map(|(sanitizer, rest)| (sanitizer.name, rest.len()))
                .map_err(|error| error.to_string())
        };
        assert_eq!(of("thread uring --retries 1"), Ok(("thread", 3)));
        for line in ["", "uring", "memory"] {
            assert!(of(line).unwrap_err().contains("address or thread"));
        }
    }
}
