//! A panic below a tier ends the transfer that it happens in, and nothing else: whoever waits hears of it, and the threads go on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use ssdtrain_libtorch::{Block, Storage};
use ssdtrain_store::{Backend, BackendInfo, BackendKind, Op, Place, Pool, Region, Store, StoreConfig};

use super::{DirectTier, Here, HostSettings, HostTier, Parcel, PoolSize, Room, Tier};
use crate::device::Simulated;
use crate::error::Completion;
use crate::error::Result;
use crate::telemetry::{Cause, ScopeId};
use crate::units::MIB;

/// A backend that panics while it is told to.
struct Panics {
    inner: Pool,
    now: AtomicBool,
}

impl Backend for Panics {
    fn open(&self, place: Place<'_>, cap_bytes: u64) -> ssdtrain_store::Result<Arc<dyn Region>> {
        self.inner.open(place, cap_bytes)
    }

    fn submit(&self, ops: Vec<Op>) {
        assert!(!self.now.load(Ordering::Relaxed), "on purpose, in a backend");
        self.inner.submit(ops);
    }

    fn describe(&self) -> BackendInfo {
        self.inner.describe()
    }
}

fn backend() -> (Arc<Panics>, Store) {
    let backend = Arc::new(Panics { inner: Pool::new(1).unwrap(), now: AtomicBool::new(true) });
    let config = StoreConfig { backend: BackendKind::Memory, ..StoreConfig::default() };
    let store = Store::open_with(config, Arc::<Panics>::clone(&backend)).unwrap();
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
    Arc::clone(&parcel).store(Block::of(from.clone()), done);
    (parcel, told)
}

fn ordered(parcel: &Arc<dyn Parcel>) -> Result<()> {
    parcel.order(None, Cause::DeviceBudget, &Arc::default(), &Here::default())
}

fn loaded(parcel: &Arc<dyn Parcel>) -> Result<()> {
    let (tell, told) = channel();
    let done = Completion::new(move |outcome| drop(tell.send(outcome)));
    let into = Storage::allocate(MIB).unwrap();
    Arc::clone(parcel).load(into.clone(), &Here::default(), done);
    told.recv().unwrap()?;
    // A copy that was queued is a success, and still writes to the storage.
    parcel.order(Some(&into), Cause::CopyIn, &Arc::default(), &Here::default())
}

#[test]
fn straight_to_the_disk() {
    let (backend, store) = backend();
    let tier: Arc<dyn Tier> = DirectTier::new(device(), store, MIB, None).unwrap();
    let from = Storage::allocate(MIB).unwrap();
    let (first, told) = stored(&tier, &from);
    assert!(ordered(&first).is_err());
    assert!(told.recv().unwrap().is_err());
    backend.now.store(false, Ordering::Relaxed);
    let (second, told) = stored(&tier, &from);
    ordered(&second).unwrap();
    assert!(told.recv().is_err(), "a store that succeeds is not told of");
    backend.now.store(true, Ordering::Relaxed);
    assert!(loaded(&second).is_err());
    backend.now.store(false, Ordering::Relaxed);
    loaded(&second).unwrap();
    tier.settle();
}

#[test]
fn through_the_host_pool() {
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
    // The second fills the pool, and the first is to be written: it stays where it is.
    let kept = [(); 2].map(|()| store());
    kept.iter().for_each(|parcel| loaded(parcel).unwrap());
    drop(kept);
    backend.now.store(false, Ordering::Relaxed);
    let below = [(); 3].map(|()| store());
    backend.now.store(true, Ordering::Relaxed);
    assert!(loaded(&below[0]).is_err(), "the oldest is on the disk only");
    backend.now.store(false, Ordering::Relaxed);
    loaded(&below[0]).unwrap();
    tier.settle();
}
