//! A policy of one's own. It profiles the second step. From then on it recomputes what takes less time to compute than to write to the
//! disk, moves the largest half of the rest, and keeps the other half.
//!
//! `cargo run --release --example own_policy -- /mnt/nvme`

use std::cmp::Reverse;
use std::env;
use std::path::PathBuf;

use ssdtrain::plan::{Course, Headroom, Observation, Outset, Placement, Saves, StepPlan};
use ssdtrain::{Policy, TensorCache};
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Tensor};

#[derive(Clone, Debug, Default)]
struct LargestHalf {
    course: Option<Course>,
}

impl Policy for LargestHalf {
    fn begin(&mut self, outset: &Outset<'_>) -> StepPlan {
        match &self.course {
            // Everything moves until a step has shown what there is.
            None => StepPlan { profiled: outset.step >= 2, ..StepPlan::default() },
            Some(course) => {
                let saves = Saves::Scheduled { courses: vec![course.clone()], unplanned: Headroom::Free };
                StepPlan { saves, ..StepPlan::default() }
            }
        }
    }

    fn end(&mut self, _plan: &StepPlan, observed: Observation) {
        let Some(profile) = observed.profile else { return };
        let disk = profile.rates.written.unwrap_or(f64::INFINITY);
        let mut placements = profile.work.unplanned();
        let mut others = Vec::new();
        for (index, activation) in profile.work.activations.iter().enumerate() {
            let again = activation.recompute.as_ref().map(|recompute| recompute.time.as_secs_f64());
            match again {
                Some(seconds) if seconds < activation.bytes as f64 / disk => {
                    placements[index] = Placement::Recompute;
                }
                _ if placements[index] == Placement::Keep => others.push(index),
                _ => {}
            }
        }
        others.sort_by_key(|&index| Reverse(profile.work.activations[index].bytes));
        for &index in &others[..others.len() / 2] {
            placements[index] = Placement::Disk;
        }
        self.course = Some(Course::new(profile.schedule(&placements)));
    }

    fn is_settled(&self) -> bool {
        self.course.is_some()
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let directory = env::args_os().nth(1).map_or_else(env::temp_dir, PathBuf::from);
    let vs = nn::VarStore::new(Device::Cpu);
    let block = |name: &str| {
        let (norm, linear) = (vs.root() / name / "norm", vs.root() / name / "linear");
        nn::seq()
            .add(nn::layer_norm(norm, vec![512], Default::default()))
            .add(nn::linear(linear, 512, 512, Default::default()))
            .add_fn(|x| x.gelu("tanh"))
    };
    let blocks = ["a", "b", "c", "d"].map(block);
    let mut opt = nn::Sgd::default().build(&vs, 0.1)?;
    let cache =
        TensorCache::builder().spill_to(directory).policy(LargestHalf::default()).parameters(&vs).build()?;
    for _ in 0..4 {
        let x = Tensor::randn([2048, 512], (Kind::Float, Device::Cpu));
        let step = cache.step();
        let y = blocks.iter().fold(x, |y, block| block.forward(&y));
        let loss = y.square().mean(Kind::Float);
        opt.zero_grad();
        step.backward(&loss)?;
        drop((y, loss));
        opt.step();
        let report = step.finish()?;
        println!("{report}; kept {}", report.kept.policy.count);
    }
    Ok(())
}
