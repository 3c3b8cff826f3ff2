//! A sweep over faults of the device: whichever call of it fails, or whenever a spill file does not grow, gradients have
//! the bits of a training without a cache, or backward is an error that names the cause; and training goes on afterwards.
//!
//! The device is the simulated one, or, in the tests that `cargo x gpu-test` runs, a GPU. Each training is repeated with
//! a fault in its first, second, third, ... call of a
//! kind, until one runs to its end without reaching the fault. By default a sample of these trainings runs. All of them,
//! more than half a million, take longer than nextest allows. A call's name instead of `all` runs those with faults of
//! that call, and a number one in so many of all:
//!
//! ```sh
//! SSDTRAIN_FAULTS=all cargo test --test device_faults -- --nocapture --test-threads 1
//! ```
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use common::assert_nothing_held;
use common::sweep::{MISSES, Model, PLACINGS, Placing, Setting, TIMES, TOO_LONG, check, panics, watchdog};
use parking_lot::{Mutex, MutexGuard};
use ssdtrain::store::{BLOCK, Faulty, Pool, Store, StoreConfig};
use ssdtrain::{
    BackendKind, DeviceCall, DeviceFaults, Error, ErrorKind, IoPath, MIB, TensorCache, TensorCacheBuilder,
};
use ssdtrain_libtorch as torch;
use tch::Device;

#[test]
fn a_host_pool_above_the_disk() {
    sweep(Way { name: "host pool", set: |it| it.host_pool(SMALLEST_POOL), ..WAY });
}

#[test]
fn a_host_pool_above_the_disk_while_memory_is_short() {
    sweep(Way {
        name: "host pool, short of memory",
        set: |it| it.host_pool(SMALLEST_POOL),
        pressed: 5,
        ..WAY
    });
}

#[test]
fn a_host_pool_that_grows_with_what_is_needed() {
    sweep(Way { name: "growing pool", set: |it| it.read_ahead(0), ..WAY });
}

#[test]
fn a_host_pool_alone() {
    sweep(Way { name: "host pool alone", set: |it| it.host_pool(2 * SMALLEST_POOL), has_disk: false, ..WAY });
}

#[test]
fn a_pool_that_only_stages() {
    sweep(Way { name: "staging pool", set: |it| it.host_pool(0).least_staging(SMALLEST_POOL), ..WAY });
}

#[test]
fn straight_from_a_device_to_the_disk() {
    sweep(Way { name: "straight to the disk", set: |it| it.path(IoPath::Direct), ..WAY });
}

mod on_a_gpu {
    use super::*;

    /// Pinned anew for each training: the least that a pool has which only stages is 256 MiB on a GPU.
    const SLOW: usize = 5 * SAMPLE;

