//! What a segment saves, made again by the recorded operations that made it first, if they make all of it: pointwise ones run as one then,
//! and the function need not be called again.

use std::sync::Arc;

use ssdtrain_libtorch as torch;
use ssdtrain_libtorch::{Handle, Reads, RecordingThread, SavedTensor, SavedVariable, Storage, StorageId};
use ssdtrain_plan::{Placement, Position};
use ssdtrain_store::sync::Mutex;
use tch::Tensor;

use super::recipe::Before;
use crate::replay::{Bounds, Given, Makers, Replays, Saving, Together};
use crate::step::{Latest, StepContext, current_scope};

/// The operations of a segment's first run.
pub(super) struct Operations {
    step: Arc<StepContext>,
    replays: Arc<Replays>,
    /// The inputs, as the step wants them.
    inputs: Vec<(StorageId, Arc<Mutex<SavedVariable>>)>,
    /// Where the first run begins.
    begin: Position,
    latest: Latest,
    /// All that stands for something.
    together: Arc<Together>,
    /// What stands for each position that was taken so far; `None` once there was one that only the function makes again.
    stands: Mutex<Option<Vec<(usize, Stand)>>>,
}

/// What stands for a tensor that a segment saved.
#[derive(Clone)]
pub(super) enum Stand {
    /// Recorded operations make it again.
    Replay(Arc<dyn Handle>),
    /// The function read it and did not make it, so it would hold it for its reruns anyway.
    Held(Storage),
}

impl Stand {
    pub(super) fn serve(&self) -> Result<Storage, String> {
        match self {
            Stand::Replay(handle) => handle.unpack(),
            Stand::Held(storage) => Ok(storage.clone()),
        }
    }
}

impl Operations {
    /// Those of a first run that begins now on this thread and lasts until the guard is dropped. `None` if none are recorded, or if nothing
    /// is gained by that.
    pub(super) fn record(
        step: &Arc<StepContext>,
        inputs: &[&Tensor],
        before: &Before,
    ) -> Option<(Operations, RecordingThread)> {
        let replays = Arc::clone(step.replays_of_parts()?);
        let inputs = inputs.iter().zip(before.saved());
        let inputs = inputs.filter_map(|(input, saved)| Some((Storage::of(input)?.id(), Arc::clone(saved))));
        let inputs = inputs.collect();
        let recording = replays.recording().record();
        let torch::Position { strand, index } = replays.recording().position();
        let begin = Position { strand, index };
        let (step, latest, stands) = (Arc::clone(step), Latest::default(), Mutex::new(Some(Vec::new())));
        let together = Arc::default();
        Some((Operations { step, replays, inputs, begin, latest, together, stands }, recording))
    }

    /// A tensor is taken at this position, if all before it are made again by operations. Whether it was counted.
    pub(super) fn take(&self, position: usize, saved: &SavedTensor<'_>) -> bool {
        if self.stands.lock().is_none() {
            return false;
        }
        let stand = self.stand_for(saved);
        let is_counted = matches!(stand, Some(Stand::Replay(_)));
        let mut stands = self.stands.lock();
        let gone = match (&mut *stands, stand) {
            (Some(stands), Some(stand)) => {
                stands.push((position, stand));
                None
            }
            (stands, _) => stands.take(),
        };
        drop(stands);
        // Memory is given back without the lock.
        drop(gone);
        is_counted
    }

    fn stand_for(&self, saved: &SavedTensor<'_>) -> Option<Stand> {
        let storage = saved.storage()?;
        if Reads::are_noted(storage.id()) {
            return Some(Stand::Held(storage));
        }
        let step = &*self.step;
        let saving = Saving {
            by: step.by(current_scope(step), &self.latest),
            stays: step.stays(),
            verify: step.verify,
            is_taken: &|storage| self.given(storage).is_none(),
            planned: &|_, _| Some(Placement::Recompute),
            makers: Makers::Any,
            keeps_unplanned: false,
            bounds: Some(Bounds {
                begin: self.begin,
                given: &|storage| self.given(storage),
                together: &self.together,
            }),
        };
        let stand = self.replays.stand_for(saved, &saving)?;
        Some(Stand::Replay(Arc::new(stand)))
    }

    /// The first run has ended. What nothing stands for needs no record, and no other segment goes back through this one.
    pub(super) fn forget(&self) {
        self.replays.forget(Some(self.begin.strand));
    }

    /// Where a storage comes from that the function did not make. `None` if it made it.
    fn given(&self, storage: StorageId) -> Option<Given> {
        let input = self.inputs.iter().find(|(input, _)| *input == storage);
        match input {
            Some((_, saved)) => Some(Given::Saved(Arc::clone(saved))),
            None => Reads::are_noted(storage).then_some(Given::Held),
        }
    }

    /// The first run has ended. What stands for the positions that were taken, if operations make all of them again.
    pub(super) fn end(&self) -> Option<Vec<(usize, Stand)>> {
        self.stands.lock().take()
    }
}

#[cfg(test)]
mod tests {
    use ssdtrain_plan::Keep;
    use tch::{Device, Kind};

    use crate::step::current_step;
    use crate::{TensorCache, segment};

    use super::*;

    /// Whether anything is on record of what a segment returned.
    fn is_recorded(function: fn(&Tensor) -> Result<Tensor, tch::TchError>) -> bool {
        let cache = TensorCache::builder().policy(Keep).min_bytes(0).build().unwrap();
        let x = Tensor::ones([64], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let _step = cache.step();
        let y = segment("s", &x, function).unwrap();
        let (step, ..) = current_step(Device::Cpu).unwrap();
        step.replays.get().unwrap().recording().maker(&Storage::of(&y).unwrap()).is_some()
    }

    #[test]
    fn records_end_with_their_segment() {
        let made_again = is_recorded(|x| x.f_sin()?.f_exp());
        let by_its_function = is_recorded(|x| x.f_dropout(0.5, true)?.f_sin()?.f_exp());
        assert!(!made_again && !by_its_function);
    }
}
