//! The linear layer that adds to its weight's gradient in place.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::sync::Barrier;

use ssdtrain::resolve_math_kernels;
use ssdtrain_models::linear_in_place;
use tch::{Device, Kind, Tensor};

unsafe extern "C" {
    /// `at::autocast::set_autocast_enabled(c10::DeviceType, bool)`; tch's function covers GPUs only.
    #[link_name = "_ZN2at8autocast20set_autocast_enabledEN3c1010DeviceTypeEb"]
    safe fn set_autocast_enabled(device: i8, on: bool);
}

/// Runs `f` under autocast to bf16 on the CPU.
fn autocast<T>(f: impl FnOnce() -> T) -> T {
    set_autocast_enabled(0, true);
    let result = f();
    set_autocast_enabled(0, false);
    // SAFETY: what was cast in the region is dropped from the cache, as at the end of any region.
    unsafe { torch_sys::at_autocast_clear_cache() };
    result
}

fn ours(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
    linear_in_place(x, weight, bias).unwrap()
}

fn libtorchs(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
    x.linear(weight, bias)
}

type Layer = fn(&Tensor, &Tensor, Option<&Tensor>) -> Tensor;

/// Input, weight and bias in single precision, the same ones each time.
fn leaves() -> [Tensor; 3] {
    resolve_math_kernels().unwrap();
    tch::manual_seed(7);
    [[3, 4, 6].as_slice(), &[5, 6], &[5]]
        .map(|shape| Tensor::randn(shape, (Kind::Float, Device::Cpu)).set_requires_grad(true))
}

fn assert_same_bits(own: &[Tensor], in_place: &[Tensor]) {
    assert_eq!(own.len(), in_place.len());
    for (own, in_place) in own.iter().zip(in_place) {
        assert_eq!((own.kind(), own.size()), (in_place.kind(), in_place.size()));
        assert!(own.view_dtype(Kind::Uint8).equal(&in_place.view_dtype(Kind::Uint8)), "{own:?} {in_place:?}");
    }
}

fn leaf(shape: &[i64]) -> Tensor {
    Tensor::randn(shape, (Kind::Double, Device::Cpu)).set_requires_grad(true)
}

/// The gradients after two backward passes through a layer with the same numbers.
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

#[test]
fn a_first_gradient_has_the_bits_of_libtorchs_own() {
    let gradients = |layer: Layer| {
        let [x, weight, bias] = leaves();
        layer(&x, &weight, Some(&bias)).square().sum(Kind::Float).backward();
        [x.grad(), weight.grad(), bias.grad()]
    };
    assert_same_bits(&gradients(libtorchs), &gradients(ours));
}

#[test]
fn two_backwards_at_once_lose_nothing() {
    for there_is_one_already in [false, true] {
        for round in 0..100 {
            let weight = Tensor::zeros([256, 512], (Kind::Float, Device::Cpu)).set_requires_grad(true);
            if there_is_one_already {
                (&weight * 0.0).sum(Kind::Float).backward();
            }
            let barrier = Barrier::new(2);
            std::thread::scope(|scope| {
                for value in [1.0, 2.0] {
                    let (weight, barrier) = (weight.shallow_clone(), &barrier);
                    scope.spawn(move || {
                        let x = Tensor::full([64, 512], value, (Kind::Float, Device::Cpu));
                        let loss = ours(&x, &weight, None).sum(Kind::Float);
                        barrier.wait();
                        loss.backward();
                    });
                }
            });
            let sum = weight.grad();
            assert!(bool::try_from(sum.eq(64.0 * 3.0).all()).unwrap(), "round {round}: {sum:?}");
        }
    }
}

/// One backward through this layer and one through libtorch's: a weight that is tied to another layer's.
#[test]
fn a_backward_of_another_layer_on_the_same_weight_loses_nothing() {
    for round in 0..100 {
        let weight = Tensor::zeros([256, 512], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        (&weight * 0.0).sum(Kind::Float).backward();
        let barrier = Barrier::new(2);
        std::thread::scope(|scope| {
            for layer in [ours, libtorchs] as [Layer; 2] {
                let (weight, barrier) = (weight.shallow_clone(), &barrier);
                scope.spawn(move || {
                    let x = Tensor::ones([64, 512], (Kind::Float, Device::Cpu));
                    let loss = layer(&x, &weight, None).sum(Kind::Float);
                    barrier.wait();
                    loss.backward();
                });
            }
        });
        let sum = weight.grad();
        assert!(bool::try_from(sum.eq(64.0 * 2.0).all()).unwrap(), "round {round}: {sum:?}");
    }
}

#[test]
fn under_autocast_it_computes_as_libtorchs_own() {
    let gradients = |layer: Layer, backwards: usize| {
        let [x, weight, bias] = leaves();
        let mut outputs: Vec<Tensor> = (0..backwards)
            .map(|_| {
                let y = autocast(|| layer(&x, &weight, Some(&bias)));
                y.square().sum(Kind::Float).backward();
                y.detach()
            })
            .collect();
        outputs.extend([x.grad(), weight.grad(), bias.grad()]);
        outputs
    };
    for backwards in [1, 2] {
        let in_place = gradients(ours, backwards);
        assert_eq!(in_place[0].kind(), Kind::BFloat16);
        assert_same_bits(&gradients(libtorchs, backwards), &in_place);
    }
}

/// libtorch caches a weight's cast copy for the region; a copy without a history would lose the weight's gradient.
#[test]
fn under_autocast_other_uses_of_the_weight_keep_their_gradients() {
    let gradient = |layer: Layer| {
        let [x, weight, _] = leaves();
        let loss = autocast(|| (layer(&x, &weight, None) + libtorchs(&x, &weight, None)).sum(Kind::Float));
        loss.backward();
        weight.grad()
    };
    let (own, in_place) = (gradient(libtorchs), gradient(ours));
    assert!(own.allclose(&in_place, 2e-2, 2e-2, false), "{own} {in_place}");
}

#[test]
fn gradients_asked_for_alone_touch_no_other() {
    let [x, weight, bias] = leaves();
    let asked = |layer: Layer, of: &[&Tensor]| {
        let loss = layer(&x, &weight, Some(&bias)).square().sum(Kind::Float);
        let gradients = Tensor::f_run_backward(&[loss], of, false, false).unwrap();
        assert!(!weight.grad().defined(), "the weight has none of its own");
        gradients
    };
    for of in [[&x].as_slice(), &[&weight], &[&bias, &weight]] {
        assert_same_bits(&asked(libtorchs, of), &asked(ours, of));
    }
}

#[test]
fn gradients_can_be_differentiated_again() {
    let second = |layer: Layer| {
        let [x, weight, bias] = leaves();
        let loss = layer(&x, &weight, Some(&bias)).sin().sum(Kind::Float);
        let first = Tensor::f_run_backward(&[loss], &[&x, &weight], true, true).unwrap();
        let penalty = first.iter().map(|gradient| gradient.square().sum(Kind::Float)).sum::<Tensor>();
        penalty.backward();
        [x.grad(), weight.grad(), bias.grad()]
    };
    for (own, in_place) in second(libtorchs).iter().zip(&second(ours)) {
        assert!(own.allclose(in_place, 1e-5, 1e-5, false), "{own} {in_place}");
    }
}
