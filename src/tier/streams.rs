//! Storages that were saved on one stream, or loaded for it, and used on another: their memory must not be reused too soon.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use ssdtrain_libtorch::{Block, Storage};
use ssdtrain_store::{BackendKind, Store, StoreConfig};

use super::{DirectTier, Here, HostSettings, HostTier, Parcel, PoolSize, Room, Tier};
use crate::device::{Simulated, SimulatedUsed};
use crate::error::Completion;
use crate::telemetry::{ScopeId, StallCause};
use crate::units::MIB;

fn tiers() -> [(Arc<dyn Tier>, SimulatedUsed); 2] {
    let store =
        || Store::open(StoreConfig { backend: BackendKind::Memory, ..StoreConfig::default() }).unwrap();
    let device = || {
        let device = Simulated::start(Duration::ZERO).unwrap();
        let used = device.used();
        (device, used)
    };
    let settings = HostSettings { pool: PoolSize::Fixed(4 * MIB), read_ahead: 0 };
    let (first, second) = (device(), device());
    [
        (HostTier::new(first.0, Some(store()), settings, None).unwrap(), first.1),
        (DirectTier::new(second.0, store(), MIB, None).unwrap(), second.1),
    ]
}

fn stored(tier: &Arc<dyn Tier>, from: &Storage) -> Arc<dyn Parcel> {
    let parcel = Arc::clone(tier).parcel(from.bytes(), ScopeId::default(), &Here::default()).unwrap();
    assert_eq!(parcel.reserve(), Room::Reserved);
    Arc::clone(&parcel).store(Block::of(from.clone()), Completion::new(|_| {}));
    parcel
}

/// A parcel of what was saved on the first stream and has left.
fn away(tier: &Arc<dyn Tier>) -> Arc<dyn Parcel> {
    let from = Storage::allocate(MIB).unwrap();
    Simulated::enter(1);
    let parcel = stored(tier, &from);
    ordered(&parcel, &from);
    parcel
}

fn loaded(parcel: &Arc<dyn Parcel>) -> Storage {
    let into = Storage::allocate(MIB).unwrap();
    let (tell, told) = channel();
    let done = Completion::new(move |outcome| drop(tell.send(outcome)));
    Arc::clone(parcel).load(into.clone(), &Here::default(), done);
    told.recv().unwrap().unwrap();
    into
}

fn ordered(parcel: &Arc<dyn Parcel>, of: &Storage) {
    parcel.order(Some(of), Some(StallCause::CopyIn), &Arc::default(), &Here::default()).unwrap();
}

#[test]
fn what_is_saved_and_let_go_of_on_two_streams() {
    for (tier, used) in tiers() {
        let from = Storage::allocate(MIB).unwrap();
        Simulated::enter(1);
        let parcel = stored(&tier, &from);
        ordered(&parcel, &from);
        assert_eq!(*used.lock(), [], "one stream needs nothing");
        Simulated::enter(2);
        ordered(&parcel, &from);
        assert_eq!(*used.lock(), [(from.id(), 2)]);
        tier.settle();
    }
}

/// Two threads run backward at once: what the one has got is loaded for the other before the one has put it in order.
#[test]
fn what_is_loaded_for_one_stream_after_another() {
    for (tier, used) in tiers() {
        let parcel = away(&tier);
        Simulated::enter(2);
        let first = loaded(&parcel);
        Simulated::enter(3);
        let second = loaded(&parcel);
        ordered(&parcel, &first);
        assert!(used.lock().contains(&(first.id(), 3)), "it was loaded for another stream");
        ordered(&parcel, &second);
        tier.settle();
    }
}

#[test]
fn what_is_loaded_for_one_stream_and_asked_for_on_another() {
    for (tier, used) in tiers() {
        let parcel = away(&tier);
        Simulated::enter(2);
        let into = loaded(&parcel);
        ordered(&parcel, &into);
        assert_eq!(*used.lock(), [], "it was loaded for this stream");
        Simulated::enter(3);
        ordered(&parcel, &into);
        assert_eq!(*used.lock(), [(into.id(), 3)]);
        tier.settle();
    }
}
