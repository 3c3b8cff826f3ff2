//! The command line, used as a user would.
#![expect(clippy::unwrap_used, reason = "a helper that cannot go on fails its test")]

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;

use common::workplace;
use serde_json::Value;
use ssdtrain_models::Checkpoint;

/// A model that takes a step in milliseconds, with activations large enough to be moved.
const TINY: &[&str] = &[
    "--layers=2",
    "--hidden=32",
    "--heads=2",
    "--block=16",
    "--batch=8",
    "--min-bytes=4KiB",
    "--tokens=bytes",
    "--threads=1",
];

fn bench(directory: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ssdtrain-bench"))
        .args(arguments)
        .current_dir(directory)
        .env("RUST_BACKTRACE", "1")
        .env("TMPDIR", directory)
        .env("SSDTRAIN_STATE", "off")
        .output()
        .unwrap()
}

fn tiny(directory: &Path, command: &[&str], more: &[&str]) -> Output {
    bench(directory, &[command, TINY, more].concat())
}

/// `rok` on a model that takes a step in milliseconds.
fn tiny_rok(directory: &Path, more: &[&str]) -> Output {
    let shape: Vec<_> = TINY.iter().copied().filter(|argument| !argument.starts_with("--batch=")).collect();
    bench(directory, &[&["rok"], &shape[..], more].concat())
}

