//! The cache's threads under every interleaving. The program's threads save, flush, fetch and release, and sleep while there is no room
//! or nothing to serve yet. The test finds a thread that sleeps while nobody is left to wake it.

use std::sync::Arc;

use ssdtrain_libtorch::{Reliever, Storage, install_cpu_allocator};

use super::Cache;
use super::keys::{EntryKey, TapeKey};
use super::table::{Limits, Outdated, Part, Saved};
use crate::sync::{Thread, assert_explored, explore};
use crate::telemetry::{Counters, ScopeId};
use crate::tier::modelled::{Copies, Disk, ModelDevice, ModelDisk, set_word, word};
use crate::tier::{DirectTier, DiskTier, Here, HostSettings, HostTier, PoolSize, Tier};
use crate::units::MIB;

/// So large that the smallest pool has room for only one.
pub(super) const BYTES: u64 = 2 * MIB;

/// One storage on the device at a time, besides what is loaded ahead.
const NARROW: Limits = Limits {
    device_budget: BYTES,
    backward_budget: 2 * BYTES,
    prefetch: BYTES,
    stores_in_flight: u64::MAX,
    late: false,
};
/// Nothing leaves before it has to.
pub(super) const LATE: Limits = Limits {
    device_budget: u64::MAX,
    backward_budget: u64::MAX,
    prefetch: 0,
    stores_in_flight: u64::MAX,
    late: true,
};

/// A cache, and one micro-batch that belongs to this thread.
pub(super) struct Batch {
    cache: Arc<Cache>,
    tape: TapeKey,
    pub(super) counters: Arc<Counters>,
    saved: Vec<(EntryKey, usize, u64)>,
}

impl Batch {
    pub(super) fn new(cache: &Arc<Cache>) -> Batch {
        Batch {
            cache: Arc::clone(cache),
            tape: cache.open_tape(),
            counters: Arc::default(),
            saved: Vec::new(),
        }
    }

    /// Saves a storage that nobody else holds, once there is room for it.
    pub(super) fn save(&mut self, word: u64) {
        let storage = Storage::allocate(BYTES).unwrap();
        set_word(&storage, word);
        self.save_one(storage, false);
    }

    /// Saves one that stays on the device.
    pub(super) fn keep(&mut self, word: u64) {
        let storage = Storage::allocate(BYTES).unwrap();
        set_word(&storage, word);
        self.save_one(storage, true);
    }

    pub(super) fn save_one(&mut self, storage: Storage, keep: bool) {
        let (here, word) = (Here::default(), word(&storage));
        let (cache, counters) = (&self.cache, Arc::clone(&self.counters));
        let tier = Arc::clone(cache.tier.as_ref().unwrap());
        let parcel = (!keep).then(|| tier.parcel(BYTES, ScopeId::default(), &here).unwrap());
        let mut jobs = Vec::new();
        let mut table = cache.table.lock();
        while !cache.fits(&mut table, BYTES, &counters, &here) {}
        let key = table.insert(Saved {
            storage,
            parcel,
            version: 0,
            part: Part { layout: 0, bytes: BYTES },
            scope: ScopeId::default(),
            step: 1,
            counters,
        });
        let position = table.attach(key, self.tape);
        table.pump(&mut jobs);
        drop(table);
        cache.submit(jobs, &here);
        self.saved.push((key, position, word));
    }

    pub(super) fn tape(&self) -> TapeKey {
        self.tape
    }

    /// The key of the storage that was saved at this place.
    pub(super) fn key(&self, place: usize) -> EntryKey {
        self.saved[place].0
    }

    pub(super) fn flush(&self) {
        self.cache.flush(&Arc::default());
    }

    /// Asks for the newest storage.
    pub(super) fn fetch(&self) {
        self.fetch_one(self.saved.len() - 1);
    }

    /// Asks for the storage that was saved at this place.
    pub(super) fn fetch_one(&self, place: usize) {
        let (key, position, expected) = self.saved[place];
        assert_eq!(word(&self.cache.fetch(key, self.tape, Some(position)).unwrap()), expected);
        self.cache.gives_back(self.cache.served(key, &mut 0));
    }

