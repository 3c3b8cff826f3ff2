//! Several threads, several caches.

mod common;

use std::sync::Barrier;
use std::thread;

use common::{assert_nothing_held, assert_same_bits, everything, grads, leaf, leaves, randn, same_bits};
use ssdtrain::{Keep, TensorCache};
use tch::{Device, Kind, Tensor};

fn forward(x: &Tensor) -> Tensor {
    (x * 1.5).tanh().exp().square().sum(Kind::Float)
}

#[test]
fn threads_of_one_step_share_its_cache() {
    let sources: Vec<Tensor> = (0..4).map(|_| randn(&[128, 128])).collect();
    let plain = leaves(&sources);
    plain.iter().for_each(|x| forward(x).backward());

    let cache = everything().build().unwrap();
    let cached = leaves(&sources);
    let step = cache.step();
    let handle = step.handle();
    let losses: Vec<Tensor> = thread::scope(|threads| {
        let workers: Vec<_> = cached
            .iter()
            .map(|x| {
                let (handle, x) = (handle.clone(), x.shallow_clone());
                threads.spawn(move || {
                    let _entered = handle.enter();
                    forward(&x)
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).collect()
    });
    step.flush();
    losses.iter().for_each(|loss| step.backward(loss).unwrap());
    let report = step.finish().unwrap();
    drop(losses);
    assert_same_bits("threads", &grads(&plain), &grads(&cached));
    assert!(report.offloaded.count >= 4, "{report:?}");
    assert_nothing_held(&cache);
}

/// Backward through what one thread has saved loads nothing that another thread saved, although they alternated.
#[test]
fn each_thread_has_an_order_of_saving_of_its_own() {
    let cache = everything().build().unwrap();
    let step = cache.step();
    let handle = step.handle();
    let turn = Barrier::new(2);
    let [first, second] = thread::scope(|threads| {
        let worker = || {
            let (handle, turn) = (handle.clone(), &turn);
            threads.spawn(move || {
                let _entered = handle.enter();
                let x = leaf(&randn(&[128, 128]));
                let y = (0..8).fold(x, |y, _| {
                    turn.wait();
                    y.sin()
                });
                y.sum(Kind::Float)
            })
        };
        [worker(), worker()].map(|worker| worker.join().unwrap())
    });
    step.flush();
    assert_eq!((cache.held().tapes, cache.held().device_bytes), (3, 0));
    step.backward(&first).unwrap();
    drop(first);
    assert_eq!(cache.held().device_bytes, 0, "of the second nothing was loaded");
    step.backward(&second).unwrap();
    drop(second);
    step.finish().unwrap();
    assert_nothing_held(&cache);
}

/// A cache that only keeps can be a GPU's cache without there being a GPU.
#[test]
fn a_tensor_goes_to_the_cache_of_its_device() {
    let source = randn(&[64, 64]);
    let plain = leaf(&source);
    forward(&plain).backward();
    for segments in [false, true] {
        let of_cpu = everything().build().unwrap();
        let of_gpu = TensorCache::builder().device(Device::Cuda(0)).policy(Keep).build().unwrap();
        let x = leaf(&source);
        let outer = of_cpu.step();
        let inner = of_gpu.step();
        let _scope = ssdtrain::scope("layer");
        let loss =
            if segments { ssdtrain::segment("block", &x, |x| Ok(forward(x))).unwrap() } else { forward(&x) };
        outer.flush();
        outer.backward(&loss).unwrap();
        drop(loss);
        assert_eq!(inner.finish().unwrap().saved.count, 0);
        let report = outer.finish().unwrap();
        assert!(same_bits(&plain.grad(), &x.grad()));
        assert!(report.offloaded.bytes > 0 && report.kept.ineligible.count == 0, "{report}");
        assert_eq!(report.recomputed.bytes > 0, segments, "{report}");
        assert_eq!(report.scopes[0].scope, if segments { "layer/block" } else { "layer" });
        assert_nothing_held(&of_cpu);
    }
}

#[test]
fn a_thread_outside_the_step_saves_as_without_a_cache() {
    let cache = everything().build().unwrap();
    let step = cache.step();
    thread::scope(|threads| {
        threads.spawn(|| forward(&leaf(&randn(&[64, 64]))).backward());
    });
    assert_eq!(step.finish().unwrap().saved.count, 0);
}

#[test]
fn what_is_saved_through_an_ended_step_stays_in_the_graph() {
    let cache = everything().build().unwrap();
    let step = cache.step();
    let handle = step.handle();
    step.finish().unwrap();
    let source = randn(&[64, 64]);
    let plain = leaf(&source);
    forward(&plain).backward();
    let late = leaf(&source);
    let _entered = handle.enter();
    let loss = forward(&late);
    assert_eq!(cache.held().entries, 0);
    loss.backward();
    assert!(same_bits(&plain.grad(), &late.grad()));
}

#[test]
fn a_step_may_begin_before_the_one_before_it_has_ended() {
    let cache = everything().build().unwrap();
    let x = leaf(&randn(&[64, 64]));
    let mut step = cache.step();
    let mut scope = ssdtrain::scope("first");
    for _ in 0..3 {
        step.backward(&forward(&x)).unwrap();
        // The new one is made before the old one is dropped.
        step = cache.step();
        scope = ssdtrain::scope("next");
    }
    step.backward(&forward(&x)).unwrap();
    drop(scope);
    let report = step.finish().unwrap();
    assert!(report.saved.count > 0, "{report:?}");
    assert_eq!(report.scopes.iter().map(|s| s.scope.as_str()).collect::<Vec<_>>(), ["next"]);
    drop(forward(&x));
    assert_nothing_held(&cache);
}

#[test]
fn each_thread_may_have_a_step_of_its_own() {
    let cache = everything().build().unwrap();
    thread::scope(|threads| {
        for _ in 0..3 {
            threads.spawn(|| {
                let source = randn(&[128, 128]);
                let plain = leaf(&source);
                forward(&plain).backward();
                for _ in 0..3 {
                    let cached = leaf(&source);
                    let step = cache.step();
                    step.backward(&forward(&cached)).unwrap();
                    step.finish().unwrap();
                    assert!(same_bits(&plain.grad(), &cached.grad()));
                }
            });
        }
    });
    assert_nothing_held(&cache);
}

#[test]
fn two_caches_do_not_mix() {
    let (outer, inner) = (everything().build().unwrap(), everything().build().unwrap());
    let sources = [randn(&[64, 64]), randn(&[64, 64])];
    let plain = leaves(&sources);
    plain.iter().for_each(|x| forward(x).backward());

    let cached = leaves(&sources);
    let step = outer.step();
    let _scope = ssdtrain::scope("outer");
    let first = forward(&cached[0]);
    let inner_report = {
        let step = inner.step();
        let _scope = ssdtrain::scope("inner");
        let second = forward(&cached[1]);
        step.flush();
        step.backward(&second).unwrap();
        step.finish().unwrap()
    };
    let after = (&cached[0] * 1.0).sin();
    step.flush();
    step.backward(&first).unwrap();
    drop((first, after));
    let report = step.finish().unwrap();
    assert_same_bits("two caches", &grads(&plain), &grads(&cached));
    assert_eq!(inner_report.scopes.iter().map(|s| s.scope.as_str()).collect::<Vec<_>>(), ["inner"]);
    assert_eq!(report.scopes.iter().map(|s| s.scope.as_str()).collect::<Vec<_>>(), ["outer"]);
    assert_nothing_held(&outer);
    assert_nothing_held(&inner);
}
