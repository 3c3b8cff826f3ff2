//! What training asks of a model.

use std::fmt::Debug;
use std::num::NonZero;

use tch::{Device, Tensor};

use crate::error::Result;

/// A model that predicts the next token of a sequence.
pub trait LanguageModel: Debug {
    /// Longest sequence, in tokens.
    fn context(&self) -> i64;

    /// Where the parameters are.
    fn device(&self) -> Device;

    /// Logits `[batch, block, vocab]` of the token after each of `inputs` (`[batch, block]`, 64-bit token ids).
    /// Dropout, if the model has any, is on if `train`.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) if `inputs` has another shape or is longer than the context,
    /// [`Error::Torch`](crate::Error::Torch) if an id is not below `vocab` or memory runs out.
    fn forward(&self, inputs: &Tensor, train: bool) -> Result<Tensor>;

    /// Logits `[vocab]` of the token after the last of `inputs` (`[1, block]`), without dropout.
    ///
    /// # Errors
    /// As [`LanguageModel::forward`].
    fn next_logits(&self, inputs: &Tensor) -> Result<Tensor>;

    /// Mean cross-entropy, in nats per token, of `targets` (`[batch, block]`) after `inputs`: a scalar of at least 32
    /// bits. Dropout, if the model has any, is on if `train`.
    ///
    /// The chunks of `with_loss_chunk` are used if no gradients are being recorded. If they are, this is the ordinary
    /// loss with all its logits; [`LanguageModel::training_loss`] is the one that uses those chunks.
    ///
    /// # Errors
    /// As [`LanguageModel::forward`].
    fn loss(&self, inputs: &Tensor, targets: &Tensor, train: bool) -> Result<Tensor>;

    /// The loss to train on: [`LanguageModel::loss`] with dropout, divided by `parts`, the number of micro-batches
    /// whose gradients are summed.
    ///
    /// With the chunks of `with_loss_chunk`, the gradients of the head are computed together with its loss. Then:
    /// - gradients must be cleared before this call, not between it and `backward`;
    /// - the head's part is in its weight's gradient as soon as this returns;
    /// - `backward` must run on the result, as it is, exactly once: it carries the rest of the gradient into the
    ///   rest of the model.
    ///
    /// # Errors
    /// As [`LanguageModel::forward`].
    fn training_loss(&self, inputs: &Tensor, targets: &Tensor, parts: NonZero<usize>) -> Result<Tensor>;
}
