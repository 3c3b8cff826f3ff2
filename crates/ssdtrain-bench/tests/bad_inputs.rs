//! Bad arguments and damaged files: whatever they are, a command ends soon, with one clear line and no panic.
//!
//! The inputs are generated from a seed, `BAD_INPUTS_SEED` or the one below, and the flags come from each command's `--help`. What runs by
//! default is a sample; the tests that are ignored by default try all.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::process::{Command, Output};

use common::workplace;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tempfile::TempDir;

const SEED: u64 = 1;
/// How many inputs of each kind a sample has.
const SAMPLE: usize = 60;
/// The values that each flag of each command gets where all inputs are tried.
const VALUES: usize = 6;
/// The damaged copies of each file where all inputs are tried.
const COPIES: usize = 70;
/// The combinations of flags where all inputs are tried.
const COMBINATIONS: usize = 300;

const COMMANDS: &[&str] = &["train", "compare", "rok", "plan", "plot", "io", "project", "doctor"];

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

/// No number, a number out of every range, or a number in a form that is not ours. Where one is a good value after all, a command that takes
/// it ends as soon as any other.
const NUMBERS: &[&str] = &[
    "",
    " ",
    "0",
    "-0",
    "-1",
    "-9223372036854775809",
    "18446744073709551615",
    "18446744073709551616",
    "99999999999999999999999999999999999999999",
    "1.5",
    "0.5",
    "1e-320",
    "1e308",
    "1e309",
    "NaN",
    "inf",
    "-inf",
    "0x10",
    "1_000",
    "1,000",
    "1 2",
    "\u{661}\u{662}",
    "+1",
    "1KiBB",
    "MiB",
    "-1GiB",
    "1e30GiB",
];
const NAMES: &[&str] = &[
    "magic",
    "AUTO",
    "auto ",
    "none,none",
    ",",
    "cuda:",
    "cuda:-1",
    "cuda:256",
    "cuda:99",
    "\u{1f980}",
    "%s%n",
    "a\nb",
];
/// Directories, what is missing or lies below a file, and names that no file system takes.
const PATHS: &[&str] = &[
    ".",
    "folder",
    "nowhere/at/all",
    "nowhere/at/all.json",
    "nowhere/at/all.csv",
    "nowhere/at/all.svg",
    "nowhere/at/all.bin",
    "text.txt/below",
    "text.txt/below.json",
    "empty",
    "/proc/self/mem",
];

/// Numbers drawn from a seed (SplitMix64).
struct Random(u64);

impl Random {
    fn seeded(stream: u64) -> Random {
        let seed = std::env::var("BAD_INPUTS_SEED").map_or(SEED, |seed| seed.parse().unwrap());
        Random(seed.wrapping_mul(0x5851_f42d_4c95_7f2d) ^ stream)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn of<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len())]
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.next() as u8).collect()
    }

    /// `most` of them, drawn without putting back.
    fn sample<T>(&mut self, mut all: Vec<T>, most: usize) -> Vec<T> {
        for index in 0..all.len().min(most) {
            let other = index + self.below(all.len() - index);
            all.swap(index, other);
        }
        all.truncate(most);
        all
    }
}

/// An argument of a command, as its `--help` tells it.
struct Flag {
    /// With the two dashes.
    name: String,
    takes_value: bool,
    /// Good values, if there are only some.
    values: Vec<String>,
}

/// An input, and what its error message must name one of.
#[derive(Debug)]
struct Case {
    arguments: Vec<OsString>,
    /// Written before the command runs, in its directory.
    files: Vec<(String, Vec<u8>)>,
    names: Vec<String>,
}

impl Case {
    fn new<A: Into<OsString>>(arguments: impl IntoIterator<Item = A>, names: &[&str]) -> Case {
        let names = names.iter().map(|&name| name.to_owned()).collect();
        Case { arguments: arguments.into_iter().map(Into::into).collect(), files: Vec::new(), names }
    }

    fn with(mut self, file: &str, bytes: impl Into<Vec<u8>>) -> Case {
        self.files.push((file.to_owned(), bytes.into()));
        self
    }
}

fn bench<A: AsRef<OsStr>>(directory: &Path, arguments: &[A]) -> Output {
    // So much memory is enough for anything small, and a size that is far too large is refused in any case.
    Command::new("sh")
        .args(["-c", "ulimit -v 16777216; exec timeout --signal=KILL 20 \"$0\" \"$@\""])
        .arg(env!("CARGO_BIN_EXE_ssdtrain-bench"))
        .args(arguments)
        .current_dir(directory)
        .env("RUST_BACKTRACE", "1")
        .env("TMPDIR", directory)
        .env("SSDTRAIN_STATE", "off")
        .output()
        .unwrap()
}

