//! Memory that runs out: a step that keeps more than there is goes on, with the bits of one that had enough.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use parking_lot::{Mutex, MutexGuard};
use ssdtrain::plan::{
    Course, Goal, Headroom, Observation, Outset, Placement, PlannedSave, Policy, Position, Room, Saves,
    Schedule, ScopeId, StepPlan,
};
use ssdtrain::{Auto, Backward, Held, Offload, StepHandle, StepReport, TensorCache, TensorCacheBuilder};
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
    deep(LAYERS, weight, x)
}

fn deep(layers: usize, weight: &Tensor, x: &Tensor) -> Tensor {
    let y = (0..layers).fold(x.shallow_clone(), |y, _| y.matmul(weight).tanh());
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
        assert!(!report.stall.memory.is_zero(), "it waits for what leaves: {report}");
        assert!(report.warnings.iter().any(|warning| warning.contains("memory ran out")), "{report}");
        assert_eq!(cache.held(), Held::default());
    }
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

/// Whether the peak was to be no higher, and all that was to go had a place: a small pool may be full of what backward is about to read.
fn has_kept_to(most: u64, report: &StepReport) -> bool {
    report.act_peak_bytes <= most || report.kept.no_room.count > 0
}

#[test]
fn a_step_that_is_to_have_half_of_its_peak_has_no_more_and_the_same_bits() {
    let _limited = Limited::turn();
    let inputs = inputs();
    let (expected, most) = plain(&inputs);
    let mut pressed = 0;
    for builder in caches() {
        let keeps = Offload::default().device_budget(u64::MAX).prefetch(4 * LAYER);
        let cache = builder.policy(Below(most / 2, keeps)).build().unwrap();
        for _ in 0..3 {
            let weight = leaf(&inputs.0);
            let step = cache.step();
            let loss = forward(&weight, &inputs.1);
            step.backward(&loss).unwrap();
            drop(loss);
            let report = step.finish().unwrap();
            assert_same_bits(&cache.io_path(), &[expected.shallow_clone()], &[weight.grad()]);
            assert!(has_kept_to(most / 2, &report), "{report}");
            pressed += report.pressed.bytes;
            let warns = |warning: &String| warning.contains("came to its limit");
            let waits = !report.stall.memory.is_zero();
            assert_eq!([report.warnings.iter().any(warns), waits], [report.pressed.count > 0; 2], "{report}");
        }
        assert_eq!(cache.held(), Held::default());
        let (_, without) = plain(&inputs);
        assert_eq!(without, most, "what is outside of steps has no limit");
    }
    // What leaves as soon as it is stored may have left in time.
    assert!(pressed >= 3 * 3 * 4 * LAYER, "{pressed} bytes");
}

/// Profiles each step, which keeps everything as long as the peak is no higher than this, and tells what the last one needs besides what it
/// saves, and what was pressed.
#[derive(Clone, Debug)]
struct Profiles(u64, Arc<Mutex<(Vec<u64>, u64)>>);

impl Policy for Profiles {
    fn begin(&mut self, _outset: &Outset<'_>) -> StepPlan {
        let room = Room::Fitting(Headroom::Bytes(u64::MAX));
        StepPlan { profiled: true, room, most_peak: Some(self.0), ..StepPlan::default() }
    }

    fn end(&mut self, _plan: &StepPlan, observed: Observation) {
        let work = observed.profile.unwrap().work;
        let extras = work.activations.iter().flat_map(|one| [one.forward_extra, one.backward_extra]);
        *self.1.lock() = (extras.chain([work.turn_extra]).collect(), observed.pressed);
    }
}

#[test]
fn a_profile_shows_what_steps_would_need_whatever_had_to_go_while_it_was_taken() {
    let _limited = Limited::turn();
    let inputs = inputs();
    let (_, most) = plain(&inputs);
    for path in [everything, staged, direct] {
        let profiled = |most: u64| {
            let shown = Arc::default();
            let cache = path().policy(Profiles(most, Arc::clone(&shown))).build().unwrap();
            for _ in 0..2 {
                let weight = leaf(&inputs.0);
                let step = cache.step();
                // It needs four layers besides what it saves, once in forward and once in backward.
                let y = (0..LAYERS).fold(inputs.1.shallow_clone(), |y, _| y.matmul(&weight).tanh());
                let loss = y.repeat([4, 1]).square().mean(y.kind());
                step.backward(&loss).unwrap();
                drop((loss, y));
                step.finish().unwrap();
            }
            shown.lock().clone()
        };
        let [enough, too_little] = [u64::MAX, most / 2].map(profiled);
        assert!(enough.1 == 0 && too_little.1 > 4 * LAYER, "{too_little:?}");
        // What is being stored may be there a moment longer.
        let is_as_much = |(shown, wanted): (&u64, &u64)| (*wanted..=wanted + LAYER).contains(shown);
        assert!(too_little.0.iter().zip(&enough.0).all(is_as_much), "{too_little:?}, {enough:?}");
    }
}

