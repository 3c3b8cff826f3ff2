//! Copies come after the computation of what they copy and before anything overwrites it, however far the host is
//! ahead of the device. A missing wait shows as bits from another step.

use std::env;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::result;
use parking_lot::Mutex;
use ssdtrain::plan::{InTurn, Placement};
use ssdtrain::{MIB, Offload, TensorCache, segment};
use ssdtrain_libtorch::{CudaDevice, OnStream};
use ssdtrain_models::linear_in_place;
use tch::{Cuda, Kind, Tensor};

use crate::lab::{Lab, assert_nothing_held, assert_same_bits, grads, leaf, leaves, plain_gradient};

on_both!(
    a_device_far_behind_through_the_host_pool,
    a_device_far_behind_through_the_disk,
    small_host_pool_used_again_in_every_step,
    host_pool_without_a_disk_used_again_in_every_step,
    two_streams_one_of_them_from_outside,
    two_streams_add_to_the_gradient_of_one_weight,
    statistics_that_two_streams_update_are_updated_once,
    what_one_stream_computes_again_is_not_served_on_another,
    what_a_segment_computes_again_on_one_stream_is_not_served_on_another,
    an_input_is_overwritten_on_another_stream_while_backward_computes_from_it,
    an_input_is_overwritten_on_another_stream_after_another_part_of_its_storage_was_on_the_first,
    an_input_is_overwritten_on_another_stream_after_the_cache_is_gone,
);

/// Steps whose values differ, each compared to a step without the cache.
fn steps(cache: &TensorCache, source: &Tensor, count: u32, forward: impl Fn(&Tensor) -> Tensor) {
    for index in 0..count {
        let source = source * (1.0 + f64::from(index) * 0.1);
        let expected = plain_gradient(&source, &forward);
        let x = leaf(&source);
        let step = cache.step();
        step.backward(&forward(&x)).unwrap();
        let report = step.finish().unwrap();
        assert!(report.loaded.bytes > 0, "step {index}: {report}");
        assert_same_bits(&format!("step {index}, {report}"), &[expected], &[x.grad()]);
    }
    assert_nothing_held(cache);
}

/// Each save waits behind milliseconds of matrix products that the host only queues, in forward and in backward.
fn far_behind(lab: &Lab, disk: bool) {
    let width: i64 = lab.suited(4096, 256);
    let storage = (width * width * 4) as u64;
    let pool = storage * if disk { 6 } else { 16 };
    let builder = lab
        .cache()
        .host_pool(pool)
        .policy(Offload::default().device_budget(3 * storage).prefetch(2 * storage));
    let cache = if disk { builder.spill_to(env::temp_dir()) } else { builder }.build().unwrap();
    let weight = lab.randn(&[width, width]) / (width as f64).sqrt();
    let source = lab.randn(&[width, width]);
    steps(&cache, &source, lab.suited(6, 3), |x| {
        let layer = |y: Tensor, _| ((0..4).fold(y, |y, _| y.matmul(&weight)) * 1.01).sin();
        (0..12).fold(x * 1.0, layer).sum(Kind::Float)
    });
    let read = cache.store_stats().map_or(0, |stats| stats.bytes_read);
    assert_eq!(read > 0, disk, "{read} bytes were read from the disk");
}

fn a_device_far_behind_through_the_host_pool(lab: &Lab) {
    far_behind(lab, false);
}

fn a_device_far_behind_through_the_disk(lab: &Lab) {
    far_behind(lab, true);
}

/// Saves 16 storages of 1 MiB.
fn chain(x: &Tensor) -> Tensor {
    (0..16).fold(x * 1.0, |y, _| (y * 1.01).sin()).sum(Kind::Float)
}

fn small_host_pool_used_again_in_every_step(lab: &Lab) {
    let builder = lab
        .cache()
        .host_pool(4 * MIB)
        .spill_to(env::temp_dir())
        .policy(Offload::default().device_budget(2 * MIB).prefetch(MIB));
    let cache = builder.build().unwrap();
    steps(&cache, &lab.randn(&[512, 512]), lab.suited(50, 5), chain);
    assert!(cache.store_stats().unwrap().bytes_read > 0);
}

