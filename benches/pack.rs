//! Host cost of saving one tensor and asking for it again, as one autograd node does.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

use criterion::{Criterion, criterion_group, criterion_main};
use ssdtrain::{BackendKind, Policy, TensorCache};
use ssdtrain_libtorch::SavedVariable;
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

fn round_trip(tensor: &Tensor) -> Tensor {
    SavedVariable::new(tensor).expect("saved").unpack().expect("back")
}

fn pack_unpack(c: &mut Criterion) {
    let mut group = c.benchmark_group("pack_unpack");
    let large = Tensor::zeros([256, 1024], F32);
    let small = Tensor::zeros([16], F32);

    let keep = TensorCache::builder().policy(Policy::Keep).build().expect("a cache that keeps");
    let step = keep.step();
    group.bench_function("kept", |b| b.iter(|| round_trip(&large)));
    drop(step);

    let offload = TensorCache::builder().backend(BackendKind::Memory).build().expect("a cache in memory");
    let step = offload.step();
    group.bench_function("kept_small", |b| b.iter(|| round_trip(&small)));
    drop(step);
    group.finish();
}

criterion_group!(benches, pack_unpack);
criterion_main!(benches);
