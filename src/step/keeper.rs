//! Hooks for the inputs of a part of the program that is to be run again.

use std::sync::Arc;

use ssdtrain_libtorch::{Handle, Packed, SavedTensor, SavedTensorHooks, Storage};
use ssdtrain_plan::Placement;

use super::context::StepContext;
use super::orders::Latest;
use crate::cache::{EntryHandle, Subject};
use crate::replay::{Makers, Saving};
use crate::telemetry::ScopeId;

/// Keeps what it is given as the step's plan says for the operation that made it. The program saves none of it here, so the plan has no
/// line for it.
pub(crate) struct Keeper {
    pub(crate) step: Arc<StepContext>,
    pub(crate) scope: ScopeId,
}

impl SavedTensorHooks for Keeper {
    fn pack(&self, saved: &SavedTensor<'_>) -> Result<Packed, String> {
        let step = &*self.step;
        if !step.could_move(saved) {
            return Ok(Packed::Keep);
        }
        let latest = Latest::default();
        let planned = |operation, result| step.cursor.result(operation, result);
        let saving = Saving {
            by: step.by(self.scope, &latest),
            stays: step.stays(),
            verify: step.verify,
            planned: &planned,
            makers: Makers::Any,
            bounds: None,
            keeps_unplanned: step.cursor.keeps_unplanned(),
            // What goes in was made outside.
            is_taken: &|_| false,
        };
        let placement = step.replays.get().zip(saved.storage());
        let placement = placement.and_then(|(replays, storage)| replays.planned(&storage, &saving));
        if let Some(replays) = step.replays.get().filter(|_| placement == Some(Placement::Recompute))
            && saved.storage().is_some_and(|storage| step.cache.in_use(&storage))
            && let Some(stand) = replays.stand_for(saved, &saving)
        {
            return Ok(Packed::Handle(Box::new(stand)));
        }
        let keep = placement == Some(Placement::Keep);
        step.record.add(self.scope, saved.storage_bytes(), keep);
        let entry = Subject::of(saved).and_then(|subject| step.cache.save(subject, keep, saving.by));
        Ok(entry.map_or(Packed::Keep, |entry| Packed::Handle(Box::new(Kept(entry)))))
    }
}

struct Kept(EntryHandle);

impl Handle for Kept {
    fn unpack(&self) -> Result<Storage, String> {
        self.0.fetch()
    }
}
