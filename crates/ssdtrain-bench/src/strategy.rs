//! One training step, with the cache and without.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::ValueEnum;
use ssdtrain::{Policy, StepReport, TensorCache};
use ssdtrain_libtorch as torch;
use ssdtrain_models::{AdamW, AdamWConfig, Batch, Error, Gpt, GptConfig, Optimizer, accumulate};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use crate::cache::CacheArgs;

/// What becomes of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Strategy {
    /// tch without a cache: no hooks. The CPU allocator is ours in every strategy, since it serves the whole process:
    /// so memory is measured alike, and no strategy gets a faster one
    Plain,
    /// A cache that keeps everything in memory, and only counts
    Keep,
    /// A cache that moves activations to disk
    Offload,
}

/// A model in training.
pub(crate) struct Learner {
    pub(crate) model: Gpt,
    pub(crate) vs: VarStore,
    pub(crate) optimizer: AdamW,
    cache: Option<TensorCache>,
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
    /// From the clearing of the gradients to the end of the last transfer.
    pub(crate) wall: Duration,
    /// Peak of allocated bytes in forward and backward, minus those at the beginning.
    pub(crate) act_peak_bytes: u64,
    /// None without a cache.
    pub(crate) report: Option<StepReport>,
}

impl Strategy {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Strategy::Plain => "plain",
            Strategy::Keep => "keep",
            Strategy::Offload => "offload",
        }
    }
}

impl Learner {
    /// A new model; the same `seed` gives the same weights.
    pub(crate) fn new(
        strategy: Strategy,
        config: &GptConfig,
        cache: &CacheArgs,
        optimizer: AdamWConfig,
        seed: u64,
    ) -> Result<Learner> {
        // First, so that all of the model is in it, whatever the strategy.
        torch::install_cpu_allocator();
        let vs = VarStore::new(Device::Cpu);
        let cache = match strategy {
            Strategy::Plain => None,
            Strategy::Keep => Some(cache.open(Policy::Keep, &vs)?),
            Strategy::Offload => Some(cache.open(Policy::Offload, &vs)?),
        };
        tch::manual_seed(seed as i64);
        let model = Gpt::new(&vs.root(), config.clone())?;
        let optimizer = AdamW::new(&vs, optimizer)?;
        Ok(Learner { model, vs, optimizer, cache })
    }

    /// Takes one step on micro-batches of equal size.
    pub(crate) fn step(&mut self, micro_batches: &[Batch], update: Update) -> Result<Outcome> {
        let start = Instant::now();
        let Learner { model, optimizer, cache, .. } = self;
        match cache {
            Some(cache) => {
                let step = cache.step();
                optimizer.zero_grad();
                let loss = accumulate(model, micro_batches, |loss| anyhow::Ok(step.backward(loss)?))?;
                update.apply(optimizer)?;
                let report = step.finish()?;
                let act_peak_bytes = report.act_peak_bytes;
                Ok(Outcome { loss, wall: start.elapsed(), act_peak_bytes, report: Some(report) })
            }
            None => {
                torch::reset_peak();
                let before = torch::cpu_memory().allocated;
                optimizer.zero_grad();
                let loss = accumulate(model, micro_batches, |loss| loss.f_backward().map_err(Error::from))?;
                let act_peak_bytes = torch::cpu_memory().peak.saturating_sub(before);
                update.apply(optimizer)?;
                Ok(Outcome { loss, wall: start.elapsed(), act_peak_bytes, report: None })
            }
        }
    }

    /// Which way the cache's bytes go.
    pub(crate) fn io_path(&self) -> String {
        self.cache.as_ref().map_or_else(|| "none: there is no cache".to_owned(), TensorCache::io_path)
    }

    /// The first parameter whose gradient has other bits than that of `other`, a model of the same shape.
    pub(crate) fn differing_gradient(&self, other: &Learner) -> Result<Option<String>> {
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
    fn apply(self, optimizer: &mut AdamW) -> Result<()> {
        if let Some(norm) = self.clip {
            optimizer.clip_grad_norm(norm)?;
        }
        Ok(optimizer.step(self.learning_rate)?)
    }
}

/// Whether two tensors of 32-bit numbers are the same to the bit: NaN equals itself, and 0 differs from -0.
fn same_bits(left: &Tensor, right: &Tensor) -> Result<bool, tch::TchError> {
    if !(left.defined() && right.defined()) {
        return Ok(left.defined() == right.defined());
    }
    left.f_view_dtype(Kind::Int)?.f_equal(&right.f_view_dtype(Kind::Int)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_compared_and_not_values() {
        let same =
            |left: &[f32], right: &[f32]| same_bits(&Tensor::from_slice(left), &Tensor::from_slice(right));
        assert!(same(&[1.0, f32::NAN], &[1.0, f32::NAN]).unwrap());
        assert!(!same(&[0.0], &[-0.0]).unwrap());
        assert!(same_bits(&Tensor::new(), &Tensor::new()).unwrap());
        assert!(!same_bits(&Tensor::new(), &Tensor::from_slice(&[0.0_f32])).unwrap());
    }
}
