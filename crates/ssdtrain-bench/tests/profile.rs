//! Profiles that one command saves and another plans with.
#![expect(clippy::unwrap_used, reason = "a helper that cannot go on fails its test")]

mod common;

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

/// Makes a command save the profile of micro-batches of this many sequences as FILE, and returns its
/// activations.
fn save(directory: &Path, command: &[&str], batch: u32, file: &str) -> Vec<Value> {
    let (batch, option) = (format!("--batch={batch}"), format!("--save-profile={file}"));
    let output = bench(directory, &[command, TINY, &[&batch, &option]]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let saved = std::fs::read_to_string(directory.join(file)).unwrap();
    let saved: Value = serde_json::from_str(&saved).unwrap();
    saved["profile"]["workload"]["activations"].as_array().unwrap().clone()
}

/// A plan of saved profiles.
fn plan(directory: &Path, more: &[&str]) -> Value {
    let output = bench(directory, &[&["plan", "--json"], more]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn refusal(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(matches!(output.status.code(), Some(1 | 2)), "{:?}: {stderr}", output.status);
    let error = stderr.lines().find(|line| line.starts_with("error:")).unwrap_or_else(|| panic!("{stderr}"));
    error.to_owned()
}

const PLAN: &[&str] = &["plan"];

#[test]
fn a_profile_that_a_run_saves_is_planned_by_another_for_other_goals() {
    let place = workplace();
    let compare: &[&str] = &["compare", "--strategies=keep,auto", "--steps=2"];
    let train: &[&str] =
        &["train", "--steps=6", "--compare-steps=0", "--sample-tokens=0", "--eval-tokens=512", "--out=run"];
    for command in [compare, train, PLAN] {
        let activations = save(place.path(), command, 8, "step.json");
        assert!(activations.len() > 4, "{activations:?}");
        let of = |more: &[&str]| plan(place.path(), &[&["--profile=step.json"], more].concat());
        let all = of(&["--budget=1GiB"]);
        assert_eq!(all["in_reach"], true, "{all}");
        let placements = all["plan"]["placements"].as_array().unwrap();
        let unplanned = |role: &Value| if role == "saved" { "keep" } else { "recompute" };
        let roles = activations.iter().map(|activation| unplanned(&activation["role"]));
        assert!(roles.eq(placements.iter().map(|placement| placement.as_str().unwrap())), "{all}");
        let peak = |plan: &Value| {
            let [forward, backward] =
                ["forward_peak", "backward_peak"].map(|peak| plan[peak].as_u64().unwrap());
            forward.max(backward)
        };
        assert_eq!(peak(&all["plan"]["prediction"]), peak(&all["kept"]));
        assert_eq!(all["of"].as_str().unwrap().matches("float on cpu").count(), 1, "{all}");

        let budget = format!("--budget={}", peak(&all["kept"]) * 9 / 10);
        let less = of(&[&budget]);
        assert_eq!(less["in_reach"], true, "{less}");
        assert!(peak(&less["plan"]["prediction"]) <= peak(&all["kept"]) * 9 / 10, "{less}");
        assert_eq!(less["kept"], all["kept"]);
        let out_of_reach = of(&["--budget=1KiB"]);
        assert_eq!(out_of_reach["in_reach"], false, "{out_of_reach}");
    }
}

#[test]
fn a_slower_disk_is_planned_for_without_having_one() {
    let place = workplace();
    let activations = save(place.path(), PLAN, 8, "step.json");
    let lowest = |more: &[&str]| {
        let options = ["--profile=step.json", "--overhead=1e9"];
        let all = plan(place.path(), &[&options[..], more].concat());
        let time = &all["plan"]["prediction"]["step"];
        time["secs"].as_f64().unwrap() + 1e-9 * time["nanos"].as_f64().unwrap()
    };
    assert!(lowest(&["--disk-rate=1MiB"]) > 2.0 * lowest(&[]));

    let options = ["--profile=step.json", "--disk-rate=2MiB", "--explain"];
    let text = bench(place.path(), &[PLAN, &options]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    for words in [
        "everything kept",
        "planned",
        "recompute",
        "writes at 2.0 MiB/s",
        "peak as planned",
        "besides activations",
        "kept",
        "block.*",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let told = plan(place.path(), &options);
    let peak = &told["explanation"]["peak"];
    let bytes = |holder: &Value| {
        let index = usize::try_from(holder["activation"].as_u64().unwrap()).unwrap();
        activations[index]["bytes"].as_u64().unwrap()
    };
    let held: u64 = peak["holders"].as_array().unwrap().iter().map(bytes).sum();
    assert_eq!(held + peak["extra"].as_u64().unwrap(), peak["bytes"].as_u64().unwrap(), "{told}");
}

#[test]
fn profiles_of_two_sizes_tell_the_largest_micro_batch() {
    let place = workplace();
    save(place.path(), PLAN, 8, "eight.json");
    save(place.path(), PLAN, 4, "four.json");
    let profiles = ["--profile=eight.json", "--profile=four.json", "--largest-batch=64"];
    let row = plan(place.path(), &[&profiles[..], &["--budget=2MiB"]].concat());
    let largest = &row["largest_batch"];
    assert!((8..=64).contains(&largest["rows"].as_u64().unwrap()), "{row}");
    assert!(largest["peak_bytes"].as_u64().unwrap() <= 2 << 20, "{row}");
    let none = plan(place.path(), &[&profiles[..], &["--budget=1KiB"]].concat());
    assert!(none["largest_batch"].is_null(), "{none}");
}

#[test]
fn what_cannot_be_saved_or_planned_is_told() {
    let place = workplace();
    save(place.path(), PLAN, 8, "step.json");
    let text = std::fs::read_to_string(place.path().join("step.json")).unwrap();
    let mut odd: Value = serde_json::from_str(&text).unwrap();
    odd["profile"]["machine"]["disk_write"] = 0.into();
    std::fs::write(place.path().join("odd.json"), odd.to_string()).unwrap();
    std::fs::write(place.path().join("empty.json"), "").unwrap();
    let wrong: &[(&[&str], &[&str])] = &[
        (&["plan", "--profile=nowhere.json"], &["nowhere.json", "No such file"]),
        (&["plan", "--profile=empty.json"], &["empty.json", "--save-profile"]),
        (&["plan", "--profile=odd.json"], &["odd.json", "byte per second"]),
        (&["plan", "--profile=step.json", "--layers=3"], &["--profile", "cannot be used with"]),
        (&["plan", "--profile=step.json", "--data=text.txt"], &["--profile", "cannot be used with"]),
        (&["plan", "--profile=step.json", "--device=cpu"], &["--profile", "cannot be used with"]),
        (&["plan", "--profile=step.json", "--save-profile=b.json"], &["--profile", "cannot be used with"]),
        (&["plan", "--profile=step.json", "--seed=1"], &["--profile", "cannot be used with"]),
        (&["plan", "--profile=step.json", "--optimizer=sgd"], &["--profile", "cannot be used with"]),
        (&["plan", "--profile=step.json", "--largest-batch=8"], &["--largest-batch", "second --profile"]),
        (&["compare", "--save-profile=a.json"], &["--save-profile", "auto"]),
        (&["train", "--strategy=keep", "--save-profile=a.json"], &["--save-profile", "auto"]),
        (&["plan", "--save-profile=no/where.json"], &["no/where.json"]),
        (&["rok", "--save-profile=a.json"], &["--save-profile", "compare"]),
    ];
    for (arguments, expected) in wrong {
        let error = refusal(&bench(place.path(), &[arguments]));
        assert!(expected.iter().all(|part| error.contains(part)), "{arguments:?}: {error}");
    }
    // One step is too few for a plan.
    let options = ["--strategies=auto", "--steps=1", "--warmup=0", "--batch=8", "--save-profile=a.json"];
    let early = bench(place.path(), &[&["compare"], TINY, &options]);
    assert!(refusal(&early).contains("a.json: no plan was made"), "{early:?}");
    assert!(
        String::from_utf8_lossy(&early.stdout).contains("| auto"),
        "what was measured is shown: {early:?}"
    );
    assert!(!place.path().join("a.json").exists());
}
