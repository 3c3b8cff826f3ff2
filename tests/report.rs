//! The report describes what happened.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;

use common::{everything, leaf, randn};
use ssdtrain::{Keep, MIB, Offload, StepReport, TensorCache, TensorCacheBuilder, scope};
use tch::{Device, Kind, Tensor, nn};

/// Four layers, each in a scope of its own; returns the report of the last of `steps` steps.
fn train(builder: TensorCacheBuilder, steps: usize) -> StepReport {
    let vs = nn::VarStore::new(Device::Cpu);
    let layers: Vec<_> =
        (0..4).map(|i| nn::linear(vs.root() / i, 256, 256, nn::LinearConfig::default())).collect();
    let cache = builder.parameters(&vs).build().unwrap();
    let x = randn(&[1024, 256]);
    let mut last = None;
    for _ in 0..steps {
        let step = cache.step();
        let loss = {
            let y = layers.iter().enumerate().fold(x.shallow_clone(), |y, (i, layer)| {
                let _block = scope(&format!("block.{i}"));
                let _mlp = scope("mlp");
                y.apply(layer).gelu("tanh")
            });
            y.square().mean(Kind::Float)
        };
        step.flush();
        step.backward(&loss).unwrap();
        last = Some(step.finish().unwrap());
    }
    last.unwrap()
}

fn small() -> TensorCacheBuilder {
    everything().min_bytes(64 << 10)
}

#[test]
fn parameters_stay_in_the_graph() {
    let report = train(small(), 1);
    assert!(report.kept.parameters.count >= 3, "{report:?}");
    // Each layer saves its input and the input of GELU, the loss its own; x itself is the first layer's input.
    assert_eq!(report.offloaded.bytes, 9 * MIB, "{report:?}");
}

#[test]
fn scopes_are_reported_by_path_in_order() {
    let report = train(small(), 1);
    let names: Vec<_> = report.scopes.iter().map(|scope| scope.scope.as_str()).collect();
    assert_eq!(names, ["block.0/mlp", "block.1/mlp", "block.2/mlp", "block.3/mlp", ""]);
}

#[test]
fn keep_last_keeps_the_last_scopes_from_the_second_step_on() {
    assert_eq!(train(small().policy(Offload::default().keep_last(2)), 1).kept.policy.count, 0);
    let report = train(small().policy(Offload::default().keep_last(2)), 2);
    let kept: Vec<_> =
        report.scopes.iter().filter(|scope| scope.kept.count > 0).map(|scope| scope.scope.as_str()).collect();
    assert_eq!(kept, ["block.3/mlp", ""]);
    assert!(report.offloaded.bytes < 9 * MIB);
}

#[test]
fn the_device_budget_bounds_what_the_cache_holds() {
    let cache = small().policy(Offload::default().device_budget(3 * MIB)).build().unwrap();
    let x = leaf(&randn(&[1024, 256]));
    let step = cache.step();
    let loss = (0..8).fold(&x * 1.0, |y, _| {
        let y = (y * 1.01).sin();
        let held = cache.held().device_bytes;
        assert!(held <= 3 * MIB, "{held}");
        y
    });
    step.backward(&loss.sum(Kind::Float)).unwrap();
    step.finish().unwrap();
}

#[test]
fn keeping_everything_moves_nothing() {
    let report = train(TensorCache::builder().policy(Keep), 1);
    assert_eq!((report.offloaded.count, report.loaded.count), (0, 0));
    assert!(report.kept.policy.count > 0);
}

#[test]
fn the_report_reads_as_one_line() {
    let report = train(small(), 1);
    let line = report.to_string();
    assert!(line.contains("offloaded 9.0 MiB") && line.contains(&report.io_path), "{line}");
    assert_eq!(line.lines().count(), 1);
}

#[test]
fn a_loss_computed_without_a_graph_reports_nothing() {
    let cache = small().build().unwrap();
    let step = cache.step();
    drop(Tensor::ones([10], (Kind::Float, Device::Cpu)).sum(Kind::Float));
    assert_eq!(step.finish().unwrap().saved.count, 0);
}
