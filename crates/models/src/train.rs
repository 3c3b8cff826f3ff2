//! The parts of a training loop that have no state of their own.

use std::num::NonZero;

use rand_chacha::rand_core::Rng;
use tch::{Tensor, no_grad};

use crate::error::{Error, Result};
use crate::language_model::LanguageModel;
use crate::tokens::{Batch, stream};

/// Seeds libtorch's generator for one step, so that its dropout masks depend only on `seed` and `step`, and a resumed
/// run draws the same masks as an uninterrupted one.
pub fn seed_step(seed: u64, step: u64) {
    tch::manual_seed(stream(seed, step).next_u64() as i64);
}

/// Adds the gradients of the mean loss over equally large micro-batches to the parameters' gradients, and returns
/// that loss, in nats per token. `backward` is called with each micro-batch's share of the loss in turn, and must run
/// backward on it once.
///
/// ```no_run
/// # use ssdtrain_models::{Batch, Error, Gpt, Result, accumulate};
/// # fn step(model: &Gpt, batch: &Batch) -> Result<f64> {
/// accumulate(model, &batch.split(4)?, |loss| loss.f_backward().map_err(Error::from))
/// # }
/// ```
///
/// # Errors
/// Those of [`LanguageModel::training_loss`] and of `backward`.
pub fn accumulate<E: From<Error>>(
    model: &dyn LanguageModel,
    micro_batches: &[Batch],
    mut backward: impl FnMut(&Tensor) -> Result<(), E>,
) -> Result<f64, E> {
    let Some(parts) = NonZero::new(micro_batches.len()) else { return Ok(0.0) };
    let mut shares = Vec::with_capacity(parts.get());
    for batch in micro_batches {
        let share = model.training_loss(&batch.inputs, &batch.targets, parts)?;
        backward(&share)?;
        shares.push(share.f_detach().map_err(Error::from)?);
    }
    // Read last, since reading waits for the GPU.
    let values = shares.iter().map(|share| share.f_double_value(&[])).collect::<Result<Vec<_>, _>>();
    Ok(values.map_err(Error::from)?.iter().sum())
}

/// Mean loss over `batches`, in nats per token, without dropout and without gradients.
///
/// # Errors
/// [`Error::Argument`] if there are no batches, otherwise those of the batches and of [`LanguageModel::loss`].
pub fn evaluate(model: &dyn LanguageModel, batches: impl IntoIterator<Item = Result<Batch>>) -> Result<f64> {
    no_grad(|| {
        let (mut total, mut tokens) = (0.0, 0);
        for batch in batches {
            let batch = batch?;
            let loss = model.loss(&batch.inputs, &batch.targets, false)?.f_double_value(&[])?;
            total += loss * batch.tokens() as f64;
            tokens += batch.tokens();
        }
        if tokens == 0 {
            return Err(Error::argument("there are no batches to evaluate on"));
        }
        Ok(total / tokens as f64)
    })
}
