//! `cargo x fuzz`: feeds bytes to whatever reads bytes from outside, and steps to whatever keeps track of space.

use std::env::consts::ARCH;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use crate::process::{cargo, command, root};
use crate::{executables, libtorch};

/// What libFuzzer needs to see which code an input reaches. The pinned compiler knows it under this name, the nightly one as
/// a sanitizer.
const FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
                     -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table";

/// How long each target runs, its corpus included, unless something else is asked for.
const USUAL: Length = Length::Seconds(5);
/// The same in CI. The generator of inputs always starts alike there.
const SMOKE: Length = Length::Seconds(2);
const SMOKE_SEED: u32 = 1;

/// When a target has run for long enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Length {
    Seconds(u64),
    Executions(u64),
}

/// What to run.
#[derive(Debug, PartialEq, Eq)]
struct Choice {
    /// All of them if there is none.
    target: Option<String>,
    length: Length,
    with_libtorch: bool,
}

/// One target, or all of them, for as long as is asked for.
pub(crate) fn run(arguments: &[OsString]) -> Result<()> {
    let Choice { target: wanted, length, with_libtorch } = parse(arguments)?;
    let targets = build(with_libtorch)?;
    let names: Vec<String> = targets.iter().map(|target| name_of(target)).collect();
    if let Some(wanted) = wanted.as_ref().filter(|wanted| !names.contains(wanted)) {
        bail!("there is no fuzz target `{wanted}`; there are {}", names.join(", "));
    }
    let is_wanted = |name: &String| wanted.as_ref().is_none_or(|wanted| wanted == name);
    let mut chosen = targets.iter().zip(&names).filter(|(_, name)| is_wanted(name));
    chosen.try_for_each(|(target, _)| fuzz(target, length, None))
}

/// Every target that does without libtorch, whose bindings take longer to build than all of these, with its corpus and a little more.
pub(crate) fn smoke() -> Result<()> {
    build(false)?.iter().try_for_each(|target| fuzz(target, SMOKE, Some(SMOKE_SEED)))
}

fn parse(arguments: &[OsString]) -> Result<Choice> {
    let mut choice = Choice { target: None, length: USUAL, with_libtorch: true };
    let mut words = arguments.iter().map(|argument| argument.to_string_lossy());
    while let Some(word) = words.next() {
        let mut number = || -> Result<u64> {
            let number = words.next().with_context(|| format!("`{word}` needs a number"))?;
            number.parse().with_context(|| format!("`{number}` is no number for `{word}`"))
        };
        match word.as_ref() {
            "--seconds" => choice.length = Length::Seconds(number()?),
            "--executions" => choice.length = Length::Executions(number()?),
            "--without-libtorch" => choice.with_libtorch = false,
            _ if word.starts_with('-') || choice.target.is_some() => bail!(
                "`cargo x fuzz` takes a target, --seconds N or --executions N, and --without-libtorch, but got `{word}`"
            ),
            _ => choice.target = Some(word.into_owned()),
        }
    }
    Ok(choice)
}

/// Builds the targets, or those that do without libtorch, and returns their executables by name.
fn build(with_libtorch: bool) -> Result<Vec<PathBuf>> {
    let mut build = cargo(["build", "--locked", "--manifest-path", "fuzz/Cargo.toml", "--target"]);
    build.arg(format!("{ARCH}-unknown-linux-gnu"));
    build.env("RUSTFLAGS", FLAGS).env_remove("CARGO_TARGET_DIR");
    if with_libtorch {
        libtorch::ensure()?;
        build.env("LIBTORCH", libtorch::location());
    } else {
        build.arg("--no-default-features");
    }
    let mut targets = executables::build(&mut build, "bin")?;
    ensure!(!targets.is_empty(), "cargo built no fuzz target");
    targets.sort_unstable();
    Ok(targets)
}

