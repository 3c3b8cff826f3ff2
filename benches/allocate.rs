//! Time to allocate tensors on the CPU and to free them: one alone, and as in a step, where what forward made goes in the reverse order.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

use criterion::{Criterion, criterion_group, criterion_main};
use ssdtrain_libtorch::install_cpu_allocator;
use tch::{Device, Kind, Tensor};

fn tensor(bytes: i64) -> Tensor {
    Tensor::empty([bytes], (Kind::Uint8, Device::Cpu))
}

/// Half of the tensors of each layer live until backward comes to them.
fn step(layers: i64) {
    let saved: Vec<_> = (0..layers)
        .map(|layer| {
            let bytes = (1 + layer % 7) << 18;
            let passing = tensor(bytes);
            (tensor(bytes), tensor(4 * bytes), drop(passing))
        })
        .collect();
    for layer in saved.into_iter().rev() {
        let gradient = tensor(layer.1.numel() as i64);
        drop((layer, gradient));
    }
}

fn allocate(c: &mut Criterion) {
    let mut group = c.benchmark_group("allocate");
    let sizes: [(&str, i64); 3] = [("4 KiB", 4 << 10), ("64 KiB", 64 << 10), ("16 MiB", 16 << 20)];
    for allocator in ["libtorch", "ssdtrain"] {
        if allocator == "ssdtrain" {
            install_cpu_allocator();
        }
        for (name, bytes) in sizes {
            group.bench_function(format!("{allocator}: {name}"), |b| b.iter(|| tensor(bytes)));
        }
        group.bench_function(format!("{allocator}: step of 96 layers"), |b| b.iter(|| step(96)));
    }
    group.finish();
}

criterion_group!(benches, allocate);
criterion_main!(benches);
