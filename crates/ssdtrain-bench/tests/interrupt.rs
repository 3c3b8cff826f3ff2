//! Signals, from a user's point of view.
#![expect(clippy::unwrap_used, reason = "a helper that cannot go on fails its test")]

mod common;

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};

use common::workplace;
use serde_json::Value;
use ssdtrain_models::Checkpoint;

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
        .env("SSDTRAIN_STATE", "off")
        .env("RUST_LOG", "debug")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Sends a signal, such as `INT`.
fn send(signal: &str, child: &Child) {
    let sent = Command::new("kill").args([&format!("-{signal}"), &child.id().to_string()]).status();
    assert!(sent.unwrap().success());
}

/// Starts a training that prints JSON, under a program such as `nohup`.
fn train(under: &[&str], directory: &Path, more: &[&str]) -> (Child, Lines<BufReader<ChildStdout>>) {
    let options = ["--json", "--dropout=0.1", "--compare-steps=0", "--sample-tokens=0", "--log-every=1"];
    let program = [under, &[env!("CARGO_BIN_EXE_ssdtrain-bench"), "train"], TINY, &options, more].concat();
    let mut child = Command::new(program[0])
        .args(&program[1..])
        .current_dir(directory)
        .env("SSDTRAIN_STATE", "off")
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    (child, lines)
}

/// Events of this kind, up to one for `step` or to the last of them.
fn events(kind: &str, lines: &mut Lines<BufReader<ChildStdout>>, step: u64) -> Vec<Value> {
    let mut found: Vec<Value> = Vec::new();
    while found.last().is_none_or(|event| event["step"].as_u64() < Some(step)) {
        let Some(line) = lines.next() else { break };
        let event: Value = serde_json::from_str(&line.unwrap()).unwrap();
        found.extend(Some(event).filter(|event| event["event"] == kind));
    }
    found
}

