//! Plain stochastic gradient descent.

use tch::nn::VarStore;
use tch::{COptimizer, Tensor};

use crate::error::Result;
use crate::optimizer::{Optimizer, trainable};

/// Takes the learning rate's share of each gradient off its parameter, as libtorch's own optimiser does. It has no state, so
/// a model that leaves no room for [`AdamW`](crate::AdamW)'s moments can be trained for a measurement; to learn well, take
/// AdamW.
#[derive(Debug)]
pub struct Sgd {
    parameters: Vec<Tensor>,
    descent: COptimizer,
}

impl Sgd {
    /// An optimiser of all trainable parameters of `vs`.
    ///
    /// # Errors
    /// [`Error::Torch`](crate::Error::Torch) if memory runs out.
    pub fn new(vs: &VarStore) -> Result<Sgd> {
        let parameters: Vec<_> = trainable(vs).into_iter().map(|(_, parameter)| parameter).collect();
        let mut descent = COptimizer::sgd(0.0, 0.0, 0.0, 0.0, false)?;
        for parameter in &parameters {
            descent.add_parameters(parameter, 0)?;
        }
        Ok(Sgd { parameters, descent })
    }
}

impl Optimizer for Sgd {
    fn parameters(&self) -> Vec<Tensor> {
        self.parameters.iter().map(Tensor::shallow_clone).collect()
    }

    fn step(&mut self, learning_rate: f64) -> Result<()> {
        self.descent.set_learning_rate(learning_rate)?;
        Ok(self.descent.step()?)
    }
}
