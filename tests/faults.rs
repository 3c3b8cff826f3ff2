//! A sweep over faults: whichever operation of the store fails, and however it does, gradients have the bits of a
//! training without a cache, or backward is an error that names the cause; and training goes on afterwards.
//!
//! Each training is repeated with a fault in its first, second, third, ... read or write, until one runs to its end
//! without reaching the fault. Or a disk vanishes from that operation on, one of several or all of them. By default a sample of
//! these trainings runs. All of them, more than 100,000, take half an hour or more, which is longer than nextest allows. A fault's
//! name instead of `all` runs those with that fault, as in `SSDTRAIN_FAULTS='Errno(5)'`, and `vanishes` those whose disks vanish.
//! `SSDTRAIN_PLACINGS` limits them to the policies whose names contain it:
//!
//! ```sh
//! SSDTRAIN_FAULTS=all cargo test --test faults -- --nocapture --test-threads 1
//! ```
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;

use std::fmt;
use std::io;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Once};
use std::time::Duration;

use common::assert_nothing_held;
use common::sweep::{MISSES, Model, PLACINGS, Placing, Setting, TIMES, check, panics, watchdog};
use ssdtrain::store::{BLOCK, Backend, Direction, Fault, Faulty, Pool, Store, StoreConfig, Uring};
use ssdtrain::{BackendKind, ErrorKind, IoPath, MIB, TensorCache, Verify};

#[test]
fn cpu_tensors_in_memory() {
    sweep(Way { name: "memory", ..CPU });
}

#[test]
fn cpu_tensors_striped_over_volumes() {
    sweep(Way { name: "three volumes", volumes: 3, sample: 2 * SAMPLE, ..CPU });
}

#[test]
fn cpu_tensors_in_a_file() {
    sweep(Way { name: "a file", in_file: true, sample: 5 * SAMPLE, ..CPU });
}

#[test]
fn cpu_tensors_that_are_encrypted() {
    sweep(Way { name: "encrypted", volumes: 2, encrypts: true, sample: 2 * SAMPLE, ..CPU });
}

#[test]
fn a_host_pool_above_the_disk() {
    let pool: Setting = |it| it.host_pool(SMALLEST_POOL);
    sweep(Way { name: "host pool", device: Some(pool), layers: 3, sample: 5 * SAMPLE, ..CPU });
}

#[test]
fn a_host_pool_above_an_encrypted_disk() {
    let pool: Setting = |it| it.host_pool(SMALLEST_POOL);
    let name = "host pool, encrypted";
    sweep(Way { name, device: Some(pool), layers: 3, encrypts: true, sample: 5 * SAMPLE, ..CPU });
}

#[test]
fn a_host_pool_above_several_disks() {
    let pool: Setting = |it| it.host_pool(SMALLEST_POOL);
    let name = "host pool, two volumes";
    sweep(Way { name, device: Some(pool), layers: 3, volumes: 2, sample: 10 * SAMPLE, ..CPU });
}

#[test]
fn a_pool_that_only_stages_above_the_disk() {
    let pool: Setting = |it| it.host_pool(0).least_staging(SMALLEST_POOL);
    sweep(Way { name: "staging pool", device: Some(pool), layers: 3, sample: 5 * SAMPLE, ..CPU });
}

#[test]
fn straight_from_a_device_to_the_disk() {
    let direct: Setting = |it| it.path(IoPath::Direct);
    let name = "straight to the disk";
    sweep(Way { name, device: Some(direct), verifies: false, volumes: 2, sample: 2 * SAMPLE, ..CPU });
}

/// One of so many trainings runs by default. A prime, so that the sample is spread over everything.
const SAMPLE: usize = 37;

/// The time limit of operations that never complete. All others have as much time as they need.
const LIMIT: Duration = Duration::from_millis(2);

/// The least that a host pool takes: a huge page. That is room for 32 small storages, and three layers save more.
const SMALLEST_POOL: u64 = 2 * MIB;

/// Where the bytes of saved tensors go, and which they are.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    /// The settings of a simulated device; `None` for CPU tensors.
    device: Option<Setting>,
    volumes: usize,
    /// In a spill file, or else in memory.
    in_file: bool,
    /// Whether checksums can be taken.
    verifies: bool,
    encrypts: bool,
    layers: usize,
    /// One of so many trainings runs by default.
    sample: usize,
}

/// CPU tensors, straight to the disk.
const CPU: Way = Way {
    name: "",
    device: None,
    volumes: 1,
    in_file: false,
    verifies: true,
    encrypts: false,
    layers: 1,
    sample: SAMPLE,
};

/// What a training is done with, but for its fault.
struct Setup {
    way: Way,
    placing: Placing,
    verify: Verify,
}

/// The `times` operations that come after the first `skip` of those fail.
#[derive(Clone, Copy, Debug)]
struct Failing {
    on: On,
    fault: Fault,
    skip: u64,
    times: u64,
}

/// Which operations are counted and fail.
#[derive(Clone, Copy, Debug)]
enum On {
    Reads,
    Writes,
    /// Those of both directions on this one disk. It does not come back.
    Disk(usize),
    /// The same on all disks.
    Disks,
}