/// Runs a target over its corpus and what earlier runs have found, and then over inputs that it makes of these.
fn fuzz(target: &Path, length: Length, seed: Option<u32>) -> Result<()> {
    let name = name_of(target);
    let corpus = root().join("fuzz/corpus").join(&name);
    ensure!(corpus.is_dir(), "the fuzz target `{name}` has no corpus: {} is missing", corpus.display());
    let place = root().join("fuzz/target/runs").join(&name);
    let found = place.join("found");
    if seed.is_some() && found.exists() {
        // What was found before would make this run another one.
        fs::remove_dir_all(&found).with_context(|| format!("cannot remove {}", found.display()))?;
    }
    fs::create_dir_all(&found).with_context(|| format!("cannot make {}", found.display()))?;
    let log = place.join("log");

    let mut run = command(target, ["-timeout=20", "-print_final_stats=1"]);
    run.arg(match length {
        Length::Seconds(seconds) => format!("-max_total_time={seconds}"),
        Length::Executions(executions) => format!("-runs={executions}"),
    });
    run.arg(format!("-artifact_prefix={}/", place.display()));
    run.args(seed.map(|seed| format!("-seed={seed}")));
    // New inputs go to the first folder.
    run.args([&found, &corpus]);
    run.stderr(File::create(&log).with_context(|| format!("cannot write {}", log.display()))?);
    let start = Instant::now();
    let status = run.status().with_context(|| format!("cannot start {}", target.display()))?;
    let said = fs::read_to_string(&log).unwrap_or_default();
    if !status.success() {
        let last: Vec<&str> = said.lines().rev().take(LAST_LINES).collect();
        let last: Vec<&str> = last.into_iter().rev().collect();
        bail!(
            "the fuzz target `{name}` failed ({status}):\n{}\n\nRun it again with {} FILE, where FILE is the input named above",
            last.join("\n"),
            target.display()
        );
    }
    let executions = executions_in(&said).context("libFuzzer does not say how often it ran")?;
    println!("{name}: {executions} executions in {:.0} s, no crash", start.elapsed().as_secs_f64());
    Ok(())
}

/// Of a target that failed.
const LAST_LINES: usize = 40;

fn name_of(target: &Path) -> String {
    target.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The number of executions in libFuzzer's last lines.
fn executions_in(said: &str) -> Option<u64> {
    said.lines().find_map(|line| line.strip_prefix("stat::number_of_executed_units:"))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_executions_is_read_from_the_last_lines() {
        let said =
            "Done 90 runs in 2 second(s)\nstat::number_of_executed_units: 90\nstat::new_units_added: 3\n";
        assert_eq!(executions_in(said), Some(90));
        assert_eq!(executions_in("INFO: Seed: 1"), None);
    }

    #[test]
    fn a_target_and_a_length_are_read_in_any_order() {
        let of = |line: &str| parse(&line.split_whitespace().map(OsString::from).collect::<Vec<_>>());
        let tape = |length| Choice { target: Some("tape".to_owned()), length, with_libtorch: true };
        assert_eq!(of("tape --executions 9").unwrap(), tape(Length::Executions(9)));
        assert_eq!(of("--seconds 9 tape").unwrap(), tape(Length::Seconds(9)));
        let pure = Choice { target: None, length: USUAL, with_libtorch: false };
        assert_eq!(of("--without-libtorch").unwrap(), pure);
        for (line, named) in
            [("--seconds", "--seconds"), ("--seconds soon", "soon"), ("tape runs", "runs"), ("-x", "-x")]
        {
            let error = of(line).unwrap_err().to_string();
            assert!(error.contains(&format!("`{named}`")), "{error}");
        }
    }

    #[test]
    fn every_target_has_a_corpus() {
        let targets = fs::read_dir(root().join("fuzz/fuzz_targets")).unwrap();
        for target in targets.map(|target| target.unwrap().path()) {
            let corpus = root().join("fuzz/corpus").join(target.file_stem().unwrap());
            assert!(
                fs::read_dir(&corpus).is_ok_and(|files| files.count() > 0),
                "{} is empty",
                corpus.display()
            );
        }
    }
}
