//! Failures are errors that say what happened and where; gradients are never wrong.

use std::sync::Arc;

use ssdtrain::{BackendKind, ErrorKind, MIB, Offload, TensorCache};
use ssdtrain_store::{Direction, Fault, Faulty, Pool, Store, StoreConfig};
use tch::{Device, Kind, Tensor};

use crate::lab::{Lab, assert_nothing_held, leaf, plain_gradient, same_bits};

on_both!(a_change_in_place_after_the_save, a_failing_load_names_the_tensor, a_load_that_fails_once);
on_the_gpu_only!(tensors_of_the_cpu_stay_in_the_graph, a_device_that_is_not_there);

/// Saves 24 storages of 1 MiB.
fn chain(x: &Tensor) -> Tensor {
    let _scope = ssdtrain::scope("block.3");
    (0..24).fold(x * 1.0, |y, _| (y * 1.01).sin()).sum(Kind::Float)
}

/// A cache whose disk fails on request, and whose host pool holds a sixth of the chain.
fn faulty(lab: &Lab) -> (Arc<Faulty>, TensorCache) {
    let backend = Arc::new(Faulty::new(Arc::new(Pool::new(2).unwrap())));
    let config = StoreConfig { backend: BackendKind::Memory, ..StoreConfig::default() };
    let store = Store::open_with(config, Arc::clone(&backend) as _).unwrap();
    let builder = lab.cache().host_pool(4 * MIB).policy(Offload::default().device_budget(1).prefetch(0));
    (backend, TensorCache::with_store(builder, store).unwrap())
}

fn a_change_in_place_after_the_save(lab: &Lab) {
    let cache = lab
        .cache()
        .host_pool(4 * MIB)
        .policy(Offload::default().device_budget(1).prefetch(0))
        .build()
        .unwrap();
    let x = leaf(&lab.randn(&[256, 256]));
    let step = cache.step();
    let mut y = &x * 2.0;
    let loss = y.sin().sum(Kind::Float);
    let _changed = y.g_add_scalar_(1.0);
    let message = step.backward(&loss).unwrap_err().to_string();
    assert!(message.contains("modified by an inplace operation"), "{message}");
}

fn a_failing_load_names_the_tensor(lab: &Lab) {
    let (backend, cache) = faulty(lab);
    let x = leaf(&lab.randn(&[512, 512]));
    let step = cache.step();
    let loss = chain(&x);
    step.flush();
    backend.inject(Direction::Read, Fault::Errno(libc::EIO), 0, u64::MAX);
    let error = step.backward(&loss).unwrap_err();
    let message = error.to_string();
    for part in ["saved tensor", "1048576 bytes", "block.3", "step 1", "Input/output error"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    assert!(!message.contains("frame #"), "no C++ backtrace: {message}");
    drop(loss);
    step.finish().unwrap();
    assert_nothing_held(&cache);
}

fn a_load_that_fails_once(lab: &Lab) {
    let (backend, cache) = faulty(lab);
    let source = lab.randn(&[512, 512]);
    let x = leaf(&source);
    let step = cache.step();
    let loss = chain(&x);
    step.flush();
    backend.inject(Direction::Read, Fault::Errno(libc::EIO), 0, 1);
    step.backward(&loss).unwrap();
    step.finish().unwrap();
    assert!(same_bits(&plain_gradient(&source, chain), &x.grad()));
}

fn tensors_of_the_cpu_stay_in_the_graph(lab: &Lab) {
    let cache = lab
        .cache()
        .host_pool(4 * MIB)
        .policy(Offload::default().device_budget(1).prefetch(0))
        .build()
        .unwrap();
    let forward = |x: &Tensor| (x * 2.0).tanh().to_device(lab.device).exp().tanh().exp().sum(Kind::Float);
    let source = Tensor::randn([256, 256], (Kind::Float, Device::Cpu));
    let x = leaf(&source);
    let step = cache.step();
    step.backward(&forward(&x)).unwrap();
    let report = step.finish().unwrap();
    assert!(report.kept.ineligible.count >= 1, "the result of tanh is on the CPU: {report:?}");
    assert!(report.offloaded.count >= 1, "that of exp is not, and leaves for the next: {report:?}");
    assert!(same_bits(&plain_gradient(&source, forward), &x.grad()));
    assert_nothing_held(&cache);
}

fn a_device_that_is_not_there(_lab: &Lab) {
    let error = TensorCache::builder().device(Device::Cuda(99)).host_pool(MIB).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Device, "{error}");
    assert!(error.to_string().contains("no CUDA device 99"), "{error}");
}
