//! The state of one step, shared by the threads that work on it.

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

/// State shared by the threads that work on one step.
pub(crate) struct StepContext {
    pub(crate) cache: Arc<Cache>,
    pub(crate) number: u64,
    /// Whether reruns are compared with first runs.
    pub(crate) verify: bool,
    pub(crate) filter: Filter,
    /// The device whose tensors are moved.
    pub(crate) device: Device,
    /// Storages of the parameters. The owner of the cache holds the parameters themselves, so that no address is reused.
    pub(crate) parameters: HashSet<StorageId>,
    /// Storages that the program holds besides the graph.
    pub(crate) held: HashSet<StorageId>,
    /// Scopes whose tensors stay on the device.
    pub(crate) kept_scopes: HashSet<ScopeId>,
    /// The position in the plan of the step's saves.
    pub(crate) cursor: Cursor,
    /// How saves that deviate from the plan are treated, if there is a plan.
    pub(crate) unplanned: Option<Unplanned>,
    /// Takes notes of the step, if it is profiled.
    pub(crate) probe: Option<Arc<Probe>>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) record: ScopeRecord,
    pub(crate) orders: Orders,
}

/// Without a plan, what fits stays, as far as there is room.
pub(crate) struct Unplanned {
    pub(crate) headroom: Headroom,
    pub(crate) device: Device,
    /// The limits from the configuration, which apply to everything else.
    pub(crate) limits: Limits,
}

impl Unplanned {
    /// The limits without a plan. Half of the free memory is left, because the rest of a step needs a part of it.
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
    /// The decision about a tensor that is being saved in `scope`.
    pub(crate) fn decide(&self, saved: &SavedTensor<'_>, scope: ScopeId) -> Decision {
        self.filter.decide(Facts {
            movable: saved.eligible() && saved.device() == self.device,
            parameter: saved.storage_id().is_some_and(|id| self.parameters.contains(&id)),
            storage_bytes: saved.storage_bytes(),
            held: saved.storage_id().is_some_and(|id| self.held.contains(&id)),
            scope_kept: self.kept_scopes.contains(&scope),
        })
    }

    /// The planned placement of a tensor that is being saved; `None` if nothing is planned for it. From the first save that deviates from
    /// the plan on, the rest of the step counts as unplanned.
    pub(super) fn planned(&self, bytes: u64, scope: ScopeId) -> Option<plan::Placement> {
        let was_lost = self.cursor.is_lost();
        let planned = self.cursor.next(bytes, scope);
        if let Some(unplanned) = self.unplanned.as_ref().filter(|_| !was_lost && self.cursor.is_lost()) {
            self.cache.set_limits(unplanned.limits(&self.cache));
        }
        planned
    }

    /// A backward has ended: what is saved next belongs to another micro-batch.
    pub(crate) fn micro_batch_ends(&self) {
        self.cursor.rewind();
        if let Some(probe) = &self.probe {
            probe.backward_ended();
            self.cache.hold_back(false);
        }
    }
}
