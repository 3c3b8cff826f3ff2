//! How the peaks of a report count gradients. The count covers the whole process, so this file has one test.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;

use common::{everything, randn};
use ssdtrain::{MIB, StepReport};
use tch::nn::{self, OptimizerConfig};
use tch::{Device, Kind};

/// When a program frees its gradients.
#[derive(Clone, Copy, PartialEq)]
enum Freed {
    Outside,
    First,
    Late,
}

/// The third step of eight layers with 1 MiB of weights each; what they save is little in comparison.
fn third_step(freed: Freed) -> StepReport {
    let vs = nn::VarStore::new(Device::Cpu);
    let config = nn::LinearConfig { bias: false, ..Default::default() };
    let layers: Vec<_> = (0..8).map(|layer| nn::linear(vs.root() / layer, 512, 512, config)).collect();
    let mut optimizer = nn::Sgd::default().build(&vs, 1e-3).unwrap();
    let cache = everything().parameters(&vs).build().unwrap();
    let x = randn(&[16, 512]);
    let mut last = None;
    for _ in 0..3 {
        if freed == Freed::Outside {
            optimizer.zero_grad();
        }
        let step = cache.step();
        if freed == Freed::First {
            optimizer.zero_grad();
        }
        let loss = layers.iter().fold(x.shallow_clone(), |x, layer| x.apply(layer)).square().sum(Kind::Float);
        if freed == Freed::Late {
            optimizer.zero_grad();
        }
        step.backward(&loss).unwrap();
        optimizer.step();
        last = Some(step.finish().unwrap());
    }
    last.unwrap()
}

#[test]
fn the_step_peak_is_the_same_wherever_gradients_are_freed() {
    let before = third_step(Freed::Outside);
    // None existed when the step began, so the two are equal.
    assert!(before.act_peak_bytes >= 8 * MIB && before.step_peak_bytes == before.act_peak_bytes, "{before}");
    for freed in [Freed::First, Freed::Late] {
        let within = third_step(freed);
        assert!(within.step_peak_bytes.abs_diff(before.step_peak_bytes) < MIB / 2, "{within}\n{before}");
        assert_eq!(within.step_peak_bytes - within.act_peak_bytes, 8 * MIB, "{within}");
    }
}
