//! Storages that operations of several streams save: their memory must not be reused too soon.

use std::sync::Arc;
use std::time::Duration;

use ssdtrain_libtorch::Storage;
use ssdtrain_store::{BackendKind, Store, StoreConfig};

use super::{By, Cache, Limits, Subject};
use crate::device::Simulated;
use crate::telemetry::{ScopeId, ScopeRecord};
use crate::tier::{DirectTier, HostSettings, HostTier, PoolSize, Tier};
use crate::units::MIB;

/// Saved on the first stream and once more on the second, and let go of on the first: its memory is not reused before what the second one
/// does with it.
#[test]
fn what_is_saved_on_several_streams() {
    let store = Store::open(StoreConfig { backend: BackendKind::Memory, ..StoreConfig::default() }).unwrap();
    let settings = HostSettings { pool: PoolSize::Fixed(4 * MIB), read_ahead: 0 };
    let devices = [(); 2].map(|()| Simulated::start(Duration::ZERO).unwrap());
    let uses = devices.each_ref().map(Simulated::used);
    let [one, other] = devices;
    let tiers: [Arc<dyn Tier>; 2] = [
        HostTier::new(one, None, settings, None).unwrap(),
        DirectTier::new(other, store, MIB, None).unwrap(),
    ];
    for (tier, used) in tiers.into_iter().zip(uses) {
        let limits = Limits { device_budget: 0, late: true, ..Limits::none(MIB) };
        let cache = Cache::new(Some(tier), limits, None);
        let (tape, counters, record) = (cache.open_tape(), Arc::default(), ScopeRecord::default());
        let by = By { step: 1, scope: ScopeId::default(), tape, counters: &counters, record: &record };
        let storage = Storage::allocate(MIB).unwrap();
        let (id, left) = (storage.id(), storage.downgrade());
        let handles = [1, 2].map(|stream| {
            Simulated::enter(stream);
            cache.save(Subject::whole(storage.clone(), 0), false, by).unwrap()
        });
        Simulated::enter(1);
        drop(storage);
        cache.flush(&counters);
        assert!(left.upgrade().is_none(), "its memory is free");
        assert!(used.lock().contains(&(id, 1)) && used.lock().contains(&(id, 2)));
        drop(handles);
        Simulated::enter(0);
    }
}
