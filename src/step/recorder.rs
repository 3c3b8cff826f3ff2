//! The hooks of a step: they decide about each tensor that autograd saves, and are the graph's handles to those that the cache takes.

use std::sync::Arc;

use ssdtrain_libtorch::{Handle, Packed, SavedTensor, SavedTensorHooks, Storage};
use ssdtrain_plan::{Position, Recomputed, Save};

use super::context::StepContext;
use super::marks::Marks;
use super::orders::Latest;
use super::part::Part;
use super::scope::{current_part, current_scope};
use crate::cache::{EntryHandle, Subject};
use crate::policy::{Decision, KeepReason, Place, Recipes};
use crate::profile::{Begun, Probe, Source};
use crate::replay::{Makers, Saving, Stand};
use crate::telemetry::{Counter, ScopeId};

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

    /// What the graph holds for a saved tensor instead of its bytes, if there is a recipe of that kind.
    fn recipe(&self, by: Recipes, saved: &SavedTensor<'_>, note: &mut SaveNote) -> Option<Packed> {
        let marked = || self.marks.recipe_of(saved, &self.step.counters);
        match by {
            Recipes::Marked => marked(),
            Recipes::Any => marked().or_else(|| {
                let part = current_part(&self.step);
                let stand = self.replayed(saved, note.scope, part.as_deref(), Makers::Any);
                stand.map(handle).or_else(|| part?.stand_for(saved))
            }),
            Recipes::Near => self.near(saved, note),
        }
    }

    /// What the graph holds for what a few operations make of what is there. The profile of the step, if there is one, has it among what is
    /// saved.
    fn near(&self, saved: &SavedTensor<'_>, note: &mut SaveNote) -> Option<Packed> {
        let step = &*self.step;
        let has_room = || step.cache.has_room_for(saved.storage_bytes());
        // Of what is computed again anyway, the cache need have nothing besides.
        let stays = step.plan.recomputed == Recomputed::PointwiseWithoutRoom && has_room();
        if stays && !step.replays.get()?.stands_for(saved) {
            return None;
        }
        let is_all = step.plan.recomputed == Recomputed::Everything;
        let makers = Makers::Near(is_all.then(|| step.cache.device_budget()));
        let part = current_part(&self.step);
        let mut stand = self.replayed(saved, note.scope, part.as_deref(), makers)?;
        self.marks.is_saved(saved);
        let number = step.probe.as_ref().and_then(|probe| stand.is_profiled_by(probe));
        number.iter().for_each(|number| self.note(saved, *number, note));
        Some(handle(stand))
    }

    /// Takes note of what is saved, which a profile knows by this number.
    fn note(&self, saved: &SavedTensor<'_>, number: u64, note: &mut SaveNote) {
        let step = &*self.step;
        if let Some((probe, begun)) = step.probe.as_ref().zip(note.begun.take()) {
            let SaveNote { scope, position, .. } = *note;
            let save = Save { entry: number, bytes: saved.storage_bytes(), scope, position };
            probe.saved(begun, save, self.source(saved), step.cache.alive());
        }
    }

    /// What counts the tensors that stay in the graph for this reason.
    fn kept(&self, reason: KeepReason) -> &Counter {
        let counters = &self.step.counters;
        match reason {
            KeepReason::Ineligible => &counters.kept_ineligible,
            KeepReason::Parameter => &counters.kept_parameters,
            KeepReason::Small => &counters.kept_small,
            KeepReason::HeldElsewhere => &counters.kept_held,
            KeepReason::Policy => &counters.kept_by_policy,
        }
    }

    /// What the graph holds for a result that such operations make again, as far as they are on record, instead of its bytes.
    fn replayed(
        &self,
        saved: &SavedTensor<'_>,
        scope: ScopeId,
        part: Option<&dyn Part>,
        makers: Makers,
    ) -> Option<Stand> {
        let step = &*self.step;
        let planned = |operation, result| match makers {
            Makers::Any => step.cursor.result(operation, result),
            Makers::Near(_) => None,
        };
        let saving = Saving {
            by: step.by(scope, &self.latest),
            stays: step.stays(),
            verify: step.verify,
            is_taken: &|storage| part.is_some_and(|part| part.has_taken(storage)),
            planned: &planned,
            makers,
            bounds: None,
            keeps_unplanned: step.cursor.keeps_unplanned(),
        };
        step.replays.get()?.stand_for(saved, &saving)
    }

    /// How a saved tensor was made.
    fn source(&self, saved: &SavedTensor<'_>) -> Source {
        let replays = self.step.replays.get();
        Source {
            recipe: self.marks.timing_of(saved),
            origin: replays.and_then(|replays| replays.origin(saved, &self.step.stays())),
            segment: current_part(&self.step).and_then(|part| part.timing()),
        }
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
        let position = step.probe.as_ref().and_then(|_| step.position()).unwrap_or_default();
        if step.probe.as_ref().is_some_and(|probe| probe.begins_again(position.strand)) {
            step.micro_batch_ends();
        }
        let begun = step.probe.as_ref().and_then(|probe| probe.saves());
        let mut note = SaveNote { begun, scope, position };
        let place = match step.decide(saved, scope) {
            Decision::Save(place) => place,
            Decision::Recompute { by, otherwise } => {
                let may_go = saved.storage().is_some_and(|storage| step.cache.in_use(&storage));
                match may_go.then(|| self.recipe(by, saved, &mut note)).flatten() {
                    Some(recipe) => return Ok(recipe),
                    None => otherwise,
                }
            }
        };
        if place.was_chosen() {
            self.marks.is_saved(saved);
        }
        let keep = match place {
            Place::Graph(reason) => {
                self.kept(reason).add(bytes);
                return Ok(Packed::Keep);
            }
            // It is entered in the cache all the same, because it counts against the device budget.
            Place::Device => {
                step.counters.kept_by_policy.add(bytes);
                true
            }
            Place::Below => false,
        };
        step.record.add(scope, bytes, keep);
        let by = step.by(scope, &self.latest);
        let Some(entry) = Subject::of(saved).and_then(|subject| step.cache.save(subject, keep, by)) else {
            return Ok(Packed::Keep);
        };
        self.note(saved, entry.key().serial, &mut note);
        let probe = step.probe.clone().map(|probe| (probe, position.strand));
        Ok(Packed::Handle(Box::new(SavedHandle { entry, probe })))
    }
}

/// What a profile notes of a save: when it began, unless no more notes are taken, and where.
struct SaveNote {
    begun: Option<Begun>,
    scope: ScopeId,
    position: Position,
}

fn handle(stand: Stand) -> Packed {
    Packed::Handle(Box::new(stand))
}

/// The graph's handle to one saved tensor.
struct SavedHandle {
    entry: EntryHandle,
    /// What takes notes, and the number of the thread that saved it.
    probe: Option<(Arc<Probe>, u32)>,
}

impl Handle for SavedHandle {
    fn unpack(&self) -> Result<Storage, String> {
        let begun = self.probe.as_ref().and_then(|(probe, strand)| Some((probe, probe.asks(*strand)?)));
        let served = self.entry.fetch();
        if let Some((probe, begun)) = begun {
            probe.asked(begun, self.entry.key().serial, self.entry.cache().alive());
        }
        served
    }
}
