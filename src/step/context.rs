//! The state of one step, shared by the threads that work on it.

use std::collections::HashSet;
use std::sync::{Arc, OnceLock};

use ssdtrain_libtorch as torch;
use ssdtrain_libtorch::{RecordingThread, SavedTensor, StorageId};
use ssdtrain_plan::{Placement, Position, Room, Saves, Saving, StepPlan};
use tch::Device;

use super::orders::{Latest, Orders};
use super::room;
use crate::cache::{By, Cache};
use crate::policy::{Cursor, Decision, Facts, Instruction, Placed, decide, stays, unplanned};
use crate::profile::Probe;
use crate::replay::{Chains, Replays, Stays};
use crate::telemetry::events::warn_once;
use crate::telemetry::{Counters, ScopeId, ScopeRecord};

/// State shared by the threads that work on one step.
pub(crate) struct StepContext {
    pub(crate) cache: Arc<Cache>,
    /// The process that took it.
    pub(crate) origin: torch::Origin,
    pub(crate) number: u64,
    /// Whether reruns are compared with first runs.
    pub(crate) verify: bool,
    /// Storages smaller than this stay in the graph.
    pub(crate) min_bytes: u64,
    /// What the step shall do.
    pub(crate) plan: StepPlan,
    /// The step's position in its plan.
    pub(crate) cursor: Cursor,
    /// Bytes that others kept when it began.
    pub(crate) kept_before: u64,
    /// The bytes and the scope of the first save that was not planned.
    pub(crate) strange: OnceLock<(u64, ScopeId)>,
    /// Upper limit on the bytes on their way off the device.
    pub(crate) stores_in_flight: u64,
    /// The device whose tensors are moved.
    pub(crate) device: Device,
    /// Storages of the parameters. The owner of the cache holds the parameters themselves, so that no address is reused.
    pub(crate) parameters: HashSet<StorageId>,
    /// Storages that the program holds besides the graph.
    pub(crate) held: HashSet<StorageId>,
    /// Results that need not be saved, if operations are recorded.
    pub(crate) replays: OnceLock<Arc<Replays>>,
    /// Makes one of several operations that are run again, where that is wanted.
    pub(crate) chains: Option<Arc<Chains>>,
    /// Takes notes of the step, if it is profiled.
    pub(crate) probe: Option<Arc<Probe>>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) record: ScopeRecord,
    pub(crate) orders: Orders,
}

impl Drop for StepContext {
    fn drop(&mut self) {
        if self.origin.is_parent() {
            // What they hold is the parent's to release.
            Box::leak(Box::new((self.replays.take(), self.probe.take())));
        }
    }
}

impl StepContext {
    /// The decision about a tensor that is being saved in `scope`. If it could be moved, the plan's next line is the next save's.
    pub(super) fn decide(&self, saved: &SavedTensor<'_>, scope: ScopeId) -> Decision {
        let facts = self.facts(saved);
        decide(facts, self.min_bytes, || {
            let placed = self.placed(facts.storage_bytes, scope);
            let may_stay = |most| self.keeps(facts.storage_bytes) <= most;
            let fits = |placement: &Placement| {
                *placement != Placement::Keep || placed.kept_up_to.is_none_or(may_stay)
            };
            Instruction {
                keeps_all: matches!(self.plan.saves, Saves::Count | Saves::Leave) || placed.in_graph,
                scope_kept: self.plan.kept_scopes.contains(&scope),
                planned: placed.placement.filter(fits),
                unplanned: unplanned(&self.plan),
            }
        })
    }

    /// What the step would keep with so many bytes more.
    fn keeps(&self, bytes: u64) -> u64 {
        self.cache.kept().saturating_sub(self.kept_before).saturating_add(bytes)
    }

    /// Whether a tensor that is being saved could be moved.
    pub(crate) fn could_move(&self, saved: &SavedTensor<'_>) -> bool {
        stays(self.facts(saved), self.min_bytes).is_none()
    }

    /// What the cache does not move.
    pub(crate) fn stays(&self) -> Stays<'_> {
        Stays {
            device: self.device,
            min_bytes: self.min_bytes,
            parameters: &self.parameters,
            held: &self.held,
        }
    }

    /// Who saves something in `scope` on this thread, whose latest tape may be `latest`.
    pub(crate) fn by(&self, scope: ScopeId, latest: &Latest) -> By<'_> {
        let tape = self.orders.tape(&self.cache, latest);
        By { step: self.number, scope, tape, counters: &self.counters, record: &self.record }
    }

    fn facts(&self, saved: &SavedTensor<'_>) -> Facts {
        Facts {
            movable: saved.eligible() && saved.device() == self.device,
            parameter: saved.storage_id().is_some_and(|id| self.parameters.contains(&id)),
            storage_bytes: saved.storage_bytes(),
            held: saved.storage_id().is_some_and(|id| self.held.contains(&id)),
        }
    }

    /// What the plan says of a tensor that is being saved.
    fn placed(&self, bytes: u64, scope: ScopeId) -> Placed {
        let placed = self.cursor.next(Saving { bytes, scope, position: self.position() });
        if let Some(room) = placed.room {
            if matches!(room, Room::Fitting(_)) {
                self.strange.get_or_init(|| (bytes, scope));
            }
            self.give_room(room);
        }
        placed
    }

    /// The point that the calling thread has reached, if operations are recorded.
    pub(crate) fn position(&self) -> Option<Position> {
        let torch::Position { strand, index } = self.replays.get()?.recording().position();
        Some(Position { strand, index })
    }

    /// Records what the calling thread does in the step, if the step needs that.
    pub(crate) fn records(&self) -> Option<RecordingThread> {
        self.replays.get().filter(|_| self.is_recorded()).map(|replays| replays.recording().record())
    }

    /// Whether all that its threads do is recorded.
    fn is_recorded(&self) -> bool {
        self.probe.is_some() || self.plan.recomputes()
    }

    /// What records the operations of parts of the step; `None` if they need not be run again as one, or cannot be.
    pub(crate) fn replays_of_parts(&self) -> Option<&Arc<Replays>> {
        if self.is_recorded() {
            return None;
        }
        if self.replays.get().is_none() {
            let chains = self.chains.as_ref().filter(|chains| chains.is_able())?;
            let made = Replays::new(&self.cache, &self.counters, None, Some(chains));
            let made = made
                .inspect_err(|error| warn_once!(%error, "operations of segments are not recorded"))
                .ok()?;
            // Another thread may have come first.
            return Some(self.replays.get_or_init(|| made));
        }
        self.replays.get()
    }

    /// From now on, this much may be on the device.
    pub(crate) fn give_room(&self, room: Room) {
        self.cache.set_limits(room::limits(room, &self.cache, self.device, self.stores_in_flight));
    }

    /// A backward has ended: what is saved next belongs to another micro-batch.
    pub(crate) fn micro_batch_ends(&self) {
        self.cursor.backward_ended();
        if let Some(replays) = self.replays.get() {
            replays.forget(None);
        }
        if let Some(probe) = &self.probe {
            probe.backward_ended();
        }
        if self.is_latest_profile() {
            self.cache.hold_back(false);
        }
    }

    /// Whether the step is profiled, and no later one.
    pub(crate) fn is_latest_profile(&self) -> bool {
        self.probe.as_ref().is_some_and(|probe| probe.is_latest())
    }
}
