//! Transfers and graphs that end in every order, over every tier: a transfer may be handed to the tier after its entry is gone.

use std::sync::Arc;

use ssdtrain_libtorch::{Storage, install_cpu_allocator};
use ssdtrain_store::{BackendKind, Store, StoreConfig};

use super::Cache;
use super::keys::{EntryKey, TapeKey};
use super::table::{Job, Limits, Part, Saved};
use crate::device::{Device, Lane, Simulated, SimulatedEvent};
use crate::telemetry::ScopeId;
use crate::tier::{DirectTier, DiskTier, Here, HostSettings, HostTier, PoolSize, Tier};

const ENTRIES: usize = 3;
const BYTES: u64 = 1 << 20;

/// When the last handle is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Goes {
    BeforeHandOver,
    AfterHandOver,
    AfterCompletion,
}

const ORDERS: [Goes; 3] = [Goes::BeforeHandOver, Goes::AfterHandOver, Goes::AfterCompletion];

/// A cache, and the gate that its device's copies in wait for.
struct Bench {
    gate: Gate,
    cache: Arc<Cache>,
    tape: TapeKey,
}

/// A gate that opens when dropped at the latest, so that a failing test does not wait for ever.
struct Gate(SimulatedEvent);

impl Drop for Gate {
    fn drop(&mut self) {
        self.0.reach();
    }
}

fn store() -> Store {
    Store::open(StoreConfig { backend: BackendKind::Memory, ..StoreConfig::default() }).unwrap()
}

/// A device whose copies in do not begin before the gate opens.
fn gated() -> (Simulated, SimulatedEvent) {
    let (device, gate) = (Simulated::start(std::time::Duration::ZERO).unwrap(), SimulatedEvent::default());
    device.wait(Lane::In, &gate).unwrap();
    (device, gate)
}

fn host(store: Option<Store>, pool: u64) -> Bench {
    let (device, gate) = gated();
    let settings = HostSettings { pool: PoolSize::Fixed(pool), read_ahead: 0 };
    Bench::over(HostTier::new(device, store, settings, None).unwrap(), gate)
}

fn benches() -> [(&'static str, Bench); 4] {
    let (device, gate) = gated();
    let direct = DirectTier::new(device, store(), BYTES, None).unwrap();
    let disk = Arc::new(DiskTier::new(store(), None));
    [
        ("host memory", host(None, 8 * BYTES)),
        // Once all have left the device, the oldest entry is on the disk.
        ("host memory and disk", host(Some(store()), 2 * BYTES)),
        ("straight to the disk", Bench::over(direct, gate)),
        ("disk", Bench::over(disk, SimulatedEvent::default())),
    ]
}

impl Bench {
    fn over(tier: Arc<dyn Tier>, gate: SimulatedEvent) -> Bench {
        install_cpu_allocator();
        let limits = Limits {
            device_budget: u64::MAX,
            backward_budget: u64::MAX,
            prefetch: 0,
            stores_in_flight: u64::MAX,
            late: true,
        };
        let cache = Cache::new(Some(tier), limits, None);
        let tape = cache.open_tape();
        Bench { gate: Gate(gate), cache, tape }
    }

    /// Saves a storage that nobody else holds, with one handle.
    fn save(&self) -> EntryKey {
        let tier = self.cache.tier.as_ref().unwrap();
        let parcel = Arc::clone(tier).parcel(BYTES, ScopeId::default(), &Here::default()).unwrap();
        let mut table = self.cache.table.lock();
        let key = table.insert(Saved {
            storage: Storage::allocate(BYTES).unwrap(),
            parcel: Some(parcel),
            version: 0,
            part: Part { layout: 0, bytes: BYTES },
            scope: ScopeId::default(),
            step: 1,
            counters: Arc::default(),
        });
        table.attach(key, self.tape);
        key
    }

    /// Hands `jobs` to the tier while all entries are released, in the order given.
    fn go(self, name: &str, keys: &[EntryKey], jobs: Vec<Job>, goes: Goes) {
        let release = || keys.iter().for_each(|key| self.cache.release(*key, self.tape, 0));
        if goes == Goes::BeforeHandOver {
            release();
        } else {
            // Otherwise this thread would wait for copies that wait for it.
            self.gate.0.reach();
        }
        self.cache.submit(jobs, &Here::default());
        if goes == Goes::AfterCompletion {
            self.cache.quiesce();
        }
        if goes != Goes::BeforeHandOver {
            release();
        }
        // The memory that was loaded into now belongs to somebody else.
        let others: Vec<_> = (0..2 * ENTRIES).map(|_| Storage::allocate(BYTES).unwrap()).collect();
        for other in &others {
            // SAFETY: the storage is this test's alone and as long as that.
            unsafe { other.data().cast::<u8>().write_bytes(0x5a, BYTES as usize) };
        }
        self.gate.0.reach();
        self.cache.quiesce();
        self.cache.close_tape(self.tape);
        let tier = self.cache.tier().unwrap();
        tier.settle();
        assert_eq!(self.cache.held(), (0, 0, 0), "{name}, {goes:?}");
        assert_eq!(tier.store().map_or(0, |store| store.stats().reserved_bytes), 0, "{name}, {goes:?}");
        // When the last reference to the tier is gone, its device has done everything that was queued.
        drop(self);
        for other in &others {
            // SAFETY: as above.
            let bytes = unsafe { std::slice::from_raw_parts(other.data().cast::<u8>(), BYTES as usize) };
            assert!(
                bytes.iter().all(|byte| *byte == 0x5a),
                "{name}, {goes:?}: somebody else's memory changed"
            );
        }
    }
}

#[test]
fn loads_of_a_graph_that_goes() {
    for goes in ORDERS {
        for (name, bench) in benches() {
            let save = || {
                let key = bench.save();
                bench.cache.flush(&Arc::default());
                key
            };
            let keys = [(); ENTRIES].map(|()| save());
            let mut jobs = Vec::new();
            for key in &keys {
                bench.cache.table.lock().ask(*key, &mut jobs);
            }
            assert_eq!(jobs.len(), ENTRIES, "{name}, {goes:?}: all are away");
            bench.go(name, &keys, jobs, goes);
        }
    }
}

#[test]
fn stores_of_a_graph_that_goes() {
    for goes in ORDERS {
        for (name, bench) in benches() {
            let keys = [(); ENTRIES].map(|()| bench.save());
            let mut jobs = Vec::new();
            bench.cache.table.lock().pump_all(&mut jobs);
            assert!(jobs.len() >= 2, "{name}");
            bench.go(name, &keys, jobs, goes);
        }
    }
}
