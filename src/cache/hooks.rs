//! The cache as autograd sees it: decides about each saved tensor, and stands in the graph for those it takes.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use ssdtrain_libtorch::{Handle, Packed, SavedTensor, SavedTensorHooks, Storage, StorageId};
use tch::Device;

use super::table::EntryKey;
use super::{Cache, TapeKey};
use crate::plan;
use crate::policy::{Facts, Filter, KeepReason, Placement, Reading};
use crate::profile::{Probe, Save};
use crate::recompute::Marks;
use crate::scope::current_scope;
use crate::telemetry::{Counters, ScopeId, ScopeRecord};

/// What the threads that work on one step share.
pub(crate) struct StepContext {
    pub(crate) cache: Arc<Cache>,
    pub(crate) number: u64,
    pub(crate) filter: Filter,
    /// Whose tensors are moved.
    pub(crate) device: Device,
    /// Storages of the parameters; the parameters themselves are held by whoever made the set, so that no address is reused.
    pub(crate) parameters: HashSet<StorageId>,
    /// Scopes whose tensors stay on the device.
    pub(crate) kept_scopes: HashSet<ScopeId>,
    /// What is planned for each save.
    pub(crate) reading: Reading,
    /// Takes notes, if the step is profiled.
    pub(crate) probe: Option<Arc<Probe>>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) record: ScopeRecord,
    /// The tape of the micro-batch under way.
    pub(crate) tape: AtomicUsize,
}

impl StepContext {
    /// What is decided about a tensor that is being saved in `scope`.
    pub(crate) fn place(&self, saved: &SavedTensor<'_>, scope: ScopeId) -> Placement {
        self.filter.place(Facts {
            movable: saved.eligible() && saved.device() == self.device,
            parameter: saved.storage_id().is_some_and(|id| self.parameters.contains(&id)),
            storage_bytes: saved.storage_bytes(),
            scope_kept: self.kept_scopes.contains(&scope),
        })
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
        let begun = step.probe.as_ref().and_then(|probe| probe.now());
        let mut placement = step.place(saved, scope);
        if placement.may_be_recomputed() {
            let planned = step.reading.next(bytes, scope);
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
        let begun = self.probe.as_ref().and_then(|probe| Some((probe, probe.now()?)));
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
