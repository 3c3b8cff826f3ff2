//! A device without memory for what a step keeps: the cache lets go of as much as is needed, and the bits are the same.

use std::env;
use std::sync::Barrier;
use std::thread;

use ssdtrain::plan::{Goal, Observation, Outset, Policy, StepPlan};
use ssdtrain::{Auto, Offload, StepHandle, TensorCacheBuilder};
use ssdtrain_libtorch as torch;
use tch::{Device, Kind, Tensor};

use crate::lab::{Lab, assert_nothing_held, assert_same_bits, leaf, plain_gradient};

on_both!(
    half_the_memory_through_the_host_pool,
    half_the_memory_through_the_disk,
    a_device_that_is_behind_and_short_of_memory,
    threads_that_are_short_of_memory_together,
    what_was_loaded_ahead_makes_room_for_what_backward_computes,
    a_plan_that_does_not_fit_is_replaced,
    half_of_the_peak_is_kept_to,
);

const LAYERS: u64 = 16;
/// How much less is taken where there is not as much in one piece, and how often.
const PIECE: u64 = 64 << 20;
const PIECES: usize = 64;
const THREADS: usize = 3;

/// Takes what the device has, but for some bytes, until it is dropped.
struct Shortage(Option<Tensor>);

impl Shortage {
    fn leaving(lab: &Lab, bytes: u64) -> Shortage {
        let Device::Cuda(index) = lab.device else {
            torch::limit_cpu_memory(lab.allocated() + bytes);
            return Shortage(None);
        };
        let device = torch::CudaDevice::new(index).unwrap();
        device.trim().unwrap();
        let mut left = device.free().unwrap().checked_sub(bytes).expect("a device that is not in use");
        // Of what is free, libtorch has some in pieces beside what is allocated. The whole is as large as can be besides.
        let take = || {
            let taken = Tensor::f_empty([left as i64], (Kind::Uint8, lab.device)).ok();
            left = left.saturating_sub(PIECE);
            taken
        };
        let taken = std::iter::repeat_with(take).take(PIECES).flatten().next();
        Shortage(Some(taken.expect("what is free is not all in pieces")))
    }
}

impl Drop for Shortage {
    fn drop(&mut self) {
        torch::limit_cpu_memory(u64::MAX);
        // libtorch's allocator would keep it from everybody else, such as cuBLAS.
        if let Some(Device::Cuda(index)) = self.0.take().map(|taken| taken.device()) {
            torch::CudaDevice::new(index).and_then(torch::CudaDevice::trim).unwrap();
        }
    }
}

fn width(lab: &Lab) -> i64 {
    lab.suited(4096, 256)
}

fn storage(lab: &Lab) -> u64 {
    (width(lab) * width(lab) * 4) as u64
}

/// Saves two storages a layer, each after milliseconds of products that the host only queues.
fn forward(weight: &Tensor, x: &Tensor) -> Tensor {
    let layer = |y: Tensor, _| ((0..2).fold(y, |y, _| y.matmul(weight)) * 1.01).sin();
    (0..LAYERS).fold(x * 1.0, layer).sum(Kind::Float)
}

fn weight(lab: &Lab) -> Tensor {
    lab.randn(&[width(lab), width(lab)]) / (width(lab) as f64).sqrt()
}

/// What one gradient takes at most without a cache.
fn wanted(lab: &Lab, weight: &Tensor, source: &Tensor) -> u64 {
    // Before the first cache, nothing counts what the CPU's tensors take.
    torch::install_cpu_allocator();
    let run = || plain_gradient(source, |x| forward(weight, x));
    // libtorch's workspaces are made in the first run and stay.
    drop(run());
    torch::reset_peak(lab.device);
    let before = lab.allocated();
    drop(run());
    torch::memory(lab.device).peak - before
}

/// Keeps everything that it can: nothing has to leave for its budgets.
fn keeping(lab: &Lab) -> TensorCacheBuilder {
    lab.cache().policy(Offload::default().device_budget(u64::MAX).prefetch(2 * storage(lab)))
}

