//! The hooks of a step: they decide about each tensor that autograd saves, and are the graph's handles to those that the cache takes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ssdtrain_libtorch::{Handle, Packed, SavedTensor, SavedTensorHooks, Storage};
use ssdtrain_plan as plan;

use super::context::StepContext;
use super::marks::Marks;
use super::orders::Latest;
use super::scope::current_scope;
use crate::cache::{By, Cache, EntryKey, TapeKey};
use crate::policy::{Decision, KeepReason};
use crate::profile::{Probe, Save};

/// Hooks of one step on one thread.
pub(crate) struct Recorder {
    step: Arc<StepContext>,
    marks: Arc<Marks>,
    latest: Latest,
}

impl Recorder {
    pub(crate) fn new(step: Arc<StepContext>, marks: Arc<Marks>) -> Recorder {
        Recorder { step, marks, latest: Latest::default() }
    }
}

impl SavedTensorHooks for Recorder {
    /// A tensor of another device may belong to a step around this one.
    fn takes(&self, saved: &SavedTensor<'_>) -> bool {
        !saved.eligible() || saved.device() == self.step.device
    }

    fn pack(&self, saved: &SavedTensor<'_>) -> Result<Packed, String> {
        let step = &*self.step;
        let bytes = saved.storage_bytes();
        let scope = current_scope(step);
        step.counters.saved.add(bytes);
        if step.probe.as_ref().is_some_and(|probe| probe.begins_again()) {
            step.micro_batch_ends();
        }
        let begun = step.probe.as_ref().and_then(|probe| probe.saves());
        let mut decision = step.decide(saved, scope);
        if decision.may_be_recomputed() {
            let planned = step.planned(bytes, scope);
            if step.cursor.recomputes(planned)
                && let Some(recipe) = self.marks.recipe_of(saved, &step.counters)
            {
                return Ok(recipe);
            }
            self.marks.is_saved(saved);
            if planned == Some(plan::Placement::Keep) {
                decision = Decision::Keep(KeepReason::Policy);
            }
        }
        if let Decision::Keep(reason) = decision {
            let counter = match reason {
                KeepReason::Ineligible => &step.counters.kept_ineligible,
                KeepReason::Parameter => &step.counters.kept_parameters,
                KeepReason::Small => &step.counters.kept_small,
                KeepReason::HeldElsewhere => &step.counters.kept_held,
                KeepReason::Policy => &step.counters.kept_by_policy,
            };
            counter.add(bytes);
            // What the policy keeps is still entered in the cache, because it counts against the device budget.
            if reason != KeepReason::Policy || step.filter.keep_all {
                return Ok(Packed::Keep);
            }
        }
        let keep = decision != Decision::Move;
        step.record.add(scope, bytes, keep);
        let tape = step.orders.tape(&step.cache, &self.latest);
        let by = By { step: step.number, scope, tape, counters: &step.counters, record: &step.record };
        let Some((key, position)) = step.cache.save(saved, keep, by) else {
            return Ok(Packed::Keep);
        };
        if let Some((probe, begun)) = step.probe.as_ref().zip(begun) {
            let recipe = self.marks.timing_of(saved);
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

/// The graph's handle to one saved tensor.
struct SavedHandle {
    cache: Arc<Cache>,
    key: EntryKey,
    tape: TapeKey,
    position: usize,
    probe: Option<Arc<Probe>>,
    /// Identifies the device copy that last served this handle.
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
