//! The table under every interleaving: a saver, an I/O thread and backward use the real [`Table`] under loom, which runs all orders in
//! which they can take the lock.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};

use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use ssdtrain_libtorch::Storage;
use ssdtrain_store::{BackendKind, Store, StoreConfig};

use super::keys::{EntryKey, TapeKey};
use super::table::{Answer, Job, Limits, Part, Saved, Table};
use crate::error::Error;
use crate::sync::assert_explored;
use crate::telemetry::ScopeId;
use crate::tier::{DiskTier, Here, Tier};

const BYTES: u64 = 4096;

type TierRef = std::sync::Arc<dyn Tier>;

/// A tier whose transfers the model performs itself.
fn memory() -> TierRef {
    let config = StoreConfig { backend: BackendKind::Memory, ..StoreConfig::default() };
    std::sync::Arc::new(DiskTier::new(Store::open(config).unwrap(), None))
}

/// How the disk behaves in one model.
#[derive(Clone, Copy)]
struct Disk {
    stores_succeed: bool,
    loads_succeed: bool,
    /// Whether there is memory for loads that nobody waits for yet.
    has_memory: bool,
}

const GOOD: Disk = Disk { stores_succeed: true, loads_succeed: true, has_memory: true };

struct World {
    table: Table,
    jobs: VecDeque<Job>,
    done: bool,
}

struct Model {
    tier: TierRef,
    world: Mutex<World>,
    changed: Condvar,
}

impl Model {
    fn new(tier: &TierRef, limits: Limits) -> Arc<Model> {
        let world = World {
            table: Table::new(Some(std::sync::Arc::clone(tier)), limits),
            jobs: VecDeque::new(),
            done: false,
        };
        Arc::new(Model {
            tier: std::sync::Arc::clone(tier),
            world: Mutex::new(world),
            changed: Condvar::new(),
        })
    }

    /// Saves one storage that nobody else holds, with one handle.
    fn save(&self, tape: TapeKey) -> (EntryKey, usize) {
        self.save_one(Storage::allocate(BYTES).unwrap(), tape)
    }

    fn save_one(&self, storage: Storage, tape: TapeKey) -> (EntryKey, usize) {
        let mut world = self.world.lock().unwrap();
        let saved = Saved {
            storage,
            parcel: Some(
                std::sync::Arc::clone(&self.tier)
                    .parcel(BYTES, ScopeId::default(), &Here::default())
                    .unwrap(),
            ),
            version: 0,
            part: Part { layout: 0, bytes: BYTES },
            scope: ScopeId::default(),
            step: 1,
            counters: std::sync::Arc::default(),
        };
        let key = world.table.insert(saved);
        let position = world.table.attach(key, tape);
        let mut jobs = Vec::new();
        world.table.pump(&mut jobs);
        world.jobs.extend(jobs);
        self.changed.notify_all();
        (key, position)
    }

    /// Performs transfers until the world is done and none is left.
    fn io(&self, disk: Disk) {
        let mut world = self.world.lock().unwrap();
        loop {
            let Some(job) = world.jobs.pop_front() else {
                if world.done {
                    return;
                }
                world = self.changed.wait(world).unwrap();
                continue;
            };
            match job {
                Job::Load { key, early: true, .. } if !disk.has_memory => {
                    world.table.postponed(key, BYTES);
                    self.changed.notify_all();
                    continue;
                }
                Job::Load { key, .. } => {
                    let is_there = world.table.loads_into(key, &Storage::allocate(BYTES).unwrap());
                    if !is_there {
                        world.table.postponed(key, BYTES);
                        self.changed.notify_all();
                        continue;
                    }
                }
                Job::Store { .. } => {}
            }
            // The transfer runs without the lock.
            drop(world);
            thread::yield_now();
            world = self.world.lock().unwrap();
            let outcome = |succeeds: bool| if succeeds { Ok(()) } else { Err("the disk failed".to_owned()) };
            match job {
                Job::Store { key, store, .. } => {
                    drop(world.table.stored(key, store, BYTES, outcome(disk.stores_succeed)))
                }
                Job::Load { key, .. } => {
                    let outcome = outcome(disk.loads_succeed).map_err(Error::torch);
                    drop(world.table.loaded(key, BYTES, outcome));
                }
            }
            let mut jobs = Vec::new();
            world.table.pump(&mut jobs);
            world.jobs.extend(jobs);
            self.changed.notify_all();
        }
    }