/// What is wrong with how a command took an input.
fn complaint(case: &Case, output: &Output) -> Option<String> {
    let stderr = String::from_utf8_lossy(&output.stderr);
    let code = output.status.code();
    if !matches!(code, Some(0..=2)) {
        return Some(format!("it ended with {:?} (137: after 20 s)", output.status));
    }
    // tch panics with libtorch's messages, and what is unforeseen is told as an internal error.
    let signs = [
        "panicked at",
        "stack backtrace",
        "RUST_BACKTRACE",
        "internal error",
        "error: libtorch:",
        "Exception raised",
    ];
    if let Some(sign) = signs.into_iter().find(|&sign| stderr.contains(sign)) {
        return Some(format!("its message has {sign:?}"));
    }
    // The library's settings are called as the flags are, with other signs between the words.
    let told = stderr.replace(['_', '-'], " ").to_lowercase();
    let is_told = |name: &String| {
        told.contains(name.trim_start_matches('-').replace(['_', '-'], " ").to_lowercase().as_str())
    };
    let named = code == Some(0) || case.names.iter().any(is_told);
    (!named).then(|| format!("its message has none of {:?}", case.names))
}

/// Tries each case, as many at once as there are processors, and fails with all that was wrong.
fn try_all(prepared: &Path, cases: Vec<Case>) {
    let (tried, waiting, wrong) = (cases.len(), Mutex::new(cases.into_iter()), Mutex::new(Vec::new()));
    let work = || {
        let place = tempfile::tempdir().unwrap();
        copy(prepared, place.path());
        loop {
            let Some(case) = waiting.lock().next() else { return };
            for (file, bytes) in &case.files {
                fs::write(place.path().join(file), bytes).unwrap();
            }
            // It is not replaced. Most cases have not made it.
            fs::remove_file(place.path().join("report.md")).ok();
            let output = bench(place.path(), &case.arguments);
            if let Some(complaint) = complaint(&case, &output) {
                let (shown, stderr) = (shown(&case), String::from_utf8_lossy(&output.stderr).into_owned());
                wrong.lock().push(format!("{shown}\n  {complaint}\n  {}", stderr.trim_end()));
            }
        }
    };
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..processors {
            scope.spawn(work);
        }
    });
    let wrong = wrong.into_inner();
    println!("{tried} inputs, {} taken badly", wrong.len());
    assert!(wrong.is_empty(), "{} of {tried}:\n{}", wrong.len(), wrong.join("\n"));
}

/// A case, short enough for a message.
fn shown(case: &Case) -> String {
    let arguments: Vec<_> = case.arguments.iter().map(|argument| format!("{argument:?}")).collect();
    let files = case.files.iter().map(|(file, bytes)| {
        let text = String::from_utf8_lossy(&bytes[..bytes.len().min(400)]).into_owned();
        format!("\n  {file}, {} bytes: {text:?}", bytes.len())
    });
    arguments.join(" ") + &files.collect::<String>()
}

