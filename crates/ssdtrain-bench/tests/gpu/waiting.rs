//! What timed steps tell: how far the device is behind its program, whatever that does before a step ends, and how fast its clock runs.

use std::sync::Arc;

use parking_lot::Mutex;
use ssdtrain::plan::{Observation, Outset, Policy, Saves, StepPlan};
use tch::{Kind, Tensor};

use crate::lab::{Lab, leaf};

on_the_gpu_only!(
    a_device_that_is_behind_is_told_from_one_that_waits,
    the_clock_runs_as_fast_as_the_device_can
);

/// Keeps everything and times each step.
#[derive(Clone, Debug)]
struct Timed(Arc<Mutex<Observation>>);

impl Policy for Timed {
    fn begin(&mut self, _outset: &Outset<'_>) -> StepPlan {
        StepPlan { timed: true, saves: Saves::Keep, ..StepPlan::default() }
    }

    fn end(&mut self, _plan: &StepPlan, observed: Observation) {
        *self.0.lock() = observed;
    }
}

/// What the last of some steps told, if the program looks at the loss before the step ends.
fn observed(lab: &Lab, size: i64, forward: impl Fn(&Tensor) -> Tensor) -> Observation {
    let seen = Arc::default();
    let cache = lab.cache().policy(Timed(Arc::clone(&seen))).build().unwrap();
    let source = lab.randn(&[size, size]);
    for _ in 0..3 {
        let x = leaf(&source);
        let step = cache.step();
        let loss = forward(&x);
        step.backward(&loss).unwrap();
        assert!(loss.double_value(&[]).is_finite());
        step.finish().unwrap();
    }
    std::mem::take(&mut *seen.lock())
}

fn products(x: &Tensor) -> Tensor {
    (0..10).fold(x * 1.0, |y, _| y.matmul(x) / 100.0).mean(Kind::Float)
}

fn a_device_that_is_behind_is_told_from_one_that_waits(lab: &Lab) {
    let behind = |observed: Observation| observed.behind.as_secs_f64() / observed.wall.as_secs_f64();
    let computing = behind(observed(lab, 8192, products));
    let waiting = behind(observed(lab, 8, |x| (0..1000).fold(x * 1.0, |y, _| y.sin()).mean(Kind::Float)));
    assert!(computing > 0.5 && waiting < 0.1, "{computing}, {waiting}");
}

fn the_clock_runs_as_fast_as_the_device_can(lab: &Lab) {
    let clock = observed(lab, 8192, products).clock.unwrap();
    assert!((3e8..4e9).contains(&clock), "{clock} cycles a second");
}
