//! How far the device is behind its program, whatever the program does before a step ends.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use ssdtrain::plan::{Observation, Outset, Policy, Saves, StepPlan};
use tch::Tensor;

use crate::lab::{Lab, leaf};

on_the_gpu_only!(a_device_that_is_behind_is_told_from_one_that_waits);

/// Keeps everything and times each step.
#[derive(Clone, Debug)]
struct Timed(Arc<Mutex<[Duration; 2]>>);

impl Policy for Timed {
    fn begin(&mut self, _outset: &Outset<'_>) -> StepPlan {
        StepPlan { timed: true, saves: Saves::Keep, ..StepPlan::default() }
    }

    fn end(&mut self, _plan: &StepPlan, observed: Observation) {
        *self.0.lock() = [observed.behind, observed.wall];
    }
}

/// What share of a step the device was behind, if the program looks at the loss before the step ends.
fn behind(lab: &Lab, size: i64, forward: impl Fn(&Tensor) -> Tensor) -> f64 {
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
    let [behind, wall] = *seen.lock();
    behind.as_secs_f64() / wall.as_secs_f64()
}

fn a_device_that_is_behind_is_told_from_one_that_waits(lab: &Lab) {
    let computing =
        behind(lab, 8192, |x| (0..10).fold(x * 1.0, |y, _| y.matmul(x) / 100.0).mean(tch::Kind::Float));
    let waiting = behind(lab, 8, |x| (0..1000).fold(x * 1.0, |y, _| y.sin()).mean(tch::Kind::Float));
    assert!(computing > 0.5 && waiting < 0.1, "{computing}, {waiting}");
}
