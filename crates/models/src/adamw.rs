//! AdamW: Adam with decoupled weight decay.

use tch::nn::VarStore;
use tch::{Kind, Tensor, no_grad};

use crate::error::{Error, Result};
use crate::optimizer::{Optimizer, trainable};

/// The settings of [`AdamW`] that stay constant over a run; the learning rate is passed to each step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Decay of the mean gradient, in `0.0..1.0`.
    pub beta1: f64,
    /// Decay of the mean squared gradient, in `0.0..1.0`.
    pub beta2: f64,
    /// Keeps the division finite; must be above 0. A model in fp16 needs about 1e-4: in fp16 the squares of small
    /// gradients are 0, and so is 1e-8.
    pub eps: f64,
    /// The share of a weight that is subtracted per step and unit of learning rate. Matrices and embeddings decay,
    /// biases and layer norms do not.
    pub weight_decay: f64,
}

impl Default for AdamWConfig {
    /// The defaults of GPT-2 and nanoGPT.
    fn default() -> AdamWConfig {
        AdamWConfig { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 }
    }
}

impl AdamWConfig {
    /// The default, with an `eps` that is large enough for parameters of `kind`.
    pub fn for_kind(kind: Kind) -> AdamWConfig {
        let config = AdamWConfig::default();
        AdamWConfig { eps: if kind == Kind::Half { 1e-4 } else { config.eps }, ..config }
    }
}

/// The optimiser, with the moments of every trainable parameter of a [`VarStore`].
#[derive(Debug)]
pub struct AdamW {
    config: AdamWConfig,
    pub(crate) slots: Vec<Slot>,
    pub(crate) steps: u64,
}

/// A parameter and its moments, all of one shape and kind.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) name: String,
    pub(crate) parameter: Tensor,
    pub(crate) exp_avg: Tensor,
    pub(crate) exp_avg_sq: Tensor,
}

/// The scalars of one step. They carry the sign and the learning rate into the denominator, since tch's `addcdiv_`
/// takes no factor.
struct Update {
    decay: f64,
    beta1: f64,
    beta2: f64,
    denominator_scale: f64,
    denominator_shift: f64,
}

impl AdamW {
    /// An optimiser of all trainable parameters of `vs`, with its moments set to zero.
    ///
    /// # Errors
    /// [`Error::Argument`] if a field of `config` is out of range, [`Error::Torch`] if memory runs out.
    pub fn new(vs: &VarStore, config: AdamWConfig) -> Result<AdamW> {
        validate(&config)?;
        let slots = trainable(vs)
            .into_iter()
            .map(|(name, parameter)| {
                let zeros = || no_grad(|| parameter.f_zeros_like());
                Ok(Slot { name, exp_avg: zeros()?, exp_avg_sq: zeros()?, parameter })
            })
            .collect::<Result<_>>()?;
        Ok(AdamW { config, slots, steps: 0 })
    }

    /// Number of steps taken.
    pub fn steps(&self) -> u64 {
        self.steps
    }
}

impl Optimizer for AdamW {
    fn parameters(&self) -> Vec<Tensor> {
        self.slots.iter().map(|slot| slot.parameter.shallow_clone()).collect()
    }

    fn step(&mut self, learning_rate: f64) -> Result<()> {
        self.steps += 1;
        let update = Update::new(&self.config, learning_rate, self.steps);
        no_grad(|| self.slots.iter_mut().try_for_each(|slot| update.apply(slot)))
    }
}

impl Update {
    fn new(config: &AdamWConfig, learning_rate: f64, step: u64) -> Update {
        let step = step as f64;
        let correction1 = 1.0 - config.beta1.powf(step);
        let correction2 = 1.0 - config.beta2.powf(step);
        let rate = learning_rate / correction1;
        Update {
            decay: 1.0 - learning_rate * config.weight_decay,
            beta1: config.beta1,
            beta2: config.beta2,
            denominator_scale: -1.0 / (rate * correction2.sqrt()),
            denominator_shift: -config.eps / rate,
        }
    }

    fn apply(&self, slot: &mut Slot) -> Result<()> {
        let gradient = slot.parameter.grad();
        if !gradient.defined() {
            return Ok(());
        }
        if slot.parameter.dim() >= 2 {
            let _decayed = slot.parameter.f_mul_scalar_(self.decay)?;
        }
        let _mean = slot.exp_avg.f_lerp_(&gradient, 1.0 - self.beta1)?;
        let _mean_square = slot.exp_avg_sq.f_lerp_(&gradient.f_square()?, 1.0 - self.beta2)?;
        if self.denominator_scale.is_finite() {
            let mut denominator = slot.exp_avg_sq.f_sqrt()?;
            let _scaled = denominator.f_mul_scalar_(self.denominator_scale)?;
            let _shifted = denominator.f_add_scalar_(self.denominator_shift)?;
            let _moved = slot.parameter.f_addcdiv_(&slot.exp_avg, &denominator)?;
        }
        Ok(())
    }
}

fn validate(config: &AdamWConfig) -> Result<()> {
    for (name, beta) in [("beta1", config.beta1), ("beta2", config.beta2)] {
        if !(0.0..1.0).contains(&beta) {
            return Err(Error::argument(format!("{name} is {beta}; it must be at least 0 and below 1")));
        }
    }
    if !(config.eps.is_finite() && config.eps > 0.0) {
        return Err(Error::argument(format!("eps is {}; it must be above 0", config.eps)));
    }
    if !(config.weight_decay.is_finite() && config.weight_decay >= 0.0) {
        let decay = config.weight_decay;
        return Err(Error::argument(format!("weight decay is {decay}; it must be at least 0")));
    }
    Ok(())
}
