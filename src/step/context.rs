//! The state of one step, which the threads that work on it share.

use std::collections::HashSet;
use std::sync::Arc;

use ssdtrain_libtorch::{SavedTensor, StorageId};
use ssdtrain_plan as plan;
use tch::Device;

use super::orders::Orders;
use crate::cache::{Cache, Limits};
use crate::mem::free_memory;
use crate::policy::{Cursor, Decision, Facts, Filter, Headroom};
use crate::profile::Probe;
use crate::telemetry::{Counters, ScopeId, ScopeRecord};

/// What the threads that work on one step share.
pub(crate) struct StepContext {
    pub(crate) cache: Arc<Cache>,
    pub(crate) number: u64,
    /// What is computed again is held beside what it was.
    pub(crate) verify: bool,
    pub(crate) filter: Filter,
    /// Whose tensors are moved.
    pub(crate) device: Device,
    /// Storages of the parameters; the parameters themselves are held by whoever made the set, so that no address is reused.
    pub(crate) parameters: HashSet<StorageId>,
    /// Storages that the program holds beside the graph.
    pub(crate) held: HashSet<StorageId>,
    /// Scopes whose tensors stay on the device.
    pub(crate) kept_scopes: HashSet<ScopeId>,
    /// What is planned for each save.
    pub(crate) cursor: Cursor,
    /// What becomes of saves that are not as planned, if any are planned.
    pub(crate) unplanned: Option<Unplanned>,
    /// Takes notes, if the step is profiled.
    pub(crate) probe: Option<Arc<Probe>>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) record: ScopeRecord,
    pub(crate) orders: Orders,
}

/// What fits stays, as far as there is room, where nothing is planned.
pub(crate) struct Unplanned {
    pub(crate) headroom: Headroom,
    pub(crate) device: Device,
    /// The settings that hold all the same.
    pub(crate) limits: Limits,
}

impl Unplanned {
    /// The limits from now on. Of the memory that is free the rest of a step needs a part: half of it stays so.
    pub(crate) fn limits(&self, cache: &Cache) -> Limits {
        let bytes = match self.headroom {
            Headroom::Bytes(bytes) => bytes,
            Headroom::Free => cache.held().2.saturating_add(free_memory(self.device) / 2),
        };
        Limits {
            device_budget: bytes,
            backward_budget: bytes,
            prefetch: bytes / 2,
            late: true,
            ..self.limits
        }
    }
}

impl StepContext {
    /// What is decided about a tensor that is being saved in `scope`.
    pub(crate) fn decide(&self, saved: &SavedTensor<'_>, scope: ScopeId) -> Decision {
        self.filter.decide(Facts {
            movable: saved.eligible() && saved.device() == self.device,
            parameter: saved.storage_id().is_some_and(|id| self.parameters.contains(&id)),
            storage_bytes: saved.storage_bytes(),
            held: saved.storage_id().is_some_and(|id| self.held.contains(&id)),
            scope_kept: self.kept_scopes.contains(&scope),
        })
    }

    /// What is planned for a tensor that is being saved; none if nothing is. With the first that is not as planned the rest of the step is
    /// another than was planned for.
    pub(super) fn planned(&self, bytes: u64, scope: ScopeId) -> Option<plan::Placement> {
        let was_lost = self.cursor.is_lost();
        let planned = self.cursor.next(bytes, scope);
        if let Some(unplanned) = self.unplanned.as_ref().filter(|_| !was_lost && self.cursor.is_lost()) {
            self.cache.set_limits(unplanned.limits(&self.cache));
        }
        planned
    }

    /// A backward has ended: what is saved next is another micro-batch's.
    pub(crate) fn micro_batch_ends(&self) {
        self.cursor.rewind();
        if let Some(probe) = &self.probe {
            probe.backward_ended();
            self.cache.hold_back(false);
        }
    }
}
