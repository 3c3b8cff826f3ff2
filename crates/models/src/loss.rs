//! Cross-entropy of a head's logits: for all tokens at once, or one chunk of them at a time.

use std::num::NonZero;

use tch::{Kind, Reduction, TchError, Tensor, no_grad};

use crate::error::{Error, Result};
use crate::layers::at_least_float;
use crate::shim::{is_recorded, known};

/// The target of tokens that a loss leaves out, as everywhere in libtorch.
const IGNORED: i64 = -100;

/// How a model computes its loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Loss {
    /// From the logits of all tokens.
    #[default]
    Whole,
    /// In training, for this many tokens at a time, adding to the weight's gradient in forward.
    Chunked(NonZero<u32>),
    /// By [`linear_cross_entropy`], for this many tokens at a time.
    Fused(NonZero<u32>),
}

/// Mean cross-entropy, in nats, of `targets` (`[tokens]`) under `logits` (`[tokens, vocab]`): a scalar of at least 32
/// bits. Targets of -100 do not count. Backward keeps the logarithms of the probabilities, `[tokens, vocab]` of `kind`.
pub(crate) fn cross_entropy(logits: &Tensor, targets: &Tensor, kind: Kind) -> Result<Tensor, TchError> {
    let log_probabilities = logits.f_log_softmax(1, kind)?;
    let losses = log_probabilities.f_nll_loss(targets, None::<&Tensor>, Reduction::None, IGNORED)?;
    // Summed in at least 32 bits, which the reductions of the loss itself would not do.
    let kind = at_least_float(logits.kind());
    losses
        .f_sum_dim_intlist(None::<&[i64]>, false, kind)?
        .f_div(&targets.f_ne(IGNORED)?.f_sum(None)?.f_to_kind(kind)?)
}

/// Mean cross-entropy, in nats per token, of `targets` (`[..]`, 64-bit ids below `vocab`) under the logits `x ·
/// weightᵀ` (`x` is `[.., hidden]`, `weight` `[vocab, hidden]`): a scalar of at least 32 bits. The logits never exist
/// for more than `chunk` tokens at a time. Targets of -100 do not count; if none does, the loss is NaN.
///
/// The gradients of `x` and of `weight` are computed here, with the loss, and wait for backward in tensors as large as
/// these. Backward scales them by the gradient that comes in and hands them to autograd; a first gradient of a weight
/// becomes its `grad` without a copy. So the loss may be scaled, several may be added up, the weight may be used
/// elsewhere too, and gradients may be cleared at any time before backward. In inference and for what needs no gradient
/// none is computed.
///
/// The weight's gradient is summed over chunks in the kind of `x`: a product of each chunk has 32 bits inside and is
/// rounded once, as when autograd sums those of micro-batches. It is divided by the number of targets before that, so in
/// fp16 a factor on the loss does not save small gradients. A `weight` of another kind than `x` is converted to it, as
/// autocast would do.
///
/// ```
/// # use std::num::NonZero;
/// # use ssdtrain_models::linear_cross_entropy;
/// # use tch::{Device, Kind, Tensor};
/// # fn main() -> ssdtrain_models::Result<()> {
/// let x = Tensor::randn([2, 50, 16], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let weight = Tensor::randn([1000, 16], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let targets = Tensor::randint(1000, [2, 50], (Kind::Int64, Device::Cpu));
/// let loss = linear_cross_entropy(&x, &weight, &targets, NonZero::new(32).expect("not zero"))?;
/// loss.f_backward()?;
/// assert_eq!(weight.grad().size(), [1000, 16]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Error::Argument`] if shapes or kinds do not match, [`Error::Torch`] if an id is not below `vocab` (on the CPU) or
/// memory runs out. Differentiating the gradients again is an error of that backward.
pub fn linear_cross_entropy(
    x: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    chunk: NonZero<u32>,
) -> Result<Tensor> {
    let (shape, of_weight) = (x.size(), weight.size());
    let is_matched = match (&shape[..], &of_weight[..]) {
        ([outer @ .., hidden], [_, width]) => hidden == width && outer == targets.size(),
        _ => false,
    };
    if !is_matched || x.numel() == 0 || !x.is_floating_point() || targets.kind() != Kind::Int64 {
        let (float, kind, targets) = (x.kind(), targets.kind(), targets.size());
        return Err(Error::argument(format!(
            "x is {float:?} {shape:?}, weight {of_weight:?} and targets {kind:?} {targets:?}; \
             linear_cross_entropy takes floats [.., hidden], [vocab, hidden] and Int64 [..]"
        )));
    }
    let x = x.f_reshape([-1, of_weight[1]])?;
    let (weight, targets) = (weight.f_to_kind(x.kind())?, targets.f_reshape([-1])?);
    let (of_x, of_weight) = (is_recorded(&x), is_recorded(&weight));
    let (loss, gradients) = no_grad(|| {
        let gradients = Gradients {
            x: of_x.then(|| x.f_empty_like()).transpose()?,
            weight: of_weight.then(|| weight.f_zeros_like()).transpose()?,
            factor: 1.0,
        };
        Ok::<_, TchError>((Chunks::new(&x, &weight, &targets, chunk)?.mean_loss(&gradients)?, gradients))
    })?;
    let inputs = [(&x, gradients.x), (&weight, gradients.weight)];
    let found: Vec<_> = inputs.into_iter().filter_map(|(input, found)| Some((input, found?))).collect();
    Ok(if found.is_empty() { loss } else { known(&loss, found)? })
}

