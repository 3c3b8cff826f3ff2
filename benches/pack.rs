//! Time of saving one tensor and asking for it again, as one autograd node does.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use ssdtrain::{BackendKind, Keep, Offload, TensorCache};
use ssdtrain_libtorch::SavedVariable;
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

fn pack(tensor: &Tensor) -> SavedVariable {
    SavedVariable::new(tensor).expect("saved")
}

fn round_trip(tensor: &Tensor) -> Tensor {
    pack(tensor).unpack().expect("back")
}

fn pack_unpack(c: &mut Criterion) {
    let mut group = c.benchmark_group("pack_unpack");
    let large = Tensor::zeros([256, 1024], F32);
    let small = Tensor::zeros([16], F32);

    let keep = TensorCache::builder().policy(Keep).build().expect("a cache that keeps");
    let step = keep.step();
    group.bench_function("kept", |b| b.iter(|| round_trip(&large)));
    drop(step);

    let offload = TensorCache::builder().policy(Offload::default()).backend(BackendKind::Memory);
    let offload = offload.build().expect("a cache in memory");
    let step = offload.step();
    group.bench_function("kept_small", |b| b.iter(|| round_trip(&small)));
    // 64 KiB, the least that moves, to and from memory in a disk's place: mostly books, hand-over and waiting. It leaves before it is
    // asked for, and what came back is let go of outside of the time taken.
    let fresh = || Tensor::zeros([16, 1024], F32);
    let moved = |tensor: Tensor| {
        let saved = pack(&tensor);
        drop(tensor);
        step.flush();
        (saved.unpack().expect("back"), saved)
    };
    group.bench_function("moved", |b| b.iter_batched(fresh, moved, BatchSize::PerIteration));
    let report = step.finish().expect("the step's report");
    assert_eq!(report.forwarded.count, 0, "not all was away when it was asked for: {report}");
    group.finish();
}

criterion_group!(benches, pack_unpack);
criterion_main!(benches);
