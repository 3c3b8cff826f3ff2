//! AdamW against a reference written out number by number.

use ssdtrain_models::{AdamW, AdamWConfig, Optimizer, Result};
use tch::nn::{Init, VarStore};
use tch::{Device, Tensor, no_grad};

const CONFIG: AdamWConfig = AdamWConfig { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };

/// One parameter of the reference.
#[derive(Clone)]
struct Scalar {
    value: f64,
    mean: f64,
    mean_square: f64,
}

impl Scalar {
    fn step(&mut self, gradient: f64, rate: f64, step: i32, decay: bool) {
        let AdamWConfig { beta1, beta2, eps, weight_decay } = CONFIG;
        if decay {
            self.value -= rate * weight_decay * self.value;
        }
        self.mean = beta1 * self.mean + (1.0 - beta1) * gradient;
        self.mean_square = beta2 * self.mean_square + (1.0 - beta2) * gradient * gradient;
        let mean = self.mean / (1.0 - beta1.powi(step));
        let mean_square = self.mean_square / (1.0 - beta2.powi(step));
        self.value -= rate * mean / (mean_square.sqrt() + eps);
    }
}

fn doubles(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(Vec::try_from(tensor.view(-1))?)
}

/// A store of one 64-bit parameter.
fn store(shape: &[i64]) -> (VarStore, Tensor) {
    let mut vs = VarStore::new(Device::Cpu);
    let parameter = vs.root().var("p", shape, Init::Randn { mean: 0.0, stdev: 1.0 });
    vs.double();
    (vs, parameter)
}

#[test]
fn steps_are_those_of_the_formula_and_only_matrices_decay() -> Result<()> {
    for shape in [&[6][..], &[2, 3]] {
        let (vs, parameter) = store(shape);
        let weights = Tensor::from_slice(&[1.0, -2.0, 0.5, 0.0, 3.0, 1e-3]).view(shape);
        let start = doubles(&parameter)?;
        let mut reference: Vec<_> =
            start.into_iter().map(|value| Scalar { value, mean: 0.0, mean_square: 0.0 }).collect();
        let mut optimizer = AdamW::new(&vs, CONFIG)?;
        for step in 1..=5 {
            let rate = 0.1 / f64::from(step);
            optimizer.zero_grad();
            (parameter.pow_tensor_scalar(3) * &weights).sum(None).backward();
            for (scalar, gradient) in reference.iter_mut().zip(doubles(&parameter.grad())?) {
                scalar.step(gradient, rate, step, shape.len() == 2);
            }
            optimizer.step(rate)?;
            for (value, expected) in doubles(&parameter)?.into_iter().zip(&reference) {
                assert!((value - expected.value).abs() < 1e-12, "step {step}: {value}, {}", expected.value);
            }
        }
        assert_eq!(optimizer.steps(), 5);
    }
    Ok(())
}

#[test]
fn at_a_learning_rate_of_zero_nothing_moves() -> Result<()> {
    let (vs, parameter) = store(&[2, 3]);
    let before = parameter.copy();
    let mut optimizer = AdamW::new(&vs, CONFIG)?;
    parameter.square().sum(None).backward();
    optimizer.step(0.0)?;
    assert_eq!(parameter, before);
    Ok(())
}

#[test]
fn parameters_without_a_gradient_stay() -> Result<()> {
    let (vs, used) = store(&[2, 3]);
    let unused = vs.root().var("unused", &[2, 2], Init::Const(1.0));
    let mut optimizer = AdamW::new(&vs, CONFIG)?;
    used.sum(None).backward();
    optimizer.clip_grad_norm(1.0)?;
    optimizer.step(0.1)?;
    assert_eq!(unused, unused.ones_like());
    Ok(())
}

#[test]
fn gradients_are_clipped_to_the_global_norm() -> Result<()> {
    let mut vs = VarStore::new(Device::Cpu);
    let (a, b) = (vs.root().var("a", &[2], Init::Const(0.0)), vs.root().var("b", &[1, 1], Init::Const(0.0)));
    vs.double();
    let mut optimizer = AdamW::new(&vs, CONFIG)?;
    (a.dot(&Tensor::from_slice(&[2.0, 3.0])) + b.sum(None) * 6.0).backward();
    assert_eq!(optimizer.clip_grad_norm(7.5)?, 7.0);
    assert_eq!(doubles(&a.grad())?, [2.0, 3.0], "below the limit nothing changes");
    assert_eq!(optimizer.clip_grad_norm(0.7)?, 7.0);
    for (gradient, expected) in doubles(&a.grad())?.into_iter().zip([0.2, 0.3]) {
        assert!((gradient - expected).abs() < 1e-12);
    }
    assert!((optimizer.clip_grad_norm(1.0)? - 0.7).abs() < 1e-12);
    Ok(())
}

#[test]
fn a_gradient_that_is_not_finite_is_reported_and_left_alone() -> Result<()> {
    let (vs, parameter) = store(&[2]);
    let mut optimizer = AdamW::new(&vs, CONFIG)?;
    parameter.dot(&Tensor::from_slice(&[f64::INFINITY, 1.0])).backward();
    assert_eq!(optimizer.clip_grad_norm(1.0)?, f64::INFINITY);
    assert_eq!(doubles(&parameter.grad())?, [f64::INFINITY, 1.0]);
    Ok(())
}

#[test]
fn frozen_parameters_are_not_the_optimizers() -> Result<()> {
    let (vs, parameter) = store(&[2, 3]);
    let frozen = parameter.set_requires_grad(false);
    let before = frozen.copy();
    let mut optimizer = AdamW::new(&vs, CONFIG)?;
    assert_eq!(no_grad(|| optimizer.clip_grad_norm(1.0))?, 0.0);
    optimizer.step(1.0)?;
    assert_eq!(frozen, before);
    Ok(())
}

#[test]
fn settings_out_of_range_are_named() {
    let vs = VarStore::new(Device::Cpu);
    for (config, name) in [
        (AdamWConfig { beta1: 1.0, ..CONFIG }, "beta1"),
        (AdamWConfig { beta2: -0.1, ..CONFIG }, "beta2"),
        (AdamWConfig { eps: 0.0, ..CONFIG }, "eps"),
        (AdamWConfig { weight_decay: f64::NAN, ..CONFIG }, "weight decay"),
    ] {
        let message =
            AdamW::new(&vs, config).map_or_else(|error| error.to_string(), |_| "accepted".to_owned());
        assert!(message.contains(name), "{message}");
    }
}
