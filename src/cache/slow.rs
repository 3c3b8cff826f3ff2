//! What may take long is done without the lock: each of it is held up here, and another thread's save goes on.

use std::sync::Arc;
use std::thread;

use super::Cache;
use super::waits::{BYTES, Batch, LATE};
use crate::tier::modelled::{Copies, Gate, ModelDevice};
use crate::tier::{HostSettings, HostTier, PoolSize};

/// A cache over host memory that holds what `program` saves, and the gate of what is to be held up.
fn over(pool: PoolSize, gate: impl Fn(&ModelDevice) -> &Arc<Gate>) -> (Arc<Cache>, Arc<Gate>) {
    let device = ModelDevice::new(Copies::AtOnce, None);
    let gate = Arc::clone(gate(&device));
    let tier = HostTier::new(device, None, HostSettings { pool, read_ahead: 0 }, None).unwrap();
    (Cache::new(Some(tier), LATE, None), gate)
}

/// Runs `held_up` on a thread of its own, and while it is held up saves something; both have what they saved in the end.
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
