//! Plain stochastic gradient descent.

use tch::Tensor;
use tch::nn::VarStore;

use crate::error::Result;
use crate::optimizer::{Optimizer, trainable};
use crate::shim::axpy;

/// Subtracts each gradient, times the learning rate, from its parameter. It has no state, so a model that leaves no
/// room for [`AdamW`](crate::AdamW)'s moments can be trained for a measurement; to learn well, use AdamW.
#[derive(Debug)]
pub struct Sgd {
    parameters: Vec<Tensor>,
}

impl Sgd {
    /// An optimiser of all trainable parameters of `vs`.
    pub fn new(vs: &VarStore) -> Sgd {
        Sgd { parameters: trainable(vs).into_iter().map(|(_, parameter)| parameter).collect() }
    }
}

impl Optimizer for Sgd {
    fn parameters(&self) -> Vec<Tensor> {
        self.parameters.iter().map(Tensor::shallow_clone).collect()
    }

    fn step(&mut self, learning_rate: f64) -> Result<()> {
        self.parameters.iter_mut().try_for_each(|parameter| descend(parameter, learning_rate))
    }
}

fn descend(parameter: &mut Tensor, learning_rate: f64) -> Result<()> {
    let gradient = parameter.grad();
    if gradient.defined() {
        // tch's addition takes no factor, and libtorch's own SGD hides the change of the parameter from autograd.
        axpy(-learning_rate, &gradient, parameter)?;
    }
    Ok(())
}
