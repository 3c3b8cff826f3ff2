//! What may take long runs without the lock: each such call is blocked here, and another thread's save still proceeds.

use std::sync::Arc;
use std::thread;

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