/// Steps of other values each, compared with steps that have all memory.
fn steps(lab: &Lab, builder: TensorCacheBuilder, count: u32, share: f64) {
    let (weight, source) = (weight(lab), lab.randn(&[width(lab), width(lab)]));
    let sources: Vec<Tensor> = (0..count).map(|index| &source * (1.0 + f64::from(index) * 0.1)).collect();
    let expected: Vec<Tensor> =
        sources.iter().map(|source| plain_gradient(source, |x| forward(&weight, x))).collect();
    let wanted = wanted(lab, &weight, &source);
    let cache = builder.build().unwrap();
    let shortage = Shortage::leaving(lab, (wanted as f64 * share) as u64 + 2 * storage(lab));
    let all = Tensor::f_empty([wanted as i64], (Kind::Uint8, lab.device));
    assert!(all.is_err(), "there must be too little without a cache");
    let mut pressed = 0;
    for (index, (source, expected)) in sources.iter().zip(&expected).enumerate() {
        let x = leaf(source);
        let step = cache.step();
        let loss = forward(&weight, &x);
        step.backward(&loss).unwrap();
        drop(loss);
        let report = step.finish().unwrap();
        pressed += report.pressed.bytes;
        let what = format!("step {index}, {report}");
        assert_same_bits(&what, &[expected.shallow_clone()], &[x.grad()]);
    }
    drop(shortage);
    assert!(pressed > storage(lab), "{pressed} bytes were let go of");
    assert_nothing_held(&cache);
}

fn half_the_memory_through_the_host_pool(lab: &Lab) {
    steps(lab, keeping(lab).host_pool(2 * LAYERS * storage(lab)), 4, 0.5);
}

fn half_the_memory_through_the_disk(lab: &Lab) {
    steps(lab, keeping(lab).host_pool(4 * storage(lab)).spill_to(env::temp_dir()), 3, 0.5);
}

/// The pool grows while memory is short.
fn a_device_that_is_behind_and_short_of_memory(lab: &Lab) {
    steps(lab, keeping(lab), lab.suited(8, 3), 0.4);
}

/// cuBLAS has a handle for each thread that computes at the time, made of memory that libtorch's allocator does not have.
fn make_handles(weight: &Tensor) {
    let all_have_one = Barrier::new(THREADS);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            let (weight, all_have_one) = (weight.shallow_clone(), &all_have_one);
            scope.spawn(move || {
                drop(weight.matmul(&weight));
                all_have_one.wait();
            });
        }
    });
}

fn threads_that_are_short_of_memory_together(lab: &Lab) {
    let (weight, source) = (weight(lab), lab.randn(&[width(lab), width(lab)]));
    let expected = plain_gradient(&source, |x| forward(&weight, x));
    let wanted = wanted(lab, &weight, &source);
    make_handles(&weight);
    let cache = keeping(lab).host_pool(4 * LAYERS * storage(lab)).build().unwrap();
    let shortage = Shortage::leaving(lab, wanted + 8 * storage(lab));
    let step = cache.step();
    let count = lab.suited(4, 2);
    let run = |handle: StepHandle, [weight, source, expected]: [Tensor; 3]| {
        let _entered = handle.enter();
        for _ in 0..count {
            let x = leaf(&source);
            forward(&weight, &x).backward();
            assert_same_bits("a thread", &[expected.shallow_clone()], &[x.grad()]);
        }
    };
    thread::scope(|scope| {
        for _ in 0..THREADS {
            let own = [&weight, &source, &expected].map(Tensor::shallow_clone);
            let handle = step.handle();
            scope.spawn(move || run(handle, own));
        }
    });
    let report = step.finish().unwrap();
    drop(shortage);
    assert!(report.pressed.bytes > 0, "{report}");
    assert_nothing_held(&cache);
}