/// A head whose logits never exist for more than one chunk of tokens, and whose weight's gradient is added to in
/// forward.
pub(crate) struct ChunkedHead<'a> {
    /// `[vocab, hidden]`.
    pub(crate) weight: &'a Tensor,
    /// In tokens.
    pub(crate) chunk: NonZero<u32>,
}

impl ChunkedHead<'_> {
    /// The value of [`cross_entropy`] for the logits `x · weightᵀ` (`x` is `[tokens, hidden]`).
    pub(crate) fn cross_entropy(&self, x: &Tensor, targets: &Tensor) -> Result<Tensor, TchError> {
        no_grad(|| Chunks::new(x, self.weight, targets, self.chunk)?.mean_loss(&Gradients::default()))
    }

    /// That value divided by `parts`; its gradient has already been added to the weight's. `backward` on the result
    /// passes the gradient on into `x`, and must run once.
    pub(crate) fn training_loss(
        &self,
        x: &Tensor,
        targets: &Tensor,
        parts: NonZero<usize>,
    ) -> Result<Tensor, TchError> {
        let parts = parts.get() as f64;
        let weight = self.weight.requires_grad().then(|| gradient_in_place(self.weight)).transpose()?;
        let (loss, by_x) = no_grad(|| {
            let by_x = x.f_empty_like()?;
            let gradients = Gradients { x: Some(by_x.shallow_clone()), weight, factor: 1.0 / parts };
            let loss = Chunks::new(x, self.weight, targets, self.chunk)?.mean_loss(&gradients)?;
            Ok::<_, TchError>((loss.f_div_scalar(parts)?, by_x))
        })?;
        // The gradient of a dot product with respect to one side is the other side, which a cache can move; the
        // product's value is subtracted again.
        let carrier = x.f_flatten(0, 1)?.f_dot(&by_x.f_flatten(0, 1)?)?;
        loss.f_add(&carrier.f_sub(&carrier.f_detach()?)?)
    }
}

/// Where gradients go, in the kind of the model; `None` for those that nobody needs.
#[derive(Default)]
struct Gradients {
    /// `[tokens, hidden]`, overwritten.
    x: Option<Tensor>,
    /// `[vocab, hidden]`, added to.
    weight: Option<Tensor>,
    /// The factor that the gradient of the mean is multiplied by.
    factor: f64,
}

/// The input of a head and its targets, to be gone through in chunks without recording.
struct Chunks<'a> {
    x: &'a Tensor,
    /// Without its history: what autocast makes of a parameter would be kept for others, whose gradients would be lost.
    weight: Tensor,
    /// `[tokens, 1]`, with some token of the vocabulary for those that do not count.
    targets: Tensor,
    /// `[tokens, 1]`: the targets that do not count.
    ignored: Tensor,
    /// How many count, in at least 32 bits.
    count: Tensor,
    /// In tokens.
    size: i64,
}