    /// Asks until there is an answer, then releases the handle. Returns whether bytes came.
    fn backward(&self, (key, position): (EntryKey, usize), tape: TapeKey) -> bool {
        let mut world = self.world.lock().unwrap();
        let served = loop {
            let mut jobs = Vec::new();
            let answer = world.table.ask(key, &mut jobs);
            world.table.look_ahead(tape, Some(position), !jobs.is_empty(), &mut jobs);
            world.jobs.extend(jobs);
            self.changed.notify_all();
            match answer {
                Answer::Here(..) => break true,
                Answer::Failed(failure) => {
                    assert_eq!(failure, "the disk failed");
                    break false;
                }
                Answer::Wait => world = self.changed.wait(world).unwrap(),
            }
        };
        let mut round = 0;
        drop(world.table.served(key, &mut round));
        drop(world.table.release(key, tape, round));
        self.changed.notify_all();
        served
    }

    fn finish(&self) {
        self.world.lock().unwrap().done = true;
        self.changed.notify_all();
    }

    fn assert_nothing_is_left(&self) {
        let world = self.world.lock().unwrap();
        assert_eq!(world.table.held(), (0, 0, 0));
        assert_eq!(world.table.transfers(), 0);
    }
}

/// Runs `scene` in every order with at most `preemptions` of them, or in every order there is. Returns the number of orders.
fn orders(preemptions: Option<usize>, scene: impl Fn() + Send + Sync + 'static) -> usize {
    let count = std::sync::Arc::new(AtomicUsize::new(0));
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    let counted = std::sync::Arc::clone(&count);
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        scene();
    });
    count.load(Ordering::Relaxed)
}

/// Explores one saver that saves two storages while an I/O thread works, and then runs backward over them. Returns the number of orders.
fn explore(limits: Limits, disk: Disk, expect_served: Option<bool>) -> usize {
    let tier = memory();
    orders(Some(3), move || {
        let model = Model::new(&tier, limits);
        let io = {
            let model = Arc::clone(&model);
            thread::spawn(move || model.io(disk))
        };
        let tape = model.world.lock().unwrap().table.open_tape();
        let first = model.save(tape);
        let second = model.save(tape);
        let served = [model.backward(second, tape), model.backward(first, tape)];
        model.world.lock().unwrap().table.close_tape(tape);
        model.finish();
        io.join().unwrap();
        model.assert_nothing_is_left();
        if let Some(expected) = expect_served {
            assert_eq!(served, [expected; 2]);
        }
    })
}

const WIDE: Limits = Limits {
    device_budget: u64::MAX,
    backward_budget: u64::MAX,
    prefetch: u64::MAX,
    stores_in_flight: u64::MAX,
    late: false,
};
const NARROW: Limits =
    Limits { device_budget: 1, backward_budget: 1, prefetch: 0, stores_in_flight: 1, late: false };

#[test]
fn every_interleaving_serves_both_and_leaves_nothing() {
    assert_explored(explore(WIDE, GOOD, Some(true)) + explore(NARROW, GOOD, Some(true)), 350);
}

#[test]
fn failing_stores_serve_from_the_device_under_every_interleaving() {
    assert_explored(explore(WIDE, Disk { stores_succeed: false, ..GOOD }, Some(true)), 170);
}

#[test]
fn failing_loads_serve_or_fail_but_never_hang_or_leak() {
    assert_explored(explore(WIDE, Disk { loads_succeed: false, ..GOOD }, None), 180);
}