/// More is loaded ahead than backward leaves room for.
fn what_was_loaded_ahead_makes_room_for_what_backward_computes(lab: &Lab) {
    let (weight, source) = (weight(lab), lab.randn(&[width(lab), width(lab)]));
    let expected = plain_gradient(&source, |x| forward(&weight, x));
    let builder = lab.cache().host_pool(2 * LAYERS * storage(lab));
    let cache = builder.policy(Offload::default().prefetch(u64::MAX)).build().unwrap();
    let x = leaf(&source);
    let step = cache.step();
    let loss = forward(&weight, &x);
    step.flush();
    let shortage = Shortage::leaving(lab, 10 * storage(lab));
    step.backward(&loss).unwrap();
    drop(loss);
    let report = step.finish().unwrap();
    drop(shortage);
    assert!(report.pressed.bytes > 0, "{report}");
    assert_same_bits(&report.to_string(), &[expected], &[x.grad()]);
    assert_nothing_held(&cache);
}

fn a_plan_that_does_not_fit_is_replaced(lab: &Lab) {
    let (weight, source) = (weight(lab), lab.randn(&[width(lab), width(lab)]));
    let expected = plain_gradient(&source, |x| forward(&weight, x));
    let wanted = wanted(lab, &weight, &source);
    // It may keep everything, and so it does as long as there is room.
    let builder = lab.cache().host_pool(2 * LAYERS * storage(lab)).spill_to(env::temp_dir());
    let cache = builder.policy(Auto::new(Goal::budget(1 << 40))).build().unwrap();
    let step = || {
        let x = leaf(&source);
        let step = cache.step();
        step.backward(&forward(&weight, &x)).unwrap();
        let report = step.finish().unwrap();
        assert_same_bits(&report.to_string(), &[expected.shallow_clone()], &[x.grad()]);
        report
    };
    let roomy = (0..4).map(|_| step()).collect::<Vec<_>>().remove(3);
    assert!(roomy.plan.is_some() && roomy.pressed.count == 0, "{roomy}");
    let shortage = Shortage::leaving(lab, wanted * 2 / 3 + 2 * storage(lab));
    let reports: Vec<_> = (0..8).map(|_| step()).collect();
    drop(shortage);
    assert!(reports[0].pressed.bytes > 0, "{}", reports[0]);
    let fits = reports.iter().find(|report| report.pressed.count == 0);
    assert!(fits.is_some_and(|report| report.offloaded.bytes > 0), "{}", reports[7]);
}

/// Everything stays, as long as the peak is no higher than this.
#[derive(Clone, Debug)]
struct Below(u64, Offload);

impl Policy for Below {
    fn begin(&mut self, outset: &Outset<'_>) -> StepPlan {
        StepPlan { most_peak: Some(self.0), ..self.1.begin(outset) }
    }

    fn end(&mut self, plan: &StepPlan, observed: Observation) {
        self.1.end(plan, observed);
    }
}

/// There is memory enough, but the step is not to have it.
fn half_of_the_peak_is_kept_to(lab: &Lab) {
    let (weight, source) = (weight(lab), lab.randn(&[width(lab), width(lab)]));
    let expected = plain_gradient(&source, |x| forward(&weight, x));
    let most = wanted(lab, &weight, &source) / 2;
    let keeps = Offload::default().device_budget(u64::MAX).prefetch(4 * storage(lab));
    let builder = lab.cache().host_pool(2 * LAYERS * storage(lab)).policy(Below(most, keeps));
    let cache = builder.build().unwrap();
    for _ in 0..3 {
        let x = leaf(&source);
        let step = cache.step();
        let loss = forward(&weight, &x);
        step.backward(&loss).unwrap();
        drop(loss);
        let report = step.finish().unwrap();
        assert_same_bits(&report.to_string(), &[expected.shallow_clone()], &[x.grad()]);
        assert!(report.act_peak_bytes <= most && report.pressed.bytes > storage(lab), "{report}");
    }
    assert_nothing_held(&cache);
}