fn json_lines(output: &Output) -> Vec<Value> {
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The keys of an object, sorted.
fn keys(object: &Value) -> Vec<&str> {
    let mut keys: Vec<_> = object.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

/// Asserts that a command failed with one clear line, and returns that line.
fn refusal(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(matches!(output.status.code(), Some(1 | 2)), "{:?}: {stderr}", output.status);
    let errors: Vec<_> = stderr.lines().filter(|line| line.starts_with("error:")).collect();
    assert_eq!(errors.len(), 1, "{stderr}");
    for word in ["panicked", "backtrace", "stack", "Exception raised"] {
        assert!(!stderr.contains(word), "{stderr}");
    }
    errors[0].to_owned()
}

#[test]
fn arguments_out_of_range_are_named() {
    let place = workplace();
    let wrong = [
        ["train", "--layers=0"],
        ["train", "--lr=-1"],
        ["train", "--dropout=1"],
        ["train", "--minutes=0"],
        ["train", "--held-out=1"],
        ["train", "--min-bytes=lots"],
        ["train", "--preset=gpt5"],
        ["train", "--accumulate=0"],
        ["train", "--device=gpu"],
        ["train", "--device=cuda:99"],
        ["train", "--dtype=fp8"],
        ["train", "--loss-chunk=-1"],
        ["train", "--model=bert"],
        ["train", "--kv-heads=2"],
        ["train", "--mlp=2"],
        ["train", "--preset=hidden512"],
        ["compare", "--recompute=blocks"],
        ["compare", "--steps=0"],
        ["compare", "--batch=0"],
        ["compare", "--strategies=magic"],
        ["compare", "--device=cuda:99"],
        ["compare", "--optimizer=magic"],
        ["compare", "--vocab=0"],
        ["io", "--depth=0"],
        ["io", "--io-bytes=2GiB"],
        ["io", "--device=gpu"],
        ["io", "--device=cuda:99"],
        ["io", "--copy-size=0"],
        ["io", "--copy-bytes=lots"],
        ["io", "--copy-depth=0"],
        ["doctor", "--backend=tape"],
        ["rok", "--batch=4"],
        ["rok", "--batches=2,0"],
        ["rok", "--out=rok.txt"],
        ["rok", "--plot=rok.gif"],
        ["rok", "--trace=trace.json"],
        ["project", "--preset=tpu"],
        ["project", "--ssd=floppy"],
        ["project", "--ssds-per-gpu=0"],
        ["project", "--waf=0.5"],
        ["project", "--retention-relaxation=nan"],
        ["project", "--plot=viability.gif"],
        ["project", "--model=gpt5"],
    ];
    for arguments in wrong {
        let error = refusal(&bench(place.path(), &arguments));
        let option = arguments[1].split('=').next().unwrap();
        assert!(error.contains(option), "{error}");
    }
}

#[test]
fn arguments_that_contradict_each_other_are_told() {
    let place = workplace();
    let heads = refusal(&bench(place.path(), &["train", "--data=text.txt", "--hidden=33", "--heads=2"]));
    assert!(heads.contains("33") && heads.contains("--heads 2"), "{heads}");
    for (option, named) in [
        ("--preset=gpt2-small", "--preset gpt2-small"),
        ("--dropout=0.1", "--dropout"),
        ("--recompute=cheap", "--recompute cheap"),
        ("--kv-heads=4", "--kv-heads 4"),
        ("--heads=100", "--heads 100"),
    ] {
        let refused = refusal(&bench(place.path(), &["compare", "--model=llama", "--data=text.txt", option]));
        assert!(refused.contains(named), "{refused}");
    }
    let warmup = tiny(place.path(), &["train", "--data=text.txt"], &["--steps=5", "--warmup-steps=6"]);
    assert!(refusal(&warmup).contains("warm-up"));
    let vocab = refusal(&tiny(place.path(), &["compare", "--data=text.txt"], &["--vocab=255"]));
    assert!(vocab.contains("--vocab 255") && vocab.contains("256"), "{vocab}");
    let rates =
        tiny(place.path(), &["train", "--data=text.txt"], &["--steps=5", "--lr=1e-4", "--min-lr=1e-3"]);
    assert!(refusal(&rates).contains("learning rate"));
}

#[test]
fn an_argument_that_no_strategy_obeys_is_refused() {
    let place = workplace();
    let cases = [
        (&["train", "--strategy=keep", "--budget=2MiB"][..], "--budget would be ignored", "keep"),
        (&["train", "--strategy=auto", "--device-budget=1MiB"], "--device-budget would be ignored", "auto"),
        (&["plan", "--keep-last=1"], "--keep-last would be ignored", "auto"),
        (
            &["compare", "--strategies=keep,offload", "--overhead=0.1"],
            "--overhead would be ignored",
            "keep, offload",
        ),
        (&["rok", "--strategies=plain", "--prefetch=1MiB"], "--prefetch would be ignored", "plain"),
    ];
    for (arguments, named, strategies) in cases {
        let error = refusal(&bench(place.path(), &[arguments, &["--data=text.txt"]].concat()));
        assert!(error.contains(named) && error.contains(strategies), "{error}");
    }
}

#[test]
fn data_that_cannot_be_used_are_named() {
    let place = workplace();
    std::fs::write(place.path().join("binary.txt"), [0xff, 0xfe, 0, 1]).unwrap();
    std::fs::write(place.path().join("odd.bin"), [1, 0, 2]).unwrap();
    std::fs::write(place.path().join("short.txt"), "too short").unwrap();
    std::fs::write(place.path().join("empty.txt"), "").unwrap();
    for name in ["nowhere.txt", "binary.txt", "odd.bin", "short.txt", "empty.txt"] {
        for command in ["train", "compare"] {
            let error = refusal(&tiny(place.path(), &[command, "--data", name], &["--steps=1"]));
            assert!(error.contains(name), "{error}");
        }
    }
}

#[test]
fn a_token_outside_the_vocabulary_is_told() {
    let place = workplace();
    std::fs::write(place.path().join("wide.bin"), [7, 9].repeat(4096)).unwrap();
    let error = refusal(&tiny(place.path(), &["compare", "--data=wide.bin"], &["--steps=1"]));
    assert!(error.contains("wide.bin") && error.contains("outside the vocabulary"), "{error}");
}

#[test]
fn a_bad_checkpoint_is_named() {
    let place = workplace();
    let resume = ["train", "--data=text.txt", "--resume", "--out=run", "--steps=2"];
    let missing = refusal(&bench(place.path(), &resume));
    assert!(missing.contains("run/checkpoint.safetensors"), "{missing}");
    std::fs::create_dir(place.path().join("run")).unwrap();
    std::fs::write(place.path().join("run/checkpoint.safetensors"), "not a checkpoint").unwrap();
    let damaged = refusal(&bench(place.path(), &resume));
    assert!(damaged.contains("damaged"), "{damaged}");
}

#[test]
fn the_log_shows_the_targets_that_are_asked_for_and_refuses_what_is_none() {
    let place = workplace();
    let logged = |filter: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ssdtrain-bench"));
        command.args(["compare", "--strategies=keep", "--steps=1"]).args(TINY);
        command.current_dir(place.path()).env("TMPDIR", place.path()).env("SSDTRAIN_STATE", "off");
        let output = command.env("RUST_LOG", filter).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    for (filter, is_shown) in
        [("ssdtrain::step=debug", true), ("debug", true), ("ssdtrain::plan=debug", false)]
    {
        assert_eq!(logged(filter).contains("a step has ended"), is_shown, "{filter}");
    }
    let refused = logged("ssdtrain=loud");
    assert!(refused.contains("WARN RUST_LOG=ssdtrain=loud is ignored"), "{refused}");
}

#[test]
fn a_spill_directory_that_is_not_there_is_named() {
    let place = workplace();
    for command in [&["train", "--data=text.txt"][..], &["compare", "--data=text.txt"]] {
        let error = refusal(&tiny(place.path(), command, &["--steps=1", "--spill-dir=/no/such/place"]));
        assert!(error.contains("/no/such/place"), "{error}");
    }
    assert!(refusal(&bench(place.path(), &["io", "--dir=/no/such/place"])).contains("/no/such/place"));
    refusal(&bench(place.path(), &["doctor", "--spill-dir=/no/such/place"]));
}

#[test]
fn strategies_train_alike_however_many_steps_they_take_in_a_row() {
    let place = workplace();
    let trained = |in_a_row: &str| {
        let more = ["--strategies=keep,offload", "--steps=4", "--warmup=1", "--check", "--json", in_a_row];
        let output = tiny(place.path(), &["compare", "--data=text.txt"], &more);
        let (rows, told) = (json_lines(&output), String::from_utf8_lossy(&output.stderr));
        assert!(told.contains("check  5 steps: "), "{told}");
        rows.iter().map(|row| row["loss_last"].as_f64().unwrap()).collect::<Vec<_>>()
    };
    let [one_each, three] = ["--in-a-row=1", "--in-a-row=3"].map(trained);
    assert_eq!(one_each.len(), 2);
    assert_eq!(one_each, three);
}

#[test]
fn compare_keeps_its_json_contract_and_every_bit() {
    let place = workplace();
    let output = tiny(
        place.path(),
        &["compare", "--data=text.txt"],
        &["--steps=3", "--warmup=1", "--check", "--json"],
    );
    let rows = json_lines(&output);
    let strategies: Vec<_> = rows.iter().map(|row| row["strategy"].as_str().unwrap()).collect();
    assert_eq!(strategies, ["plain", "keep", "offload"]);
    let mut contract = [
        "strategy",
        "step_ms_median",
        "tokens_per_s",
        "act_peak_bytes",
        "act_peak_spread_bytes",
        "act_peak_to_keep",
        "step_peak_bytes",
        "adaptive",
        "planned",
        "saved_bytes",
        "offloaded_bytes",
        "recomputed_bytes",
        "rerun_ms",
        "deduplicated_bytes",
        "forwarded_bytes",
        "stall_ms",
        "stall_ms_by_cause",
        "pinned_bytes",
        "disk",
        "ratio_to_keep",
        "loss_last",
        "io_path",
    ];
    contract.sort_unstable();
    for row in &rows {
        assert_eq!(keys(row), contract);
        assert!(row["step_ms_median"].as_f64().unwrap() > 0.0 && row["act_peak_bytes"].as_u64().unwrap() > 0);
        for end in ["median", "low", "high"] {
            assert!(row["ratio_to_keep"][end].as_f64().unwrap() > 0.0, "{row}");
        }
        assert_eq!(row["loss_last"], rows[0]["loss_last"]);
    }
    // Gradients exist from the first step on, so every strategy has the same amount besides its activations.
    let gradients =
        |row: &Value| row["step_peak_bytes"].as_u64().unwrap() - row["act_peak_bytes"].as_u64().unwrap();
    assert!(gradients(&rows[0]) > 0);
    assert!(rows.iter().all(|row| gradients(row) == gradients(&rows[0])), "{rows:?}");
    assert_eq!(rows[1]["saved_bytes"], rows[2]["saved_bytes"]);
    assert_eq!(rows[1]["offloaded_bytes"], 0);
    assert!(rows[2]["offloaded_bytes"].as_u64().unwrap() + rows[2]["forwarded_bytes"].as_u64().unwrap() > 0);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("every loss and every gradient the same to the bit"), "{stderr}");
}

#[test]
fn a_trace_has_each_strategy_with_a_cache_as_a_process() {
    let directory = workplace();
    let trace = |command: &[&str], more: &[&str]| -> Vec<String> {
        let arguments = [&["--data=text.txt", "--trace=trace.json"], more].concat();
        let output = tiny(directory.path(), command, &arguments);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let file = std::fs::read_to_string(directory.path().join("trace.json")).unwrap();
        let file: Value = serde_json::from_str(&file).unwrap();
        let events = file["traceEvents"].as_array().unwrap();
        let named = |name: &str| events.iter().filter(|event| event["name"] == name).count();
        assert!(named("step 3") > 0 && named("step 4") == 0, "three steps of each");
        let processes = events.iter().filter(|event| event["name"] == "process_name");
        processes.map(|event| event["args"]["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(trace(&["compare"], &["--steps=2", "--warmup=1"]), ["keep", "offload"]);
    assert_eq!(trace(&["train"], &["--steps=3", "--compare-steps=1"]), ["offload"]);
    assert_eq!(trace(&["train"], &["--steps=3", "--compare-steps=1", "--overhead=1"]), ["auto"]);
    let by_hand = ["--steps=3", "--compare-steps=1", "--device-budget=1MiB"];
    assert_eq!(trace(&["train"], &by_hand), ["offload"]);
    let plain = tiny(directory.path(), &["compare"], &["--data=text.txt", "--strategies=plain", "--trace=t"]);
    assert!(refusal(&plain).contains("--trace"));
    let nowhere = tiny(directory.path(), &["train"], &["--data=text.txt", "--trace=no/where"]);
    assert!(refusal(&nowhere).contains("no/where"));
}

#[test]
fn a_loss_in_chunks_has_the_value_of_the_whole_and_a_lower_peak() {
    let place = workplace();
    let row = |more: &[&str]| {
        let options = ["--steps=2", "--warmup=0", "--strategies=plain", "--vocab=4096", "--seed=1", "--json"];
        let output = tiny(place.path(), &["compare", "--data=text.txt"], &[&options[..], more].concat());
        json_lines(&output).remove(0)
    };
    for model in ["gpt", "llama"] {
        let model = format!("--model={model}");
        let whole = row(&[&model]);
        for chunks in [&["--loss-chunk=24"][..], &["--loss-chunk=24", "--fused-loss"]] {
            saves(&whole, &row(&[&[&*model], chunks].concat()));
        }
    }
}

/// Asserts that a loss in chunks has the value of the whole, and the logits of few tokens.
fn saves(whole: &Value, chunked: &Value) {
    let loss = |row: &Value| row["loss_last"].as_f64().unwrap();
    assert!((loss(whole) - loss(chunked)).abs() < 1e-4, "{whole} {chunked}");
    let peak = |row: &Value| row["act_peak_bytes"].as_u64().unwrap();
    // 128 tokens of 4096 logits, which log-softmax and backward hold several times.
    assert!(peak(chunked) + 2 * 128 * 4096 * 4 < peak(whole), "{whole} {chunked}");
}

#[test]
fn strategies_agree_to_the_bit_on_a_llama() {
    let place = workplace();
    for more in [&["--fused-loss", "--accumulate=2"][..], &["--recompute=layer", "--loss-chunk=24"], &[]] {
        // In steps this small, backward may ask before anything has left: the median of a few would sometimes be 0.
        let options = ["--model=llama", "--strategies=plain,keep,recompute,offload,auto", "--steps=9"];
        let options = [&options[..], &["--warmup=0", "--check", "--json"], more].concat();
        let rows = json_lines(&tiny(place.path(), &["compare", "--data=text.txt"], &options));
        assert_eq!(rows.len(), 5);
        assert!(rows.iter().any(|row| row["offloaded_bytes"].as_u64() > Some(0)), "{more:?}");
    }
}

#[test]
fn a_llama_is_trained_goes_on_and_tells_what_it_is() {
    let place = workplace();
    let run = |more: &[&str]| {
        let options = ["--out=run", "--eval-tokens=512", "--compare-steps=2", "--sample-tokens=5"];
        tiny(place.path(), &["train", "--data=text.txt"], &[&options[..], more].concat())
    };
    let first = run(&["--model=llama", "--kv-heads=1", "--steps=2"]);
    let shown = String::from_utf8_lossy(&first.stderr) + String::from_utf8_lossy(&first.stdout);
    assert!(first.status.success() && shown.contains("Llama, 2 layers"), "{shown}");
    let second = run(&["--resume", "--kv-heads=1", "--steps=4"]);
    assert!(second.status.success(), "{}", String::from_utf8_lossy(&second.stderr));
    let other = refusal(&run(&["--resume", "--model=gpt", "--steps=6"]));
    assert!(other.contains("--model gpt") && other.contains("Llama"), "{other}");
}

#[test]
fn strategies_agree_to_the_bit_in_every_kind() {
    let place = workplace();
    for dtype in ["bf16", "fp16"] {
        for more in [&["--optimizer=sgd", "--loss-chunk=24", "--accumulate=2"][..], &[]] {
            let dtype = format!("--dtype={dtype}");
            let options = ["--steps=2", "--warmup=0", "--check", "--json", "--device=cpu", &dtype];
            let command = ["compare", "--data=text.txt"];
            let rows = json_lines(&tiny(place.path(), &command, &[&options[..], more].concat()));
            assert_eq!(rows.len(), 3);
            assert!(rows[2]["saved_bytes"].as_u64().unwrap() > 0, "{}", rows[2]);
        }
    }
}

#[test]
fn strategies_agree_to_the_bit_with_parts_recomputed() {
    let place = workplace();
    for (recompute, optimizer) in [("layer", "--optimizer=sgd"), ("cheap", "--optimizer=adamw")] {
        let recompute = format!("--recompute={recompute}");
        let options =
            ["--steps=2", "--warmup=0", "--check", "--json", "--dropout=0.1", &recompute, optimizer];
        let rows = json_lines(&tiny(place.path(), &["compare", "--data=text.txt"], &options));
        let recomputed: Vec<_> = rows.iter().map(|row| row["recomputed_bytes"].as_u64().unwrap()).collect();
        assert_eq!(recomputed[0], 0, "plain has no cache: {recomputed:?}");
        assert!(recomputed[1] > 0 && recomputed[1] == recomputed[2], "{recomputed:?}");
    }
}

#[test]
fn recompute_keeps_less_than_keep_and_has_its_bits() {
    let place = workplace();
    for (recompute, optimizer) in [("none", "--optimizer=adamw"), ("cheap", "--optimizer=sgd")] {
        let recompute = format!("--recompute={recompute}");
        let options = ["--strategies=keep,recompute,offload", "--steps=2", "--warmup=0", "--check", "--json"];
        let more = ["--dropout=0.1", &recompute, optimizer];
        let rows =
            json_lines(&tiny(place.path(), &["compare", "--data=text.txt"], &[&options[..], &more].concat()));
        let of = |name: &str| -> Vec<_> { rows.iter().map(|row| row[name].as_u64().unwrap()).collect() };
        let (peaks, recomputed) = (of("act_peak_bytes"), of("recomputed_bytes"));
        assert!(peaks[1] < peaks[0], "{peaks:?}");
        assert!(recomputed[1] > recomputed[0] && recomputed[0] == recomputed[2], "{recomputed:?}");
    }
}

#[test]
fn a_run_in_16_bits_is_resumed_in_16_bits_only() {
    let place = workplace();
    let train = |more: &[&str]| {
        let options = ["--loss-chunk=24", "--out=run", "--eval-tokens=512", "--compare-steps=2"];
        tiny(place.path(), &["train", "--data=text.txt"], &[&options[..], more].concat())
    };
    assert!(train(&["--steps=2", "--dtype=bf16"]).status.success());
    let refused = refusal(&train(&["--steps=3", "--resume"]));
    assert!(refused.contains("BF16") && refused.contains("Float"), "{refused}");
    assert!(train(&["--steps=3", "--resume", "--dtype=bf16"]).status.success());
}

#[test]
fn the_best_checkpoint_is_kept_beside_the_latest() {
    let place = workplace();
    let train = |more: &[&str]| {
        let command = [
            "train",
            "--data=text.txt",
            "--json",
            "--eval-tokens=512",
            "--compare-steps=0",
            "--sample-tokens=0",
        ];
        // Steps become so large that the loss rises again.
        let options = ["--out=run", "--eval-every=1", "--warmup-steps=6", "--lr=0.3", "--min-lr=0.3"];
        let events = json_lines(&tiny(place.path(), &command, &[&options[..], more].concat()));
        let evaluations: Vec<_> = events.into_iter().filter(|event| event["event"] == "eval").collect();
        // The last one is the final evaluation, on more tokens.
        evaluations[..evaluations.len() - 1].to_vec()
    };
    let best_of = |evaluations: &[Value]| {
        let loss = |event: &Value| event["held_out_loss"].as_f64().unwrap();
        let best = evaluations.iter().min_by(|left, right| loss(left).total_cmp(&loss(right))).unwrap();
        best["step"].as_u64().unwrap()
    };
    let kept = |name: &str| Checkpoint::open(place.path().join("run").join(name)).unwrap().state().step;
    let mut evaluations = train(&["--steps=6"]);
    assert_eq!(evaluations.len(), 6);
    assert!((2..6).contains(&best_of(&evaluations)), "{evaluations:?}");
    assert_eq!(kept("best-checkpoint.safetensors"), best_of(&evaluations), "{evaluations:?}");
    assert_eq!(kept("checkpoint.safetensors"), 6);
    // A resumed run knows the best loss so far.
    evaluations.extend(train(&["--steps=8", "--resume"]));
    assert_eq!(kept("best-checkpoint.safetensors"), best_of(&evaluations), "{evaluations:?}");
}

#[test]
fn a_resumed_run_ends_as_an_uninterrupted_one() {
    let place = workplace();
    let train = |out: &str, more: &[&str]| {
        let command = [
            "train",
            "--data=text.txt",
            "--json",
            "--eval-tokens=512",
            "--compare-steps=0",
            "--sample-tokens=8",
        ];
        let out = format!("--out={out}");
        let options =
            ["--warmup-steps=2", "--min-lr=1e-3", "--dropout=0.1", "--log-every=2", "--accumulate=2"];
        let output = tiny(place.path(), &command, &[&[out.as_str()], &options[..], more].concat());
        let events = json_lines(&output);
        let loss =
            events.iter().rfind(|event| event["event"] == "eval").unwrap()["held_out_loss"].as_f64().unwrap();
        (loss, events)
    };
    let (whole, events) = train("whole", &["--steps=8"]);
    let steps: Vec<_> = events.iter().filter(|event| event["event"] == "step").collect();
    assert_eq!(steps.iter().map(|step| step["step"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 4, 6, 8]);
    assert!(steps.last().unwrap()["loss"].as_f64() < steps[0]["loss"].as_f64(), "{steps:?}");
    assert!(steps[0]["report"]["offloaded"]["bytes"].as_u64().unwrap() > 0, "{steps:?}");
    assert!(events.iter().any(|event| event["event"] == "sample"));

    let (half, _) = train("parts", &["--steps=4"]);
    let (both, _) = train("parts", &["--steps=8", "--resume"]);
    assert_ne!(half.to_bits(), both.to_bits());
    assert_eq!(whole.to_bits(), both.to_bits());
    let held =
        |name: &str| std::fs::read(place.path().join(name).join("checkpoint.safetensors")).unwrap().len();
    assert_eq!(held("whole"), held("parts"));
}

#[test]
fn a_checkpoint_of_another_model_is_refused_and_an_older_one_is_kept() {
    let place = workplace();
    let options = ["--steps=1", "--compare-steps=0", "--sample-tokens=0", "--out=run"];
    let train =
        |more: &[&str]| tiny(place.path(), &["train", "--data=text.txt"], &[&options[..], more].concat());
    assert!(train(&[]).status.success());
    let error = refusal(&train(&["--resume", "--untied"]));
    assert!(error.contains("checkpoint"), "{error}");
    assert!(train(&[]).status.success());
    assert!(place.path().join("run/previous-checkpoint.safetensors").exists());
}

#[test]
fn io_and_doctor_say_what_they_found() {
    let place = workplace();
    let io = bench(place.path(), &["io", "--size=16MiB", "--rounds=1", "--json", "--dir=."]);
    let modes = json_lines(&io);
    assert_eq!(
        modes.iter().map(|row| row["mode"].as_str().unwrap()).collect::<Vec<_>>(),
        ["write", "read", "both"]
    );
    assert!(
        modes.iter().all(|row| row["raw_bytes_per_s"].as_f64() > Some(0.0)
            && row["store_bytes_per_s"].as_f64() > Some(0.0))
    );
    for row in &modes {
        assert_eq!(
            keys(row),
            [
                "depth",
                "io_bytes",
                "io_path",
                "mode",
                "raw_bytes_per_s",
                "raw_path",
                "size",
                "store_bytes_per_s",
                "store_to_raw"
            ]
        );
    }
    let checks = json_lines(&bench(place.path(), &["doctor", "--json", "--spill-dir=."]));
    for name in [
        "libtorch",
        "your package",
        "CUDA",
        "io_uring",
        "spill",
        "memory",
        "locked memory",
        "huge pages",
        "threads",
        "route",
        "used",
    ] {
        assert!(checks.iter().any(|check| check["name"] == name), "{name}");
    }
    for check in &checks {
        assert_eq!(keys(check), ["advice", "found", "name", "status"]);
    }
}

#[test]
fn what_is_to_be_left_to_others_on_a_disk_is_not_written_to() {
    let place = workplace();
    let written = |more: &[&str]| {
        let options = [&["--steps=2", "--warmup=0", "--strategies=keep,offload", "--check", "--json"], more];
        let rows = json_lines(&tiny(place.path(), &["compare", "--data=text.txt"], &options.concat()));
        rows[1]["disk"]["written_bytes_per_step"].as_u64().unwrap()
    };
    assert!(written(&["--disk-keep-free=0", "--disk-timeout=60"]) > 0);
    assert_eq!(written(&["--disk-keep-free=1048576TiB", "--disk-timeout=none", "--device-timeout=9"]), 0);
}

#[test]
fn what_is_encrypted_is_called_so() {
    let place = workplace();
    let io = json_lines(&bench(
        place.path(),
        &["io", "--size=16MiB", "--rounds=1", "--json", "--dir=.", "--encrypt"],
    ));
    assert!(io.iter().all(|row| row["io_path"].as_str().unwrap().contains("encrypted")), "{io:?}");
    let checks = json_lines(&bench(place.path(), &["doctor", "--json", "--spill-dir=.", "--encrypt"]));
    for name in ["encryption", "route", "used", "verdict"] {
        let check = checks.iter().find(|check| check["name"] == name).unwrap();
        assert!(check["found"].as_str().unwrap().contains("encrypted"), "{check}");
    }
    let options = ["--steps=2", "--warmup=0", "--strategies=keep,offload", "--encrypt", "--check", "--json"];
    let rows = json_lines(&tiny(place.path(), &["compare", "--data=text.txt"], &options));
    assert!(rows[1]["io_path"].as_str().unwrap().contains("encrypted"), "{rows:?}");
    assert!(rows[1]["disk"]["checked_bytes_per_step"].as_u64() > Some(0), "{rows:?}");
}

#[test]
fn what_runs_write_to_a_disk_adds_up_and_doctor_tells() {
    let place = workplace();
    let state = place.path().join("state");
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ssdtrain-bench"));
        command.args(arguments).current_dir(place.path()).env("TMPDIR", place.path());
        command.env("SSDTRAIN_STATE", &state).output().unwrap()
    };
    let options = [
        "--data=text.txt",
        "--steps=3",
        "--device-budget=0",
        "--keep-last=0",
        "--disk-endurance=600TB",
        "--compare-steps=0",
        "--sample-tokens=0",
        "--json",
    ];
    let mut of_runs = 0;
    for _ in 0..2 {
        let events = json_lines(&run(&[&["train"], TINY, &options[..]].concat()));
        let mut steps = events.iter().filter(|event| event["event"] == "step");
        let report = &steps.next_back().unwrap()["report"];
        let Some(disk) = report["disks"].get(0) else {
            return eprintln!("skipped: the temporary directory is in memory");
        };
        // Steps that are not shown have written, too.
        assert!(disk["by_run"].as_u64() > Some(0) && disk["by_all_runs"].as_u64() > Some(of_runs), "{disk}");
        let history: Value =
            serde_json::from_str(&std::fs::read_to_string(state.join("disks.json")).unwrap()).unwrap();
        let drives = history["drives"].as_object().unwrap();
        let total: u64 = drives.values().map(|drive| drive["total"].as_u64().unwrap()).sum();
        assert!(
            total > of_runs && !history.to_string().contains(place.path().to_str().unwrap()),
            "{history}"
        );
        of_runs = total;
    }
    let checks = json_lines(&run(&["doctor", "--json", "--spill-dir=.", "--disk-endurance=600TB"]));
    let found = checks.iter().find(|check| check["name"] == "endurance").unwrap()["found"].as_str().unwrap();
    assert!(found.contains("all runs have written") && found.contains("rated for 600.0 TB"), "{found}");
}

#[test]
fn rok_sweeps_goes_on_and_is_drawn_again() {
    let place = workplace();
    let options = ["--data=text.txt", "--steps=2", "--warmup=0", "--plot=rok.png", "--json"];
    let rok = |more: &[&str]| tiny_rok(place.path(), &[&options[..], more].concat());
    let points = json_lines(&rok(&["--batches=4,2", "--strategies=keep,recompute"]));
    let of = |points: &[Value]| -> Vec<_> {
        let name = |point: &Value| point["strategy"].as_str().unwrap().to_owned();
        points.iter().map(|point| (point["micro_batch"].as_u64().unwrap(), name(point))).collect()
    };
    let names = |sizes: &[u64], names: &[&str]| -> Vec<_> {
        sizes.iter().flat_map(|&size| names.iter().map(move |name| (size, (*name).to_owned()))).collect()
    };
    assert_eq!(of(&points), names(&[2, 4], &["keep", "recompute"]));
    for point in &points {
        let figure = |name: &str| point[name].as_f64().unwrap();
        // Two layers of width 32 and 256 words: 32,768 weights; 16 tokens of attention.
        let flops = 6.0 * 32_768.0 + 12.0 * 2.0 * 32.0 * 16.0;
        assert!(
            (figure("model_tflops") * 1e12 / figure("tokens_per_s") / flops - 1.0).abs() < 1e-9,
            "{point}"
        );
        assert!(figure("act_peak_bytes") > 0.0 && figure("act_peak_to_keep") <= 1.0, "{point}");
        assert!(point["predicted_step_ms"].is_null() && point["failed"].is_null(), "{point}");
    }
    assert!(points.iter().any(|point| point["frontier"] == true), "{points:?}");
    assert!(points[3]["recomputed_bytes"].as_u64() > Some(0) && points[3]["ratio_to_keep"].is_f64());

    let more = rok(&["--batches=2,4", "--strategies=keep,recompute,offload"]);
    assert!(String::from_utf8_lossy(&more.stderr).contains("batch  2: offload"), "{more:?}");
    let more = json_lines(&more);
    assert_eq!(of(&more), names(&[2, 4], &["keep", "recompute", "offload"]));
    let steps =
        |points: &[Value]| -> Vec<_> { points.iter().map(|point| point["step_ms_median"].clone()).collect() };
    assert_eq!([&steps(&more)[..2], &steps(&more)[3..5]].concat(), steps(&points), "measured once");
    assert!(more[2]["ratio_to_keep"].is_f64(), "keep took turns with offload, too");

    let other = refusal(&rok(&["--batches=2", "--dropout=0.1"]));
    for part in ["rok.csv", "model.dropout (0.0 there, 0.1 here)", "--out", "--fresh"] {
        assert!(other.contains(part), "{other}");
    }
    let fresh = json_lines(&rok(&["--batches=2", "--strategies=plain", "--fresh"]));
    assert_eq!(of(&fresh), names(&[2], &["plain"]));

    let drawn = bench(place.path(), &["plot", "rok.csv", "--plot", "again.svg", "again.png"]);
    assert!(drawn.status.success(), "{drawn:?}");
    let svg = std::fs::read_to_string(place.path().join("again.svg")).unwrap();
    for text in ["plain", "frontier", "activation peak, ", "model throughput, GFLOP/s"] {
        assert!(svg.contains(text), "{svg}");
    }
    let picture = |name: &str| std::fs::read(place.path().join(name)).unwrap();
    assert_eq!(picture("again.png"), picture("rok.png"));
    let nothing = refusal(&bench(place.path(), &["plot", "none.csv", "--plot=none.svg"]));
    assert!(nothing.contains("none.csv"), "{nothing}");
}

#[test]
fn rok_goes_on_where_memory_runs_out() {
    let place = workplace();
    // 131,072 tokens of 65,536 logits are 32 GiB.
    let rok = "ulimit -v 16777216; exec \"$0\" rok --data=text.txt --vocab=65536 --steps=1 --warmup=0 --json \
        --strategies=keep,offload --batches=8192,1 --layers=1 --hidden=8 --heads=1 --block=16 --tokens=bytes --threads=1";
    let output = Command::new("sh")
        .args(["-c", rok, env!("CARGO_BIN_EXE_ssdtrain-bench")])
        .current_dir(place.path())
        .env("TMPDIR", place.path())
        .env("SSDTRAIN_STATE", "off")
        .output()
        .unwrap();
    let points = json_lines(&output);
    assert_eq!(points.len(), 4);
    for point in &points {
        match point["failed"].as_str() {
            None => assert!(point["micro_batch"] == 1 && point["act_peak_bytes"].is_u64(), "{point}"),
            Some(why) => assert!(point["micro_batch"] == 8192 && why.contains("out of memory"), "{point}"),
        }
    }
}

#[test]
fn project_shows_the_papers_configurations_and_draws_them() {
    let place = workplace();
    let rows = json_lines(&bench(place.path(), &["project", "--json", "--plot=viability.svg"]));
    assert_eq!(rows.len(), 12);
    for row in &rows {
        assert_eq!(
            keys(row),
            [
                "activation_bytes",
                "batch",
                "configuration",
                "forward_s",
                "gpus",
                "largest",
                "lifespan_years",
                "micro_batch",
                "model",
                "pipeline_parallel",
                "step_s",
                "tensor_parallel",
                "tflops",
                "write_bytes_per_s",
                "zero"
            ]
        );
        assert!(row["lifespan_years"].as_f64() > Some(3.0), "{row}");
        assert!(row["write_bytes_per_s"].as_f64() <= Some(12.1e9), "{row}");
    }
    let svg = std::fs::read_to_string(place.path().join("viability.svg")).unwrap();
    assert!(svg.contains("bandwidth") && svg.contains("2240 GPUs"), "{svg}");
    let table = bench(place.path(), &["project", "--plot=viability.png"]);
    let text = String::from_utf8_lossy(&table.stdout).into_owned();
    assert!(text.contains("175B ZeRO-3, 384 GPUs") && text.contains("viability.png"), "{text}");
    assert!(std::fs::read(place.path().join("viability.png")).unwrap().starts_with(b"\x89PNG"));
}

/// The bytes projected for a model are those that compare moves, within 5 %.
#[test]
fn project_agrees_with_what_compare_moves() {
    let place = workplace();
    let compare = ["compare", "--data=text.txt", "--strategies=offload", "--steps=1", "--json"];
    let shapes: [(&str, &[(&str, u64)], _, _); 4] = [
        ("gpt", &[("layers", 2), ("hidden", 32), ("heads", 2)], 16, 8),
        ("gpt", &[("layers", 3), ("hidden", 64), ("heads", 8)], 32, 4),
        ("gpt", &[("layers", 1), ("hidden", 48), ("heads", 4)], 64, 2),
        ("llama", &[("layers", 2), ("hidden", 64), ("heads", 4), ("kv_heads", 2), ("mlp", 160)], 32, 4),
    ];
    for (family, sizes, block, batch) in shapes {
        let options = sizes.iter().map(|(name, size)| format!("--{}={size}", name.replace('_', "-")));
        let options: Vec<_> = options
            .chain([format!("--model={family}"), format!("--block={block}"), format!("--batch={batch}")])
            .collect();
        let options: Vec<_> = options.iter().map(String::as_str).collect();
        let everything =
            ["--min-bytes=0", "--keep-last=0", "--device-budget=0", "--tokens=bytes", "--threads=1"];
        let moved = json_lines(&bench(place.path(), &[&compare[..], &options, &everything].concat()));
        let moved = moved[0]["offloaded_bytes"].as_f64().unwrap();

        let sizes = sizes.iter().map(|(name, size)| format!("{name} = {size}\n")).collect::<String>();
        let model = format!("{sizes}vocab = 256\nsequence = {block}\n");
        std::fs::write(place.path().join("model.toml"), model).unwrap();
        let micro_batch = format!("--micro-batch={batch}");
        let project =
            ["project", "--model=model.toml", "--implementation=ssdtrain", "--number-bytes=4", "--json"];
        let projected = json_lines(&bench(place.path(), &[&project[..], &[&micro_batch]].concat()));
        let projected = projected[0]["activation_bytes"].as_f64().unwrap();
        assert!((projected / moved - 1.0).abs() < 0.05, "{options:?}: {projected} projected, {moved} moved");
    }
}

#[test]
fn project_knows_llamas_by_name() {
    let place = workplace();
    let row = |arguments: &[&str]| {
        json_lines(&bench(place.path(), &[&["project", "--json"], arguments].concat())).remove(0)
    };
    // Keys and values are narrower, but the MLP is wider, and so is the vocabulary.
    let (older, newer) = (row(&["--model=llama-7b"]), row(&["--model=llama-8b", "--sequence=4096"]));
    assert_eq!((&older["model"], &newer["model"]), (&"llama-7b".into(), &"llama-8b".into()));
    assert!(older["activation_bytes"].as_u64() < newer["activation_bytes"].as_u64(), "{older} {newer}");
    let (gpt, llama) = (row(&["--model=mini"]), row(&["--model=llama-mini"]));
    assert_ne!(gpt["activation_bytes"], llama["activation_bytes"]);
}

#[test]
fn what_project_cannot_use_is_named() {
    let place = workplace();
    std::fs::write(place.path().join("odd.toml"), "layers = 2\nwidth = 3\n").unwrap();
    let shape = "layers = 2\nhidden = 64\nheads = 4\nkv_heads = 2\nvocab = 99\nsequence = 8\n";
    std::fs::write(place.path().join("half.toml"), shape).unwrap();
    let wrong: [(&[&str], &str); 9] = [
        (&["--model=odd.toml"], "odd.toml"),
        (&["--model=half.toml"], "add mlp"),
        (&["--model=llama-8b", "--tensor-parallel=16"], "--tensor-parallel 16"),
        (&["--model=llama-8b", "--dropout"], "--dropout"),
        (&["--model=nowhere.toml"], "nowhere.toml"),
        (&["--ssd=odd.toml"], "odd.toml"),
        (&["--model=gpt2-xl", "--tensor-parallel=7"], "--tensor-parallel 7"),
        (&["--model=gpt2-xl", "--gpus=4", "--batch=6"], "--batch 6"),
        (&["--model=gpt2-xl", "--tflops=1e-320"], "--tflops"),
    ];
    for (arguments, expected) in wrong {
        let error = refusal(&bench(place.path(), &[&["project"], arguments].concat()));
        assert!(error.contains(expected), "{error}");
    }
    let without_model = bench(place.path(), &["project", "--tensor-parallel=8"]);
    assert!(String::from_utf8_lossy(&without_model.stderr).contains("--model"), "{without_model:?}");
}

/// Runs only if there is a GPU.
#[test]
fn io_and_doctor_know_a_gpu() {
    let place = workplace();
    let checks = json_lines(&bench(place.path(), &["doctor", "--json", "--spill-dir=."]));
    if !checks.iter().any(|check| check["name"] == "cuda:0") {
        return eprintln!("skipped: there is no GPU here");
    }
    let pinned = checks.iter().find(|check| check["name"] == "pinned memory").unwrap();
    assert_eq!(pinned["status"], "ok", "{pinned}");
    let small = ["io", "--size=16MiB", "--rounds=1", "--json", "--dir=."];
    let copies = ["--device=cuda", "--copy-size=64MiB", "--copy-bytes=4MiB"];
    let rows = json_lines(&bench(place.path(), &[&small[..], &copies].concat()));
    let loads: Vec<_> = rows.iter().filter_map(|row| row["load"].as_str()).collect();
    assert_eq!((rows.len(), loads), (7, vec!["copy_out", "copy_in", "copy_both", "all"]));
    for rate in ["out_bytes_per_s", "in_bytes_per_s", "write_bytes_per_s", "read_bytes_per_s"] {
        assert!(rows[6][rate].as_f64() > Some(0.0), "{}", rows[6]);
    }
    assert!(rows[3]["in_bytes_per_s"].is_null() && rows[5]["read_bytes_per_s"].is_null(), "{rows:?}");
}

#[test]
fn a_plan_is_held_beside_the_step_and_tells_the_largest_micro_batch() {
    let place = workplace();
    let plan = |more: &[&str]| {
        let options = [&["--budget=2MiB"], more].concat();
        tiny(place.path(), &["plan", "--data=text.txt"], &options)
    };
    let rows = json_lines(&plan(&["--json", "--largest-batch=64"]));
    let row = &rows[0];
    assert_eq!(keys(row), ["act_peak_bytes", "largest_batch", "planned", "step_ms"]);
    assert!(row["planned"]["in_reach"].as_bool().unwrap() && row["step_ms"].as_f64().unwrap() > 0.0, "{row}");
    let largest = &row["largest_batch"];
    assert!((1..=64).contains(&largest["rows"].as_u64().unwrap()), "{row}");
    assert!(largest["peak_bytes"].as_u64().unwrap() <= 2 << 20, "{row}");

    let told = &json_lines(&plan(&["--explain", "--json"]))[0]["plan"];
    let peak = &told["peak"];
    let held = peak["holders"].as_array().unwrap().iter().map(|row| row["held"]["bytes"].as_u64().unwrap());
    assert_eq!(
        held.sum::<u64>() + peak["extra"].as_u64().unwrap(),
        peak["bytes"].as_u64().unwrap(),
        "{told}"
    );

    let text = String::from_utf8(plan(&["--explain"]).stdout).unwrap();
    assert!(
        [
            "planned",
            "measured",
            "block.0.mlp",
            "recompute",
            "counting on",
            "peak as planned",
            "besides activations"
        ]
        .iter()
        .all(|word| text.contains(word)),
        "{text}"
    );
}

/// The answer to a request for this page.
fn page(url: &str) -> String {
    let (address, path) = url.strip_prefix("http://").unwrap().split_once('/').unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(format!("GET /{path} HTTP/1.1\r\n\r\n").as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn metrics_are_served_while_a_training_goes_on() {
    let place = workplace();
    let mut train = Command::new(env!("CARGO_BIN_EXE_ssdtrain-bench"))
        .args(
            [&["train", "--data=text.txt", "--metrics=0", "--steps=1000000", "--strategy=offload"], TINY]
                .concat(),
        )
        .current_dir(place.path())
        .env("TMPDIR", place.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(train.stdout.take().unwrap()).lines().map_while(Result::ok);
    let url = lines.find_map(|line| line.strip_prefix("metrics ").map(str::to_owned)).unwrap();
    let has_stepped = |page: &str| {
        let steps = "ssdtrain_steps_total{cache=\"offload\",planning=\"unplanned\"} ";
        page.lines().any(|line| line.strip_prefix(steps).is_some_and(|count| count != "0"))
    };
    while !has_stepped(&page(&url)) {
        thread::yield_now();
    }
    train.kill().unwrap();
    train.wait().unwrap();
}

#[test]
fn metrics_that_cannot_be_served_are_refused_before_the_training() {
    let place = workplace();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("--metrics={}", taken.local_addr().unwrap());
    let error = refusal(&tiny(place.path(), &["train", "--data=text.txt", "--steps=1"], &[&address]));
    assert!(error.contains("--metrics") && error.contains("another program has this port"), "{error}");
    let plain = ["--metrics=0", "--strategy=plain"];
    let error = refusal(&tiny(place.path(), &["train", "--data=text.txt", "--steps=1"], &plain));
    assert!(error.contains("--metrics") && error.contains("plain"), "{error}");
    let error = refusal(&bench(place.path(), &["train", "--metrics=example.org:80"]));
    assert!(error.contains("--metrics"), "{error}");
}
