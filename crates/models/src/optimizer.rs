//! What the optimisers have in common.

use tch::nn::VarStore;
use tch::{Tensor, no_grad};

use crate::error::{Error, Result};
use crate::layers::at_least_float;

/// Moves parameters along their negative gradients.
pub trait Optimizer {
    /// The parameters that it updates, always in the same order.
    fn parameters(&self) -> Vec<Tensor>;

    /// Takes one step down the gradients; parameters without a gradient stay as they are.
    ///
    /// # Errors
    /// [`Error::Torch`] if memory runs out.
    fn step(&mut self, learning_rate: f64) -> Result<()>;

    /// Sets all gradients to zero.
    fn zero_grad(&mut self) {
        for mut parameter in self.parameters() {
            parameter.zero_grad();
        }
    }

    /// Scales all gradients in place so that their global Euclidean norm is at most `max_norm`, and returns the norm
    /// that they had before. An infinite or undefined norm is returned too, and the gradients are then left
    /// unchanged.
    ///
    /// # Errors
    /// [`Error::Argument`] if `max_norm` is not above 0.
    fn clip_grad_norm(&mut self, max_norm: f64) -> Result<f64> {
        if max_norm.is_nan() || max_norm <= 0.0 {
            return Err(Error::argument(format!("gradients cannot be clipped to a norm of {max_norm}")));
        }
        let gradients =
            self.parameters().iter().map(Tensor::grad).filter(Tensor::defined).collect::<Vec<_>>();
        if gradients.is_empty() {
            return Ok(0.0);
        }
        no_grad(|| {
            let norms = gradients.iter().map(norm).collect::<Result<Vec<_>>>()?;
            let norm = Tensor::f_stack(&norms, 0)?.f_norm()?.f_double_value(&[])?;
            if norm.is_finite() && norm > max_norm {
                for mut gradient in gradients {
                    let _scaled = gradient.f_mul_scalar_(max_norm / norm)?;
                }
            }
            Ok(norm)
        })
    }
}

impl<O: Optimizer + ?Sized> Optimizer for Box<O> {
    fn parameters(&self) -> Vec<Tensor> {
        (**self).parameters()
    }

    fn step(&mut self, learning_rate: f64) -> Result<()> {
        (**self).step(learning_rate)
    }
}

/// The trainable parameters of `vs` in the order of their names, so that a gradient norm is summed in the same order
/// in every run.
pub(crate) fn trainable(vs: &VarStore) -> Vec<(String, Tensor)> {
    let mut variables: Vec<_> = vs.variables().into_iter().collect();
    variables.retain(|(_, variable)| variable.requires_grad());
    variables.sort_by(|(left, _), (right, _)| left.cmp(right));
    variables
}

/// In at least 32 bits: a norm soon exceeds what 16 bits can hold.
fn norm(gradient: &Tensor) -> Result<Tensor> {
    Ok(gradient.f_norm_scalaropt_dtype(2, at_least_float(gradient.kind()))?)
}