/// The losses of steps, to the bit.
fn losses(steps: &[Value]) -> Vec<u64> {
    steps.iter().map(|step| step["loss"].as_f64().unwrap().to_bits()).collect()
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
fn a_signal_ends_a_training_after_its_step_and_it_resumes_with_the_same_losses() {
    let place = workplace();
    // More than a pipe holds the lines of, so a run cannot end before it is told to.
    let steps = 100;
    let limit = format!("--steps={steps}");
    let (mut child, mut lines) = train(&[], place.path(), &[&limit, "--out=whole"]);
    let whole = losses(&events("step", &mut lines, u64::MAX));
    assert_eq!((child.wait().unwrap().code(), whole.len()), (Some(0), steps));
    for (signal, code) in [("INT", 130), ("TERM", 143), ("HUP", 129)] {
        let out = format!("--out={signal}");
        // Whatever ignores the signal in this process, such as nohup.
        let (mut child, mut lines) = train(&["env", "--default-signal=HUP"], place.path(), &[&limit, &out]);
        let mut taken = losses(&events("step", &mut lines, 2));
        send(signal, &child);
        let rest: Vec<Value> = lines.map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
        assert_eq!(child.wait().unwrap().code(), Some(code), "{signal}");
        let (checkpoint, rest) = rest.split_last().unwrap();
        taken.extend(losses(rest));
        assert_eq!(checkpoint["event"], "checkpoint", "{signal}");
        assert_eq!(checkpoint["step"].as_u64(), Some(taken.len() as u64), "{signal}");
        assert!(taken.len() < steps, "{signal}");
        let (mut child, mut lines) = train(&[], place.path(), &[&limit, &out, "--resume"]);
        taken.extend(losses(&events("step", &mut lines, u64::MAX)));
        assert_eq!(child.wait().unwrap().code(), Some(0), "{signal}");
        assert_eq!(taken, whole, "{signal}");
    }
}

#[test]
fn a_training_under_nohup_outlives_its_terminal() {
    let place = workplace();
    let (mut child, mut lines) = train(&["nohup"], place.path(), &["--steps=1000000", "--out=run"]);
    events("step", &mut lines, 2);
    send("HUP", &child);
    // By then the signal has long arrived.
    assert_eq!(events("step", &mut lines, 80).len(), 78);
    send("TERM", &child);
    assert_eq!(events("checkpoint", &mut lines, u64::MAX).len(), 1);
    assert_eq!(child.wait().unwrap().code(), Some(143));
}

#[test]
fn work_that_was_not_done_has_the_exit_code_of_the_signal() {
    let place = workplace();
    let text = std::fs::read(place.path().join("text.txt")).unwrap();
    let pipe = place.path().join("pipe.txt");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for (command, says) in [
        ("compare", "measured 0 of "),
        ("train", "interrupted after step 0; "),
        ("plan", "interrupted after 0 steps"),
        ("rok", "is not measured "),
    ] {
        // `rok` has sizes of its own.
        let tiny = TINY[1..].iter().copied().filter(|option| command != "rok" || *option != "--batch=8");
        let mut child = start(place.path(), &[&[command, "--data=pipe.txt"], &tiny.collect::<Vec<_>>()]);
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        // The command reads its data while it is told to stop, and begins no step after that.
        let mut data = OpenOptions::new().write(true).open(&pipe).unwrap();
        send("TERM", &child);
        wait_for("stopping after this step", &mut stderr);
        data.write_all(&text).unwrap();
        drop(data);
        let (code, told, _) = end(child, stderr);
        let last = told.lines().last().unwrap();
        assert!(last.contains(says) && !last.contains("error"), "{command}: {told}");
        assert_eq!(code, Some(143), "{command}: {told}");
    }
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
        wait_for("the plan has changed", &mut stderr);
        send("INT", &child);
        let (code, told, shown) = end(child, stderr);
        assert_eq!(code, Some(130), "{told}");
        let error = told.lines().last().unwrap();
        assert!(error.starts_with("measured ") && error.contains(" of 1000000 steps"), "{told}");
        assert!(error.contains("interrupted after ") && error.ends_with(" of 1000000 steps"), "{told}");
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
    let options =
        ["--strategy=auto", "--steps=1", "--compare-steps=100000", "--sample-tokens=0", "--out=run"];
    let mut child = start(place.path(), &[&["train"], TINY, &options]);
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    // One step is not enough for a plan, so this is one of the steps of the comparison.
    wait_for("the plan has changed", &mut stderr);
    send("INT", &child);
    let (code, told, shown) = end(child, stderr);
    assert_eq!(code, Some(130), "{told}");
    let error = told.lines().last().unwrap();
    assert!(error.starts_with("the run is done and saved: measured "), "{told}");
    assert!(error.contains("interrupted after "), "{told}");
    assert!(shown.contains("Held-out loss after 1 steps"), "{shown}");
    assert!(place.path().join("run/checkpoint.safetensors").exists());
}

#[test]
fn a_second_signal_ends_at_once() {
    let place = workplace();
    let pipe = place.path().join("pipe.txt");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for command in ["compare", "train", "plan", "rok"] {
        let mut child = start(place.path(), &[&[command, "--data=pipe.txt"]]);
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        // Opens once the program reads its data, which never arrive: there is no step after which it could end.
        let data = OpenOptions::new().write(true).open(&pipe).unwrap();
        send("INT", &child);
        wait_for("stopping after this step", &mut stderr);
        send("TERM", &child);
        let (code, told, _) = end(child, stderr);
        assert_eq!(code, Some(143), "{command}: {told}");
        drop(data);
    }
}

/// Starts a training that prints to nobody, after its first step.
fn train_unheard(directory: &Path) -> Child {
    let (mut heard, output) = std::io::pipe().unwrap();
    let options = ["--steps=1000000", "--log-every=1000000", "--eval-every=1000000", "--out=run"];
    let child = Command::new(env!("CARGO_BIN_EXE_ssdtrain-bench"))
        .args([&["train"], TINY, &options].concat())
        .current_dir(directory)
        .stdout(output.try_clone().unwrap())
        .stderr(output)
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut lines = BufReader::new(&mut heard);
    while !line.starts_with("step ") {
        line.clear();
        assert_ne!(lines.read_line(&mut line).unwrap(), 0, "it ended before its first step");
    }
    child
}

#[test]
fn ctrl_c_saves_even_if_it_has_ended_whoever_reads_the_output() {
    let place = workplace();
    let mut child = train_unheard(place.path());
    // As in `ssdtrain-bench train 2>&1 | tee log`: `tee` is gone before the message that the run stops.
    send("INT", &child);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let checkpoint = Checkpoint::open(place.path().join("run/checkpoint.safetensors")).unwrap();
    assert!(checkpoint.state().step > 0);
}

#[test]
fn a_run_that_nobody_reads_any_longer_stops_and_saves() {
    let place = workplace();
    let (mut child, lines) = train(&[], place.path(), &["--steps=1000000", "--out=run"]);
    drop(lines);
    assert_eq!(child.wait().unwrap().code(), Some(141));
    let checkpoint = Checkpoint::open(place.path().join("run/checkpoint.safetensors")).unwrap();
    assert!(checkpoint.state().step < 1_000_000);
}
