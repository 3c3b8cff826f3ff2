//! Whatever the mix of placements, gradients have the same bits as without a cache.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;

use std::time::Duration;

use common::{assert_nothing_held, assert_same_bits, everything, grads, leaves, randn};
use proptest::prelude::*;
use ssdtrain::plan::{InTurn, Placement};
use ssdtrain::{KIB, MIB, Offload, TensorCacheBuilder, remat, segment};
use tch::{Kind, Tensor};

const BLOCKS: usize = 3;
const WIDTH: i64 = 32;

/// Blocks of products, a norm and GELU that can be recomputed, dropout, views and, in every other block, a segment.
fn loss(weights: &[Tensor]) -> Tensor {
    let y = (0..BLOCKS).fold(weights[0].tanh(), |x, block| {
        let w = [weights[1 + block].shallow_clone(), weights[1 + (block + 1) % BLOCKS].shallow_clone()];
        let block_of = move |x: &Tensor| {
            let y =
                remat(&[x], |x| x[0].f_layer_norm([WIDTH], None::<&Tensor>, None::<&Tensor>, 1e-5, true))?;
            let y = y.f_matmul(&w[0])?;
            let y = remat(&[&y], |y| y[0].f_gelu("tanh")?.f_dropout(0.1, true))?;
            let y = y.f_matmul(&w[1])?.f_narrow(1, 0, WIDTH / 2)?.f_repeat([1, 2])?;
            x.f_add(&y.f_mul(&y)?.f_dropout(0.2, true)?)
        };
        if block % 2 == 1 { segment("block", &x, block_of).unwrap() } else { block_of(&x).unwrap() }
    });
    y.square().mean(Kind::Float)
}

struct Sample {
    sources: Vec<Tensor>,
    expected: Vec<Tensor>,
}

fn sample() -> Sample {
    tch::manual_seed(1);
    let mut sources = vec![randn(&[24, WIDTH])];
    sources.extend((0..BLOCKS).map(|_| randn(&[WIDTH, WIDTH]) / 4.0));
    let plain = leaves(&sources);
    tch::manual_seed(7);
    loss(&plain).backward();
    Sample { expected: grads(&plain), sources }
}

fn placement() -> impl Strategy<Value = Placement> {
    use Placement::{Disk, Host, Keep, Recompute};
    prop::sample::select(vec![Keep, Host, Disk, Recompute])
}

fn builder(way: usize) -> TensorCacheBuilder {
    let simulated = || everything().simulated_device(Duration::from_micros(20));
    match way {
        0 => everything(),
        1 => simulated().host_pool(4 * MIB),
        2 => simulated().host_pool(16 * KIB),
        _ => simulated().host_pool(0),
    }
}

#[test]
fn every_mix_of_placements_has_the_same_bits() {
    let Sample { sources, expected } = sample();
    let cases = (
        prop::collection::vec(placement(), 1..40),
        0..4_usize,
        prop::sample::select(vec![1, 8 * KIB, 32 * KIB, u64::MAX]),
        prop::sample::select(vec![0, 4 * KIB, MIB]),
        1..3_usize,
    );
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(500)
    });
    let outcome = runner.run(&cases, |(placements, way, budget, prefetch, steps)| {
        let cache = builder(way)
            .policy(InTurn::new(Offload::default().device_budget(budget).prefetch(prefetch), placements))
            .build()
            .unwrap();
        for number in 0..steps {
            let inputs = leaves(&sources);
            tch::manual_seed(7);
            let step = cache.step();
            let loss = loss(&inputs);
            step.backward(&loss).unwrap();
            drop(loss);
            step.finish().unwrap();
            assert_same_bits(&format!("step {number}"), &expected, &grads(&inputs));
            assert_nothing_held(&cache);
        }
        Ok(())
    });
    outcome.unwrap();
}