    #[test]
    #[ignore = "needs a GPU"]
    fn a_host_pool_above_the_disk() {
        sweep(Way { name: "GPU, host pool", set: |it| it.host_pool(SMALLEST_POOL), ..GPU });
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn a_host_pool_that_grows_with_what_is_needed() {
        sweep(Way { name: "GPU, growing pool", set: |it| it.read_ahead(0), sample: SLOW, ..GPU });
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn a_host_pool_alone() {
        let set = |it: TensorCacheBuilder| it.host_pool(2 * SMALLEST_POOL);
        sweep(Way { name: "GPU, host pool alone", set, has_disk: false, ..GPU });
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn a_pool_that_only_stages() {
        sweep(Way { name: "GPU, staging pool", set: |it| it.host_pool(0), sample: SLOW, ..GPU });
    }
}

/// One of so many trainings runs by default. A prime, so that the sample is spread over everything.
const SAMPLE: usize = 1_499;

/// The least that a pool takes: a huge page. That is room for 32 small storages, and three layers save more.
const SMALLEST_POOL: u64 = 2 * MIB;

/// Where the bytes of saved tensors go.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    set: Setting,
    has_disk: bool,
    /// One in so many allocations is told that there is no memory; 0 for none.
    pressed: u64,
    /// One of so many trainings runs by default.
    sample: usize,
    device: Device,
}

const WAY: Way =
    Way { name: "", set: |it| it, has_disk: true, pressed: 0, sample: SAMPLE, device: Device::Cpu };
/// A GPU cannot be stopped. Kernels of reruns would be compiled anew for each cache, and are left out.
const GPU: Way = Way { device: Device::Cuda(0), ..WAY };

/// What a training is done with, but for its fault.
#[derive(Clone, Copy)]
struct Setup {
    way: Way,
    placing: Placing,
}

/// The `times` calls that come after the first `skip` fail.
#[derive(Clone, Copy, Debug)]
struct Failing {
    call: Call,
    skip: u64,
    times: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Call {
    Device(DeviceCall),
    /// Calls of any kind.
    Any,
    /// A spill file grows.
    Grow,
    /// The device does something of what is queued on its lanes. It does not fail, but does nothing any more.
    Proceed,
}

const CALLS: [Call; DeviceCall::ALL.len() + 3] = {
    let mut calls = [Call::Any; DeviceCall::ALL.len() + 3];
    let mut of_device = 0;
    while of_device < DeviceCall::ALL.len() {
        calls[of_device] = Call::Device(DeviceCall::ALL[of_device]);
        of_device += 1;
    }
    calls[of_device + 1] = Call::Grow;
    calls[of_device + 2] = Call::Proceed;
    calls
};

/// What can be made to fail.
struct Parts {
    device: Arc<DeviceFaults>,
    disk: Option<Arc<Faulty>>,
}

impl Parts {
    fn inject(&self, Failing { call, skip, times }: Failing) {
        match call {
            Call::Device(call) => self.device.inject(Some(call), skip, times),
            Call::Any => self.device.inject(None, skip, times),
            Call::Grow => self.disk.iter().for_each(|disk| disk.refuse_growth(libc::ENOSPC, skip, times)),
            Call::Proceed => self.device.stop_after(skip),
        }
    }

    fn calls(&self, call: Call) -> u64 {
        match call {
            Call::Device(call) => self.device.calls(Some(call)),
            Call::Any => self.device.calls(None),
            Call::Grow => self.disk.as_ref().map_or(0, |disk| disk.growths()),
            Call::Proceed => self.device.begun(),
        }
    }

    fn heal(&self) {
        self.device.heal();
        self.disk.iter().for_each(|disk| disk.heal());
    }
}

impl Failing {
    fn all() -> impl Iterator<Item = Failing> {
        let all = CALLS.into_iter().flat_map(|call| TIMES.map(|times| Failing { call, skip: 0, times }));
        all.filter(|failing| failing.call != Call::Proceed || failing.times == u64::MAX)
    }

    /// The kind and the words of the error that backward may return; `None` if gradients have to be right.
    ///
    /// What cannot leave the device stays, and so does what others could use too soon if it left; only what backward runs again cannot
    /// go on then. Memory that is not pinned, a file that does not grow, an event that seems not to be reached, and a time that is not
    /// known are no reasons to fail.
    fn error(&self, error: &Error) -> Option<(ErrorKind, String)> {
        use DeviceCall::{Allocate, BlockUnlessLate, CopyOut, Pin, Query, Synchronize, Time};
        let kind = match self.call {
            Call::Device(BlockUnlessLate | CopyOut | Pin | Query | Synchronize | Time) | Call::Grow => {
                return None;
            }
            // As libtorch's own.
            Call::Device(Allocate) => ErrorKind::Torch,
            Call::Any if error.to_string().contains("Allocate:") => ErrorKind::Torch,
            Call::Device(_) | Call::Any => ErrorKind::Device,
            Call::Proceed => return Some((ErrorKind::TimedOut, "the device has not done".to_owned())),
        };
        Some((kind, DeviceFaults::WORDS.to_owned()))
    }
}

impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.way.name, self.placing.name)
    }
}

impl Way {
    fn is_gpu(&self) -> bool {
        self.device.is_cuda()
    }
}

/// No other test uses the GPU at the same time: peaks and random numbers belong to the process. Without one the test fails.
fn alone(device: Device) -> Option<MutexGuard<'static, ()>> {
    static ALONE: Mutex<()> = Mutex::new(());
    device.is_cuda().then(|| {
        let alone = ALONE.lock();
        torch::load_cuda().unwrap();
        torch::make_deterministic().unwrap();
        alone
    })
}

/// Runs the trainings of this way, with every policy, fault and place of the fault.
fn sweep(way: Way) {
    let chosen = std::env::var("SSDTRAIN_FAULTS").unwrap_or_default();
    let sample = chosen.parse().ok();
    let _alone = alone(way.device);
    let (model, watchdog) = (Model::on(way.device, 3), watchdog());
    let mut tally = Tally::default();
    for placing in PLACINGS {
        let setup = Setup { way, placing };
        let usual = train(&model, &setup, None, &watchdog);
        for failing in Failing::all().filter(|failing| !way.is_gpu() || failing.call != Call::Proceed) {
            let all =
                chosen == "all" || format!("{:?}", failing.call).contains(&chosen) && !chosen.is_empty();
            if !(all || chosen.is_empty() || sample.is_some()) {
                continue;
            }
            let (mut skip, mut misses) = (0, 0);
            while misses < MISSES {
                let failing = Failing { skip, ..failing };
                tally.possible += 1;
                let is_reached = if all || tally.possible.is_multiple_of(sample.unwrap_or(way.sample)) {
                    let trained = train(&model, &setup, Some(failing), &watchdog);
                    tally.count(&trained, failing);
                    trained.reaches(failing)
                } else {
                    usual.reaches(failing)
                };
                misses = if is_reached { 0 } else { misses + 1 };
                skip += 1;
            }
        }
        println!("{setup}: {tally:?}");
    }
    assert!(tally.errors > 0 && tally.reached > tally.trainings / 2, "{tally:?}");
}

