//! Plans that one command saves and another starts with.
#![expect(clippy::unwrap_used, reason = "a helper that cannot go on fails its test")]

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use common::workplace;
use serde_json::Value;

/// A model that takes a step in milliseconds, with activations large enough to be moved.
const TINY: &[&str] = &[
    "--data=text.txt",
    "--layers=2",
    "--hidden=32",
    "--heads=2",
    "--block=16",
    "--min-bytes=4KiB",
    "--tokens=bytes",
    "--threads=1",
    "--batch=8",
];
/// A goal that moves much.
const GOAL: &[&str] = &["--overhead=1e9"];
const TRAIN: &[&str] = &[
    "train",
    "--json",
    "--steps=3",
    "--log-every=1",
    "--compare-steps=0",
    "--sample-tokens=0",
    "--eval-tokens=512",
    "--out=run",
];

fn bench(directory: &Path, arguments: &[&[&str]]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ssdtrain-bench"))
        .args(arguments.concat())
        .current_dir(directory)
        .env("TMPDIR", directory)
        .env("SSDTRAIN_STATE", "off")
        .output()
        .unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The plans that the reports of a training run's steps have, and what it printed to stderr.
fn train(directory: &Path, more: &[&str]) -> (Vec<Value>, String) {
    let output = bench(directory, &[TRAIN, TINY, more]);
    assert!(output.status.success(), "{}", stderr(&output));
    let stdout = String::from_utf8_lossy(&output.stdout);
    let events = stdout.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let reports = events.filter(|event| event["event"] == "step").map(|event| event["report"].clone());
    (reports.collect(), stderr(&output))
}

fn save(directory: &Path, file: &str) {
    let output = bench(directory, &[&["plan"], TINY, GOAL, &[&format!("--save={file}")]]);
    assert!(output.status.success(), "{}", stderr(&output));
}

fn refusal(output: &Output) -> String {
    let stderr = stderr(output);
    assert!(matches!(output.status.code(), Some(1 | 2)), "{:?}: {stderr}", output.status);
    let error = stderr.lines().find(|line| line.starts_with("error:")).unwrap_or_else(|| panic!("{stderr}"));
    error.to_owned()
}

#[test]
fn training_follows_a_saved_plan_from_its_first_step() {
    let place = workplace();
    save(place.path(), "plan.json");
    let (reports, told) =
        train(place.path(), &[GOAL, &["--plan=plan.json", "--save-plan=next.json"]].concat());
    assert_eq!(reports.len(), 3);
    for report in &reports {
        assert!(report["plan"].is_object() && report["left_plan"] == false, "{report}");
    }
    assert!(
        reports[0]["offloaded"]["bytes"].as_u64() > Some(0)
            || reports[0]["recomputed"]["bytes"].as_u64() > Some(0),
        "{}",
        reports[0]
    );
    assert!(!told.contains("saved plan is"), "{told}");
    let (reports, _) = train(place.path(), &[GOAL, &["--plan=next.json"]].concat());
    assert!(reports[0]["plan"].is_object(), "a plan that was followed can be saved: {}", reports[0]);
}

#[test]
fn losses_are_those_of_steps_that_keep_everything() {
    let place = workplace();
    save(place.path(), "plan.json");
    let options =
        ["--strategies=keep,auto", "--steps=2", "--warmup=0", "--check", "--json", "--plan=plan.json"];
    let output = bench(place.path(), &[&["compare"], TINY, GOAL, &options]);
    assert!(output.status.success(), "{}", stderr(&output));
    let stdout = String::from_utf8_lossy(&output.stdout);
    let rows: Vec<Value> = stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let auto = rows.iter().find(|row| row["strategy"] == "auto").unwrap();
    assert_eq!(auto["planned"]["plans"], 1, "both steps were planned: {auto}");
}

#[test]
fn what_does_not_suit_the_run_is_warned_of() {
    let place = workplace();
    save(place.path(), "plan.json");
    let (reports, told) = train(place.path(), &["--budget=1GiB", "--plan=plan.json"]);
    assert!(told.matches("another goal").count() == 1 && reports[0]["plan"].is_object(), "{told}");
    let (reports, told) = train(place.path(), &[GOAL, &["--plan=plan.json", "--model=llama"]].concat());
    assert_eq!(told.matches("saves something else").count(), 1, "{told}");
    assert!(reports[2]["plan"].is_object(), "the second step was profiled: {}", reports[2]);
}

#[test]
fn what_cannot_be_saved_or_read_is_told() {
    let place = workplace();
    let output =
        bench(place.path(), &[&["plan"], TINY, GOAL, &["--save=plan.json", "--save-profile=step.json"]]);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = fs::read_to_string(place.path().join("plan.json")).unwrap();
    let whole: Value = serde_json::from_str(&text).unwrap();
    let write = |file: &str, change: &dyn Fn(&mut Value)| {
        let mut odd = whole.clone();
        change(&mut odd);
        fs::write(place.path().join(file), odd.to_string()).unwrap();
    };
    write("newer.json", &|plan| plan["format"] = 2.into());
    write("odd.json", &|plan| plan["saves"][0]["activation"] = 100_000.into());
    fs::write(place.path().join("empty.json"), "").unwrap();
    let wrong: &[(&[&str], &[&str])] = &[
        (&["train", "--plan=nowhere.json"], &["nowhere.json", "--plan", "No such file"]),
        (&["compare", "--plan=empty.json"], &["empty.json", "--save-plan"]),
        (&["train", "--plan=step.json"], &["step.json", "no plan of --save-plan"]),
        (&["train", "--plan=odd.json"], &["odd.json", "save 0 is of a scope or an activation"]),
        (&["train", "--plan=newer.json"], &["newer.json", "format 2", "save the plan again"]),
        (&["train", "--strategy=keep", "--plan=plan.json"], &["--plan would be ignored", "auto"]),
        (&["train", "--strategy=keep", "--save-plan=a.json"], &["--save-plan", "auto"]),
        (&["plan", "--save=no/where.json"], &["no/where.json"]),
        (&["plan", "--profile=step.json", "--save=a.json"], &["--save and --profile", "leave --profile out"]),
        (&["plan", "--profile=step.json", "--plan=plan.json"], &["--profile", "cannot be used with"]),
        (&["plan", "--largest-batch=8", "--plan=plan.json"], &["--largest-batch", "cannot be used with"]),
        (&["rok", "--plan=plan.json"], &["--plan", "compare"]),
        (&["rok", "--save-plan=a.json"], &["--save-plan", "compare"]),
    ];
    for (arguments, expected) in wrong {
        let error = refusal(&bench(place.path(), &[arguments]));
        assert!(expected.iter().all(|part| error.contains(part)), "{arguments:?}: {error}");
    }
    // One step is too few for a plan.
    let options = ["--strategies=auto", "--steps=1", "--warmup=0", "--save-plan=a.json"];
    let early = bench(place.path(), &[&["compare"], TINY, &options]);
    assert!(refusal(&early).contains("a.json: no plan was made"), "{early:?}");
    assert!(!place.path().join("a.json").exists());
}
