//! A cache in a process that was forked off from its own.

use std::sync::OnceLock;

use ssdtrain_libtorch as torch;
use ssdtrain_libtorch::Origin;

use super::TensorCache;
use crate::cache::{Cache, Limits};
use crate::config::TensorCacheBuilder;
use crate::route::{Route, Way};
use crate::switch::Switch;

/// What takes a cache's place there: one with nothing of its parent's, under which steps run as without a cache.
#[derive(Default)]
pub(super) struct Forked {
    origin: Origin,
    stand_in: OnceLock<Box<TensorCache>>,
}

impl TensorCache {
    /// This cache or, in a process that was forked off since it was built, what takes its place.
    pub(super) fn here(&self) -> &TensorCache {
        let Forked { origin, stand_in } = &self.forked;
        if !origin.is_parent() {
            return self;
        }
        // Forked off once more, this process has a stand-in of its parent's, which has one in turn.
        match stand_in.get() {
            Some(stand_in) => stand_in.here(),
            None => {
                let made = Box::new(self.stand_in());
                torch::once(stand_in, || made).here()
            }
        }
    }

    fn stand_in(&self) -> TensorCache {
        let notice = "this process was forked off from the one that built the cache: steps run as without it; build one here";
        // Of the settings, none is taken over: the variables, for one, may be locked by a thread that is not there.
        let config = TensorCacheBuilder::default().fuse_reruns(false).keeping();
        let route = Route { way: Way::Stay, why: None, pool: None, store: None };
        let cache = Cache::new(None, Limits::none(0), None);
        TensorCache::assemble(config, route, cache, Switch::Off, vec![notice.to_owned()])
    }
}

impl Drop for TensorCache {
    fn drop(&mut self) {
        if self.forked.origin.is_parent() {
            // Their thread is not here to be joined. The rest is kept since the fork: it observes writes.
            Box::leak(Box::new(self.chains.take()));
        }
    }
}