    /// Asks for all storages, the newest first.
    pub(super) fn backward(&mut self, may_fail: bool) {
        while let Some((key, position, expected)) = self.saved.pop() {
            let mut round = 0;
            let fetched = self.cache.fetch(key, self.tape, Some(position));
            match fetched {
                Ok(storage) => assert_eq!(word(&storage), expected),
                Err(error) => assert!(may_fail, "{error}"),
            }
            self.cache.gives_back(self.cache.served(key, &mut round));
            self.cache.release(key, self.tape, round);
        }
        self.cache.close_tape(self.tape);
    }
}

/// What lies below a cache.
#[derive(Clone, Copy, Debug)]
enum Below {
    /// The disk, which has a thread.
    Disk,
    /// A host pool with room for one storage, and the disk.
    Host(PoolSize),
    /// The disk, reached directly from a device.
    Direct,
}

const FULL: Below = Below::Host(PoolSize::Fixed(BYTES));
/// It has nothing at first.
const GROWS: Below = Below::Host(PoolSize::Learned { cap: BYTES });

/// Runs `program` in every order. Returns the number of orders.
fn run(
    below: Below,
    does: Disk,
    limits: Limits,
    preemptions: usize,
    program: impl Fn(&Arc<Cache>) + Send + Sync + 'static,
) -> usize {
    let disk = ModelDisk::new(does);
    let (store, used) = (disk.store(), Arc::clone(&disk));
    let orders = explore(preemptions, move || {
        disk.begin();
        let (device, store) = (ModelDevice::new(Copies::AtLast, None), store.clone());
        let mut thread = None;
        let tier: Arc<dyn Tier> = match below {
            Below::Disk => {
                thread = Some(disk.start());
                Arc::new(DiskTier::new(store, None))
            }
            Below::Host(pool) => {
                let settings = HostSettings { pool, read_ahead: BYTES };
                HostTier::new(device, Some(store), settings, None).unwrap()
            }
            Below::Direct => DirectTier::new(device, store, BYTES, None).unwrap(),
        };
        let cache = Cache::new(Some(tier), limits, None);
        program(&cache);
        ends(&cache);
        disk.close();
        thread.into_iter().for_each(|thread| thread.join().unwrap());
    });
    println!("{orders} orders over {below:?}, {does:?}: {} transfers", used.transfers());
    assert!(orders > 1 && used.transfers() >= orders / 2, "the disk has its part in this");
    orders
}

/// Runs `program` in every order over host memory that has room for all. Returns the number of orders.
fn run_in_memory(
    limits: Limits,
    preemptions: usize,
    program: impl Fn(&Arc<Cache>) + Send + Sync + 'static,
) -> usize {
    install_cpu_allocator();
    let orders = explore(preemptions, move || {
        let device = ModelDevice::new(Copies::AtLast, None);
        let settings = HostSettings { pool: PoolSize::Fixed(8 * BYTES), read_ahead: 0 };
        let cache = Cache::new(Some(HostTier::new(device, None, settings, None).unwrap()), limits, None);
        program(&cache);
        ends(&cache);
    });
    println!("{orders} orders over host memory");
    orders
}

fn ends(cache: &Arc<Cache>) {
    cache.quiesce();
    let tier = cache.tier().unwrap();
    tier.settle();
    assert_eq!(cache.held(), (0, 0, 0));
    assert_eq!(tier.store().map_or(0, |store| store.stats().reserved_bytes), 0);
}

/// Memory that was free a moment ago, and is this thread's now.
struct Mine(Vec<Storage>);

const MINE: u64 = 7;

impl Mine {
    fn new() -> Mine {
        let mine: Vec<_> = (0..4).map(|_| Storage::allocate(BYTES).unwrap()).collect();
        mine.iter().for_each(|storage| set_word(storage, MINE));
        Mine(mine)
    }

    /// Whatever the device was given, it has written to none of it.
    fn is_unchanged(&self, cache: &Cache) {
        cache.tier().unwrap().synchronize().unwrap();
        assert!(self.0.iter().all(|storage| word(storage) == MINE), "somebody else's memory has changed");
    }
}

/// One thread saves, flushes and runs backward.
fn alone(cache: &Arc<Cache>, may_fail: bool) {
    let mut batch = Batch::new(cache);
    for word in 1..=2 {
        batch.save(word);
        batch.flush();
    }
    batch.backward(may_fail);
}

