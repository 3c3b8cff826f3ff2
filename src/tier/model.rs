//! The host tier under every interleaving: the threads that save, ask and release use the real tier, its threads and its waits under the
//! explorer, over a device that copies at once or as late as possible and a disk that may fail.

use std::sync::{Arc, Weak};

use ssdtrain_libtorch::{Block, Storage};
use ssdtrain_store::Store;

use super::modelled::{Copies, Disk, FOREIGN, Fault, ModelDevice, ModelDisk, set_word, word};
use super::{Here, HostSettings, HostTier, Parcel, PoolSize, Room, RoomListener, Tier};
use crate::error::Completion;
use crate::sync::{Condvar, Mutex, Thread, assert_explored, explore};
use crate::telemetry::{ScopeId, StallCause};
use crate::units::MIB;

/// The settings of one model.
#[derive(Clone, Copy, Debug)]
struct Scene {
    parcels: usize,
    /// How many parcels the pool has room for.
    slots: u64,
    disk: Option<Disk>,
    copies: Copies,
    /// The number of the copy that fails.
    failing_copy: Option<usize>,
    /// Whether the first parcel's entry is released while the others are saved.
    goes: bool,
    /// Whether what was loaded leaves again if it may, and is asked for once more.
    twice: bool,
    preemptions: usize,
}

const SCENE: Scene = Scene {
    parcels: 2,
    slots: 1,
    disk: Some(Disk::Works),
    copies: Copies::AtLast,
    failing_copy: None,
    goes: false,
    twice: false,
    preemptions: 1,
};

/// A value that one thread waits for and another provides.
struct Brought<T>(Mutex<Option<T>>, Condvar);

impl<T> Brought<T> {
    fn new() -> Arc<Brought<T>> {
        Arc::new(Brought(Mutex::new(None), Condvar::new()))
    }

    fn bring(&self, value: T) {
        *self.0.lock() = Some(value);
        self.1.notify_all();
    }

    fn wait(&self) -> T {
        let mut brought = self.0.lock();
        loop {
            if let Some(value) = brought.take() {
                return value;
            }
            self.1.wait(&mut brought);
        }
    }
}

/// A parcel that was saved, and its storage.
struct Saved {
    parcel: Arc<dyn Parcel>,
    storage: Storage,
    word: u64,
}

/// The tier, and a stand-in for the cache above it.
struct Model {
    tier: Arc<HostTier<ModelDevice>>,
    /// Stands for the cache's lock, and the condition variable on which it waits for room.
    books: Mutex<()>,
    changed: Condvar,
    /// Storages that have left the device. They belong to somebody else, who writes to their memory.
    left: ssdtrain_store::sync::Mutex<Vec<Storage>>,
    room: Arc<RoomListener>,
}

impl Model {
    fn new(scene: Scene, store: Option<Store>) -> Arc<Model> {
        let device = ModelDevice::new(scene.copies, scene.failing_copy.map(Fault::Copy));
        let settings = HostSettings { pool: PoolSize::Fixed(2 * MIB), read_ahead: bytes(scene) };
        let tier = HostTier::new(device, store, settings, None).unwrap();
        let model = Arc::new_cyclic(|this: &Weak<Model>| {
            let this = Weak::clone(this);
            let room = move || {
                let Some(model) = this.upgrade() else { return };
                drop(model.books.lock());
                model.changed.notify_all();
            };
            Model {
                tier,
                books: Mutex::new(()),
                changed: Condvar::new(),
                left: ssdtrain_store::sync::Mutex::default(),
                room: Arc::new(room),
            }
        });
        model.tier.on_room(&model.room);
        model
    }

    fn parcel(&self, bytes: u64) -> Arc<dyn Parcel> {
        Arc::<HostTier<ModelDevice>>::clone(&self.tier)
            .parcel(bytes, ScopeId::default(), &Here::default())
            .unwrap()
    }

    /// Waits until it is known whether there is room for the parcel, and returns that.
    fn reserve(&self, parcel: &Arc<dyn Parcel>) -> bool {
        let mut books = self.books.lock();
        loop {
            match parcel.reserve() {
                Room::Reserved => return true,
                Room::None => return false,
                Room::Later => self.changed.wait(&mut books),
            }
        }
    }

    /// Makes the storage leave the device once its copy out is done. Returns it if there is no copy, so that it stays.
    fn let_go(&self, parcel: &Arc<dyn Parcel>, storage: Storage) -> Option<Storage> {
        let ordered = parcel
            .order(Some(&storage), Some(StallCause::DeviceBudget), &Arc::default(), &Here::default())
            .is_ok();
        if ordered {
            self.leaves(storage);
            None
        } else {
            Some(storage)
        }
    }

    fn leaves(&self, storage: Storage) {
        set_word(&storage, FOREIGN);
        self.left.lock().push(storage);
    }

    /// Loads a parcel; `None` if it cannot be loaded.
    fn load(&self, parcel: &Arc<dyn Parcel>, bytes: u64) -> Option<u64> {
        let into = Storage::allocate(bytes).unwrap();
        set_word(&into, FOREIGN);
        let answer = Brought::new();
        let told = Arc::clone(&answer);
        let done = Completion::new(move |outcome| told.bring(outcome));
        Arc::clone(parcel).load(into.clone(), &Here::default(), done);
        let loaded = answer.wait().is_ok()
            && parcel.order(Some(&into), Some(StallCause::CopyIn), &Arc::default(), &Here::default()).is_ok();
        let word = loaded.then(|| word(&into));
        self.leaves(into);
        word
    }
}

