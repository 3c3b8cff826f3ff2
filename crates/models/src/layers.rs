//! Layers that the models share.

use ssdtrain::remat;
use tch::{Kind, TchError, Tensor, nn};

use crate::shim::linear_in_place;

/// GPT-2's standard deviation of initial weights.
pub(crate) const INIT_STD: f64 = 0.02;

/// `x · weightᵀ + bias`.
#[derive(Debug)]
pub(crate) struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
    /// Whether backward adds to the weight's gradient in place.
    pub(crate) grads_in_place: bool,
}

impl Linear {
    /// Weights drawn from a normal distribution of standard deviation `std`, biases zero.
    pub(crate) fn new(
        vs: &nn::Path<'_>,
        inputs: i64,
        outputs: i64,
        std: f64,
        bias: bool,
    ) -> Result<Linear, TchError> {
        Ok(Linear {
            weight: normal(vs, outputs, inputs, std)?,
            bias: zeros_if(bias, vs, outputs)?,
            grads_in_place: false,
        })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor, TchError> {
        linear(x, &self.weight, self.bias.as_ref(), self.grads_in_place)
    }

    /// The same layer, with shared parameters.
    pub(crate) fn shallow_clone(&self) -> Linear {
        Linear { weight: self.weight.shallow_clone(), bias: shallow(&self.bias), ..*self }
    }
}

/// `x · weightᵀ + bias`; with `in_place`, backward adds to the weight's gradient in place.
pub(crate) fn linear(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    in_place: bool,
) -> Result<Tensor, TchError> {
    if in_place && weight.requires_grad() {
        return linear_in_place(x, weight, bias);
    }
    x.f_linear(weight, bias)
}

/// A normalisation over the last dimension.
pub(crate) trait Norm {
    fn forward(&self, x: &Tensor) -> Result<Tensor, TchError>;
}

/// Normalisation to a mean of zero and a variance of one.
#[derive(Debug)]
pub(crate) struct LayerNorm {
    weight: Tensor,
    bias: Option<Tensor>,
    width: i64,
    /// Whether backward recomputes the result instead of having it saved.
    pub(crate) recomputed: bool,
}

impl LayerNorm {
    pub(crate) fn new(vs: &nn::Path<'_>, width: i64, bias: bool) -> Result<LayerNorm, TchError> {
        let weight = vs.f_ones("weight", &[width])?;
        Ok(LayerNorm { weight, bias: zeros_if(bias, vs, width)?, width, recomputed: false })
    }

    fn norm(&self, x: &Tensor) -> Result<Tensor, TchError> {
        x.f_layer_norm([self.width], Some(&self.weight), self.bias.as_ref(), 1e-5, true)
    }

    /// The same layer, with shared parameters.
    pub(crate) fn shallow_clone(&self) -> LayerNorm {
        LayerNorm { weight: self.weight.shallow_clone(), bias: shallow(&self.bias), ..*self }
    }
}

impl Norm for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor, TchError> {
        if self.recomputed {
            let held = self.shallow_clone();
            return remat(&[x], move |inputs| held.norm(inputs[0]));
        }
        self.norm(x)
    }
}

/// Normalisation to a mean square of one, in plain operations.
#[derive(Debug)]
pub(crate) struct RmsNorm {
    weight: Tensor,
}

impl RmsNorm {
    pub(crate) fn new(vs: &nn::Path<'_>, width: i64) -> Result<RmsNorm, TchError> {
        Ok(RmsNorm { weight: vs.f_ones("weight", &[width])? })
    }

    /// The same layer, with shared parameters.
    pub(crate) fn shallow_clone(&self) -> RmsNorm {
        RmsNorm { weight: self.weight.shallow_clone() }
    }
}

impl Norm for RmsNorm {
    /// In at least 32 bits, except for the product with the weight.
    fn forward(&self, x: &Tensor) -> Result<Tensor, TchError> {
        let wide = x.f_to_kind(at_least_float(x.kind()))?;
        let mean_square = wide.f_pow_tensor_scalar(2)?.f_mean_dim(&[-1i64][..], true, None)?;
        let normed = wide.f_mul(&mean_square.f_add_scalar(1e-5)?.f_rsqrt()?)?;
        normed.f_to_kind(x.kind())?.f_mul(&self.weight)
    }
}

fn shallow(bias: &Option<Tensor>) -> Option<Tensor> {
    bias.as_ref().map(Tensor::shallow_clone)
}

/// The matrix `weight` of `vs`, drawn from a normal distribution. It is scaled in place: next to a model of many
/// gigabytes there may not be room for its largest matrix twice.
pub(crate) fn normal(vs: &nn::Path<'_>, rows: i64, columns: i64, std: f64) -> Result<Tensor, TchError> {
    let weight = Tensor::f_randn([rows, columns], (vs.kind(), vs.device()))?.f_mul_scalar_(std)?;
    Ok(vs.add("weight", weight, true))
}

/// Dropout while training; otherwise, and at rate 0, `x` itself.
pub(crate) fn dropout(x: Tensor, rate: f64, train: bool) -> Result<Tensor, TchError> {
    if train && rate > 0.0 { x.f_dropout(rate, true) } else { Ok(x) }
}

/// The kind to use for summing many numbers of `kind`.
pub(crate) fn at_least_float(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

fn zeros_if(wanted: bool, vs: &nn::Path<'_>, width: i64) -> Result<Option<Tensor>, TchError> {
    wanted.then(|| vs.f_zeros("bias", &[width])).transpose()
}
