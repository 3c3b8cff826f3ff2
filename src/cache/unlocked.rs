//! What other threads do, and what fails, while the cache works without its lock.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use ssdtrain_libtorch::{
    Packed, SavedTensor, SavedTensorHooks, SavedVariable, Storage, WriteObserver, activate, install,
};
use tch::{Kind, Tensor};

use super::table::Limits;
use super::waits::{BYTES, Batch, LATE};
use super::{By, Cache, Subject, TapeKey};
use crate::device::{DeviceCall, DeviceFaults, FaultyDevice};
use crate::sync::Thread;
use crate::telemetry::{Counters, ScopeId, ScopeRecord};
use crate::tier::modelled::{Copies, Fault, ModelDevice};
use crate::tier::{HostSettings, HostTier, PoolSize};

/// Longer than anything here takes.
const FOR_EVER: Duration = Duration::from_secs(10);

/// Saves as a step's hooks do.
struct Saves {
    cache: Arc<Cache>,
    tape: TapeKey,
    counters: Arc<Counters>,
    record: ScopeRecord,
}

impl SavedTensorHooks for Saves {
    fn pack(&self, saved: &SavedTensor<'_>) -> Result<Packed, String> {
        let by = By {
            step: 1,
            scope: ScopeId::default(),
            tape: self.tape,
            counters: &self.counters,
            record: &self.record,
        };
        // The entry outlives the test.
        _ = std::mem::ManuallyDrop::new(
            Subject::of(saved).and_then(|subject| self.cache.save(subject, false, by)),
        );
        Ok(Packed::Keep)
    }
}

fn save(cache: &Arc<Cache>, tensor: &Tensor) {
    let saves = Saves {
        cache: Arc::clone(cache),
        tape: cache.open_tape(),
        counters: Arc::default(),
        record: ScopeRecord::default(),
    };
    let _active = activate(Arc::new(saves));
    drop(SavedVariable::new(tensor).unwrap());
}

/// Meanwhile another thread saves the storage under a different version counter, though nobody writes to it.
#[test]
fn a_storage_is_saved_by_two_threads_at_two_versions_of_which_one_waits_for_room() {
    install().unwrap();
    let device = ModelDevice::new(Copies::AtOnce, None);
    let (pins, events) = (Arc::clone(&device.pins), Arc::clone(&device.events));
    let settings = HostSettings { pool: PoolSize::Learned { cap: 64 * BYTES }, read_ahead: 0 };
    let tier = HostTier::new(device, None, settings, None).unwrap();
    let cache = Cache::new(Some(tier), Limits { device_budget: BYTES, late: false, ..LATE }, None);
    let mut x = Tensor::zeros([BYTES as i64], (Kind::Uint8, tch::Device::Cpu));
    drop(x.zero_());
    let alias = x.data();
    // The device budget is full, and stays full while the pool is being pinned.
    pins.close();
    Batch::new(&cache).save(1);
    events.close();
    let (tell, told) = channel();
    let first = Arc::clone(&cache);
    let _thread = Thread::start("saves", move || {
        save(&first, &x);
        tell.send(()).unwrap();
    });
    // It holds the lock until it waits for room.
    events.holds_somebody_up();
    events.open();
    cache.table.lock().set_limits(LATE);
    save(&cache, &alias);
    cache.changed.notify_all();
    let saved = told.recv_timeout(FOR_EVER);
    pins.open();
    assert!(saved.is_ok(), "the thread has the cache's lock, and waits for it");
}

/// A cache with three storages away, all of which are loaded when the newest is asked for.
fn three_away(fault: Option<Fault>) -> (Arc<Cache>, Batch) {
    let device = ModelDevice::new(Copies::AtOnce, fault);
    let settings = HostSettings { pool: PoolSize::Fixed(8 * BYTES), read_ahead: 0 };
    let tier = HostTier::new(device, None, settings, None).unwrap();
    let cache = Cache::new(Some(tier), Limits { prefetch: 4 * BYTES, ..LATE }, None);
    let mut batch = Batch::new(&cache);
    (1..=3).for_each(|word| batch.save(word));
    batch.flush();
    (cache, batch)
}

/// Nothing comes after a copy of it where the device refuses to wait.
#[test]
fn what_is_written_to_while_it_is_copied_is_not_free_before_that() {
    let faults = Arc::<DeviceFaults>::default();
    let device = FaultyDevice::new(ModelDevice::new(Copies::AtLast, None), &faults);
    let settings = HostSettings { pool: PoolSize::Fixed(8 * BYTES), read_ahead: 0 };
    let tier = HostTier::new(device, None, settings, None).unwrap();
    let cache = Cache::new(Some(tier), Limits { device_budget: 0, late: false, ..LATE }, None);
    let mut batch = Batch::new(&cache);
    let storage = Storage::allocate(BYTES).unwrap();
    let held = storage.downgrade();
    batch.save_one(storage, false);
    faults.inject(Some(DeviceCall::Wait), 0, 1);
    cache.written(held.id());
    batch.backward(false);
    while held.upgrade().is_some() {
        std::thread::yield_now();
    }
    assert_eq!(faults.calls(Some(DeviceCall::BlockUnlessLate)), 1, "nobody has waited for the copy");
}

/// The device's model ensures this: only what is recorded after the allocation comes after what others queued before it.
#[test]
fn copies_in_come_after_what_was_queued_when_their_memory_was_allocated() {
    let (cache, mut batch) = three_away(None);
    batch.backward(false);
    assert_eq!(cache.held(), (0, 0, 0));
}

#[test]
fn an_allocation_that_panics_fails_that_load_and_no_other() {
    let (cache, mut batch) = three_away(Some(Fault::AllocationPanics(0)));
    batch.backward(true);
    let (tell, told) = channel();
    let waits = Arc::clone(&cache);
    let _thread = Thread::start("waits", move || {
        waits.quiesce();
        tell.send(()).unwrap();
    });
    assert!(told.recv_timeout(FOR_EVER).is_ok(), "there are loads that never end");
    assert_eq!(cache.held(), (0, 0, 0));
}

/// A thread may have obtained its tape just before the step ended.
#[test]
fn what_is_saved_after_the_end_of_its_step_is_not_the_next_ones() {
    install().unwrap();
    let (cache, _batch) = three_away(None);
    let ended = cache.open_tape();
    cache.close_tape(ended);
    let next = cache.open_tape();
    let saves = Saves {
        cache: Arc::clone(&cache),
        tape: ended,
        counters: Arc::default(),
        record: ScopeRecord::default(),
    };
    let before = cache.held();
    let _active = activate(Arc::new(saves));
    drop(SavedVariable::new(&Tensor::zeros([BYTES as i64], (Kind::Uint8, tch::Device::Cpu))).unwrap());
    assert_eq!(cache.held(), before);
    cache.close_tape(next);
}
