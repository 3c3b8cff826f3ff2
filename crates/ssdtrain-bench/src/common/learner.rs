//! A training step, with or without the cache.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ssdtrain::{StepReport, TensorCache};
use ssdtrain_libtorch as torch;
use ssdtrain_models::{Batch, Error, LanguageModel, Optimizer, accumulate};
use tch::nn::VarStore;
use tch::{Kind, Tensor};

use crate::common::cache::CacheArgs;
use crate::common::model_device::ModelDevice;
use crate::common::shape::Shape;
use crate::common::strategy::Strategy;

/// A model being trained by an optimizer `O`.
pub(crate) struct Learner<O> {
    pub(crate) model: Box<dyn LanguageModel>,
    pub(crate) vs: VarStore,
    pub(crate) optimizer: O,
    cache: Option<TensorCache>,
    model_device: ModelDevice,
}

/// How the optimizer takes a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Update {
    pub(crate) learning_rate: f64,
    /// Gradients are scaled down to this norm.
    pub(crate) clip: Option<f64>,
}

/// What a step did.
pub(crate) struct Outcome {
    /// In nats per token.
    pub(crate) loss: f64,
    /// From clearing the gradients to the end of the last transfer and of the device's work.
    pub(crate) wall: Duration,
    /// As [`StepReport::act_peak_bytes`].
    pub(crate) act_peak_bytes: u64,
    /// As [`StepReport::step_peak_bytes`].
    pub(crate) step_peak_bytes: u64,
    /// `None` without a cache.
    pub(crate) report: Option<StepReport>,
}

impl<O: Optimizer> Learner<O> {
    /// A new model; the same `seed` gives the same weights.
    pub(crate) fn new(
        strategy: Strategy,
        shape: &Shape,
        model_device: ModelDevice,
        cache: &CacheArgs,
        optimizer: impl FnOnce(&VarStore) -> Result<O>,
        seed: u64,
    ) -> Result<Learner<O>> {
        // Done first, so that the whole model is allocated by it, whatever the strategy.
        torch::install_cpu_allocator();
        let mut vs = VarStore::new(model_device.device);
        vs.set_kind(model_device.kind());
        let cache = cache.open(strategy, &vs)?;
        tch::manual_seed(seed as i64);
        let model = shape.build(&vs.root(), strategy.recompute(shape))?;
        let optimizer = optimizer(&vs)?;
        Ok(Learner { model, vs, optimizer, cache, model_device })
    }

    /// Takes one step on micro-batches of equal size.
    pub(crate) fn step(&mut self, micro_batches: &[Batch], update: Update) -> Result<Outcome> {
        let start = Instant::now();
        let Learner { model, vs, optimizer, cache, model_device } = self;
        let (loss, [act_peak_bytes, step_peak_bytes], report) = match cache {
            Some(cache) => {
                let step = cache.step();
                optimizer.zero_grad();
                let loss =
                    accumulate(model.as_ref(), micro_batches, |loss| anyhow::Ok(step.backward(loss)?))?;
                update.apply(optimizer)?;
                let report = step.finish()?;
                (loss, [report.act_peak_bytes, report.step_peak_bytes], Some(report))
            }
            None => {
                torch::reset_peak(model_device.device);
                let before = torch::memory(model_device.device).allocated;
                let gradients = torch::gradient_bytes(vs.variables().values());
                optimizer.zero_grad();
                let loss =
                    accumulate(model.as_ref(), micro_batches, |loss| loss.f_backward().map_err(Error::from))?;
                let peak = torch::memory(model_device.device).peak.saturating_sub(before);
                update.apply(optimizer)?;
                (loss, [peak, peak + gradients], None)
            }
        };
        model_device.synchronize();
        Ok(Outcome { loss, wall: start.elapsed(), act_peak_bytes, step_peak_bytes, report })
    }

    /// The cache, if the strategy has one.
    pub(crate) fn cache(&self) -> Option<&TensorCache> {
        self.cache.as_ref()
    }

    /// How the cache's bytes are moved.
    pub(crate) fn io_path(&self) -> String {
        self.cache.as_ref().map_or_else(|| "none: there is no cache".to_owned(), TensorCache::io_path)
    }

    /// The first parameter whose gradient differs in its bits from that of `other`, a model of the same shape.
    pub(crate) fn differing_gradient(&self, other: &Learner<O>) -> Result<Option<String>> {
        let theirs = other.vs.variables();
        let mut ours: Vec<_> = self.vs.variables().into_iter().collect();
        ours.sort_by(|(left, _), (right, _)| left.cmp(right));
        for (name, parameter) in ours {
            let their = theirs.get(&name).with_context(|| format!("the other model has no {name}"))?;
            if !same_bits(&parameter.grad(), &their.grad()).map_err(Error::from)? {
                return Ok(Some(name));
            }
        }
        Ok(None)
    }
}

impl Update {
    fn apply(self, optimizer: &mut impl Optimizer) -> Result<()> {
        if let Some(norm) = self.clip {
            optimizer.clip_grad_norm(norm)?;
        }
        Ok(optimizer.step(self.learning_rate)?)
    }
}

/// Whether two tensors of the same kind have identical bits: NaN equals itself, and 0 differs from -0.
fn same_bits(left: &Tensor, right: &Tensor) -> Result<bool, tch::TchError> {
    if !(left.defined() && right.defined()) {
        return Ok(left.defined() == right.defined());
    }
    if left.kind() != right.kind() {
        return Ok(false);
    }
    let bits = match left.kind().elt_size_in_bytes() {
        2 => Kind::Int16,
        4 => Kind::Int,
        _ => Kind::Int64,
    };
    left.f_view_dtype(bits)?.f_equal(&right.f_view_dtype(bits)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_compared_and_not_values() {
        for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half] {
            let tensor = |values: &[f32]| Tensor::from_slice(values).to_kind(kind);
            let same = |left: &[f32], right: &[f32]| same_bits(&tensor(left), &tensor(right)).unwrap();
            assert!(same(&[1.0, f32::NAN], &[1.0, f32::NAN]), "{kind:?}");
            assert!(!same(&[1.0, 0.0], &[1.0, -0.0]), "{kind:?}");
        }
        assert!(same_bits(&Tensor::new(), &Tensor::new()).unwrap());
        assert!(!same_bits(&Tensor::new(), &Tensor::from_slice(&[0.0_f32])).unwrap());
    }
}
