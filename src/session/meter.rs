//! The figures of a cache, read while it works.

use std::fmt;
use std::sync::{Arc, Weak};

use ssdtrain_libtorch::Origin;
use ssdtrain_store::{HostPool, Store};

use super::TensorCache;
use crate::cache::Cache;
use crate::telemetry::{Accounts, HostPoolMetrics, Level, Metrics};
use crate::tier::Tier;

/// A limit that no memory has.
const NO_LIMIT: u64 = 1 << 62;

/// Reads the figures of a [`TensorCache`], from any thread and while steps are under way. A cheap handle: it neither keeps the cache nor
/// its spill files.
#[derive(Clone)]
pub struct Meter {
    origin: Origin,
    accounts: Arc<Accounts>,
    on_device: Level,
    tier: Option<Weak<dyn Tier>>,
}

impl Meter {
    pub(super) fn new(cache: &Cache, accounts: &Arc<Accounts>) -> Meter {
        Meter {
            origin: Origin::default(),
            accounts: Arc::clone(accounts),
            on_device: cache.on_device.clone(),
            tier: cache.weak_tier(),
        }
    }

    /// The figures as they are now; see [`TensorCache::metrics`]. Once the cache and all that was saved through it are gone, those of the
    /// host pool and the spill files are `None`, and the others stay. In a process that was forked off, all are zero.
    pub fn read(&self) -> Metrics {
        // Locks may have been held by a thread that is not here.
        if self.origin.is_parent() {
            return Metrics::default();
        }
        let tier = self.tier.as_ref().and_then(Weak::upgrade);
        Metrics {
            device_bytes: self.on_device.now(),
            host_pool: tier.as_ref().and_then(|tier| tier.host_pool()).map(of_pool),
            disk: tier.as_ref().and_then(|tier| tier.store()).map(Store::stats),
            ..self.accounts.metrics()
        }
    }
}

fn of_pool(pool: &HostPool) -> HostPoolMetrics {
    HostPoolMetrics {
        used_bytes: pool.used_bytes(),
        pinned_bytes: pool.capacity(),
        limit_bytes: Some(pool.cap()).filter(|cap| *cap < NO_LIMIT),
    }
}

impl TensorCache {
    /// What the cache has done since it was built, and what it holds now. Steps go on meanwhile: they are never waited for, nor is a disk
    /// or a device. Each figure is right at some moment during the call; those of a step under way may be of slightly different moments.
    /// Figures that count something never fall.
    pub fn metrics(&self) -> Metrics {
        self.meter().read()
    }

    /// A handle that reads the same from any thread, for example one that serves them to a monitoring system. The crate
    /// `ssdtrain-metrics` does that.
    pub fn meter(&self) -> Meter {
        self.here().meter.clone()
    }
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meter").finish_non_exhaustive()
    }
}
