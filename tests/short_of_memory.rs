//! Memory that runs out: a step that keeps more than there is goes on, with the bits of one that had enough.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use parking_lot::{Mutex, MutexGuard};
use ssdtrain::plan::Goal;
use ssdtrain::{Auto, Held, Offload, StepHandle, TensorCache, TensorCacheBuilder};
use ssdtrain_libtorch as torch;
use tch::{Device, Tensor};

use common::{assert_same_bits, direct, everything, leaf, randn, staged};

const LAYERS: usize = 16;
/// Bytes of what each layer saves.
const LAYER: u64 = 1 << 20;

/// The limit is that of the process, so the tests take turns.
static TURN: Mutex<()> = Mutex::new(());

/// Memory for so many bytes more than are allocated now, until this is dropped.
struct Limited(#[expect(dead_code, reason = "held for its drop")] MutexGuard<'static, ()>);

impl Limited {
    fn turn() -> Limited {
        let turn = TURN.lock();
        torch::install_cpu_allocator();
        Limited(turn)
    }

    fn to(&self, bytes: u64) {
        torch::limit_cpu_memory(torch::memory(Device::Cpu).allocated + bytes);
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        torch::limit_cpu_memory(u64::MAX);
    }
}

fn forward(weight: &Tensor, x: &Tensor) -> Tensor {
    let y = (0..LAYERS).fold(x.shallow_clone(), |y, _| y.matmul(weight).tanh());
    y.square().mean(y.kind())
}

fn inputs() -> (Tensor, Tensor) {
    (randn(&[512, 512]) / 16.0, randn(&[512, 512]))
}

/// The gradient of a step without a cache, and the bytes that it took at most.
fn plain((weight, x): &(Tensor, Tensor)) -> (Tensor, u64) {
    let weight = leaf(weight);
    torch::reset_peak(Device::Cpu);
    let before = torch::memory(Device::Cpu).allocated;
    forward(&weight, x).backward();
    (weight.grad(), torch::memory(Device::Cpu).peak - before)
}

/// Caches that keep what they can, over each tier.
fn caches() -> [TensorCacheBuilder; 4] {
    let keeps = |builder: TensorCacheBuilder| builder.policy(Offload::default().device_budget(u64::MAX));
    [keeps(everything()), keeps(staged()), keeps(staged().host_pool(4 * LAYER)), keeps(direct())]
}

#[test]
fn a_step_that_wants_twice_the_memory_there_is_has_the_same_bits() {
    let limited = Limited::turn();
    let inputs = inputs();
    let (expected, most) = plain(&inputs);
    assert!(most > LAYERS as u64 * LAYER);
    for builder in caches() {
        let cache = builder.build().unwrap();
        let (weight, path) = (leaf(&inputs.0), cache.io_path());
        limited.to(most / 2);
        let failed = catch_unwind(AssertUnwindSafe(|| forward(&weight, &inputs.1)));
        assert!(failed.is_err(), "without a cache there is too little");
        let step = cache.step();
        let loss = forward(&weight, &inputs.1);
        step.backward(&loss).unwrap();
        drop(loss);
        let report = step.finish().unwrap();
        torch::limit_cpu_memory(u64::MAX);
        assert_same_bits(&path, &[expected.shallow_clone()], &[weight.grad()]);
        assert!(report.pressed.bytes >= 4 * LAYER, "{report}");
        assert!(report.act_peak_bytes <= most / 2, "{report}");
        assert!(report.warnings.iter().any(|warning| warning.contains("memory ran out")), "{report}");
        assert_eq!(cache.held(), Held::default());
    }
}

#[test]
fn threads_that_run_out_of_memory_together_do_not_wait_for_each_other() {
    let limited = Limited::turn();
    let inputs = inputs();
    let (expected, most) = plain(&inputs);
    for builder in caches() {
        let cache = builder.build().unwrap();
        // Twice as much is wanted. What threads compute with cannot go.
        limited.to(most * 3 / 2);
        let step = cache.step();
        let run = |handle: StepHandle, [source, x, expected]: [Tensor; 3]| {
            let _entered = handle.enter();
            for _ in 0..3 {
                let weight = leaf(&source);
                forward(&weight, &x).backward();
                assert_same_bits("a thread", &[expected.shallow_clone()], &[weight.grad()]);
            }
        };
        thread::scope(|scope| {
            for _ in 0..3 {
                let own = [&inputs.0, &inputs.1, &expected].map(Tensor::shallow_clone);
                let handle = step.handle();
                scope.spawn(move || run(handle, own));
            }
        });
        let report = step.finish().unwrap();
        torch::limit_cpu_memory(u64::MAX);
        assert!(report.pressed.bytes > 0, "{report}");
        assert_eq!(cache.held(), Held::default());
    }
}

#[test]
fn what_no_cache_can_let_go_of_fails_as_ever_and_the_next_step_works() {
    let limited = Limited::turn();
    let inputs = inputs();
    let (expected, _) = plain(&inputs);
    let cache = everything().build().unwrap();
    let weight = leaf(&inputs.0);
    limited.to(2 * LAYER);
    let step = cache.step();
    let failed = catch_unwind(AssertUnwindSafe(|| {
        let y: Vec<Tensor> = (0..4).map(|_| inputs.1.matmul(&weight).tanh()).collect();
        drop(y);
    }));
    let said = failed.unwrap_err();
    assert!(said.downcast_ref::<String>().unwrap().contains("out of memory"));
    drop(step);
    torch::limit_cpu_memory(u64::MAX);
    let step = cache.step();
    step.backward(&forward(&weight, &inputs.1)).unwrap();
    assert!(step.finish().unwrap().pressed.count == 0);
    assert_same_bits("after it", &[expected], &[weight.grad()]);
    assert_eq!(cache.held(), Held::default());
}

#[test]
fn a_plan_that_there_is_no_memory_for_is_replaced_by_one_that_fits() {
    let limited = Limited::turn();
    let inputs = inputs();
    let (expected, most) = plain(&inputs);
    // It may keep everything, and so it does.
    let cache: TensorCache = everything().policy(Auto::new(Goal::budget(1 << 40))).build().unwrap();
    let step = || {
        let weight = leaf(&inputs.0);
        let step = cache.step();
        step.backward(&forward(&weight, &inputs.1)).unwrap();
        let report = step.finish().unwrap();
        assert_same_bits("a step", &[expected.shallow_clone()], &[weight.grad()]);
        report
    };
    let roomy = (0..4).map(|_| step()).collect::<Vec<_>>().remove(3);
    assert!(roomy.plan.is_some() && roomy.offloaded.bytes == 0 && roomy.pressed.bytes == 0, "{roomy}");
    // With the weight's copy, which each step makes anew.
    limited.to(most * 2 / 3 + 2 * LAYER);
    let pressed = step();
    assert!(pressed.pressed.bytes > 0, "{pressed}");
    let fits = (0..6).map(|_| step()).find(|report| report.pressed.bytes == 0);
    let fits = fits.expect("a plan for less memory");
    assert!(fits.plan.is_some() && fits.offloaded.bytes > 0, "{fits}");
}