impl Failing {
    /// All faults that a training can be expected to survive or to notice. With checksums, those that may change bytes or
    /// leave the checksums behind.
    fn all(way: Way, verify: Verify) -> Vec<Failing> {
        use On::{Reads, Writes};
        let (faults, vanishing): (Vec<_>, &[i32]) = if verify != Verify::Off {
            let faults =
                [(Reads, Fault::FlippedBit), (Reads, Fault::Errno(libc::EIO)), (Writes, Fault::Never)];
            (faults.into(), &[libc::EIO])
        } else {
            let both = |fault| [Writes, Reads].map(|on| (on, fault));
            let errnos = [libc::EIO, libc::EINTR, libc::EAGAIN].map(Fault::Errno);
            let faults = errnos.into_iter().flat_map(both).chain([(Writes, Fault::Errno(libc::ENOSPC))]);
            let others = [Fault::Short, Fault::Delayed(LIMIT), Fault::Never].into_iter().flat_map(both);
            (faults.chain(others).collect(), &[libc::EIO, libc::ENODEV, libc::ENXIO])
        };
        let times = |(on, fault)| TIMES.map(|times| Failing { on, fault, skip: 0, times });
        // The last of several disks, or all of them.
        let which = (way.volumes > 1).then_some(On::Disk(way.volumes - 1)).into_iter().chain([On::Disks]);
        let vanish = |on| {
            vanishing.iter().map(move |&code| Failing {
                on,
                fault: Fault::Errno(code),
                skip: 0,
                times: u64::MAX,
            })
        };
        faults.into_iter().flat_map(times).chain(which.flat_map(vanish)).collect()
    }

    /// What chooses it.
    fn name(&self) -> String {
        match self.on {
            On::Reads | On::Writes => format!("{:?}", self.fault),
            On::Disk(_) | On::Disks => "vanishes".to_owned(),
        }
    }

    fn inject(&self, backend: &Faulty) {
        let Failing { on, fault, skip, times } = *self;
        match (on, fault) {
            (On::Reads, _) => backend.inject(Direction::Read, fault, skip, times),
            (On::Writes, _) => backend.inject(Direction::Write, fault, skip, times),
            (On::Disk(disk), Fault::Errno(code)) => backend.vanish(Some(disk), code, skip),
            (On::Disks, Fault::Errno(code)) => backend.vanish(None, code, skip),
            (On::Disk(_) | On::Disks, _) => unreachable!("a disk vanishes with an error number"),
        }
    }

    /// The kind and the words of the error that backward may return; `None` if gradients have to be right.
    ///
    /// What cannot be written stays. A read is retried twice unless it was given up, and an operation that was interrupted
    /// a hundred times.
    fn error(&self) -> Option<(ErrorKind, String)> {
        let attempts = match self.fault {
            Fault::Errno(libc::EINTR | libc::EAGAIN) => 300,
            Fault::Never => 1,
            _ => 3,
        };
        if matches!(self.on, On::Writes) || self.times < attempts {
            return None;
        }
        match self.fault {
            Fault::Errno(code) => Some((ErrorKind::Io, io::Error::from_raw_os_error(code).to_string())),
            Fault::FlippedBit => Some((ErrorKind::Corrupt, "came back changed".to_owned())),
            Fault::Never => Some((ErrorKind::TimedOut, "the disk has not answered within".to_owned())),
            _ => None,
        }
    }

    /// Whether an operation has failed in this training.
    fn is_reached(&self, trained: &Trained) -> bool {
        let operations = match self.on {
            On::Reads => trained.operations[Direction::Read as usize],
            On::Writes => trained.operations[Direction::Write as usize],
            On::Disk(_) => trained.of_last_disk,
            On::Disks => trained.operations.iter().sum(),
        };
        operations > self.skip
    }

    /// Whether the store has to count it once it has happened.
    fn is_counted(&self) -> bool {
        match self.fault {
            Fault::Errno(libc::EINTR | libc::EAGAIN) => self.times == u64::MAX,
            Fault::Errno(_) | Fault::FlippedBit | Fault::Never => true,
            _ => false,
        }
    }
}

impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}, verify({:?})", self.way.name, self.placing.name, self.verify)
    }
}

