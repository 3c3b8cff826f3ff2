//! A model whose parts are recomputed in backward has the same gradients as one whose parts are kept.
#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::num::NonZero;

use ssdtrain::{KIB, Offload, StepReport, TensorCache};
use ssdtrain_models::{Batch, Gpt, GptConfig, Recompute, Result, accumulate, seed_step};
use tch::{Device, Kind, Tensor, nn};

const SHAPE: [i64; 2] = [4, 16];

fn config() -> GptConfig {
    GptConfig {
        vocab: 64,
        context: SHAPE[1],
        layers: 3,
        heads: 2,
        hidden: 32,
        dropout: 0.2,
        tied: true,
        bias: true,
    }
}

fn batch() -> Batch {
    tch::manual_seed(1);
    let ids = || Tensor::randint(64, SHAPE, (Kind::Int64, Device::Cpu));
    Batch { inputs: ids(), targets: ids() }
}

/// Loss, gradients and report of one step of two micro-batches.
fn step(
    change: impl Fn(Gpt) -> Gpt,
    recompute: Recompute,
    budget: u64,
) -> Result<(f64, Vec<Tensor>, StepReport)> {
    let batch = batch();
    tch::manual_seed(2);
    let mut vs = nn::VarStore::new(Device::Cpu);
    let model = change(Gpt::new(&vs.root(), config())?).with_recompute(recompute);
    vs.set_kind(Kind::Float);
    let cache = TensorCache::builder()
        .spill_to(std::env::temp_dir())
        .disk_cap(1 << 28)
        .min_bytes(4 * KIB)
        .policy(Offload::default().device_budget(budget))
        .parameters(&vs)
        .build()
        .unwrap();
    seed_step(3, 0);
    let step = cache.step();
    let loss = accumulate(&model, &batch.split(2)?, |loss| {
        step.backward(loss).unwrap();
        Ok::<_, ssdtrain_models::Error>(())
    })?;
    let report = step.finish().unwrap();
    let held = cache.held();
    assert_eq!((held.entries, held.tapes, held.device_bytes), (0, 0, 0), "{held:?}");
    let mut gradients: Vec<_> = vs.variables().into_iter().map(|(name, v)| (name, v.grad())).collect();
    gradients.sort_by(|(left, _), (right, _)| left.cmp(right));
    Ok((loss, gradients.into_iter().map(|(_, gradient)| gradient).collect(), report))
}

#[test]
fn recomputed_parts_change_no_bit() -> Result<()> {
    let changes: [fn(Gpt) -> Gpt; 4] = [
        |model| model,
        |model| model.with_grads_in_place(true),
        |model| model.with_loss_chunk(NonZero::new(5)),
        |model| model.with_fused_loss(NonZero::new(5)),
    ];
    for (index, change) in changes.into_iter().enumerate() {
        let (loss, gradients, plain) = step(change, Recompute::None, 1 << 30)?;
        assert_eq!(plain.recomputed.count, 0);
        for recompute in [Recompute::Layer, Recompute::Cheap] {
            for budget in [1, 1 << 30] {
                let (again, others, report) = step(change, recompute, budget)?;
                let what = format!("{recompute}, budget {budget}, change {index}: {report}");
                assert_eq!(loss.to_bits(), again.to_bits(), "{what}");
                assert_eq!(gradients, others, "{what}");
                assert!(report.recomputed.count > 0 && report.reruns.count > 0, "{what}");
                assert!(report.offloaded.bytes < plain.saved.bytes - report.recomputed.bytes, "{what}");
            }
        }
    }
    Ok(())
}

#[test]
fn cheap_recipes_are_for_gelu_and_layer_norms() -> Result<()> {
    let (.., report) = step(|model| model, Recompute::Cheap, 1)?;
    let GptConfig { layers, hidden, .. } = config();
    let [rows, block] = SHAPE;
    let stream = rows * block * hidden * 4;
    // Four widths of GELU and two norms per block, plus the norm of the head.
    assert_eq!(report.recomputed.bytes as i64, (6 * layers + 1) * stream, "{report}");
    Ok(())
}
