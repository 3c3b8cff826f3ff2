//! The cache as autograd sees it: decides about each saved tensor, and stands in the graph for those it takes.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use ssdtrain_libtorch::{Handle, Packed, SavedTensor, SavedTensorHooks, Storage, StorageId};
use tch::Device;

use super::table::EntryKey;
use super::{Cache, Limits, TapeKey};
use crate::mem::free_memory;
use crate::plan;
use crate::policy::{Facts, Filter, KeepReason, Placement, Reading, Room};
use crate::profile::{Probe, Save};
use crate::recompute::Marks;
use crate::scope::current_scope;
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
    pub(crate) reading: Reading,
    /// What becomes of saves that are not as planned, if any are planned.
    pub(crate) unplanned: Option<Unplanned>,
    /// Takes notes, if the step is profiled.
    pub(crate) probe: Option<Arc<Probe>>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) record: ScopeRecord,
    /// The tape of the micro-batch under way.
    pub(crate) tape: AtomicUsize,
}

/// What fits stays, as far as there is room, where nothing is planned.
pub(crate) struct Unplanned {
    pub(crate) room: Room,
    pub(crate) device: Device,
    /// The settings that hold all the same.
    pub(crate) limits: Limits,
}

impl Unplanned {
    /// The limits from now on. Of the memory that is free the rest of a step needs a part: half of it stays so.
    pub(crate) fn limits(&self, cache: &Cache) -> Limits {
        let bytes = match self.room {
            Room::Bytes(bytes) => bytes,
            Room::Free => cache.held().2.saturating_add(free_memory(self.device) / 2),
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
    pub(crate) fn place(&self, saved: &SavedTensor<'_>, scope: ScopeId) -> Placement {
        self.filter.place(Facts {
            movable: saved.eligible() && saved.device() == self.device,
            parameter: saved.storage_id().is_some_and(|id| self.parameters.contains(&id)),
            storage_bytes: saved.storage_bytes(),
            held: saved.storage_id().is_some_and(|id| self.held.contains(&id)),
            scope_kept: self.kept_scopes.contains(&scope),
        })
    }

    /// What is planned for a tensor that is being saved; none if nothing is. With the first that is not as planned the rest of the step is
    /// another than was planned for.
    fn planned(&self, bytes: u64, scope: ScopeId) -> Option<plan::Placement> {
        let was_lost = self.reading.is_lost();
        let planned = self.reading.next(bytes, scope);
        if let Some(unplanned) = self.unplanned.as_ref().filter(|_| !was_lost && self.reading.is_lost()) {
            self.cache.set_limits(unplanned.limits(&self.cache));
        }
        planned
    }

    /// A backward has ended: what is saved next is another micro-batch's.
    pub(crate) fn micro_batch_ends(&self) {
        self.reading.rewind();
        if let Some(probe) = &self.probe {
            probe.backward_ended();
            self.cache.hold_back(false);
        }
    }
}

/// Hooks of one step on one thread.
pub(crate) struct Recorder {
    pub(crate) step: Arc<StepContext>,
    pub(crate) marks: Arc<Marks>,
}

impl SavedTensorHooks for Recorder {
    fn pack(&self, saved: &SavedTensor<'_>) -> Result<Packed, String> {
        let step = &*self.step;
        let bytes = saved.storage_bytes();
        let scope = current_scope();
        step.counters.saved.add(bytes);
        if step.probe.as_ref().is_some_and(|probe| probe.begins_again()) {
            step.micro_batch_ends();
        }
        let begun = step.probe.as_ref().and_then(|probe| probe.saves());
        let mut placement = step.place(saved, scope);
        if placement.may_be_recomputed() {
            let planned = step.planned(bytes, scope);
            if step.reading.recomputes(planned)
                && let Some(recipe) = self.marks.recipe_of(saved, &step.counters)
            {
                return Ok(recipe);
            }
            self.marks.is_saved(saved);
            if planned == Some(plan::Placement::Keep) {
                placement = Placement::Keep(KeepReason::Policy);
            }
        }
        if let Placement::Keep(reason) = placement {
            let counter = match reason {
                KeepReason::Ineligible => &step.counters.kept_ineligible,
                KeepReason::Parameter => &step.counters.kept_parameters,
                KeepReason::Small => &step.counters.kept_small,
                KeepReason::Held => &step.counters.kept_held,
                KeepReason::Policy => &step.counters.kept_by_policy,
            };
            counter.add(bytes);
            // What is kept by scope or by plan is entered in the books all the same: it counts against the device budget.
            if reason != KeepReason::Policy || step.filter.keep_all {
                return Ok(Packed::Keep);
            }
        }
        let keep = placement != Placement::Move;
        step.record.add(scope, bytes, keep);
        let tape = step.tape.load(Ordering::Acquire);
        let Some((key, position)) = step.cache.save(saved, keep, step, scope, tape) else {
            return Ok(Packed::Keep);
        };
        if let Some((probe, begun)) = step.probe.as_ref().zip(begun) {
            let recipe = self.marks.shown_of(saved);
            probe.saved(begun, Save { entry: key.serial, bytes, scope }, recipe, step.cache.alive());
        }
        let (cache, probe) = (Arc::clone(&step.cache), step.probe.clone());
        Ok(Packed::Handle(Box::new(SavedHandle {
            cache,
            key,
            tape,
            position,
            probe,
            round: AtomicU64::new(0),
        })))
    }
}

/// Stands in the graph for one saved tensor.
struct SavedHandle {
    cache: Arc<Cache>,
    key: EntryKey,
    tape: TapeKey,
    position: usize,
    probe: Option<Arc<Probe>>,
    /// Which copy of the entry this handle was served from last.
    round: AtomicU64,
}

impl Handle for SavedHandle {
    fn unpack(&self) -> Result<Storage, String> {
        let begun = self.probe.as_ref().and_then(|probe| Some((probe, probe.asks()?)));
        let mut round = self.round.load(Ordering::Acquire);
        let served = self.cache.fetch(self.key, self.tape, self.position, &mut round);
        self.round.store(round, Ordering::Release);
        if let Some((probe, begun)) = begun {
            probe.asked(begun, self.key.serial, self.cache.alive());
        }
        served
    }
}

impl Drop for SavedHandle {
    fn drop(&mut self) {
        self.cache.release(self.key, self.tape, self.round.load(Ordering::Acquire));
    }
}