/// Two threads do so side by side.
fn side_by_side(cache: &Arc<Cache>, count: u64, may_fail: bool) {
    let other = Arc::clone(cache);
    let other = Thread::start("other", move || {
        let mut batch = Batch::new(&other);
        batch.save(100);
        batch.backward(may_fail);
    });
    let mut batch = Batch::new(cache);
    (1..=count).for_each(|word| batch.save(word));
    batch.backward(may_fail);
    other.unwrap().join().unwrap();
}

const WAYS: [Below; 3] = [Below::Disk, FULL, Below::Direct];

#[test]
fn two_threads_get_what_they_saved_from_the_disk() {
    let orders = run(Below::Disk, Disk::Works, NARROW, 2, |cache| side_by_side(cache, 2, false));
    assert_explored(orders, 17_000);
}

#[test]
fn two_threads_get_what_they_saved_from_host_memory() {
    let orders = run(FULL, Disk::Works, NARROW, 1, |cache| side_by_side(cache, 3, false));
    assert_explored(orders, 7_500);
}

#[test]
fn two_threads_get_what_they_saved_straight_from_the_disk() {
    let orders = run(Below::Direct, Disk::Works, NARROW, 2, |cache| side_by_side(cache, 2, false));
    assert_explored(orders, 30_000);
}

#[test]
fn whoever_flushes_hears_of_the_room_that_others_make() {
    let ways = WAYS.into_iter().chain([GROWS]);
    let orders = ways.map(|below| run(below, Disk::Works, LATE, 2, |cache| alone(cache, false)));
    assert_explored(orders.sum(), 14_500);
}

/// A thread whose allocation found no memory, beside one that saves and runs backward.
#[test]
fn who_is_short_of_memory_gets_some_while_others_go_on() {
    let orders = WAYS.map(|below| {
        run(below, Disk::Works, LATE, 1, |cache| {
            let other = Arc::clone(cache);
            let short = Thread::start("short", move || {
                other.relieve(2 * BYTES);
            });
            let mut batch = Batch::new(cache);
            batch.keep(1);
            batch.save(2);
            // At the latest now there is something to store.
            Arc::clone(cache).relieve(2 * BYTES);
            batch.backward(false);
            short.unwrap().join().unwrap();
        })
    });
    assert_explored(orders.iter().sum(), 3_500);
}

/// Its store may be over before the thread that began it looks.
#[test]
fn who_is_short_of_memory_hears_of_all_that_it_got() {
    let orders = WAYS.map(|below| {
        run(below, Disk::Works, LATE, 1, |cache| {
            let mut batch = Batch::new(cache);
            batch.keep(1);
            assert_eq!(Arc::clone(cache).relieve(BYTES), BYTES);
            batch.backward(false);
        })
    });
    assert_explored(orders.iter().sum(), 75);
}

#[test]
fn what_cannot_be_written_stays_and_nobody_waits_for_it() {
    let late = WAYS.map(|below| run(below, Disk::FailsToWrite, LATE, 1, |cache| alone(cache, false)));
    let narrow = [Below::Disk, Below::Direct]
        .map(|below| run(below, Disk::FailsToWrite, NARROW, 1, |cache| side_by_side(cache, 2, false)));
    assert_explored(late.iter().chain(&narrow).sum(), 590);
}

#[test]
fn what_cannot_be_read_is_an_error_and_nobody_waits_for_it() {
    let late = WAYS.map(|below| run(below, Disk::FailsToRead, LATE, 1, |cache| alone(cache, true)));
    let narrow = [Below::Disk, Below::Direct]
        .map(|below| run(below, Disk::FailsToRead, NARROW, 2, |cache| side_by_side(cache, 2, true)));
    assert_explored(late.iter().chain(&narrow).sum(), 49_000);
}

/// What is on its way to the disk when backward begins may exceed its budget.
#[test]
fn backward_waits_until_enough_has_left_for_its_budget() {
    let limits = Limits { device_budget: 3 * BYTES, backward_budget: BYTES, ..NARROW };
    let orders = [Disk::Works, Disk::FailsToWrite].map(|does| {
        run(Below::Disk, does, limits, 2, move |cache| {
            let mut batch = Batch::new(cache);
            (1..=3).for_each(|word| batch.save(word));
            batch.fetch();
            let on_device = cache.held().2;
            assert!(does != Disk::Works || on_device <= BYTES, "{on_device} bytes");
            batch.backward(false);
        })
    });
    assert_explored(orders.iter().sum(), 100);
}

