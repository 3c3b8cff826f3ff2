//! Steps of a chain of operations whose saves all look the same.

use ssdtrain::{StepReport, TensorCache};
use tch::{Kind, Tensor};

use super::{grads, leaf, randn};

const LAYERS: usize = 24;

/// A chain of element-wise operations, each of which saves 1 MiB.
pub(crate) fn chain(x: &Tensor) -> Tensor {
    (0..LAYERS).fold(x * 1.0, |y, _| (y * 1.01).sin()).sum(Kind::Float)
}

pub(crate) fn input() -> Tensor {
    tch::manual_seed(3);
    leaf(&randn(&[512, 512]))
}

pub(crate) fn step(cache: &TensorCache, x: &Tensor) -> StepReport {
    let step = cache.step();
    let loss = chain(x);
    step.backward(&loss).unwrap();
    drop(loss);
    step.finish().unwrap()
}

pub(crate) fn expected() -> Vec<Tensor> {
    let x = input();
    chain(&x).backward();
    grads(&[x])
}

/// Clears gradients between steps.
pub(crate) trait ZeroGrad {
    fn zero_grad_if_any(&self);
}

impl ZeroGrad for Tensor {
    fn zero_grad_if_any(&self) {
        if self.grad().defined() {
            self.shallow_clone().zero_grad();
        }
    }
}
