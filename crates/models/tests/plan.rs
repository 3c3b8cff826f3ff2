//! What a plan expects of a GPT's step is what the step does.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::num::NonZero;
use std::time::Duration;

use ssdtrain::plan::Goal;
use ssdtrain::{KIB, MIB, Policy, StepReport, TensorCache, TensorCacheBuilder};
use ssdtrain_models::{Batch, Gpt, GptConfig, Recompute, Result};
use tch::{Device, Kind, Tensor, nn};

const ROWS: i64 = 4;
const TOKENS: i64 = 128;

fn config() -> GptConfig {
    GptConfig {
        vocab: 512,
        context: TOKENS,
        layers: 4,
        heads: 4,
        hidden: 256,
        dropout: 0.0,
        tied: false,
        bias: true,
    }
}

fn train(builder: TensorCacheBuilder, recompute: Recompute, steps: usize) -> Result<Vec<StepReport>> {
    tch::manual_seed(2);
    let vs = nn::VarStore::new(Device::Cpu);
    let model = Gpt::new(&vs.root(), config())?
        .with_recompute(recompute)
        .with_loss_chunk(NonZero::new(64))
        .with_grads_in_place(true);
    let tokens = Tensor::randint(512, [ROWS, TOKENS + 1], (Kind::Int64, Device::Cpu));
    let batch = Batch { inputs: tokens.narrow(1, 0, TOKENS), targets: tokens.narrow(1, 1, TOKENS) };
    let cache = builder.parameters(&vs).min_bytes(16 * KIB).build().unwrap();
    let step = |_| {
        let step = cache.step();
        vs.variables().values_mut().for_each(Tensor::zero_grad);
        let loss = model.loss(&batch.inputs, &batch.targets, true)?;
        let forward = ssdtrain_libtorch::memory(Device::Cpu).peak;
        step.backward(&loss).unwrap();
        drop(loss);
        eprintln!("forward {forward}");
        Ok(step.finish().unwrap())
    };
    (0..steps).map(step).collect()
}

#[test]
fn peaks() -> Result<()> {
    let kept = train(TensorCache::builder().policy(Policy::Keep), Recompute::None, 2)?[1].act_peak_bytes;
    for (share, slow) in [(0.3, 20), (0.4, 20), (0.5, 20), (0.6, 20), (0.4, 4000), (0.5, 4000), (0.6, 4000)] {
        let budget = (share * kept as f64) as u64;
        let staged = TensorCache::builder().simulated_device(Duration::from_micros(slow)).host_pool(64 * MIB);
        let reports = train(staged.policy(Policy::Auto(Goal::budget(budget))), Recompute::Cheap, 4)?;
        let report = &reports[3];
        let plan = report.plan.as_ref().unwrap();
        eprintln!(
            "{share} {slow}: budget {budget} expected {} (forward {} backward {}) measured {} recomputed {} reach {}",
            plan.prediction.peak(),
            plan.prediction.forward_peak,
            plan.prediction.backward_peak,
            report.act_peak_bytes,
            report.recomputed.bytes,
            plan.in_reach
        );
        if share == 0.6 {
            eprintln!("{plan}");
        }
    }
    panic!("kept {kept}");
}
