//! The end of a model: a norm, a linear layer, and the loss.

use std::num::NonZero;

use ssdtrain::scope;
use tch::{TchError, Tensor};

use crate::error::Result;
use crate::layers::{Norm, at_least_float, linear};
use crate::loss::{ChunkedHead, Loss, cross_entropy, linear_cross_entropy};

/// What turns the residual stream into logits or a loss. Runs under the scope `head`.
#[derive(Debug)]
pub(crate) struct Head<N> {
    pub(crate) norm: N,
    /// `[vocab, hidden]`.
    pub(crate) weight: Tensor,
    pub(crate) method: Loss,
    /// Whether backward of the loss adds to the weight's gradient in place.
    pub(crate) grads_in_place: bool,
    /// Whether a whole loss takes the logarithms of probabilities in at least 32 bits, whatever the logits have.
    pub(crate) is_loss_wide: bool,
}

impl<N: Norm> Head<N> {
    pub(crate) fn new(norm: N, weight: Tensor) -> Head<N> {
        Head { norm, weight, method: Loss::Whole, grads_in_place: false, is_loss_wide: false }
    }

    /// `[batch, block, vocab]`, given the residual stream.
    pub(crate) fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let _scope = scope("head");
        Ok(self.norm.forward(hidden)?.f_linear(&self.weight, None::<&Tensor>)?)
    }

    /// `[vocab]`: those at the last position of the only sequence.
    pub(crate) fn last_logits(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(self.logits(&hidden.f_narrow(1, -1, 1)?)?.f_view([-1])?)
    }

    /// As [`LanguageModel::loss`](crate::LanguageModel::loss).
    pub(crate) fn loss(&self, hidden: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let _scope = scope("head");
        let (x, targets) = self.rows(hidden, targets)?;
        match self.method {
            Loss::Fused(chunk) => linear_cross_entropy(&x, &self.weight, &targets, chunk),
            Loss::Chunked(chunk) if !x.requires_grad() => {
                Ok(ChunkedHead { weight: &self.weight, chunk }.cross_entropy(&x, &targets)?)
            }
            Loss::Whole | Loss::Chunked(_) => {
                let logits = linear(&x, &self.weight, None, self.grads_in_place)?;
                let kind = if self.is_loss_wide { at_least_float(logits.kind()) } else { logits.kind() };
                Ok(cross_entropy(&logits, &targets, kind)?)
            }
        }
    }

    /// As [`LanguageModel::training_loss`](crate::LanguageModel::training_loss).
    pub(crate) fn training_loss(
        &self,
        hidden: &Tensor,
        targets: &Tensor,
        parts: NonZero<usize>,
    ) -> Result<Tensor> {
        match self.method {
            Loss::Chunked(chunk) if hidden.requires_grad() => {
                let _scope = scope("head");
                let (x, targets) = self.rows(hidden, targets)?;
                Ok(ChunkedHead { weight: &self.weight, chunk }.training_loss(&x, &targets, parts)?)
            }
            _ => Ok(self.loss(hidden, targets)?.f_div_scalar(parts.get() as f64)?),
        }
    }

    /// The input of the linear layer, `[tokens, hidden]`, and the targets, `[tokens]`.
    fn rows(&self, hidden: &Tensor, targets: &Tensor) -> Result<(Tensor, Tensor), TchError> {
        let x = self.norm.forward(hidden)?;
        let width = self.weight.size()[1];
        Ok((x.f_view([-1, width])?, targets.f_reshape([-1])?))
    }
}
