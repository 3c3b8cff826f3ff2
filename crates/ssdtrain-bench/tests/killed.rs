//! Trainings that are killed at any moment leave nothing behind but their checkpoints.
//!
//! What runs by default is a sample; the tests that are ignored by default kill a hundred of each kind.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::workplace;
use rustix::fs::statvfs;
use ssdtrain::{MIB, Offload, TensorCache};
use ssdtrain_models::Checkpoint;
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

/// How many of each kind are killed by default, and how many where all are.
const SAMPLE: u32 = 5;
const ALL: u32 = 100;
/// How large the file system is that the victims spill to. It is a sparse file.
const DISK: u64 = 2 << 30;
/// How long the kernel may take to give the space of a killed process back.
const PATIENCE: Duration = Duration::from_secs(60);

/// Moves tens of megabytes in each step, and saves a checkpoint after each.
const TRAIN: &[&str] = &[
    "train",
    "--data=text.txt",
    "--layers=2",
    "--hidden=64",
    "--heads=2",
    "--block=64",
    "--batch=32",
    "--min-bytes=4KiB",
    "--tokens=bytes",
    "--threads=1",
    "--steps=12",
    "--eval-every=1",
    "--eval-tokens=512",
    "--compare-steps=0",
    "--sample-tokens=0",
    "--device-budget=0",
    "--keep-last=0",
    "--spill-dir=spill",
    "--out=run",
];
/// The same steps without and with the cache, one after the other.
const COMPARE: &[&str] = &[
    "compare",
    "--data=text.txt",
    "--layers=2",
    "--hidden=64",
    "--heads=2",
    "--block=64",
    "--batch=32",
    "--min-bytes=4KiB",
    "--tokens=bytes",
    "--threads=1",
    "--steps=2",
    "--warmup=0",
    "--strategies=keep,offload,auto",
    "--device-budget=0",
    "--keep-last=0",
    "--overhead=1e9",
    "--spill-dir=spill",
];

/// What a training leaves in the directory of its run.
const CHECKPOINTS: [&str; 4] = [
    "checkpoint.safetensors",
    "best-checkpoint.safetensors",
    "previous-checkpoint.safetensors",
    "previous-best-checkpoint.safetensors",
];

/// The directory in which [`trains_with_a_host_pool`] is to spill.
const POOLED: &str = "KILLED_POOLED";

#[derive(Clone, Copy)]
enum Victim {
    Train,
    /// The same, with what it spills encrypted.
    Encrypted,
    Compare,
    Pooled,
}

impl Victim {
    /// Starts it in a directory that has `text.txt` and `spill`.
    fn start(self, directory: &Path) -> Child {
        let (program, arguments): (PathBuf, &[&str]) = match self {
            Victim::Train | Victim::Encrypted => (env!("CARGO_BIN_EXE_ssdtrain-bench").into(), TRAIN),
            Victim::Compare => (env!("CARGO_BIN_EXE_ssdtrain-bench").into(), COMPARE),
            Victim::Pooled => (env::current_exe().unwrap(), &["--exact", "trains_with_a_host_pool"]),
        };
        let mut command = Command::new(program);
        command.args(arguments).current_dir(directory).env("TMPDIR", directory.join("temporary"));
        command.env("SSDTRAIN_STATE", "off");
        match self {
            Victim::Train | Victim::Compare => {}
            Victim::Encrypted => drop(command.arg("--encrypt")),
            Victim::Pooled => drop(command.env(POOLED, directory.join("spill"))),
        }
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }
}

