//! Plain stochastic gradient descent.

use tch::nn::VarStore;
use tch::{Kind, Tensor, no_grad};

use crate::error::Result;
use crate::optimizer::{Optimizer, trainable};

/// Takes the learning rate's share of each gradient off its parameter. It has no state, so a model that leaves no
/// room for [`AdamW`](crate::AdamW)'s moments can be trained for a measurement; to learn well, take AdamW.
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
        no_grad(|| self.parameters.iter_mut().try_for_each(|parameter| descend(parameter, learning_rate)))
    }
}

fn descend(parameter: &mut Tensor, learning_rate: f64) -> Result<()> {
    let gradient = parameter.grad();
    if gradient.defined() {
        // The addition at hand takes no factor; a product with a scalar tensor makes no temporary either.
        let factor = Tensor::f_full([0_i64; 0], -learning_rate, (Kind::Double, parameter.device()))?;
        let _moved = parameter.f_addcmul_(&gradient, &factor)?;
    }
    Ok(())
}
