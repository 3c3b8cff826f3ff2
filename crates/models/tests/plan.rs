//! A GPT's step does what its plan predicts.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::num::NonZero;
use std::time::Duration;

use ssdtrain::plan::{Goal, OperationRow};
use ssdtrain::{Auto, IoPath, KIB, Keep, MIB, StepReport, TensorCache, TensorCacheBuilder};
use ssdtrain_models::{Batch, Gpt, GptConfig, LanguageModel, Recompute, Result};
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
    let change = |model: Gpt| model.with_recompute(recompute).with_loss_chunk(NonZero::new(64));
    train_changed(builder, change, steps)
}

fn train_changed(
    builder: TensorCacheBuilder,
    change: impl FnOnce(Gpt) -> Gpt,
    steps: usize,
) -> Result<Vec<StepReport>> {
    train_of(config(), builder, change, steps)
}

fn train_of(
    config: GptConfig,
    builder: TensorCacheBuilder,
    change: impl FnOnce(Gpt) -> Gpt,
    steps: usize,
) -> Result<Vec<StepReport>> {
    tch::manual_seed(2);
    let vs = nn::VarStore::new(Device::Cpu);
    let model = change(Gpt::new(&vs.root(), config)?).with_grads_in_place(true);
    let tokens = Tensor::randint(512, [ROWS, TOKENS + 1], (Kind::Int64, Device::Cpu));
    let batch = Batch { inputs: tokens.narrow(1, 0, TOKENS), targets: tokens.narrow(1, 1, TOKENS) };
    let cache = builder.parameters(&vs).min_bytes(16 * KIB).build().unwrap();
    let step = |_| {
        let step = cache.step();
        vs.variables().values_mut().for_each(Tensor::zero_grad);
        let loss = model.loss(&batch.inputs, &batch.targets, true)?;
        step.backward(&loss).unwrap();
        drop(loss);
        Ok(step.finish().unwrap())
    };
    (0..steps).map(step).collect()
}

#[test]
fn a_step_has_the_peak_that_was_planned() -> Result<()> {
    let kept = train(TensorCache::builder().policy(Keep), Recompute::None, 2)?[1].act_peak_bytes;
    // Where copies take longer than the whole step, cheap activations are recomputed instead.
    let cases =
        [(Duration::from_micros(20), &[0.4, 0.5, 0.7][..], false), (Duration::from_millis(50), &[0.4], true)];
    for (copy_takes, shares, recomputes) in cases {
        for share in shares {
            let budget = (share * kept as f64) as u64;
            let staged = TensorCache::builder().simulated_device(copy_takes).host_pool(64 * MIB);
            let reports = train(staged.policy(Auto::new(Goal::budget(budget))), Recompute::Cheap, 3)?;
            let report = &reports[2];
            let plan = report.plan.as_ref().unwrap();
            let expected = plan.prediction.peak();
            assert!(plan.in_reach && expected <= budget, "{share}\n{plan}");
            // Where computing is quicker than when it was profiled, copies this slow are back later than planned.
            let least = if recomputes { 0 } else { expected - 16 * KIB };
            assert!(
                (least..=expected + 16 * KIB).contains(&report.act_peak_bytes),
                "{share}: {report}\n{plan}"
            );
            // A machine that others keep busy may take longer to compute than even such copies take.
            let all_copied = report.saved.bytes as f64 / plan.machine.copy_out;
            let recomputes = recomputes && all_copied > plan.kept_step.as_secs_f64();
            assert!(!recomputes || report.recomputed.bytes > 0, "{share}: {report}\n{plan}");
        }
    }
    Ok(())
}