/// Good files of every kind, for commands to read or to have damaged.
fn prepared() -> TempDir {
    let place = workplace();
    let run = |arguments: &[&[&str]]| {
        let output = bench(place.path(), &arguments.concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    run(&[&["plan"], TINY, &["--batch=8", "--overhead=1e9", "--save=plan.json", "--save-profile=step.json"]]);
    run(&[&["plan"], TINY, &["--batch=4", "--overhead=1e9", "--save-profile=half.json"]]);
    run(&[&["train"], TINY, TRAIN]);
    for file in ["--out=good.csv", "--out=good.json"] {
        run(&[&["rok"], TINY, ROK, &[file]]);
    }
    fs::create_dir(place.path().join("folder")).unwrap();
    fs::write(place.path().join("empty"), "").unwrap();
    let words: Vec<u8> = (0..4096_u16).flat_map(|word| (word % 250).to_le_bytes()).collect();
    fs::write(place.path().join("words.bin"), words).unwrap();
    fs::write(place.path().join("model.toml"), MODEL).unwrap();
    fs::write(place.path().join("gpu.toml"), "memory_gib = 80\npeak_tflops = 312.0\n").unwrap();
    fs::write(
        place.path().join("ssd.toml"),
        "capacity_tb = 1.0\ndrive_writes_per_day = 3\nwarranty_years = 5\n",
    )
    .unwrap();
    place
}

const TRAIN: &[&str] =
    &["--batch=8", "--steps=1", "--compare-steps=0", "--sample-tokens=0", "--eval-tokens=512", "--out=run"];
const COMPARE: &[&str] = &["--batch=8", "--steps=1", "--warmup=0"];
const ROK: &[&str] = &["--batches=2", "--steps=1", "--warmup=0", "--strategies=keep", "--fresh"];
const MODEL: &str = "layers = 2\nhidden = 64\nheads = 4\nkv_heads = 2\nmlp = 160\nvocab = 99\nsequence = 8\nname = \"mine\"\n";

fn copy(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            fs::create_dir(&target).unwrap();
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// The arguments with which a command does something small.
fn small(command: &str) -> Vec<&str> {
    let (first, then): (&[&str], &[&str]) = match command {
        "train" => (TINY, TRAIN),
        "compare" => (TINY, COMPARE),
        "rok" => (TINY, ROK),
        "plan" => (TINY, &["--batch=8"]),
        "plot" => (&["good.csv"], &["--plot=picture.svg"]),
        "io" => (&["--dir=.", "--size=64KiB"], &["--rounds=1", "--io-bytes=4KiB"]),
        "doctor" => (&["--spill-dir=."], &[]),
        _ => (&[], &[]),
    };
    [&[command], first, then].concat()
}

/// The flags that a command's help tells.
fn flags(command: &str) -> Vec<Flag> {
    let output = bench(Path::new("."), &[command, "--help"]);
    let help = String::from_utf8(output.stdout).unwrap();
    let mut flags: Vec<Flag> = Vec::new();
    for line in help.lines().take_while(|line| !line.starts_with("Examples:")) {
        let words = line.trim_start();
        if line.starts_with("      --") && !line.starts_with("       ") {
            let name = words.split([' ', '.', '=']).next().unwrap().to_owned();
            flags.push(Flag { name, takes_value: words.contains('<'), values: Vec::new() });
        }
        let Some(flag) = flags.last_mut() else { continue };
        if let Some(values) = words.strip_prefix("[possible values: ") {
            flag.values =
                values.split([',', ']', ' ']).filter(|value| !value.is_empty()).map(str::to_owned).collect();
        } else if let Some((value, _)) = words.strip_prefix("- ").and_then(|words| words.split_once(':')) {
            flag.values.push(value.to_owned());
        }
    }
    assert!(!flags.is_empty(), "{command} has no flags: {help}");
    flags
}

/// A command with one argument more, which takes the place of an argument of the same flag.
fn with_argument(command: &str, flag: &str, argument: impl Into<OsString>) -> Vec<OsString> {
    let given = small(command);
    let is_same = |given: &&str| given.strip_prefix(flag).is_some_and(|rest| rest.starts_with('='));
    let kept = given.into_iter().filter(|given| !is_same(given)).map(OsString::from);
    kept.chain([argument.into()]).collect()
}

fn equals(flag: &str, value: &OsStr) -> OsString {
    let mut argument = OsString::from(flag);
    argument.push("=");
    argument.push(value);
    argument
}

/// Each flag of each command, with values that are wrong for most.
fn bad_arguments(random: &mut Random) -> Vec<Case> {
    let mut values: Vec<OsString> =
        [NUMBERS, NAMES, PATHS].concat().into_iter().map(OsString::from).collect();
    values.extend(
        [&b"\xff\xfe"[..], b"a\xffb.json", b"folder/\xc3(.svg", b"\xed\xa0\x80.csv"]
            .map(|bytes| OsString::from_vec(bytes.to_vec())),
    );
    values.extend(["x".repeat(300), "y/".repeat(3000)].map(OsString::from));
    let mut cases = Vec::new();
    for &command in COMMANDS {
        for flag in flags(command) {
            let name = &*flag.name;
            if !flag.takes_value {
                cases.push(Case::new(with_argument(command, name, equals(name, OsStr::new("1"))), &[name]));
                continue;
            }
            cases.push(Case::new(with_argument(command, name, name), &[name]));
            for value in random.sample(values.clone(), VALUES) {
                if name == "--disk-rate" && is_slow(&value) {
                    continue;
                }
                let lossy = value.to_string_lossy();
                let names = [name, "lines above", &*lossy];
                let names = if lossy.trim().is_empty() { &names[..2] } else { &names };
                cases.push(Case::new(with_argument(command, name, equals(name, &value)), names));
            }
        }
        cases.push(Case::new([command, "--no-such-flag"], &["--no-such-flag"]));
        cases.push(Case::new(
            [OsStr::new(command), OsStr::from_bytes(b"\xff")],
            &["\\xff", "\u{fffd}", "FILE"],
        ));
    }
    cases.push(Case::new(["tran"], &["tran"]));
    cases.push(Case::new([""], &["''"]));
    cases.push(Case::new([OsStr::from_bytes(b"\xff")], &["\\xff", "\u{fffd}"]));
    cases.push(Case::new::<&str>([], &["Usage"]));
    cases
}

/// Whether this is a good value of `--disk-rate` with which a step takes hours, as it was asked to.
fn is_slow(value: &OsStr) -> bool {
    value
        .to_str()
        .and_then(|value| value.trim().parse::<f64>().ok())
        .is_some_and(|rate| (1.0..1e6).contains(&rate))
}

/// Several flags at a time, each with a value that may well be good.
fn combinations(random: &mut Random, number: usize) -> Vec<Case> {
    let known: Vec<_> = COMMANDS.iter().map(|&command| (command, flags(command))).collect();
    let plausible = [
        "0",
        "1",
        "2",
        "3",
        "0.5",
        "4KiB",
        "1MiB",
        "none",
        "keep",
        "offload,auto",
        "plan.json",
        "step.json",
        "folder",
        "cpu",
        "cuda",
        "made.svg",
        "made.csv",
    ];
    let mut cases = Vec::new();
    while cases.len() < number {
        // Most rules are those of training.
        let (command, flags) = random.of(&known);
        let mut arguments: Vec<OsString> = small(command).into_iter().map(OsString::from).collect();
        let (mut names, mut given) = (Vec::new(), Vec::new());
        for _ in 0..2 + random.below(4) {
            let Flag { name, takes_value, values } = random.of(flags);
            // These make a run long, or none.
            if ["--help", "--steps", "--rounds", "--size", "--copy-size", "--disk-rate"]
                .contains(&name.as_str())
                || names.contains(name)
            {
                continue;
            }
            let prefix = format!("{name}=");
            arguments.retain(|argument| !argument.to_string_lossy().starts_with(&prefix));
            let value = if values.is_empty() { *random.of(&plausible) } else { random.of(values) };
            arguments.push(if *takes_value { format!("{prefix}{value}").into() } else { name.into() });
            names.push(name.clone());
            given.push(value.to_owned());
        }
        // doctor has told what is wrong on stdout.
        names.push("lines above".to_owned());
        let names: Vec<_> = names.iter().chain(&given).map(String::as_str).collect();
        cases.push(Case::new(arguments, &names));
    }
    cases
}

/// The files that commands read, and the arguments that have each read. `FILE` stands for the file.
const READERS: &[(&str, &[&[&str]])] = &[
    (
        "step.json",
        &[
            &["plan", "--profile=FILE", "--explain"],
            &["plan", "--profile=half.json", "--profile=FILE", "--largest-batch=64", "--budget=1MiB"],
            &["doctor", "--spill-dir=.", "--bundle=report.md", "--profile=FILE"],
        ],
    ),
    ("plan.json", &[&["train", "--plan=FILE"], &["compare", "--strategies=auto", "--plan=FILE"]]),
    ("run/checkpoint.safetensors", &[&["train", "--resume"]]),
    ("good.csv", &[&["plot", "FILE", "--plot=picture.svg"], &["rok", "--out=FILE"]]),
    ("good.json", &[&["plot", "FILE", "--plot=picture.png"], &["rok", "--out=FILE"]]),
    ("text.txt", &[&["compare", "--data=FILE"], &["train", "--data=FILE", "--tokens=chars"]]),
    ("words.bin", &[&["compare", "--data=FILE"]]),
    ("model.toml", &[&["project", "--model=FILE"]]),
    ("gpu.toml", &[&["project", "--model=mini", "--gpu=FILE"]]),
    ("ssd.toml", &[&["project", "--model=mini", "--ssd=FILE"]]),
];

/// Damaged copies of good files, each with a command that reads it.
fn damaged_files(prepared: &Path, random: &mut Random) -> Vec<Case> {
    let mut cases = Vec::new();
    for (good, readers) in READERS {
        let bytes = fs::read(prepared.join(good)).unwrap();
        // Other names leave the good files good.
        let bad = match good.rsplit_once('.').unwrap() {
            ("run/checkpoint", _) => (*good).to_owned(),
            (_, extension) => format!("bad.{extension}"),
        };
        for copy in 0..COPIES {
            let reader = readers[copy % readers.len()];
            let damaged = damaged(&bytes, copy / readers.len(), random);
            let file = Path::new(&bad).file_name().unwrap().to_str().unwrap();
            cases.push(Case::new(reading(reader, &bad), &[file]).with(&bad, damaged));
        }
    }
    cases
}

fn reading(reader: &[&str], file: &str) -> Vec<String> {
    let small: Vec<_> = match reader[0] {
        // What is in the file is of interest, so it is not measured anew.
        "rok" => small("rok").into_iter().filter(|argument| *argument != "--fresh").collect(),
        command @ ("train" | "compare") => small(command),
        command => vec![command],
    };
    let given = &reader[1..];
    let flag = |argument: &str| argument.split('=').next().unwrap_or_default().to_owned();
    let replaced = |argument: &str| given.iter().any(|given| flag(given) == flag(argument));
    let kept = small.into_iter().filter(|argument| !replaced(argument));
    kept.chain(given.iter().copied()).map(|argument| argument.replace("FILE", file)).collect()
}

/// What takes the place of a file of another shape.
const SHAPES: &[&str] = &[
    "",
    "\n",
    "null",
    "[]",
    "{}",
    "0",
    "\"text\"",
    "[[[[[[[[",
    "{\"of\":1,\"batch\":2,\"profile\":3}",
    "# {}\n",
    "# {\"title\":\"x\",\"settings\":{}}\n\n",
    "# {\"title\":\"x\",\"settings\":{}}\na,b\n1,2,3\n",
    "= = =\n",
    "layers = 99999999999999999999\n",
    "\u{feff}{}",
];

/// A damaged copy; the first are of every shape, and then they are drawn.
fn damaged(bytes: &[u8], number: usize, random: &mut Random) -> Vec<u8> {
    if let Some(shape) = SHAPES.get(number) {
        return shape.as_bytes().to_vec();
    }
    if number == SHAPES.len() {
        return b"[".repeat(200_000);
    }
    let text = std::str::from_utf8(bytes).ok();
    let parsed = text.and_then(|text| serde_json::from_str::<Value>(text).ok());
    match (random.below(8), parsed, text) {
        (0, ..) => bytes[..random.below(bytes.len())].to_vec(),
        (1, ..) => {
            let length = random.below(4096);
            random.bytes(length)
        }
        (2, None, None) => flipped(bytes, random),
        (_, Some(mut value), _) => {
            for _ in 0..=random.below(3) {
                change(&mut value, random);
            }
            value.to_string().into_bytes()
        }
        (_, None, Some(text)) if text.len() < 1 << 16 => with_other_number(text, random).into_bytes(),
        _ => flipped(bytes, random),
    }
}

/// With some bytes changed, most of them near the beginning, where a binary file has its sizes.
fn flipped(bytes: &[u8], random: &mut Random) -> Vec<u8> {
    let mut flipped = bytes.to_vec();
    for _ in 0..=random.below(4) {
        let end = *random.of(&[8, 512, flipped.len()]);
        let place = random.below(end.min(flipped.len()));
        flipped[place] = random.next() as u8;
    }
    flipped
}

/// With one of the numbers in a text replaced.
fn with_other_number(text: &str, random: &mut Random) -> String {
    let starts: Vec<_> = text.match_indices(|c: char| c.is_ascii_digit()).map(|(place, _)| place).collect();
    let Some(&start) = starts.get(random.below(starts.len().max(1))) else { return text.replace('o', "\0") };
    let length = text[start..].find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len() - start);
    let numbers = [NUMBERS, &["1048576", "16777216", "9223372036854775807", "7"]].concat();
    format!("{}{}{}", &text[..start], random.of(&numbers), &text[start + length..])
}

/// Changes one value somewhere in a JSON document.
fn change(document: &mut Value, random: &mut Random) {
    let others = [
        json!(null),
        json!(0),
        json!(-1),
        json!(1),
        json!(7),
        json!(0.5),
        json!(u64::MAX),
        json!(i64::MAX),
        json!(u64::from(u32::MAX)),
        json!(1_u64 << 60),
        json!(1e300),
        json!(-1e300),
        json!(1e-300),
        json!("text"),
        json!([]),
        json!({}),
        json!(true),
    ];
    let mut places = Vec::new();
    collect(document, String::new(), &mut places);
    let place = random.of(&places).clone();
    let value = document.pointer_mut(&place).unwrap();
    match value {
        Value::Array(items) if !items.is_empty() && random.below(4) > 0 => {
            let index = random.below(items.len());
            match random.below(4) {
                0 => drop(items.remove(index)),
                1 => items.truncate(index),
                2 => items.reverse(),
                _ => items.extend(items.clone()),
            }
        }
        Value::Object(fields) if !fields.is_empty() && random.below(4) > 0 => {
            let key = random.of(&fields.keys().cloned().collect::<Vec<_>>()).clone();
            drop(fields.remove(&key));
        }
        Value::Number(number) if random.below(2) == 0 => {
            // Another number of the same kind goes further than one that no field takes.
            let numbers: Vec<_> = others
                .into_iter()
                .filter(|other| if number.is_f64() { other.is_number() } else { other.is_u64() })
                .collect();
            *value = random.of(&numbers).clone();
        }
        _ => *value = random.of(&others).clone(),
    }
}

/// The JSON pointers of all values, the document itself among them.
fn collect(value: &Value, place: String, places: &mut Vec<String>) {
    match value {
        Value::Array(items) => {
            items
                .iter()
                .enumerate()
                .for_each(|(index, item)| collect(item, format!("{place}/{index}"), places));
        }
        Value::Object(fields) => fields.iter().for_each(|(key, item)| {
            let key = key.replace('~', "~0").replace('/', "~1");
            collect(item, format!("{place}/{key}"), places);
        }),
        _ => {}
    }
    places.push(place);
}

#[test]
fn what_is_wrong_is_named_by_its_argument() {
    let place = workplace();
    let wrong: &[(&str, &[u8], &str)] = &[
        ("train", b"--tokens=\xff", "\"--tokens=\\xFF\""),
        ("plan", b"--require-direct", "--require-direct"),
        ("rok", b"--spill-dir=\xff", "--spill-dir"),
        ("train", b"--min-lr=7", "--min-lr"),
        ("train", b"--warmup-steps=7", "--warmup-steps"),
        ("io", b"--depth=4096", "--depth"),
    ];
    for (command, argument, expected) in wrong {
        let flag = argument.split(|&byte| byte == b'=').next().unwrap();
        let argument = OsString::from_vec(argument.to_vec());
        let mut arguments = with_argument(command, std::str::from_utf8(flag).unwrap_or_default(), argument);
        if *command == "io" {
            // More than the limit of `bench`, whatever the machine has.
            arguments.retain(|argument| argument != "--io-bytes=4KiB");
        }
        let output = bench(place.path(), &arguments);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(
            matches!(output.status.code(), Some(1 | 2)) && stderr.contains(expected),
            "{arguments:?}: {stderr}"
        );
    }
}

#[test]
fn a_sample_of_bad_arguments_is_refused_or_obeyed() {
    let (place, mut random) = (prepared(), Random::seeded(1));
    let cases = bad_arguments(&mut random);
    try_all(place.path(), random.sample(cases, SAMPLE));
}

#[test]
fn a_sample_of_combined_flags_is_refused_or_obeyed() {
    let (place, mut random) = (prepared(), Random::seeded(2));
    let cases = combinations(&mut random, SAMPLE / 2);
    try_all(place.path(), cases);
}

#[test]
fn a_sample_of_damaged_files_is_refused_or_read() {
    let (place, mut random) = (prepared(), Random::seeded(3));
    let cases = damaged_files(place.path(), &mut random);
    try_all(place.path(), random.sample(cases, SAMPLE));
}

#[test]
#[ignore = "takes minutes"]
fn all_bad_arguments_are_refused_or_obeyed() {
    let (place, mut random) = (prepared(), Random::seeded(1));
    try_all(place.path(), bad_arguments(&mut random));
}

#[test]
#[ignore = "takes minutes"]
fn many_combined_flags_are_refused_or_obeyed() {
    let (place, mut random) = (prepared(), Random::seeded(2));
    try_all(place.path(), combinations(&mut random, COMBINATIONS));
}

#[test]
#[ignore = "takes minutes"]
fn all_damaged_files_are_refused_or_read() {
    let (place, mut random) = (prepared(), Random::seeded(3));
    let cases = damaged_files(place.path(), &mut random);
    try_all(place.path(), cases);
}
