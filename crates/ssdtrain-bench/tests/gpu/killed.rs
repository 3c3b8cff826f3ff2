//! A training that is killed leaves nothing behind: no memory of the GPU, none of the host, pinned or not, and no spill file.

use std::env;
use std::fs;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ssdtrain::{MIB, Offload};
use ssdtrain_libtorch::CudaDevice;
use tch::Kind;

use crate::lab::{Lab, leaf};

on_the_gpu_only!(what_a_killed_training_had_is_free_again, trains_until_it_is_killed);

/// How many are killed: half of them at any moment, and half while they move tensors.
const VICTIMS: u32 = 10;
/// The longest that a training needs to begin, by far.
const TOO_LONG: Duration = Duration::from_secs(60);
/// The pinned memory of a training, in bytes. Others on the machine take and give back less meanwhile.
const POOL: u64 = 2048 * MIB;
/// So many pages more may be pinned than before: the driver pins some for the process that looks, too. A pool has half a million.
const FEW_PAGES: i64 = 1000;
/// The directory in which [`trains_until_it_is_killed`] is to spill.
const SPILLS_TO: &str = "KILLED_ON_A_GPU";

fn what_a_killed_training_had_is_free_again(_lab: &Lab) {
    let place = tempfile::tempdir().unwrap();
    let place = &place.path().canonicalize().unwrap();
    let (mut killed, mut moving) = (0, 0);
    let before = Free::now();
    for number in 0..VICTIMS {
        let mut victim = start(place);
        let begun = Instant::now();
        if number % 2 == 0 {
            thread::sleep(Duration::from_secs(8).mul_f64(drawn()));
        } else {
            while spill_files(&victim, place) == 0 {
                assert!(begun.elapsed() < TOO_LONG, "it does not begin to move tensors");
                assert!(victim.try_wait().unwrap().is_none(), "it ended by itself");
            }
            thread::sleep(Duration::from_secs(2).mul_f64(drawn()));
        }
        moving += u32::from(spill_files(&victim, place) > 0);
        victim.kill().unwrap();
        let status = victim.wait().unwrap();
        killed += u32::from(status.signal() == Some(9));
        assert_eq!(fs::read_dir(place).unwrap().count(), 0, "a file is left");
        before.assert_again();
    }
    println!("{killed} killed, {moving} of them with spill files open; pinned pages are counted: {before:?}");
    assert!(killed == VICTIMS && moving >= VICTIMS / 2);
}

/// What is killed, in a process of its own.
fn trains_until_it_is_killed(lab: &Lab) {
    let Some(directory) = env::var_os(SPILLS_TO) else { return };
    let cache = lab
        .cache()
        .spill_to(directory)
        .host_pool(POOL)
        .policy(Offload::default().device_budget(1).prefetch(0))
        .build()
        .unwrap();
    let source = lab.randn(&[4096, 4096]);
    loop {
        let x = leaf(&source);
        let step = cache.step();
        // 64 storages of 64 MiB each.
        let loss = (0..64).fold(&x * 1.0, |y, _| (y * 1.01).sin()).sum(Kind::Float);
        step.backward(&loss).unwrap();
        let moved = step.finish().unwrap().offloaded.bytes;
        assert!(moved > POOL, "{moved} bytes have been moved");
    }
}

fn start(directory: &Path) -> Child {
    let this = "killed::only_on_the_gpu::trains_until_it_is_killed";
    let mut victim = Command::new(env::current_exe().unwrap());
    victim.args(["--exact", this, "--ignored"]).env(SPILLS_TO, directory).env("SSDTRAIN_STATE", "off");
    victim.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// A number from 0 to 1.
fn drawn() -> f64 {
    RandomState::new().build_hasher().finish() as f64 / u64::MAX as f64
}

/// How many files in `directory` a process has open, deleted ones too.
fn spill_files(process: &Child, directory: &Path) -> usize {
    let open = fs::read_dir(format!("/proc/{}/fd", process.id())).into_iter().flatten();
    let files = open.filter_map(|file| fs::read_link(file.ok()?.path()).ok());
    files.filter(|file| file.starts_with(directory)).count()
}

/// What is free, in bytes.
#[derive(Clone, Copy, Debug)]
struct Free {
    gpu: u64,
    host: u64,
    /// Pages that are pinned for devices, if the kernel tells.
    pinned: Option<i64>,
}

impl Free {
    fn now() -> Free {
        let of = |file: &str, name: &str| -> Option<i64> {
            let text = fs::read_to_string(file).ok()?;
            text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse().ok())
        };
        let vmstat = |name| of("/proc/vmstat", name);
        let host = of("/proc/meminfo", "MemAvailable:").expect("the kernel tells what is available");
        Free {
            gpu: CudaDevice::new(0).and_then(CudaDevice::free).unwrap(),
            host: u64::try_from(host).unwrap() << 10,
            pinned: vmstat("nr_foll_pin_acquired ")
                .zip(vmstat("nr_foll_pin_released "))
                .map(|(acquired, released)| acquired - released),
        }
    }

    /// Waits until as much is free again, but for what others take.
    fn assert_again(&self) {
        let start = Instant::now();
        loop {
            let now = Free::now();
            let is_again = now.gpu >= self.gpu
                && now.host + POOL / 2 >= self.host
                && now.pinned.zip(self.pinned).is_none_or(|(now, before)| now <= before + FEW_PAGES);
            if is_again {
                return;
            }
            assert!(start.elapsed() < TOO_LONG, "{self:?} was free, and now {now:?}");
            thread::sleep(Duration::from_millis(100));
        }
    }
}
