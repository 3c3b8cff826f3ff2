//! Plain gradient descent.

use ssdtrain_models::{Optimizer, Result, Sgd};
use tch::nn::{Init, VarStore};
use tch::{Device, Kind, Tensor};

#[test]
fn a_step_takes_the_rates_share_of_each_gradient() -> Result<()> {
    for (kind, tolerance) in
        [(Kind::Float, 1e-6), (Kind::Double, 1e-12), (Kind::BFloat16, 1e-2), (Kind::Half, 1e-3)]
    {
        let mut vs = VarStore::new(Device::Cpu);
        vs.set_kind(kind);
        let moved = vs.root().var("moved", &[3], Init::Const(1.0));
        let unused = vs.root().var("unused", &[2, 2], Init::Const(1.0));
        let mut optimizer = Sgd::new(&vs);
        let weights = Tensor::from_slice(&[1.0, -2.0, 0.0]).to_kind(kind);
        for _ in 0..2 {
            optimizer.zero_grad();
            moved.dot(&weights).backward();
            optimizer.step(0.1)?;
        }
        assert_eq!(moved.kind(), kind);
        let values = Vec::<f64>::try_from(moved.to_kind(Kind::Double))?;
        for (value, expected) in values.into_iter().zip([0.8, 1.4, 1.0]) {
            assert!((value - expected).abs() < tolerance, "{kind:?}: {value} instead of {expected}");
        }
        assert_eq!(moved.grad(), weights, "a step leaves the gradient alone");
        assert_eq!(unused, unused.ones_like());
    }
    Ok(())
}

#[test]
fn a_step_before_backward_is_an_error_of_backward() -> Result<()> {
    let vs = VarStore::new(Device::Cpu);
    let moved = vs.root().var("moved", &[3], Init::Const(1.0));
    let mut optimizer = Sgd::new(&vs);
    moved.sum(Kind::Float).backward();
    let loss = moved.square().sum(Kind::Float);
    optimizer.step(0.1)?;
    assert!(loss.f_backward().is_err(), "the gradient of what it was is not to be had any more");
    Ok(())
}
