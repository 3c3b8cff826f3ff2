//! A segment that the step may compute again or not: its inputs are kept once it is to be.

use std::sync::{Arc, OnceLock};

use ssdtrain_libtorch as torch;
use ssdtrain_libtorch::{Hooks, Reads, Storage};
use ssdtrain_store::sync::Mutex;
use tch::Tensor;

use super::recipe::Input;
use crate::profile::SegmentTiming;
use crate::step::{Keeper, StepContext};
use crate::telemetry::ScopeId;

/// What a segment needs to be computed again, while it is not known yet whether it has to be.
pub(super) struct Offer {
    scope: ScopeId,
    /// The stream that it began on.
    stream: Option<usize>,
    inputs: Mutex<Inputs>,
    /// How the segment was timed, if the step is profiled.
    pub(super) timing: Option<Arc<SegmentTiming>>,
}

enum Inputs {
    /// They are as the function got them, with their versions.
    Given(Vec<(Tensor, Option<u32>)>),
    Kept(Vec<Input>),
    /// They could not be kept, since they had changed or there was an error.
    Gone,
}

impl Offer {
    /// The function is about to run.
    pub(super) fn new(inputs: &[&Tensor], step: &StepContext, scope: ScopeId) -> Offer {
        let stream = stream(inputs, step);
        let given = inputs.iter().map(|input| (input.shallow_clone(), torch::version(input))).collect();
        let timing = step.probe.as_ref().map(|probe| {
            let on_device = inputs.iter().filter(|input| input.device() == step.device);
            let storages: Vec<Storage> = on_device.filter_map(|input| Storage::of(input)).collect();
            let replays = step.replays.get();
            let (reads, operations) =
                replays.map(|replays| replays.origin_of_all(&storages, &step.stays())).unwrap_or_default();
            let beside = probe.beside(step.cache.alive());
            let (from, to) = (probe.stamp(), OnceLock::new());
            Arc::new(SegmentTiming { from, to, beside, reads, operations })
        });
        Offer { scope, stream, inputs: Mutex::new(Inputs::Given(given)), timing }
    }

    /// Keeps the inputs, unless that was done. False if they cannot be kept any more, or not on the stream that the calling thread
    /// computes on: it need not have waited for all of them.
    pub(super) fn keep_inputs(&self, step: &Arc<StepContext>) -> bool {
        let mut inputs = self.inputs.lock();
        if let Inputs::Given(given) = &*inputs {
            let is_same = given.iter().all(|(input, version)| torch::version(input) == *version);
            let given: Vec<&Tensor> = given.iter().map(|(input, _)| input).collect();
            if stream(&given, step) != self.stream {
                return false;
            }
            let keeper = Keeper { step: Arc::clone(step), scope: self.scope };
            let _active = torch::activate(Arc::new(keeper) as Hooks);
            let kept = if is_same { Input::save_all(&given).ok() } else { None };
            *inputs = kept.map_or(Inputs::Gone, Inputs::Kept);
        }
        matches!(*inputs, Inputs::Kept(_))
    }

    /// The inputs, if they were kept.
    pub(super) fn take(&self) -> Vec<Input> {
        match std::mem::replace(&mut *self.inputs.lock(), Inputs::Gone) {
            Inputs::Kept(inputs) => inputs,
            Inputs::Given(_) | Inputs::Gone => Vec::new(),
        }
    }

    /// The function has ended. A profile counts on it only if it changes nothing that it has not made.
    pub(super) fn ends(&self, step: &StepContext, reads: Option<&Reads>) {
        let is_repeatable = reads.is_some_and(|reads| reads.check_unchanged_within().is_ok());
        if let Some((timing, probe)) = self.timing.as_ref().zip(step.probe.as_ref()).filter(|_| is_repeatable)
        {
            timing.to.get_or_init(|| probe.stamp());
        }
    }
}

/// The stream of the inputs' device that the calling thread computes on.
fn stream(inputs: &[&Tensor], step: &StepContext) -> Option<usize> {
    let mut on_device = inputs.iter().filter(|input| input.device() == step.device);
    step.cache.stream(&Storage::of(on_device.next()?)?)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ssdtrain_plan::{InTurn, Offload, Placement};
    use tch::{Kind, TchError};

    use super::*;
    use crate::device::Simulated;
    use crate::{MIB, TensorCache, segment};

    /// The bytes that are computed again of a segment whose function goes to `stream` before it saves anything. All of them can be by the
    /// segment, and some by recorded operations.
    fn computed_again(stream: usize) -> u64 {
        let builder =
            TensorCache::builder().min_bytes(0).simulated_device(Duration::ZERO).host_pool(16 * MIB);
        let policy = InTurn::new(Offload::default(), vec![Placement::Recompute]);
        let cache = builder.policy(policy).build().unwrap();
        let x = Tensor::ones([64], (Kind::Float, tch::Device::Cpu)).set_requires_grad(true);
        let step = cache.step();
        let function = move |x: &Tensor| -> Result<Tensor, TchError> {
            Simulated::enter(stream);
            // Nothing recorded makes it.
            let y = x.f_dropout(0.5, true)?.f_sin();
            Simulated::enter(0);
            y
        };
        let loss = segment("part", &x, function).unwrap().sum(Kind::Float);
        step.backward(&loss).unwrap();
        drop(loss);
        step.finish().unwrap().recomputed.bytes
    }

    #[test]
    fn inputs_are_kept_where_they_were_given() {
        assert!(computed_again(1) < computed_again(0));
    }
}
