//! A panic below a tier or in a completion, or an operation that is dropped, ends only the transfer in which it happens: those who wait
//! for it get an answer, and the threads continue.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use ssdtrain_libtorch::{Block, Storage, install_cpu_allocator};
use ssdtrain_store::sync::Mutex;
use ssdtrain_store::{
    Backend, BackendInfo, BackendKind, Op, Place, Pool, Region, Store, StoreConfig, contained,
};

use super::modelled::{Copies, Fault, ModelDevice};
use super::{DirectTier, DiskTier, Here, HostSettings, HostTier, Parcel, PoolSize, Room, RoomListener, Tier};
use crate::device::Simulated;
use crate::error::Completion;
use crate::error::Result;
use crate::telemetry::{ScopeId, StallCause};
use crate::units::MIB;

/// How a backend treats operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Does {
    CarriesOut,
    Panics,
    /// Drops them, so that nobody completes them.
    Drops,
}

const FAILURES: [Does; 2] = [Does::Panics, Does::Drops];

struct Unreliable {
    inner: Pool,
    does: Mutex<Does>,
}

impl Unreliable {
    fn does(&self, does: Does) {
        *self.does.lock() = does;
    }
}

impl Backend for Unreliable {
    fn open(&self, place: Place<'_>, cap_bytes: u64) -> ssdtrain_store::Result<Arc<dyn Region>> {
        self.inner.open(place, cap_bytes)
    }

    fn submit(&self, ops: Vec<Op>) {
        let does = *self.does.lock();
        match does {
            Does::CarriesOut => self.inner.submit(ops),
            Does::Panics => panic!("on purpose, in a backend"),
            Does::Drops => drop(ops),
        }
    }

    fn describe(&self) -> BackendInfo {
        self.inner.describe()
    }
}

fn backend() -> (Arc<Unreliable>, Store) {
    let backend = Arc::new(Unreliable { inner: Pool::new(1).unwrap(), does: Mutex::new(Does::CarriesOut) });
    let config = StoreConfig { backend: BackendKind::Memory, ..StoreConfig::default() };
    let store = Store::open_with(config, Arc::<Unreliable>::clone(&backend)).unwrap();
    (backend, store)
}

fn device() -> Simulated {
    Simulated::start(Duration::ZERO).unwrap()
}

fn stored(tier: &Arc<dyn Tier>, from: &Storage) -> (Arc<dyn Parcel>, Receiver<Result<()>>) {
    let parcel = Arc::clone(tier).parcel(from.bytes(), ScopeId::default(), &Here::default()).unwrap();
    assert_eq!(parcel.reserve(), Room::Reserved);
    let (tell, told) = channel();
    let done = Completion::new(move |outcome| drop(tell.send(outcome)));
    // As the cache does.
    contained("a store", || Arc::clone(&parcel).store(Block::of(from.clone()), done));
    (parcel, told)
}

fn ordered(parcel: &Arc<dyn Parcel>) -> Result<()> {
    parcel.order(None, Some(StallCause::DeviceBudget), &Arc::default(), &Here::default())
}

fn loaded(parcel: &Arc<dyn Parcel>) -> Result<()> {
    let (tell, told) = channel();
    let done = Completion::new(move |outcome| drop(tell.send(outcome)));
    let into = Storage::allocate(MIB).unwrap();
    contained("a load", || Arc::clone(parcel).load(into.clone(), &Here::default(), done));
    told.recv().unwrap()?;
    // A copy that was queued counts as a success, and still writes to the storage.
    parcel.order(Some(&into), Some(StallCause::CopyIn), &Arc::default(), &Here::default())
}

/// Loads with a completion that panics, and waits for it.
fn loaded_by_one_that_panics(parcel: &Arc<dyn Parcel>) {
    let (tell, told) = channel();
    let done = Completion::new(move |outcome| {
        tell.send(outcome).unwrap();
        panic!("on purpose, in a completion");
    });
    let into = Storage::allocate(MIB).unwrap();
    Arc::clone(parcel).load(into.clone(), &Here::default(), done);
    told.recv().unwrap().unwrap();
    parcel.order(Some(&into), Some(StallCause::CopyIn), &Arc::default(), &Here::default()).unwrap();
}

#[test]
fn cpu_tensors() {
    install_cpu_allocator();
    let (backend, store) = backend();
    let tier: Arc<dyn Tier> = Arc::new(DiskTier::new(store, None));
    let from = Storage::allocate(MIB).unwrap();
    for failure in FAILURES {
        backend.does(failure);
        assert!(stored(&tier, &from).1.recv().unwrap().is_err(), "{failure:?}");
        backend.does(Does::CarriesOut);
        let (parcel, told) = stored(&tier, &from);
        told.recv().unwrap().unwrap();
        backend.does(failure);
        assert!(loaded(&parcel).is_err(), "{failure:?}");
        backend.does(Does::CarriesOut);
        loaded_by_one_that_panics(&parcel);
        loaded(&parcel).unwrap();
    }
    tier.settle();
}