/// Profiles the first step. Everything stays as long as the peak is no higher than 17 layers.
#[derive(Clone, Debug)]
struct ProfilesFirst;

impl Policy for ProfilesFirst {
    fn begin(&mut self, outset: &Outset<'_>) -> StepPlan {
        let room = Room::Fitting(Headroom::Bytes(u64::MAX));
        StepPlan { profiled: outset.step == 1, room, most_peak: Some(17 * LAYER), ..StepPlan::default() }
    }

    fn end(&mut self, _plan: &StepPlan, _observed: Observation) {}
}

/// It let go of something after its highest point, and its graph was not needed.
#[test]
fn the_peak_of_a_step_is_its_own_though_the_graph_of_one_that_was_profiled_is_still_there() {
    let _limited = Limited::turn();
    let cache = staged().policy(ProfilesFirst).build().unwrap();
    let x = leaf(&randn(&[512, 512]));
    let profiled = cache.step();
    let graph = x.tanh().sum(x.kind());
    profiled.backward_with(&graph, Backward { retain_graph: true, ..Backward::default() }).unwrap();
    profiled.finish().unwrap();
    let step = cache.step();
    let sum = x.repeat([8, 1]).tanh().sum(x.kind());
    let others = Tensor::zeros([10 * LAYER as i64 / 4], (x.kind(), x.device()));
    let report = step.finish().unwrap();
    assert!(report.pressed.bytes >= 8 * LAYER, "{report}");
    assert!(report.act_peak_bytes >= 16 * LAYER, "{report}");
    drop((graph, sum, others));
}

/// Its plan keeps three storages, and nothing else.
#[derive(Clone, Debug)]
struct KeepsThree(Headroom);

impl Policy for KeepsThree {
    fn begin(&mut self, _outset: &Outset<'_>) -> StepPlan {
        let (scope, position) = (ScopeId::default(), Position::default());
        let save = PlannedSave { bytes: LAYER, scope, placement: Placement::Keep, position, varies: false };
        let courses = vec![Course::new(Schedule::new(vec![save; 3], HashMap::new(), 0))];
        StepPlan { saves: Saves::Scheduled { courses, unplanned: self.0 }, ..StepPlan::default() }
    }

    fn end(&mut self, _plan: &StepPlan, _observed: Observation) {}
}

/// It goes through its plan nearly three times before any backward.
#[test]
fn a_step_that_goes_on_beyond_its_plan_keeps_no_more_where_bytes_have_a_limit() {
    let _limited = Limited::turn();
    for (unplanned, kept) in [(Headroom::Bytes(0), 3), (Headroom::Free, 8)] {
        let cache = staged().policy(KeepsThree(unplanned)).build().unwrap();
        let x = leaf(&randn(&[512, 512]));
        for _ in 0..2 {
            let step = cache.step();
            let y = (0..8).fold(x.shallow_clone(), |y, _| y.tanh());
            step.backward(&y.sum(y.kind())).unwrap();
            drop(y);
            let report = step.finish().unwrap();
            assert_eq!(report.kept.policy.count, kept, "{report}");
        }
    }
}

/// Each step has another depth, and no plan fits all of them.
#[test]
fn steps_that_are_deeper_than_any_before_keep_to_the_budget() {
    let _limited = Limited::turn();
    let inputs = inputs();
    for builder in [everything(), staged(), staged().host_pool(4 * LAYER), direct()] {
        let most = 10 * LAYER;
        let cache = builder.policy(Auto::new(Goal::budget(most))).build().unwrap();
        for layers in [4, 4, 4, 16, 5, 32, 4, 12] {
            let [plain, weight] = [(); 2].map(|()| leaf(&inputs.0));
            deep(layers, &plain, &inputs.1).backward();
            let step = cache.step();
            let loss = deep(layers, &weight, &inputs.1);
            step.backward(&loss).unwrap();
            drop(loss);
            let report = step.finish().unwrap();
            assert_same_bits(&cache.io_path(), &[plain.grad()], &[weight.grad()]);
            assert!(has_kept_to(most, &report), "{layers} layers: {report}");
        }
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