#[test]
fn what_has_left_counts_in_the_budget_as_long_as_the_program_holds_it() {
    let limits = Limits { device_budget: 2 * BYTES, ..NARROW };
    let orders = run(Below::Disk, Disk::Works, limits, 2, |cache| {
        let mut batch = Batch::new(cache);
        let held = Storage::allocate(BYTES).unwrap();
        set_word(&held, 1);
        batch.save_one(held.clone(), false);
        for word in 2..=4 {
            batch.save(word);
            let table = cache.table.lock();
            let has_left = table.entry(batch.key(0)).is_some_and(|entry| entry.device.is_none());
            let bytes = table.held().2 + if has_left { BYTES } else { 0 };
            assert!(bytes <= 2 * BYTES, "{bytes} bytes");
        }
        drop(held);
        batch.backward(false);
    });
    assert_explored(orders, 100);
}

/// The thread that loads it ahead finds no entry any more, and the one that has released it has not told anybody yet.
#[test]
fn what_is_released_while_it_is_loaded_ahead_is_not_loaded() {
    let orders = run_in_memory(Limits { prefetch: BYTES, ..LATE }, 2, |cache| {
        let mut batch = Batch::new(cache);
        batch.save(1);
        batch.save(2);
        batch.flush();
        let (older, tape, other) = (batch.key(0), batch.tape(), Arc::clone(cache));
        let goes = Thread::start("goes", move || other.release(older, tape, 0)).unwrap();
        batch.fetch();
        let mine = Mine::new();
        goes.join().unwrap();
        mine.is_unchanged(cache);
        batch.saved.remove(0);
        batch.backward(false);
    });
    assert_explored(orders, 78);
}

/// Saves a storage, and once more with another version counter while it leaves, so that it stays; and then is short of memory, so that it
/// leaves anew. The end of the store before may be seen only then.
fn leaves_twice(batch: &mut Batch, cache: &Arc<Cache>, begins: impl FnOnce()) -> Mine {
    let storage = Storage::allocate(BYTES).unwrap();
    set_word(&storage, 1);
    let alias = storage.clone();
    batch.save_one(storage, false);
    begins();
    let found = cache.table.lock().find(alias.id(), 1);
    found.and_then(|(_, outdated)| outdated).into_iter().for_each(Outdated::abandon);
    drop(alias);
    Arc::clone(cache).relieve(BYTES);
    Mine::new()
}

#[test]
fn the_end_of_a_store_in_host_memory_is_not_taken_for_that_of_a_later_one() {
    let orders = run_in_memory(LATE, 3, |cache| {
        let (mut batch, other, mut flushes) = (Batch::new(cache), Arc::clone(cache), None);
        let mine = leaves_twice(&mut batch, cache, || {
            flushes = Thread::start("flushes", move || other.flush(&Arc::default())).ok();
        });
        flushes.unwrap().join().unwrap();
        mine.is_unchanged(cache);
        batch.backward(false);
    });
    assert_explored(orders, 1_150);
}

#[test]
fn the_end_of_a_store_on_the_disk_is_not_taken_for_that_of_a_later_one() {
    install_cpu_allocator();
    let orders = run(Below::Disk, Disk::Works, Limits { late: false, ..LATE }, 3, |cache| {
        let mut batch = Batch::new(cache);
        leaves_twice(&mut batch, cache, || ());
        batch.backward(false);
    });
    assert_explored(orders, 700);
}

#[test]
fn what_leaves_twice_straight_to_the_disk_is_what_was_saved() {
    install_cpu_allocator();
    let orders = [Disk::Works, Disk::FailsToWrite].map(|does| {
        run(Below::Direct, does, LATE, 2, |cache| {
            let (mut batch, other, mut flushes) = (Batch::new(cache), Arc::clone(cache), None);
            leaves_twice(&mut batch, cache, || {
                flushes = Thread::start("flushes", move || other.flush(&Arc::default())).ok();
            });
            flushes.unwrap().join().unwrap();
            batch.backward(false);
        })
    });
    assert_explored(orders.iter().sum(), 11_300);
}