/// What does not fit into the pool stays on the device.
fn host_pool_without_a_disk_used_again_in_every_step(lab: &Lab) {
    let cache = lab
        .cache()
        .host_pool(4 * MIB)
        .policy(Offload::default().device_budget(2 * MIB).prefetch(MIB))
        .build()
        .unwrap();
    steps(&cache, &lab.randn(&[512, 512]), lab.suited(50, 5), chain);
}

/// On a GPU, runs what is computed on a stream that is not libtorch's, until the guard is dropped. That comes after all that was
/// computed before.
fn second_stream(lab: &Lab) -> impl Fn() -> Option<OnStream> {
    let second = Second::create(lab);
    move || {
        if second.0.is_some() {
            Cuda::synchronize(0);
        }
        second.enter()
    }
}

/// The address of a stream of the GPU that is not libtorch's; `None` where there is no GPU.
#[derive(Clone, Copy)]
struct Second(Option<usize>);

impl Second {
    fn create(lab: &Lab) -> Second {
        Second(lab.is_gpu().then(|| {
            // The device's context is current once it has computed.
            drop(lab.randn(&[1]));
            // It is never destroyed: libtorch keeps memory for it.
            result::stream::create(result::stream::StreamKind::NonBlocking).unwrap().expose_provenance()
        }))
    }

    /// The calling thread computes there, until the guard is dropped.
    fn enter(self) -> Option<OnStream> {
        let (stream, device) = (ptr::with_exposed_provenance_mut(self.0?), CudaDevice::new(0).unwrap());
        // SAFETY: the stream is the first device's and is never destroyed.
        Some(unsafe { device.enter(stream) }.unwrap())
    }
}

/// Layers alternate between two streams, so that what one of them has loaded ahead is asked for on the other.
fn two_streams_one_of_them_from_outside(lab: &Lab) {
    let width: i64 = lab.suited(4096, 256);
    let storage = (width * width * 4) as u64;
    let on_second = second_stream(lab);
    let cache = lab
        .cache()
        .host_pool(16 * storage)
        .policy(Offload::default().device_budget(3 * storage).prefetch(2 * storage))
        .build()
        .unwrap();
    let weight = lab.randn(&[width, width]) / (width as f64).sqrt();
    let source = lab.randn(&[width, width]);
    steps(&cache, &source, lab.suited(6, 3), |x| {
        let layer = |y: Tensor, index: i32| {
            let stream = (index % 2 == 1).then(&on_second).flatten();
            let y = ((0..4).fold(y, |y, _| y.matmul(&weight)) * 1.01).sin();
            if stream.is_some() {
                Cuda::synchronize(0);
            }
            y
        };
        (0..12).fold(x * 1.0, layer).sum(Kind::Float)
    });
}

/// Layers that share a weight add to its gradient in place, each on the stream that its forward ran on. All values
/// are whole numbers, so the sum has the same bits in every order, and an addition that was overwritten by another is
/// missing from it.
fn two_streams_add_to_the_gradient_of_one_weight(lab: &Lab) {
    let width: i64 = lab.suited(4096, 256);
    let whole = |seed: i64| {
        let numbers = Tensor::arange(width * width, (Kind::Int64, lab.device));
        ((numbers * (2 * seed + 7)).remainder(11) - 5).view([width, width]).to_kind(Kind::Float)
    };
    let storage = (width * width * 4) as u64;
    let inputs: Vec<Tensor> = (0..8).map(whole).collect();
    let scales: Vec<Tensor> = (8..16).map(whole).collect();
    let on_second = second_stream(lab);
    let losses = |layer: &dyn Fn(&Tensor) -> Tensor| {
        let loss_of = |(index, (input, scale)): (usize, (&Tensor, &Tensor))| {
            let stream = (index % 2 == 1).then(&on_second).flatten();
            let loss = (layer(&(input * 1.0)) * scale).sum(Kind::Float);
            if stream.is_some() {
                Cuda::synchronize(0);
            }
            loss
        };
        inputs.iter().zip(&scales).enumerate().map(loss_of).sum::<Tensor>()
    };
    let expected = leaf(&whole(16));
    losses(&|input| input.linear(&expected, None::<&Tensor>)).backward();

    let cache = lab
        .cache()
        .host_pool(32 * storage)
        .policy(Offload::default().device_budget(6 * storage).prefetch(2 * storage))
        .build()
        .unwrap();
    let weight = leaf(&whole(16));
    for round in 1..=lab.suited(5, 2) {
        let step = cache.step();
        step.backward(&losses(&|input| linear_in_place(input, &weight, None).unwrap())).unwrap();
        let report = step.finish().unwrap();
        let expected = expected.grad() * i64::from(round);
        assert_same_bits(&format!("round {round}, {report}"), &[expected], &[weight.grad()]);
    }
    assert_nothing_held(&cache);
}