impl<'a> Chunks<'a> {
    /// `x` is `[tokens, hidden]`, `targets` `[tokens]`.
    fn new(
        x: &'a Tensor,
        weight: &Tensor,
        targets: &Tensor,
        size: NonZero<u32>,
    ) -> Result<Chunks<'a>, TchError> {
        let targets = targets.f_unsqueeze(1)?;
        let ignored = targets.f_eq(IGNORED)?;
        Ok(Chunks {
            x,
            weight: weight.detach(),
            targets: targets.f_masked_fill(&ignored, 0)?,
            count: ignored.f_logical_not()?.f_sum(None)?.f_to_kind(at_least_float(x.kind()))?,
            ignored,
            size: size.get().into(),
        })
    }

    fn mean_loss(&self, gradients: &Gradients) -> Result<Tensor, TchError> {
        let tokens = self.x.size()[0];
        // What each row counts of the mean. Where none does, the mean is NaN, and gradients are zeros.
        let shares = self.count.f_clamp_min(1.0)?.f_reciprocal()?.f_mul_scalar(gradients.factor)?;
        let shares = shares.f_expand([tokens, 1], false)?.f_masked_fill(&self.ignored, 0.0)?;
        let mut found = Vec::new();
        for start in (0..tokens).step_by(self.size as usize) {
            let rows = |tensor: &Tensor| tensor.f_narrow(0, start, self.size.min(tokens - start));
            let (x, targets) = (rows(self.x)?, rows(&self.targets)?);
            let mut log_probabilities = self.log_probabilities(&x)?;
            let of_targets = log_probabilities.f_gather(1, &targets, false)?;
            if gradients.x.is_some() || gradients.weight.is_some() {
                // Probabilities minus one at the target: computed from the wide logarithm, since the difference to 1
                // would be lost in 16 bits.
                let mut by_logits = log_probabilities.f_exp_()?.f_to_kind(x.kind())?;
                let at_targets = of_targets.f_expm1()?.f_to_kind(x.kind())?;
                let _replaced = by_logits.f_scatter_(1, &targets, &at_targets)?;
                let by_x = gradients.x.as_ref().map(rows).transpose()?;
                gradients.add(&by_logits, &x, &self.weight, &rows(&shares)?, by_x)?;
            }
            found.push(of_targets);
        }
        let counted = Tensor::f_cat(&found, 0)?.f_masked_fill(&self.ignored, 0.0)?;
        counted.f_sum(None)?.f_div(&self.count)?.f_neg()
    }

    /// The log-probability of each token of the vocabulary at each row of `x`, in at least 32 bits.
    fn log_probabilities(&self, x: &Tensor) -> Result<Tensor, TchError> {
        let wide = at_least_float(x.kind());
        // On a GPU the product is written in 32 bits directly, without a separate pass that casts it.
        let logits = match x.kind() {
            Kind::Half | Kind::BFloat16 if x.device().is_cuda() => {
                x.f_mm_dtype(&self.weight.f_tr()?, wide)?
            }
            _ => x.f_mm(&self.weight.f_tr()?)?,
        };
        logits.f_log_softmax(1, wide)
    }
}

impl Gradients {
    /// Adds a chunk's part to the weight's gradient, and writes the gradient of its rows to `by_x`. The rows' shares
    /// (`[tokens, 1]`, of at least 32 bits) are applied to tensors as narrow as `x`, not to the logits' gradient,
    /// which is many times wider.
    fn add(
        &self,
        by_logits: &Tensor,
        x: &Tensor,
        weight: &Tensor,
        shares: &Tensor,
        by_x: Option<Tensor>,
    ) -> Result<(), TchError> {
        if let Some(by_weight) = &self.weight {
            let scaled = x.f_mul(shares)?.f_to_kind(x.kind())?;
            let _summed = by_weight.shallow_clone().f_addmm_(&by_logits.f_tr()?, &scaled)?;
        }
        if let Some(by_x) = by_x {
            let _scaled = by_logits.f_mm_out(&by_x, weight)?.f_mul_(shares)?;
        }
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
