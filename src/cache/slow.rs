//! What may take long runs without the lock: each such call is blocked here, and another thread's save still proceeds.

use std::sync::Arc;
use std::thread;

use ssdtrain_store::{BackendKind, Direction, Faulty, Pool, Store, StoreConfig};

use super::Cache;
use super::waits::{BYTES, Batch, LATE};
use crate::tier::modelled::{Copies, Gate, ModelDevice};
use crate::tier::{HostSettings, HostTier, PoolSize};

/// A cache over host memory that holds what `program` saves, and the gate that blocks the slow call.
fn over(pool: PoolSize, gate: impl Fn(&ModelDevice) -> &Arc<Gate>) -> (Arc<Cache>, Arc<Gate>) {
    let device = ModelDevice::new(Copies::AtOnce, None);
    let gate = Arc::clone(gate(&device));
    let tier = HostTier::new(device, None, HostSettings { pool, read_ahead: 0 }, None).unwrap();
    (Cache::new(Some(tier), LATE, None), gate)
}

/// Runs `held_up` on its own thread and saves something while that is blocked. In the end both have what they saved.
fn saves_beside(cache: &Arc<Cache>, gate: &Gate, mut own: Batch, held_up: impl FnOnce(&mut Batch) + Send) {
    gate.close();
    thread::scope(|scope| {
        let other = scope.spawn(move || {
            held_up(&mut own);
            own
        });
        gate.holds_somebody_up();
        let mut batch = Batch::new(cache);
        batch.save(7);
        gate.open();
        other.join().unwrap().backward(false);
        batch.backward(false);
    });
    assert_eq!(cache.held(), (0, 0, 0));
}

#[test]
fn nobody_waits_for_a_pool_that_grows_but_who_needs_it() {
    let (cache, gate) = over(PoolSize::Learned { cap: 4 * BYTES }, |device| &device.pins);
    let mut batch = Batch::new(&cache);
    batch.save(1);
    saves_beside(&cache, &gate, batch, |batch| batch.flush());
}

#[test]
fn nobody_waits_for_memory_of_the_device_but_who_needs_it() {
    let (cache, gate) = over(PoolSize::Fixed(4 * BYTES), |device| &device.allocations);
    let mut batch = Batch::new(&cache);
    batch.save(1);
    batch.flush();
    saves_beside(&cache, &gate, batch, |batch| batch.fetch());
}

/// Such memory is read into where the pool is full of what is needed sooner. It is not pinned, so the driver waits for the device.
#[test]
fn nobody_waits_for_a_copy_from_memory_that_is_not_pinned_but_who_needs_it() {
    let faulty = Arc::new(Faulty::new(Arc::new(Pool::new(1).unwrap())));
    let config = StoreConfig { backend: BackendKind::Memory, ..StoreConfig::default() };
    let store = Store::open_with(config, Arc::<Faulty>::clone(&faulty)).unwrap();
    let device = ModelDevice::new(Copies::AtOnce, None);
    let gate = Arc::clone(&device.copies_in);
    let settings = HostSettings { pool: PoolSize::Fixed(BYTES), read_ahead: 0 };
    let tier = HostTier::new(device, Some(store), settings, None).unwrap();
    let cache = Cache::new(Some(tier), LATE, None);
    let mut batch = Batch::new(&cache);
    batch.save(1);
    batch.flush();
    cache.tier().unwrap().settle();
    // The pool has room for one, which is being written.
    faulty.hold(Direction::Write);
    batch.save(2);
    batch.flush();
    faulty.wait_held(1);
    saves_beside(&cache, &gate, batch, |batch| {
        batch.fetch_one(0);
        faulty.release();
    });
}