/// Numbers of trainings.
#[derive(Debug, Default)]
struct Tally {
    possible: usize,
    trainings: usize,
    /// Those with a call that failed.
    reached: usize,
    right: usize,
    errors: usize,
}

impl Tally {
    fn count(&mut self, trained: &Trained, failing: Failing) {
        self.trainings += 1;
        self.reached += usize::from(trained.reaches(failing));
        self.right += usize::from(!trained.erred);
        self.errors += usize::from(trained.erred);
    }
}

struct Trained {
    /// How many calls of each kind there were in all steps.
    calls: [u64; CALLS.len()],
    /// Whether a step ended in an error.
    erred: bool,
}

impl Trained {
    /// Whether the first call that was to fail was made.
    fn reaches(&self, Failing { call, skip, .. }: Failing) -> bool {
        CALLS.iter().zip(self.calls).any(|(of, calls)| *of == call && calls > skip)
    }
}

/// Some steps with a fault and then one without, and everything that is promised of them. Between two steps host memory and disk are
/// given back, so that each takes them anew.
fn train(model: &Model, setup: &Setup, failing: Option<Failing>, watchdog: &Sender<String>) -> Trained {
    let what = failing.map_or_else(|| setup.to_string(), |failing| format!("{setup}: {failing:?}"));
    watchdog.send(what.clone()).unwrap();
    let before = panics();
    let (parts, cache) = open(setup);
    let begun = CALLS.map(|call| parts.calls(call));
    failing.into_iter().for_each(|failing| parts.inject(failing));
    let step = |name: &str, number: usize| {
        torch::press_cpu_memory(setup.way.pressed);
        let outcome = model.step(&format!("{what}, {name} {number}"), &cache, number);
        torch::press_cpu_memory(0);
        outcome
    };
    let mut erred = false;
    for number in 0..setup.placing.steps {
        if let Err(error) = step("step", number) {
            check(&what, &error, failing.and_then(|failing| failing.error(&error)));
            erred = true;
        }
        cache.pause();
    }
    let mut calls = CALLS.map(|call| parts.calls(call));
    calls.iter_mut().zip(begun).for_each(|(calls, begun)| *calls -= begun);
    let trained = Trained { calls, erred };
    parts.heal();
    for number in 0..2 {
        let healed = step("healed", number);
        assert!(healed.is_ok(), "{what}, healed: {}", healed.unwrap_err());
    }
    // Autograd's thread for a GPU may hold the end of a graph a little longer.
    let start = Instant::now();
    while setup.way.is_gpu() && cache.held().entries > 0 && start.elapsed() < TOO_LONG / 2 {
        thread::yield_now();
    }
    assert_nothing_held(&cache);
    assert_eq!(panics(), before, "{what}: a thread has panicked");
    trained
}

/// A cache on a device, and over a store, whose calls fail on request.
fn open(Setup { way, placing }: &Setup) -> (Parts, TensorCache) {
    let device = Arc::new(DeviceFaults::default());
    let builder = (placing.set)(TensorCache::builder().min_bytes(0));
    let builder = match way.is_gpu() {
        true => builder.device(way.device).fuse_reruns(false),
        false => builder.simulated_device(Duration::ZERO),
    };
    let builder = (way.set)(builder).device_faults(&device);
    if !way.has_disk {
        return (Parts { device, disk: None }, builder.build().unwrap());
    }
    let disk = Arc::new(Faulty::new(Arc::new(Pool::new(2).unwrap())));
    let config = StoreConfig {
        directories: vec![std::env::temp_dir()],
        backend: BackendKind::Pool,
        cap_bytes: 8 * MIB,
        stripe_bytes: 4 * BLOCK,
        io_bytes: 8 * BLOCK,
        ..StoreConfig::default()
    };
    let store = Store::open_with(config, Arc::clone(&disk) as _).unwrap();
    (Parts { device, disk: Some(disk) }, TensorCache::with_store(builder, store).unwrap())
}
