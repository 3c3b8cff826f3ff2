//! Budgets of programs that accumulate gradients, each in its own way, and whose peaks are not always the same.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;

use std::time::Duration;

use common::{leaves, randn};
use ssdtrain::plan::Goal;
use ssdtrain::{Auto, Backward, MIB, StepReport, TensorCache, TensorCacheBuilder, scope};
use tch::nn::{self, OptimizerConfig};
use tch::{Device, Kind, Tensor};

const LAYERS: usize = 8;

fn with_budget(bytes: u64) -> TensorCacheBuilder {
    let goal = Auto::new(Goal::budget(bytes));
    TensorCache::builder().min_bytes(0).simulated_device(Duration::ZERO).host_pool(256 * MIB).policy(goal)
}

fn sources(width: i64) -> Vec<Tensor> {
    (0..LAYERS).map(|_| randn(&[width, width]) / (width as f64).sqrt()).collect()
}

fn hidden(weights: &[Tensor], x: &Tensor) -> Tensor {
    weights.iter().enumerate().fold(x.shallow_clone(), |y, (layer, weight)| {
        let _scope = scope(&format!("layer.{layer}"));
        y.matmul(weight).gelu("tanh")
    })
}

fn loss(weights: &[Tensor], x: &Tensor) -> Tensor {
    hidden(weights, x).square().mean(Kind::Float)
}

/// The peaks above that limit, in planned steps.
fn over(reports: &[StepReport], most: u64) -> Vec<u64> {
    let over = |report: &&StepReport| report.plan.is_some() && report.act_peak_bytes > most;
    reports.iter().filter(over).map(|report| report.step).collect()
}

/// The optimizer sets gradients to none within each step, which begins with those of the previous step.
fn with_an_optimizer(rows: &[i64], steps: usize, budget: u64) -> Vec<StepReport> {
    let vs = nn::VarStore::new(Device::Cpu);
    let config = nn::LinearConfig { bias: false, ..Default::default() };
    let layers: Vec<_> = (0..LAYERS).map(|layer| nn::linear(vs.root() / layer, 512, 512, config)).collect();
    let mut optimizer = nn::Sgd::default().build(&vs, 1e-4).unwrap();
    let cache = with_budget(budget).parameters(&vs).build().unwrap();
    let xs: Vec<_> = rows.iter().map(|&rows| randn(&[rows, 512])).collect();
    let steps = (0..steps).map(|_| {
        let step = cache.step();
        optimizer.zero_grad();
        for x in &xs {
            let forward = |y: Tensor, layer: &nn::Linear| y.apply(layer).gelu("tanh");
            let loss = layers.iter().fold(x.shallow_clone(), forward).square().mean(Kind::Float);
            step.backward(&loss).unwrap();
        }
        optimizer.step();
        step.finish().unwrap()
    });
    steps.collect()
}

#[test]
fn what_a_loop_holds_for_a_micro_batch_is_no_gradient() {
    let head = randn(&[256, 8192]) / 16.0;
    let planned_peak = |hold: bool| {
        let cache = with_budget(54 * MIB).build().unwrap();
        let sources = sources(256);
        let steps = (0..4).map(|_| {
            let weights = leaves(&sources);
            let step = cache.step();
            for _ in 0..3 {
                let logits = hidden(&weights, &randn(&[256, 256])).matmul(&head); // 8 MiB
                let loss = logits.square().mean(Kind::Float);
                let _held = hold.then_some(logits);
                step.backward(&loss).unwrap();
            }
            step.finish().unwrap()
        });
        steps.last().unwrap().plan.unwrap().prediction.peak()
    };
    let [free, held] = [false, true].map(planned_peak);
    assert!(held < free + MIB, "{held} bytes planned for, and {free} where nothing is held");
}

#[test]
fn gradients_set_to_none_within_the_step_are_counted() {
    let reports = with_an_optimizer(&[512; 3], 4, 13 * MIB);
    assert_eq!(over(&reports, 13 * MIB), [0; 0]);
}

#[test]
fn steps_with_a_smaller_last_micro_batch_come_within_their_budget() {
    let over = over(&with_an_optimizer(&[512, 512, 128], 8, 13 * MIB), 13 * MIB);
    assert!(over.len() <= 1, "{over:?}");
}

#[test]
fn so_do_steps_of_more_micro_batches_than_were_profiled() {
    let sources = sources(512);
    // A whole number of blocks of a mebibyte, and the scalars of a loss besides: on a busy machine the lowest plan takes 16 MiB and 8 bytes.
    let budget = 16 * MIB + 1024;
    let cache = with_budget(budget).build().unwrap();
    let reports: Vec<_> = (0..8)
        .map(|index| {
            let weights = leaves(&sources);
            let step = cache.step();
            for _ in 0..if index % 2 == 0 { 3 } else { 1 } {
                let x = randn(&[512, 512]);
                step.backward(&loss(&weights, &x)).unwrap();
            }
            step.finish().unwrap()
        })
        .collect();
    let over = over(&reports, budget);
    assert!(over.len() <= 2, "{over:?}");
}

#[test]
fn one_peak_of_something_else_does_not_lower_plans_for_good() {
    let sources = sources(256);
    let cache = with_budget(14 * MIB).build().unwrap();
    let reports: Vec<_> = (0..24)
        .map(|index| {
            let weights = leaves(&sources);
            let x = randn(&[1024, 256]);
            let step = cache.step();
            let loss = loss(&weights, &x);
            if index == 5 {
                drop(Tensor::zeros([32 << 20], (Kind::Uint8, Device::Cpu)));
            }
            step.backward(&loss).unwrap();
            step.finish().unwrap()
        })
        .collect();
    let [before, last] = [4, 23].map(|index| reports[index].offloaded.bytes);
    assert!(last <= before, "{before} bytes moved before it, and {last} long after");
}

#[test]
fn two_losses_of_one_graph_are_one_micro_batch() {
    let sources = sources(256);
    let cache = with_budget(14 * MIB).build().unwrap();
    let reports: Vec<_> = (0..10)
        .map(|_| {
            let weights = leaves(&sources);
            let x = randn(&[1024, 256]);
            let step = cache.step();
            let y = hidden(&weights, &x);
            let (one, other) = (y.square().mean(Kind::Float), y.abs().mean(Kind::Float));
            drop(y);
            step.backward_with(&one, Backward { retain_graph: true, create_graph: false }).unwrap();
            step.backward(&other).unwrap();
            step.finish().unwrap()
        })
        .collect();
    let unplanned = reports.iter().filter(|report| report.plan.is_none()).map(|report| report.step);
    assert_eq!(unplanned.collect::<Vec<_>>(), [1, 2]);
}