/// Takes the device some milliseconds.
fn products(x: &Tensor, by: &Tensor) -> Tensor {
    (0..16).fold(x.shallow_clone(), |y, _| y.matmul(by).tanh())
}

/// Backward begins on the second stream, and computes there what the first one has saved, too. The first does not wait for it.
fn what_one_stream_computes_again_is_not_served_on_another(lab: &Lab) {
    let width: i64 = lab.suited(4096, 64);
    let [x, by, on_first, on_other] = [(); 4].map(|()| lab.randn(&[width, width]));
    let on_second = second_stream(lab);
    let loss = |weights: &[Tensor]| {
        let p = products(&x, &by);
        let one = (&weights[0] * &p).sum(Kind::Float);
        let stream = on_second();
        let other = (&weights[1] * p.sin()).sum(Kind::Float);
        if stream.is_some() {
            Cuda::synchronize(0);
        }
        drop(stream);
        one + other
    };
    let weights = [on_first, on_other];
    let expected = leaves(&weights);
    loss(&expected).backward();
    let policy = InTurn::new(Offload::default(), vec![Placement::Recompute]);
    let cache = lab.cache().host_pool(64 * MIB).policy(policy).build().unwrap();
    for round in 0..lab.suited(5, 2) {
        let weights = leaves(&weights);
        let step = cache.step();
        step.backward(&loss(&weights)).unwrap();
        let report = step.finish().unwrap();
        assert!(report.reruns.bytes > 0, "{report}");
        assert_same_bits(&format!("round {round}, {report}"), &grads(&expected), &grads(&weights));
    }
    assert_nothing_held(&cache);
}

/// Without a cache, backward does not read the input, and whoever fills it anew need not wait for that.
fn an_input_is_overwritten_on_another_stream_while_backward_computes_from_it(lab: &Lab) {
    overwrite_input(lab, Before::Nothing);
}

fn an_input_is_overwritten_on_another_stream_after_another_part_of_its_storage_was_on_the_first(lab: &Lab) {
    overwrite_input(lab, Before::AnotherPart);
}

fn an_input_is_overwritten_on_another_stream_after_the_cache_is_gone(lab: &Lab) {
    overwrite_input(lab, Before::CacheGoes);
}

/// What happens between backward and the write on another stream.
#[derive(PartialEq)]
enum Before {
    Nothing,
    AnotherPart,
    CacheGoes,
}

fn overwrite_input(lab: &Lab, before: Before) {
    let width: i64 = lab.suited(4096, 64);
    let buffer = lab.randn(&[2, width, width]);
    let [input, beside] = [0, 1].map(|half| buffer.get(half));
    let [next, by, weight] = [(); 3].map(|()| lab.randn(&[width, width]));
    let second = Second::create(lab);
    let fill = |half: &Tensor, with: &Tensor| tch::no_grad(|| half.shallow_clone().copy_(with));
    let loss = |weight: &Tensor| products(&(weight * (&input + 1.0)), &by).sum(Kind::Float);
    let wait = || {
        if lab.is_gpu() {
            Cuda::synchronize(0);
        }
    };
    let first = input.copy();
    let expected = leaf(&weight);
    loss(&expected).backward();
    for round in 0..lab.suited(5, 2) {
        // What the products save is there, and the device computes them for a while before it comes to the input.
        let placements = [vec![Placement::Recompute], vec![Placement::Keep; 63]].concat();
        let policy = InTurn::new(Offload::default(), placements);
        let cache = lab.cache().host_pool(64 * MIB).policy(policy).build().unwrap();
        fill(&input, &first);
        let weight = leaf(&weight);
        let step = cache.step();
        let loss = loss(&weight);
        wait();
        step.backward(&loss).unwrap();
        drop(loss);
        if before == Before::AnotherPart {
            fill(&beside, &next);
        }
        let overwrite = || {
            let _stream = second.enter();
            fill(&input, &next);
        };
        let report = if before == Before::CacheGoes {
            let report = step.finish().unwrap();
            drop(cache);
            overwrite();
            report
        } else {
            overwrite();
            let report = step.finish().unwrap();
            assert_nothing_held(&cache);
            report
        };
        wait();
        assert!(report.reruns.bytes > 0, "{report}");
        assert_same_bits(&format!("round {round}, {report}"), &[expected.grad()], &[weight.grad()]);
    }
}