/// Where what is profiled keeps everything, it is told of what the program holds by references.
#[test]
fn a_step_has_the_peak_that_was_planned_from_one_that_kept_everything() -> Result<()> {
    let kept = train(TensorCache::builder().policy(Keep), Recompute::None, 2)?[1].act_peak_bytes;
    for recompute in [Recompute::None, Recompute::Cheap] {
        let staged = TensorCache::builder().simulated_device(Duration::from_micros(20));
        let lowest = staged.host_pool(64 * MIB).policy(Auto::new(Goal::overhead(f64::INFINITY)));
        let reports = train(lowest, recompute, 3)?;
        assert_eq!(reports[1].act_peak_bytes, kept, "{}", reports[1]);
        let report = &reports[2];
        let plan = report.plan.as_ref().unwrap();
        let expected = plan.prediction.peak();
        assert!(expected < kept / 2, "{plan}");
        assert!(report.act_peak_bytes.abs_diff(expected) <= 16 * KIB, "{report}\n{plan}");
    }
    Ok(())
}

#[test]
fn a_step_straight_to_the_disk_has_the_peak_that_was_planned() -> Result<()> {
    let kept = train(TensorCache::builder().policy(Keep), Recompute::None, 2)?[1].act_peak_bytes;
    for share in [0.5, 0.7] {
        let budget = (share * kept as f64) as u64;
        let direct = TensorCache::builder()
            .simulated_device(Duration::ZERO)
            .spill_to(std::env::temp_dir())
            .path(IoPath::Direct);
        let reports = train(direct.policy(Auto::new(Goal::budget(budget))), Recompute::Cheap, 3)?;
        let report = &reports[2];
        let plan = report.plan.as_ref().unwrap();
        let expected = plan.prediction.peak();
        assert!(plan.in_reach && expected <= budget, "{share}\n{plan}");
        assert!(report.act_peak_bytes.abs_diff(expected) <= 16 * KIB, "{share}: {report}\n{plan}");
    }
    Ok(())
}

/// The gradients that a fused loss holds are no activations that could be moved.
#[test]
fn a_step_with_a_fused_loss_has_the_peak_that_was_planned() -> Result<()> {
    let fused = |model: Gpt| model.with_recompute(Recompute::Cheap).with_fused_loss(NonZero::new(64));
    let kept = train_changed(TensorCache::builder().policy(Keep), fused, 2)?[1].act_peak_bytes;
    for share in [0.5, 0.7] {
        let budget = (share * kept as f64) as u64;
        let staged = TensorCache::builder().simulated_device(Duration::from_micros(20)).host_pool(64 * MIB);
        let reports = train_changed(staged.policy(Auto::new(Goal::budget(budget))), fused, 3)?;
        let report = &reports[2];
        let plan = report.plan.as_ref().unwrap();
        let expected = plan.prediction.peak();
        assert!(plan.in_reach && expected <= budget, "{share}\n{plan}");
        assert!(report.act_peak_bytes.abs_diff(expected) <= 16 * KIB, "{share}: {report}\n{plan}");
    }
    Ok(())
}

/// What dropout drew cannot be made again by recorded operations, but by a segment.
#[test]
fn a_step_whose_segments_are_computed_again_keeps_to_its_plan() -> Result<()> {
    let config = || GptConfig { dropout: 0.1, ..config() };
    let segments = |model: Gpt| model.with_recompute(Recompute::Layer).with_loss_chunk(NonZero::new(64));
    let keep = TensorCache::builder().policy(Keep);
    let kept =
        train_of(config(), keep, |model| model.with_loss_chunk(NonZero::new(64)), 2)?[1].act_peak_bytes;
    // Less than recorded operations reach by themselves, and little has room below the device.
    let budget = (0.4 * kept as f64) as u64;
    let staged = TensorCache::builder().simulated_device(Duration::from_micros(20)).host_pool(MIB);
    let reports = train_of(config(), staged.policy(Auto::new(Goal::budget(budget))), segments, 3)?;
    let report = &reports[2];
    let plan = report.plan.as_ref().unwrap();
    let expected = plan.prediction.peak();
    assert!(plan.in_reach && expected <= budget, "{plan}");
    let runs = |row: &OperationRow| row.operation == "segment" && row.reruns > 0;
    assert!(plan.operations.iter().any(runs), "{plan}");
    // A rerun holds less than all that its segment held in forward.
    assert!(report.act_peak_bytes <= expected + 16 * KIB, "{report}\n{plan}");
    Ok(())
}