/// Kills a victim `count` times, each later than the one before, from its start to its end, and looks for what is left.
fn kill(victim: Victim, count: u32) {
    let place = workplace();
    let directory = &place.path().canonicalize().unwrap();
    for folder in ["spill", "temporary"] {
        fs::create_dir(directory.join(folder)).unwrap();
    }
    let spill = directory.join("spill");
    // Elsewhere others take and free space too.
    let disk = Disk::mount(&spill).inspect_err(|why| println!("the space is not looked at: {why}")).ok();
    let start = Instant::now();
    assert!(victim.start(directory).wait().unwrap().success());
    let whole = start.elapsed();
    let free_before = disk.as_ref().map(|_| free(&spill));
    let (mut killed, mut spilling) = (0, 0);
    for number in 0..=count {
        let mut child = victim.start(directory);
        if number < count {
            // Any moment will do, so this is not a wait for something to happen.
            std::thread::sleep(moment(whole, number, count));
        } else {
            // The last one has its spill files open, however busy the processors are.
            while still_open(&spill).is_empty() {
                assert!(child.try_wait().unwrap().is_none(), "it ended before a spill file was seen");
            }
        }
        spilling += u32::from(!still_open(&spill).is_empty());
        child.kill().unwrap();
        let status = child.wait().unwrap();
        assert!(status.signal() == Some(9) || status.success(), "{status}");
        killed += u32::from(!status.success());
        nothing_is_left(directory, child.id());
        if let Some(before) = free_before {
            let start = Instant::now();
            while free(&spill) != before {
                let now = free(&spill);
                assert!(start.elapsed() < PATIENCE, "{before} bytes were free, and now {now}");
            }
        }
    }
    println!("{killed} killed, {spilling} of them with spill files open, in runs of {whole:?}");
    if let Victim::Train = victim {
        kill_during_a_save(directory);
    }
}

/// A file system in a directory of its own, until it is dropped: on others, more than the victims take and free space.
struct Disk {
    directory: PathBuf,
    device: String,
    /// The folder of the file below it.
    _image: TempDir,
}

impl Disk {
    /// The error says why it cannot be had here.
    fn mount(directory: &Path) -> Result<Disk, String> {
        let place = workplace();
        let image = place.path().join("image");
        File::create(&image).and_then(|file| file.set_len(DISK)).map_err(|error| error.to_string())?;
        run(Command::new("mkfs.ext4").args(["-q", "-F", "-O", "^has_journal", "-m", "0"]).arg(&image))?;
        let device = run(Command::new("losetup").args(["--find", "--show"]).arg(&image))?;
        let disk = Disk { directory: directory.to_owned(), device, _image: place };
        run(Command::new("mount").arg(&disk.device).arg(directory))?;
        fs::remove_dir(directory.join("lost+found")).map_err(|error| error.to_string())?;
        Ok(disk)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // What was not mounted is not to be unmounted.
        run(Command::new("umount").arg("--lazy").arg(&self.directory)).ok();
        run(Command::new("losetup").arg("--detach").arg(&self.device)).ok();
    }
}

/// Runs a program. Returns what it prints, or why it has failed.
fn run(command: &mut Command) -> Result<String, String> {
    let shown = command.get_program().display().to_string();
    let output = command.output().map_err(|error| format!("{shown}: {error}"))?;
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() {
        Ok(said(&output.stdout))
    } else {
        Err(format!("{shown}: {}", said(&output.stderr)))
    }
}

/// Kills a training while it writes a checkpoint: nothing is left but files of known names, and those that were not finished
/// are gone after the next one.
fn kill_during_a_save(directory: &Path) {
    let others = || {
        let names = names(&directory.join("run")).into_iter().map(|name| name.into_string().unwrap());
        names.filter(|name| !CHECKPOINTS.contains(&name.as_str())).collect::<Vec<_>>()
    };
    // A save may be over by the time that it is killed, so this may take several.
    while others().is_empty() {
        let mut child = Victim::Train.start(directory);
        while others().is_empty() && child.try_wait().unwrap().is_none() {}
        child.kill().unwrap();
        child.wait().unwrap();
        let unfinished = format!(".{}.unfinished", child.id());
        let known = others()
            .iter()
            .all(|name| name.strip_suffix(&unfinished).is_some_and(|name| CHECKPOINTS.contains(&name)));
        assert!(known, "{:?}", others());
    }
    assert!(Victim::Train.start(directory).wait().unwrap().success());
    assert!(others().is_empty(), "{:?}", others());
}

/// When to kill: spread over a run, each at random in its part of it.
fn moment(whole: Duration, number: u32, count: u32) -> Duration {
    let drawn = RandomState::new().build_hasher().finish() as f64 / u64::MAX as f64;
    whole.mul_f64((f64::from(number) + drawn) / f64::from(count))
}

