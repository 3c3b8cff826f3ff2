//! Several threads, several caches, one device.

use std::{ptr, thread};

use cudarc::driver::{result, sys};
use ssdtrain::{BackendKind, KIB, MIB, Offload, TensorCache};
use ssdtrain_libtorch::SavedVariable;
use tch::{Device, Kind, Tensor};

use crate::lab::{Lab, assert_nothing_held, assert_same_bits, grads, leaf, leaves, same_bits};

on_both!(
    threads_with_a_step_of_their_own,
    threads_of_one_step,
    threads_with_a_cache_of_their_own,
    two_caches_of_one_thread,
);
on_the_gpu_only!(the_context_that_is_current_stays_current, caches_of_two_devices_of_one_thread);

/// Saves a dozen storages of 256 KiB.
fn forward(x: &Tensor) -> Tensor {
    (0..6).fold(x * 1.5, |y, _| (y * 1.01).tanh().matmul(x).sin()).sum(Kind::Float)
}

fn tight(lab: &Lab) -> TensorCache {
    lab.cache()
        .host_pool(64 * MIB)
        .policy(Offload::default().device_budget(MIB).prefetch(256 * KIB))
        .build()
        .unwrap()
}

/// Sources, and what their gradients must be.
fn expected(lab: &Lab, count: usize) -> Vec<(Tensor, Tensor)> {
    let sources: Vec<_> = (0..count).map(|_| lab.randn(&[256, 256]) * 0.05).collect();
    sources
        .into_iter()
        .map(|source| {
            let x = leaf(&source);
            forward(&x).backward();
            (source, x.grad())
        })
        .collect()
}

fn train(cache: &TensorCache, source: &Tensor, gradient: &Tensor, steps: usize) {
    for index in 0..steps {
        let x = leaf(source);
        let step = cache.step();
        step.backward(&forward(&x)).unwrap();
        step.finish().unwrap();
        assert!(same_bits(gradient, &x.grad()), "step {index}");
    }
}

/// Half of the graph is computed on the host, which has another cache.
fn caches_of_two_devices_of_one_thread(lab: &Lab) {
    let forward = |x: &Tensor| forward(&(x.to_device(Device::Cpu) * 0.5).tanh().sin().to_device(x.device()));
    let source = lab.randn(&[256, 256]) * 0.05;
    let plain = leaf(&source);
    forward(&plain).backward();
    let of_host = TensorCache::builder().policy(Offload::default()).backend(BackendKind::Memory).min_bytes(0);
    let (of_host, of_gpu) = (of_host.build().unwrap(), tight(lab));
    for of_gpu_is_inner in [true, false] {
        let x = leaf(&source);
        let (outer, inner) = if of_gpu_is_inner { (&of_host, &of_gpu) } else { (&of_gpu, &of_host) };
        let (outer, inner) = (outer.step(), inner.step());
        let loss = forward(&x);
        outer.flush();
        inner.flush();
        outer.backward(&loss).unwrap();
        drop(loss);
        let reports = [inner.finish().unwrap(), outer.finish().unwrap()];
        assert!(reports.iter().all(|report| report.offloaded.bytes > 0 && report.kept.ineligible.count == 0));
        assert!(same_bits(&plain.grad(), &x.grad()));
        assert_nothing_held(&of_host);
        assert_nothing_held(&of_gpu);
    }
}

fn threads_with_a_step_of_their_own(lab: &Lab) {
    let cache = &tight(lab);
    let steps = lab.suited(30, 3);
    thread::scope(|threads| {
        for (source, gradient) in expected(lab, 3) {
            threads.spawn(move || train(cache, &source, &gradient, steps));
        }
    });
    assert_nothing_held(cache);
}

fn threads_of_one_step(lab: &Lab) {
    let cache = tight(lab);
    let (sources, gradients): (Vec<_>, Vec<_>) = expected(lab, 3).into_iter().unzip();
    let inputs = leaves(&sources);
    let step = cache.step();
    let losses: Vec<Tensor> = thread::scope(|threads| {
        let workers: Vec<_> = inputs
            .iter()
            .map(|x| {
                let (handle, x) = (step.handle(), x.shallow_clone());
                threads.spawn(move || {
                    let _entered = handle.enter();
                    forward(&x)
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).collect()
    });
    losses.iter().for_each(|loss| step.backward(loss).unwrap());
    let report = step.finish().unwrap();
    drop(losses);
    assert!(report.loaded.count > 0, "{report:?}");
    assert_same_bits("threads", &gradients, &grads(&inputs));
    assert_nothing_held(&cache);
}

fn threads_with_a_cache_of_their_own(lab: &Lab) {
    let caches = [tight(lab), tight(lab)];
    let steps = lab.suited(30, 3);
    thread::scope(|threads| {
        for (cache, (source, gradient)) in caches.iter().zip(expected(lab, 2)) {
            threads.spawn(move || train(cache, &source, &gradient, steps));
        }
    });
    caches.iter().for_each(assert_nothing_held);
}

fn two_caches_of_one_thread(lab: &Lab) {
    let (outer, inner) = (tight(lab), tight(lab));
    let [(first, first_gradient), (second, second_gradient)] = expected(lab, 2).try_into().unwrap();
    let x = leaf(&first);
    let step = outer.step();
    let loss = forward(&x);
    train(&inner, &second, &second_gradient, 2);
    step.backward(&loss).unwrap();
    step.finish().unwrap();
    drop(loss);
    assert!(same_bits(&first_gradient, &x.grad()));
    assert_nothing_held(&outer);
    assert_nothing_held(&inner);
}

/// The context that a program computes with, for example another GPU's, must not be changed underneath it.
fn the_context_that_is_current_stays_current(lab: &Lab) {
    let cache = &lab.cache().host_pool(64 * MIB).policy(Offload::default().device_budget(1)).build().unwrap();
    let tensor = lab.randn(&[512, 512]);
    thread::scope(|threads| {
        threads.spawn(move || {
            let device = result::device::get(0).unwrap();
            // SAFETY: the driver gave the device's handle, and null asks for nothing special.
            let own = unsafe { result::ctx::create_v4(ptr::null_mut(), 0, device) }.unwrap();
            let assert_current = |after: &str| {
                assert!(result::ctx::get_current().unwrap() == Some(own), "another is current after {after}");
            };
            assert_current("it was made");
            let step = cache.step();
            let saved = SavedVariable::new(&tensor).unwrap();
            assert_current("a save");
            step.flush();
            assert_current("a flush");
            // libtorch makes its own context current when it computes.
            // SAFETY: null is no context.
            unsafe { result::ctx::set_current(ptr::null_mut()) }.unwrap();
            assert!(saved.unpack().unwrap().equal(&tensor));
            drop(saved);
            assert!(step.finish().unwrap().offloaded.bytes > 0);
            // SAFETY: made above, and current on no thread.
            unsafe { sys::cuCtxDestroy_v2(own) }.result().unwrap();
        });
    });
    assert_nothing_held(cache);
}
