//! The linear layer that adds to its weight's gradient in place.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use ssdtrain_libtorch::linear_in_place;
use tch::{Device, Kind, Tensor};

fn leaf(shape: &[i64]) -> Tensor {
    Tensor::randn(shape, (Kind::Double, Device::Cpu)).set_requires_grad(true)
}

/// The gradients after two backwards through a layer of the same numbers.
fn gradients(layer: impl Fn(&Tensor, &Tensor, Option<&Tensor>) -> Tensor, with_bias: bool) -> Vec<Tensor> {
    tch::manual_seed(5);
    let (x, weight, bias) = (leaf(&[3, 4, 6]), leaf(&[5, 6]), leaf(&[5]));
    for _ in 0..2 {
        layer(&x, &weight, with_bias.then_some(&bias)).square().sum(Kind::Double).backward();
    }
    let mut grads = vec![x.grad(), weight.grad()];
    grads.extend(with_bias.then(|| bias.grad()));
    grads
}

#[test]
fn its_gradients_are_those_of_libtorchs_own() {
    for with_bias in [false, true] {
        let own = gradients(|x, weight, bias| x.linear(weight, bias), with_bias);
        let in_place = gradients(|x, weight, bias| linear_in_place(x, weight, bias).unwrap(), with_bias);
        for (own, in_place) in own.iter().zip(&in_place) {
            assert!(own.allclose(in_place, 1e-12, 1e-12, false), "{own:?} {in_place:?}");
        }
    }
}

#[test]
fn the_gradient_that_is_there_is_the_one_that_grows() {
    let (x, weight) = (leaf(&[2, 3]), leaf(&[4, 3]));
    linear_in_place(&x, &weight, None).unwrap().sum(Kind::Double).backward();
    let place = weight.grad().data_ptr();
    linear_in_place(&x, &weight, None).unwrap().sum(Kind::Double).backward();
    assert_eq!(weight.grad().data_ptr(), place);
}

#[test]
fn a_weight_that_changed_before_backward_is_an_error() {
    let (x, weight) = (leaf(&[2, 3]), leaf(&[4, 3]));
    let y = linear_in_place(&x, &weight, None).unwrap().sum(Kind::Double);
    tch::no_grad(|| drop(weight.shallow_clone().f_mul_scalar_(2.0).unwrap()));
    assert!(y.f_backward().is_err());
}

#[test]
fn a_weight_that_is_no_leaf_is_refused() {
    let (x, weight) = (leaf(&[2, 3]), leaf(&[4, 3]) * 2.0);
    let error = linear_in_place(&x, &weight, None).unwrap_err();
    assert!(error.to_string().contains("not a leaf"), "{error}");
}