/// Neither files nor memory of a process that is gone.
fn nothing_is_left(directory: &Path, process: u32) {
    for folder in ["spill", "temporary"] {
        let left = names(&directory.join(folder));
        assert!(left.is_empty(), "in {folder}: {left:?}");
    }
    // The text and the two folders; the rest is what the run is for, and a checkpoint that was being written, until the next one is.
    for name in names(directory) {
        let known = ["text.txt", "spill", "temporary", "run"].into_iter().any(|known| name == known);
        assert!(known, "{name:?}");
    }
    let process = process.to_string();
    for name in names(Path::new("/dev/shm")) {
        let name = name.to_string_lossy();
        assert!(!name.contains("ssdtrain") && !name.contains(&process), "/dev/shm/{name}");
    }
    let held = still_open(directory);
    assert!(held.is_empty(), "{held:?}");
    for name in CHECKPOINTS {
        let path = directory.join("run").join(name);
        if path.exists() {
            Checkpoint::open(&path).unwrap();
        }
    }
}

/// The files in this directory, deleted ones too, that some process has open: their space is not free.
fn still_open(directory: &Path) -> Vec<PathBuf> {
    let processes =
        names(Path::new("/proc")).into_iter().map(|process| Path::new("/proc").join(process).join("fd"));
    let open = processes.filter(|folder| folder.is_dir()).flat_map(|folder| {
        let files = names(&folder);
        files.into_iter().filter_map(move |file| fs::read_link(folder.join(file)).ok())
    });
    open.filter(|file| file.starts_with(directory)).collect()
}

/// The names in a directory; none if it is not there, or no longer.
fn names(directory: &Path) -> Vec<OsString> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    entries.filter_map(|entry| Some(entry.ok()?.file_name())).collect()
}

/// Bytes that are free on the directory's file system.
fn free(directory: &Path) -> u64 {
    let space = statvfs(directory).unwrap();
    space.f_bavail * space.f_frsize
}

/// What is killed, in a process of its own: on a CPU, only a simulated device has a host pool.
#[test]
fn trains_with_a_host_pool() {
    let Some(directory) = env::var_os(POOLED) else { return };
    tch::set_num_threads(1);
    let vs = nn::VarStore::new(Device::Cpu);
    let layers = (0..6).fold(nn::seq(), |layers, layer| {
        layers
            .add(nn::linear(vs.root() / layer, 256, 256, nn::LinearConfig::default()))
            .add_fn(|x| x.gelu("none"))
    });
    let cache = TensorCache::builder()
        .parameters(&vs)
        .spill_to(directory)
        .simulated_device(Duration::ZERO)
        .host_pool(8 * MIB)
        .policy(Offload::default().device_budget(0).keep_last(0))
        .build()
        .unwrap();
    let input = Tensor::randn([1024, 256], (Kind::Float, Device::Cpu));
    let mut moved = 0;
    for _ in 0..4 {
        let step = cache.step();
        let loss = layers.forward(&input).sum(Kind::Float);
        step.backward(&loss).unwrap();
        moved += step.finish().unwrap().offloaded.bytes;
    }
    assert!(moved > 8 * MIB, "{moved} bytes have been moved");
}

#[test]
fn a_training_that_is_killed_leaves_nothing() {
    kill(Victim::Train, SAMPLE);
}

#[test]
fn an_encrypted_training_that_is_killed_leaves_nothing() {
    kill(Victim::Encrypted, SAMPLE);
}

#[test]
fn a_comparison_that_is_killed_leaves_nothing() {
    kill(Victim::Compare, SAMPLE);
}

#[test]
fn a_training_with_a_host_pool_that_is_killed_leaves_nothing() {
    kill(Victim::Pooled, SAMPLE);
}

#[test]
#[ignore = "takes minutes"]
fn a_hundred_trainings_that_are_killed_leave_nothing() {
    kill(Victim::Train, ALL);
}

#[test]
#[ignore = "takes minutes"]
fn a_hundred_encrypted_trainings_that_are_killed_leave_nothing() {
    kill(Victim::Encrypted, ALL);
}

#[test]
#[ignore = "takes minutes"]
fn a_hundred_comparisons_that_are_killed_leave_nothing() {
    kill(Victim::Compare, ALL);
}

#[test]
#[ignore = "takes minutes"]
fn a_hundred_trainings_with_a_host_pool_that_are_killed_leave_nothing() {
    kill(Victim::Pooled, ALL);
}