#[test]
fn early_loads_without_memory_are_asked_for_again() {
    assert_explored(explore(WIDE, Disk { has_memory: false, ..GOOD }, Some(true)), 180);
}

#[test]
fn releasing_at_any_moment_leaves_nothing() {
    let tier = memory();
    let explored = orders(None, move || {
        let model = Model::new(&tier, WIDE);
        let io = {
            let model = Arc::clone(&model);
            thread::spawn(move || model.io(GOOD))
        };
        let tape = model.world.lock().unwrap().table.open_tape();
        let (key, _) = model.save(tape);
        drop(model.world.lock().unwrap().table.release(key, tape, 0));
        model.world.lock().unwrap().table.close_tape(tape);
        model.finish();
        io.join().unwrap();
        model.assert_nothing_is_left();
    });
    assert_explored(explored, 240);
}

#[test]
fn a_graph_that_goes_while_backward_looks_ahead_leaves_nothing() {
    let tier = memory();
    let explored = orders(Some(2), move || {
        let model = Model::new(&tier, WIDE);
        let io = {
            let model = Arc::clone(&model);
            thread::spawn(move || model.io(GOOD))
        };
        let tape = model.world.lock().unwrap().table.open_tape();
        let (first, second) = (model.save(tape), model.save(tape));
        let goes = {
            let model = Arc::clone(&model);
            thread::spawn(move || {
                let gone = model.world.lock().unwrap().table.release(first.0, tape, 0);
                drop(gone);
            })
        };
        assert!(model.backward(second, tape));
        goes.join().unwrap();
        model.world.lock().unwrap().table.close_tape(tape);
        model.finish();
        io.join().unwrap();
        model.assert_nothing_is_left();
    });
    assert_explored(explored, 270);
}

/// The program holds a saved storage, writes to it once and drops it, at any moment. Backward gets either that storage, or what was
/// stored of it before the write.
#[test]
fn a_write_at_any_moment_is_what_backward_gets_or_comes_after_it() {
    let tier = memory();
    let explored = orders(Some(3), move || {
        let model = Model::new(&tier, WIDE);
        let io = {
            let model = Arc::clone(&model);
            thread::spawn(move || model.io(GOOD))
        };
        let tape = model.world.lock().unwrap().table.open_tape();
        let storage = Storage::allocate(BYTES).unwrap();
        let id = storage.id();
        let saved = model.save_one(storage.clone(), tape);
        let writer = {
            let model = Arc::clone(&model);
            thread::spawn(move || {
                let void = model.world.lock().unwrap().table.written(id);
                drop(void);
                model.changed.notify_all();
                drop(storage);
            })
        };
        let served = model.backward(saved, tape);
        writer.join().unwrap();
        assert!(served);
        model.world.lock().unwrap().table.close_tape(tape);
        model.finish();
        io.join().unwrap();
        model.assert_nothing_is_left();
    });
    assert_explored(explored, 1_400);
}

/// A storage that is written to while its store is in flight is not served from below: the store was useless.
#[test]
fn what_is_written_is_served_from_where_it_was_written() {
    let tier = memory();
    let explored = orders(Some(3), move || {
        let model = Model::new(&tier, WIDE);
        let io = {
            let model = Arc::clone(&model);
            thread::spawn(move || model.io(GOOD))
        };
        let tape = model.world.lock().unwrap().table.open_tape();
        let storage = Storage::allocate(BYTES).unwrap();
        let id = storage.id();
        let (key, position) = model.save_one(storage.clone(), tape);
        // Whatever state the store is in by now.
        drop(model.world.lock().unwrap().table.written(id));
        drop(storage);
        let answer = model.world.lock().unwrap().table.ask(key, &mut Vec::new());
        assert!(matches!(answer, Answer::Here(storage, None) if storage.id() == id));
        assert!(model.backward((key, position), tape));
        model.world.lock().unwrap().table.close_tape(tape);
        model.finish();
        io.join().unwrap();
        model.assert_nothing_is_left();
    });
    assert_explored(explored, 140);
}
