//! Ctrl-C, from a user's point of view.
#![expect(clippy::unwrap_used, reason = "a helper that cannot go on fails its test")]

mod common;

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};

use common::workplace;
use serde_json::Value;

/// A model that takes a step in milliseconds, with activations large enough to be moved.
const TINY: &[&str] = &[
    "--data=text.txt",
    "--layers=2",
    "--hidden=32",
    "--heads=2",
    "--block=16",
    "--batch=8",
    "--min-bytes=4KiB",
    "--tokens=bytes",
    "--threads=1",
];

/// Starts a command that reports its plans on stderr.
fn start(directory: &Path, arguments: &[&[&str]]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_ssdtrain-bench"))
        .args(arguments.concat())
        .current_dir(directory)
        .env("TMPDIR", directory)
        .env("RUST_LOG", "debug")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn interrupt(child: &Child) {
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
}

/// Reads up to a line with these words.
fn wait_for(words: &str, lines: &mut BufReader<ChildStderr>) {
    let mut line = String::new();
    while !line.contains(words) {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0, "the program ended without {words:?}");
    }
}

/// The exit code, what is left of stderr, and stdout.
fn end(mut child: Child, mut stderr: BufReader<ChildStderr>) -> (Option<i32>, String, String) {
    let (mut told, mut shown) = (String::new(), String::new());
    stderr.read_to_string(&mut told).unwrap();
    child.stdout.take().unwrap().read_to_string(&mut shown).unwrap();
    (child.wait().unwrap().code(), told, shown)
}

#[test]
fn compare_shows_what_it_has_measured_and_says_that_it_was_stopped() {
    let place = workplace();
    for json in [true, false] {
        let options = ["--strategies=keep,auto", "--steps=1000000", "--warmup=0", "--trace=trace.json"];
        let format: &[&str] = if json { &["--json"] } else { &[] };
        let mut child = start(place.path(), &[&["compare"], TINY, &options, format]);
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        // Made from measured steps, since there is no warm-up.
        wait_for("of a micro-batch", &mut stderr);
        interrupt(&child);
        let (code, told, shown) = end(child, stderr);
        assert_eq!(code, Some(1), "{told}");
        let error = told.lines().last().unwrap();
        assert!(error.starts_with("error: measured ") && error.contains(" of 1000000 steps"), "{told}");
        assert!(error.contains("interrupted after ") && error.ends_with(" of 1000000 rounds"), "{told}");
        if json {
            let rows: Vec<Value> = shown.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            let strategies: Vec<_> = rows.iter().map(|row| row["strategy"].as_str().unwrap()).collect();
            assert_eq!(strategies, ["keep", "auto"]);
            assert!(rows.iter().all(|row| row["step_ms_median"].as_f64() > Some(0.0)), "{rows:?}");
        } else {
            assert!(shown.contains("| keep ") && shown.contains("| auto "), "{shown}");
        }
        let trace = std::fs::read(place.path().join("trace.json")).unwrap();
        assert!(serde_json::from_slice::<Value>(&trace).unwrap()["traceEvents"].is_array());
        let left: Vec<_> =
            std::fs::read_dir(place.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left.len(), 2, "the text and the trace: {left:?}");
    }
}

#[test]
fn a_run_that_is_done_is_saved_whatever_becomes_of_its_comparison() {
    let place = workplace();
    let options = ["--steps=1", "--compare-steps=100000", "--sample-tokens=0", "--out=run"];
    let mut child = start(place.path(), &[&["train"], TINY, &options]);
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    // One step is not enough for a plan, so this is one of the steps of the comparison.
    wait_for("of a micro-batch", &mut stderr);
    interrupt(&child);
    let (code, told, shown) = end(child, stderr);
    assert_eq!(code, Some(1), "{told}");
    let error = told.lines().last().unwrap();
    assert!(error.starts_with("error: the run is done and saved: measured "), "{told}");
    assert!(error.contains("interrupted after "), "{told}");
    assert!(shown.contains("Held-out loss after 1 steps"), "{shown}");
    assert!(place.path().join("run/checkpoint.safetensors").exists());
}

#[test]
fn a_second_ctrl_c_ends_at_once() {
    let place = workplace();
    let pipe = place.path().join("pipe.txt");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for command in ["compare", "train", "plan", "rok"] {
        let mut child = start(place.path(), &[&[command, "--data=pipe.txt"]]);
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        // Opens once the program reads its data, which never arrive: there is no step after which it could end.
        let data = OpenOptions::new().write(true).open(&pipe).unwrap();
        interrupt(&child);
        wait_for("stopping after this step", &mut stderr);
        interrupt(&child);
        let (code, told, _) = end(child, stderr);
        assert_eq!(code, Some(130), "{command}: {told}");
        drop(data);
    }
}