/// Runs the trainings of this way, with every policy, fault and place of the fault.
fn sweep(way: Way) {
    let [chosen, placings] =
        ["SSDTRAIN_FAULTS", "SSDTRAIN_PLACINGS"].map(|name| std::env::var(name).unwrap_or_default());
    let (model, watchdog) = (Model::new(way.layers), watchdog());
    let mut tally = Tally::default();
    for placing in PLACINGS.into_iter().filter(|placing| placing.name.contains(&placings)) {
        for verify in [Verify::Off, Verify::Full].into_iter().take(1 + usize::from(way.verifies)) {
            let setup = Setup { way, placing, verify };
            let usual = train(&model, &setup, None, &watchdog);
            for failing in Failing::all(way, verify) {
                let all = chosen == "all" || failing.name() == chosen;
                if !(all || chosen.is_empty()) {
                    continue;
                }
                let (mut skip, mut misses) = (0, 0);
                while misses < MISSES {
                    let failing = Failing { skip, ..failing };
                    tally.possible += 1;
                    let is_reached = if all || tally.possible.is_multiple_of(way.sample) {
                        let trained = train(&model, &setup, Some(failing), &watchdog);
                        tally.count(&trained, &failing);
                        failing.is_reached(&trained)
                    } else {
                        failing.is_reached(&usual)
                    };
                    misses = if is_reached { 0 } else { misses + 1 };
                    skip += 1;
                }
            }
        }
        println!("{}, up to {}: {tally:?}", way.name, placing.name);
    }
    // Some faults by themselves are never an error: a write that finds no room leaves its tensor where it is.
    let errs = tally.errors > 0 || !(chosen.is_empty() || chosen == "all");
    assert!(errs && tally.reached > tally.trainings / 2, "{tally:?}");
}

/// Numbers of trainings.
#[derive(Debug, Default)]
struct Tally {
    possible: usize,
    trainings: usize,
    /// Those with an operation that failed.
    reached: usize,
    right: usize,
    errors: usize,
}

impl Tally {
    fn count(&mut self, trained: &Trained, failing: &Failing) {
        self.trainings += 1;
        self.reached += usize::from(failing.is_reached(trained));
        self.right += usize::from(!trained.erred);
        self.errors += usize::from(trained.erred);
    }
}

struct Trained {
    /// The operations of each direction in all steps.
    operations: [u64; 2],
    /// The operations of both directions on the last disk.
    of_last_disk: u64,
    /// Whether a step ended in an error.
    erred: bool,
}

/// Some steps with a fault and then one without, and everything that is promised of them.
fn train(model: &Model, setup: &Setup, failing: Option<Failing>, watchdog: &Sender<String>) -> Trained {
    let what = failing.map_or_else(|| setup.to_string(), |failing| format!("{setup}: {failing:?}"));
    watchdog.send(what.clone()).unwrap();
    let before = panics();
    let (backend, cache) = open(setup);
    if let Some(failing) = failing {
        failing.inject(&backend);
        backend.never_within(LIMIT);
    }
    let mut erred = false;
    for number in 0..setup.placing.steps {
        if let Err(error) = model.step(&format!("{what}, step {number}"), &cache, number) {
            check(&what, &error, failing.and_then(|failing| failing.error()));
            erred = true;
        }
    }
    let operations = [Direction::Read, Direction::Write].map(|direction| backend.submitted(direction));
    let of_last_disk = backend.submitted_to(Some(setup.way.volumes - 1));
    let trained = Trained { operations, of_last_disk, erred };
    let stats = cache.store_stats().unwrap();
    let counted = stats.failures + stats.retried;
    if let Some(failing) = failing.filter(|failing| failing.is_reached(&trained)) {
        assert!(counted > 0 || !failing.is_counted(), "{what}: nobody has noticed: {stats:?}");
    } else {
        assert_eq!(counted, 0, "{what}: {stats:?}");
    }
    backend.heal();
    let healed = model.step(&format!("{what}, healed"), &cache, 0);
    assert!(healed.is_ok(), "{what}, healed: {}", healed.unwrap_err());
    // What never completed does so now: reads leave garbage where nobody may look any more.
    backend.release();
    let ended = model.step(&format!("{what}, ended"), &cache, 1);
    assert!(ended.is_ok(), "{what}, ended: {}", ended.unwrap_err());
    assert_eq!(cache.store_stats().unwrap().reserved_bytes, 0, "{what}");
    assert_nothing_held(&cache);
    assert_eq!(panics(), before, "{what}: a thread has panicked");
    trained
}

/// A cache over a store whose operations fail on request.
fn open(Setup { way, placing, verify }: &Setup) -> (Arc<Faulty>, TensorCache) {
    let threads = || Arc::new(Pool::new(2).unwrap()) as Arc<dyn Backend>;
    let inner = match way.in_file.then(|| Uring::new(8)) {
        Some(Ok(ring)) => Arc::new(ring),
        Some(Err(refused)) => {
            static TOLD: Once = Once::new();
            TOLD.call_once(|| {
                eprintln!("{}: by threads, since io_uring is refused here: {refused}", way.name)
            });
            threads()
        }
        None => threads(),
    };
    let backend = Arc::new(Faulty::new(inner));
    let config = StoreConfig {
        directories: vec![std::env::temp_dir(); way.volumes],
        backend: if way.in_file { BackendKind::Pool } else { BackendKind::Memory },
        cap_bytes: 8 * MIB,
        encrypt: way.encrypts,
        stripe_bytes: 4 * BLOCK,
        io_bytes: 8 * BLOCK,
        ..StoreConfig::default()
    };
    let store = Store::open_with(config, Arc::clone(&backend) as _).unwrap();
    let builder = (placing.set)(TensorCache::builder().min_bytes(0).verify(*verify));
    let builder = match way.device {
        Some(device) => device(builder.simulated_device(Duration::ZERO)),
        None => builder,
    };
    (backend, TensorCache::with_store(builder, store).unwrap())
}