#[test]
fn straight_to_the_disk() {
    let (backend, store) = backend();
    let tier: Arc<dyn Tier> = DirectTier::new(device(), store, MIB, None).unwrap();
    let from = Storage::allocate(MIB).unwrap();
    for failure in FAILURES {
        backend.does(failure);
        let (first, told) = stored(&tier, &from);
        assert!(ordered(&first).is_err(), "{failure:?}");
        assert!(told.recv().unwrap().is_err(), "{failure:?}");
        backend.does(Does::CarriesOut);
        let (second, told) = stored(&tier, &from);
        ordered(&second).unwrap();
        assert!(told.recv().is_err(), "a store that succeeds is not told of");
        backend.does(failure);
        assert!(loaded(&second).is_err(), "{failure:?}");
        backend.does(Does::CarriesOut);
        loaded_by_one_that_panics(&second);
        loaded(&second).unwrap();
    }
    tier.settle();
}

#[test]
fn through_the_host_pool() {
    for failure in FAILURES {
        let (backend, store) = backend();
        let settings = HostSettings { pool: PoolSize::Fixed(2 * MIB), read_ahead: 0 };
        let tier: Arc<dyn Tier> = HostTier::new(device(), Some(store), settings, None).unwrap();
        let from = Storage::allocate(MIB).unwrap();
        let store = || {
            let parcel = stored(&tier, &from).0;
            ordered(&parcel).unwrap();
            tier.settle();
            parcel
        };
        backend.does(failure);
        // The second fills the pool, so the first should be written. It stays in the pool.
        let kept = [(); 2].map(|()| store());
        kept.iter().for_each(|parcel| loaded(parcel).unwrap());
        drop(kept);
        backend.does(Does::CarriesOut);
        let below = [(); 3].map(|()| store());
        backend.does(failure);
        assert!(loaded(&below[0]).is_err(), "{failure:?}: the oldest is on the disk only");
        backend.does(Does::CarriesOut);
        loaded_by_one_that_panics(&below[0]);
        loaded_by_one_that_panics(&below[2]);
        below.iter().for_each(|parcel| loaded(parcel).unwrap());
        tier.settle();
    }
}

/// A host tier with room for one parcel and a device with this fault.
fn failing_device(fault: Fault, pool: PoolSize) -> Arc<dyn Tier> {
    failing_device_above(backend().1, fault, pool)
}

fn failing_device_above(store: Store, fault: Fault, pool: PoolSize) -> Arc<dyn Tier> {
    let settings = HostSettings { pool, read_ahead: 0 };
    let device = ModelDevice::new(Copies::AtOnce, Some(fault));
    HostTier::new(device, Some(store), settings, None).unwrap()
}

#[test]
fn a_copy_out() {
    let tier = failing_device(Fault::CopyPanics(0), PoolSize::Fixed(MIB));
    let from = Storage::allocate(MIB).unwrap();
    let (first, told) = stored(&tier, &from);
    assert!(ordered(&first).is_err());
    assert!(told.recv().unwrap().is_err());
    let (second, _) = stored(&tier, &from);
    ordered(&second).unwrap();
    loaded(&second).unwrap();
}

#[test]
fn a_copy_in() {
    let tier = failing_device(Fault::CopyPanics(1), PoolSize::Fixed(MIB));
    let (parcel, _) = stored(&tier, &Storage::allocate(MIB).unwrap());
    assert!(loaded(&parcel).is_err());
    loaded(&parcel).unwrap();
}

/// A completion may ask the tier for anything, so none is called while the tier's lock is held.
#[test]
fn a_copy_in_of_what_was_read() {
    let bytes = 2 * MIB;
    // Two copies out, and then the first copy in.
    let tier = failing_device(Fault::CopyPanics(2), PoolSize::Fixed(bytes));
    let from = Storage::allocate(bytes).unwrap();
    let below = [(); 2].map(|()| {
        let parcel = stored(&tier, &from).0;
        ordered(&parcel).unwrap();
        tier.settle();
        parcel
    });
    let (tell, told) = channel();
    let load = |tell: Sender<Result<()>>| {
        let other = Arc::clone(&below[1]);
        let done = Completion::new(move |outcome| {
            other.may_evict();
            tell.send(outcome).unwrap();
        });
        Arc::clone(&below[0]).load(Storage::allocate(bytes).unwrap(), &Here::default(), done);
    };
    load(tell.clone());
    assert!(told.recv_timeout(Duration::from_secs(20)).unwrap().is_err());
    load(tell);
    told.recv().unwrap().unwrap();
    tier.settle();
}

#[test]
fn a_copy_in_from_memory_that_is_not_the_pools() {
    let bytes = 2 * MIB;
    let (backend, store) = backend();
    // Two copies out, and then the first copy in.
    let tier = failing_device_above(store, Fault::CopyPanics(2), PoolSize::Fixed(bytes));
    let from = Storage::allocate(bytes).unwrap();
    let below = [Does::CarriesOut, Does::Drops].map(|does| {
        // What is not written stays in the pool, which is full then.
        backend.does(does);
        let parcel = stored(&tier, &from).0;
        ordered(&parcel).unwrap();
        tier.settle();
        parcel
    });
    backend.does(Does::CarriesOut);
    assert!(loaded(&below[0]).is_err());
    loaded(&below[0]).unwrap();
    tier.settle();
}

#[test]
fn pinning() {
    let tier = failing_device(Fault::PinPanics, PoolSize::Learned { cap: 2 * MIB });
    let (tell, told) = channel();
    let room: Arc<RoomListener> = Arc::new(move || tell.send(()).unwrap());
    tier.on_room(&room);
    let parcel = Arc::clone(&tier).parcel(MIB, ScopeId::default(), &Here::default()).unwrap();
    assert_eq!(parcel.reserve(), Room::Later);
    told.recv().unwrap();
    assert_eq!(parcel.reserve(), Room::None);
}