fn bytes(scene: Scene) -> u64 {
    2 * MIB / scene.slots
}

/// Saves parcels while earlier ones leave the device, are loaded, and are released. Returns the number of orders.
fn run(scene: Scene) -> usize {
    // Expensive to open, and unchanged once nothing is stored.
    let disk = scene.disk.map(ModelDisk::new);
    let (store, used) = (disk.as_ref().map(ModelDisk::store), disk.clone());
    let orders = explore(scene.preemptions, move || {
        disk.iter().for_each(|disk| disk.begin());
        let model = Model::new(scene, store.clone());
        let bytes = bytes(scene);
        let handed: Vec<_> = (0..scene.parcels).map(|_| Brought::<Option<Saved>>::new()).collect();
        let backward = {
            let (model, handed) = (Arc::clone(&model), handed.clone());
            Thread::start("backward", move || {
                for (index, saved) in handed.iter().enumerate() {
                    let Some(Saved { parcel, storage, word }) = saved.wait() else { continue };
                    let goes = scene.goes && index == 0;
                    let kept = if goes { Some(storage) } else { model.let_go(&parcel, storage) };
                    if kept.is_none() {
                        Arc::clone(&parcel).bring_near();
                        let loaded = model.load(&parcel, bytes);
                        let may_fail = scene.disk == Some(Disk::FailsToRead) || scene.failing_copy.is_some();
                        assert!(loaded == Some(word) || (loaded.is_none() && may_fail), "{loaded:x?}");
                        // A second backward.
                        if scene.twice && parcel.may_evict() {
                            assert_eq!(model.load(&parcel, bytes), Some(word));
                        }
                    }
                    parcel.abandon(kept.as_ref());
                    kept.into_iter().for_each(|storage| model.leaves(storage));
                }
            })
            .unwrap()
        };
        for (index, saved) in handed.into_iter().enumerate() {
            let (parcel, storage) = (model.parcel(bytes), Storage::allocate(bytes).unwrap());
            let word = 100 + index as u64;
            set_word(&storage, word);
            if !model.reserve(&parcel) {
                // It stays on the device, and is not asked for below.
                parcel.abandon(None);
                saved.bring(None);
                continue;
            }
            let (from, job) = (Block::of(storage.clone()), Arc::clone(&parcel));
            // Backward learns of it as it does in the cache: before the store is submitted.
            saved.bring(Some(Saved { parcel, storage, word }));
            job.store(from, Completion::new(|_| {}));
            model.tier.audit();
        }
        backward.join().unwrap();
        model.tier.settle();
        model.tier.assert_nothing_is_held();
        disk.iter().for_each(|disk| disk.assert_rules_were_kept());
    });
    let transfers = used.map_or(0, |disk| disk.transfers());
    println!("{orders} orders of {scene:?}: {transfers} transfers");
    assert!(orders > 1);
    orders
}

const FAILING: [Disk; 2] = [Disk::FailsToWrite, Disk::FailsToRead];

#[test]
fn one_that_is_saved_comes_back() {
    assert_explored(run(Scene { parcels: 1, preemptions: 2, ..SCENE }), 1_700);
}

#[test]
fn two_that_share_a_slot_come_back() {
    let orders = [Copies::AtOnce, Copies::AtLast].map(|copies| run(Scene { copies, ..SCENE }));
    assert_explored(orders.iter().sum(), 1_400);
}

#[test]
fn without_a_disk_what_finds_no_room_stays() {
    assert_explored(run(Scene { parcels: 3, slots: 2, disk: None, ..SCENE }), 24);
}

#[test]
fn what_nobody_else_has_does_not_leave_the_device() {
    let alone = run(Scene { disk: None, twice: true, preemptions: 2, ..SCENE });
    assert_explored(alone + run(Scene { twice: true, ..SCENE }), 1_500);
}

#[test]
fn a_disk_that_fails_costs_no_bytes_and_leaves_nobody_waiting() {
    let orders = FAILING.map(|disk| run(Scene { disk: Some(disk), ..SCENE }));
    assert_explored(orders.iter().sum(), 1_250);
}

#[test]
fn a_copy_that_fails_leaves_nobody_waiting() {
    let orders = (0..3).map(|copy| run(Scene { failing_copy: Some(copy), ..SCENE }));
    assert_explored(orders.sum(), 1_100);
}

#[test]
fn an_entry_that_goes_while_others_are_saved_leaves_nothing() {
    let three = run(Scene { parcels: 3, slots: 2, goes: true, ..SCENE });
    assert_explored(three + run(Scene { goes: true, ..SCENE }), 1_100);
}

/// The thread that hands a copy out over may still do so when the parcel is on the disk and released.
#[test]
fn a_tier_that_has_settled_holds_no_extent() {
    let disk = ModelDisk::new(Disk::Works);
    let store = disk.store();
    let orders = explore(1, move || {
        disk.begin();
        let model = Model::new(SCENE, Some(store.clone()));
        let (parcel, storage) = (model.parcel(bytes(SCENE)), Storage::allocate(bytes(SCENE)).unwrap());
        assert!(model.reserve(&parcel));
        let (from, job) = (Block::of(storage.clone()), Arc::clone(&parcel));
        let saves = Thread::start("saves", move || job.store(from, Completion::new(|_| {}))).unwrap();
        assert!(model.let_go(&parcel, storage).is_none());
        parcel.abandon(None);
        drop(parcel);
        model.tier.settle();
        model.tier.assert_nothing_is_held();
        saves.join().unwrap();
    });
    assert_explored(orders, 23);
}