/// As above, with a segment that computes on both streams. It waits for both in forward alone: what backward asks for first is all on
/// the second one.
fn what_a_segment_computes_again_on_one_stream_is_not_served_on_another(lab: &Lab) {
    let width: i64 = lab.suited(4096, 64);
    let [x, by] = [(); 2].map(|()| lab.randn(&[width, width]));
    let second = Second::create(lab);
    let is_forward = Arc::new(AtomicBool::new(true));
    let waits = Arc::clone(&is_forward);
    let function = move |x: &Tensor| {
        let wait = || {
            if second.0.is_some() && waits.load(Ordering::Relaxed) {
                Cuda::synchronize(0);
            }
        };
        let h = products(x, &by);
        let one = h.f_cos()?;
        wait();
        let other = {
            let _stream = second.enter();
            h.f_sin()?
        };
        wait();
        one.f_add(&other)
    };
    let expected = leaf(&x);
    function(&expected).unwrap().sum(Kind::Float).backward();
    let cache = lab.cache().host_pool(1024 * MIB).build().unwrap();
    let function = Arc::new(Mutex::new(function));
    for round in 0..lab.suited(5, 2) {
        let x = leaf(&x);
        let step = cache.step();
        is_forward.store(true, Ordering::Relaxed);
        let function = Arc::clone(&function);
        let loss = segment("both", &x, move |x| function.lock()(x)).unwrap().sum(Kind::Float);
        is_forward.store(false, Ordering::Relaxed);
        step.backward(&loss).unwrap();
        drop(loss);
        let report = step.finish().unwrap();
        assert!(report.reruns.bytes > 0, "{report}");
        assert_same_bits(&format!("round {round}, {report}"), &[expected.grad()], &[x.grad()]);
    }
    assert_nothing_held(&cache);
}

/// Branches that do not wait for each other in backward, where each begins again with other values of the same statistics, which lie beside
/// what they read.
fn statistics_that_two_streams_update_are_updated_once(lab: &Lab) {
    let [rows, channels, side] = lab.suited([64, 64, 56], [4, 8, 8]);
    let sources: Vec<Tensor> = (0..6).map(|_| lab.randn(&[rows, channels, side, side])).collect();
    let on_second = second_stream(lab);
    let cache = lab.cache().host_pool(64 * MIB).policy(Offload::default().device_budget(1)).build().unwrap();
    let train = |in_segments: bool| {
        let buffer = Tensor::ones([3 * channels], (Kind::Float, lab.device));
        let inputs: Vec<Tensor> = sources.iter().map(leaf).collect();
        let step = cache.step();
        let branch = |(index, input): (usize, &Tensor)| {
            let stream = (index % 2 == 1).then(&on_second).flatten();
            let [mean, var, table] = [0, 1, 2].map(|part| buffer.narrow(0, part * channels, channels));
            let function = move |x: &Tensor| {
                let none = None::<&Tensor>;
                let y = x.f_batch_norm(none, none, Some(&mean), Some(&var), true, 0.5, 1e-5, true)?;
                y.f_sin()?.f_mul(&table.f_view([1, channels, 1, 1])?)
            };
            let y = if in_segments { segment("norm", input, function) } else { function(input) };
            let loss = y.unwrap().square().sum(Kind::Float);
            if stream.is_some() {
                Cuda::synchronize(0);
            }
            loss
        };
        let loss = inputs.iter().enumerate().map(branch).reduce(|sum, loss| sum + loss).unwrap();
        step.backward(&loss).unwrap();
        drop(loss);
        step.finish().unwrap();
        let mut all = grads(&inputs);
        all.push(buffer);
        all
    };
    let expected = train(false);
    for _ in 0..lab.suited(10, 2) {
        assert_same_bits("statistics", &expected, &train(true));
    }
    assert_nothing_held(&cache);
}
