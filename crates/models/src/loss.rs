//! Cross-entropy of a head's logits: for all tokens at once, or one chunk of them at a time.

use std::num::NonZero;

use tch::{Kind, Reduction, TchError, Tensor, no_grad};

use crate::layers::at_least_float;

/// Mean cross-entropy, in nats, of `targets` (`[tokens]`) under `logits` (`[tokens, vocab]`): a scalar of at least 32
/// bits. What backward keeps is also `[tokens, vocab]`, and has the kind of the logits.
pub(crate) fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor, TchError> {
    let log_probabilities = logits.f_log_softmax(1, logits.kind())?;
    let losses = log_probabilities.f_nll_loss(targets, None::<&Tensor>, Reduction::None, -100)?;
    losses.f_mean(at_least_float(logits.kind()))
}

/// A head whose logits never exist for more than one chunk of tokens.
pub(crate) struct ChunkedHead<'a> {
    /// `[vocab, hidden]`.
    pub(crate) weight: &'a Tensor,
    /// In tokens.
    pub(crate) chunk: NonZero<u32>,
}

/// What a backward pass through the head would compute, in the kind of the model.
struct Gradients {
    /// The weight's gradient, `[vocab, hidden]`, or `None` if the weight is frozen.
    weight: Option<Tensor>,
    /// `[tokens, hidden]`.
    hidden: Tensor,
    /// The factor that the gradient of the sum over all tokens is multiplied by.
    factor: f64,
}

impl ChunkedHead<'_> {
    /// The value of [`cross_entropy`] for the logits `hidden · weightᵀ` (`hidden` is `[tokens, hidden]`).
    pub(crate) fn cross_entropy(&self, hidden: &Tensor, targets: &Tensor) -> Result<Tensor, TchError> {
        no_grad(|| self.mean_loss(hidden, targets, None))
    }

    /// That value divided by `parts`; its gradient has already been added to the weight's. `backward` on the result
    /// passes the gradient on into `hidden`, and must run once.
    pub(crate) fn training_loss(
        &self,
        hidden: &Tensor,
        targets: &Tensor,
        parts: NonZero<usize>,
    ) -> Result<Tensor, TchError> {
        let parts = parts.get() as f64;
        let weight = self.weight.requires_grad().then(|| gradient_in_place(self.weight)).transpose()?;
        let (loss, gradient) = no_grad(|| {
            let factor = 1.0 / (parts * hidden.size()[0] as f64);
            let gradients = Gradients { weight, hidden: hidden.f_empty_like()?, factor };
            let loss = self.mean_loss(hidden, targets, Some(&gradients))?.f_div_scalar(parts)?;
            Ok::<_, TchError>((loss, gradients.hidden))
        })?;
        // The gradient of a dot product with respect to one side is the other side; the product's value is subtracted
        // again.
        let carrier = hidden.f_flatten(0, 1)?.f_dot(&gradient.f_flatten(0, 1)?)?;
        loss.f_add(&carrier.f_sub(&carrier.f_detach()?)?)
    }

    fn mean_loss(
        &self,
        hidden: &Tensor,
        targets: &Tensor,
        gradients: Option<&Gradients>,
    ) -> Result<Tensor, TchError> {
        let (tokens, chunk) = (hidden.size()[0], i64::from(self.chunk.get()));
        let mut found = Vec::new();
        for start in (0..tokens).step_by(self.chunk.get() as usize) {
            let rows = |tensor: &Tensor| tensor.f_narrow(0, start, chunk.min(tokens - start));
            let (hidden, targets) = (rows(hidden)?, rows(targets)?.f_unsqueeze(1)?);
            let mut log_probabilities = self.log_probabilities(&hidden)?;
            let of_targets = log_probabilities.f_gather(1, &targets, false)?;
            if let Some(gradients) = gradients {
                // Probabilities minus one at the target: computed from the wide logarithm, since the difference to 1
                // would be lost in 16 bits.
                let mut by_logits = log_probabilities.f_exp_()?.f_to_kind(hidden.kind())?;
                let at_targets = of_targets.f_expm1()?.f_to_kind(hidden.kind())?;
                let _replaced = by_logits.f_scatter_(1, &targets, &at_targets)?;
                gradients.add(&by_logits, &hidden, self.weight, &rows(&gradients.hidden)?)?;
            }
            found.push(of_targets);
        }
        Tensor::f_cat(&found, 0)?.f_mean(None)?.f_neg()
    }

    /// The log-probability of each token of the vocabulary at each row of `hidden`, in at least 32 bits.
    fn log_probabilities(&self, hidden: &Tensor) -> Result<Tensor, TchError> {
        let wide = at_least_float(hidden.kind());
        // On a GPU the product is written in 32 bits directly, without a separate pass that casts it.
        let logits = match hidden.kind() {
            Kind::Half | Kind::BFloat16 if hidden.device().is_cuda() => {
                hidden.f_mm_dtype(&self.weight.f_tr()?, wide)?
            }
            _ => hidden.f_mm(&self.weight.f_tr()?)?,
        };
        logits.f_log_softmax(1, wide)
    }
}

impl Gradients {
    /// Adds a chunk's part to the weight's gradient, and writes the gradient of its hidden states to `by_hidden`. The
    /// factor is applied to tensors as narrow as `hidden`, not to the logits' gradient, which is many times wider.
    fn add(
        &self,
        by_logits: &Tensor,
        hidden: &Tensor,
        weight: &Tensor,
        by_hidden: &Tensor,
    ) -> Result<(), TchError> {
        if let Some(by_weight) = &self.weight {
            let scaled = hidden.f_mul_scalar(self.factor)?;
            let _summed = by_weight.shallow_clone().f_addmm_(&by_logits.f_tr()?, &scaled)?;
        }
        let _scaled = by_logits.f_mm_out(by_hidden, weight)?.f_mul_scalar_(self.factor)?;
        Ok(())
    }
}

/// The gradient of a parameter, to be added to in place; zeros if there was none.
fn gradient_in_place(parameter: &Tensor) -> Result<Tensor, TchError> {
    if !parameter.grad().defined() {
        // tch cannot set a gradient. The gradient of the sum of no rows is zeros.
        parameter.f_narrow(0, 0, 0)?.f_sum(None)?.f_backward()?;
    }
    Ok(parameter.grad())
}
