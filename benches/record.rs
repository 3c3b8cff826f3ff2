//! Time that recording adds to an operation: 1,000 small operations each, with what is forgotten at their end.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::sync::Arc;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ssdtrain_libtorch::Recording;
use tch::{Device, Kind, Tensor};

const OPERATIONS: usize = 1000;

fn chain(x: &Tensor, y: &Tensor) -> Tensor {
    (0..OPERATIONS).fold(x.shallow_clone(), |x, _| x * y)
}

fn record(c: &mut Criterion) {
    let mut group = c.benchmark_group("record");
    group.throughput(Throughput::Elements(OPERATIONS as u64));
    // Nothing requires a gradient, so no graph is built.
    let (x, y) =
        (Tensor::ones([16], (Kind::Float, Device::Cpu)), Tensor::ones([16], (Kind::Float, Device::Cpu)));
    let recording = Arc::new(Recording::new(None).unwrap());
    group.bench_function("without", |b| b.iter(|| chain(&x, &y)));
    group.bench_function("with", |b| {
        let _recording = recording.record();
        b.iter(|| {
            let result = chain(&x, &y);
            recording.clear(None);
            result
        });
    });
    group.finish();
}

criterion_group!(benches, record);
criterion_main!(benches);
