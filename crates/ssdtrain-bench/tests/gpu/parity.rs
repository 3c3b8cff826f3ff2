//! Gradients with the cache have the same bits as gradients without it, whichever path the tensors took.

use std::env;

use ssdtrain::{Offload, TensorCacheBuilder, Verify};
use tch::{Kind, Tensor};

use crate::lab::{Lab, assert_nothing_held, assert_same_bits, grads, leaves};

on_both!(
    small_mixed_computation_in_float,
    small_mixed_computation_in_bf16,
    mixed_computation_in_float,
    mixed_computation_in_bf16,
    mixed_computation_in_fp16,
    every_way_is_taken,
);

fn small_mixed_computation_in_float(lab: &Lab) {
    parity(lab, SMALL, Kind::Float);
}

fn small_mixed_computation_in_bf16(lab: &Lab) {
    parity(lab, SMALL, Kind::BFloat16);
}

fn mixed_computation_in_float(lab: &Lab) {
    parity(lab, lab.suited(LARGE, SMALL), Kind::Float);
}

fn mixed_computation_in_bf16(lab: &Lab) {
    parity(lab, lab.suited(LARGE, SMALL), Kind::BFloat16);
}

fn mixed_computation_in_fp16(lab: &Lab) {
    parity(lab, lab.suited(LARGE, SMALL), Kind::Half);
}

/// The smallest pools are too small for what is saved, so the disk is used.
fn every_way_is_taken(lab: &Lab) {
    let shape = lab.suited(LARGE, Shape { batch: 8, block: 64, hidden: 128, ..SMALL });
    let sources = shape.sources(lab, Kind::Float);
    for (name, way) in ways(lab, &shape) {
        let cache = way.build().unwrap();
        let inputs = leaves(&sources);
        for _ in 0..2 {
            let step = cache.step();
            let loss = shape.mixed(&inputs);
            step.flush();
            step.backward(&loss).unwrap();
            let report = step.finish().unwrap();
            assert!(report.loaded.bytes > 0, "{name}: {report}");
            assert_eq!(report.kept.no_room.count, 0, "{name}: {report}");
        }
        // A bounce buffer holds a small computation.
        if name.ends_with("disk") && (lab.is_gpu() || !name.starts_with("bounce")) {
            assert!(cache.store_stats().unwrap().bytes_read > 0, "{name}");
        }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Shape {
    batch: i64,
    block: i64,
    hidden: i64,
    heads: i64,
    vocab: i64,
}

pub(crate) const SMALL: Shape = Shape { batch: 2, block: 16, hidden: 64, heads: 2, vocab: 50 };
/// Attention of several blocks of keys; more than a bounce buffer holds.
const LARGE: Shape = Shape { batch: 16, block: 512, hidden: 512, heads: 8, vocab: 4096 };

impl Shape {
    fn sources(&self, lab: &Lab, kind: Kind) -> Vec<Tensor> {
        let Shape { batch, block, hidden: h, vocab, .. } = *self;
        tch::manual_seed(3);
        let weights: [&[i64]; 8] =
            [&[vocab, h], &[3 * h, h], &[3 * h], &[h], &[h], &[8 * h, h], &[h, 4 * h], &[1, h]];
        let mut sources = vec![Tensor::randint(vocab, [batch, block], (Kind::Int64, lab.device))];
        sources.extend(weights.map(|size| (lab.randn(size) * 0.05).to_kind(kind)));
        sources
    }

    /// A transformer block and its loss: views, transposes, chunks and an expanded row among what it saves.
    fn mixed(&self, x: &[Tensor]) -> Tensor {
        let Shape { batch, block, hidden, heads, vocab } = *self;
        let [tokens, table, qkv, qkv_bias, scale, shift, up, down, row] = x else { panic!("nine sources") };
        let h = Tensor::embedding(table, tokens, -1, false, false).dropout(0.1, true);
        let qkv = h.layer_norm([hidden], Some(scale), Some(shift), 1e-5, true).linear(qkv, Some(qkv_bias));
        let qkv = qkv.view([batch, block, 3, heads, hidden / heads]);
        let [q, k, v] = [0, 1, 2].map(|part| qkv.select(2, part).transpose(1, 2));
        let y = Tensor::scaled_dot_product_attention(&q, &k, &v, None::<&Tensor>, 0.0, true, None, false);
        let h = h + y.transpose(1, 2).reshape([batch, block, hidden]).dropout(0.1, true);
        let halves = h.linear(up, None::<&Tensor>).chunk(2, -1);
        let mlp = (halves[0].gelu("tanh") * &halves[1]).linear(down, None::<&Tensor>);
        let h = h + mlp * row.exp().expand([batch, block, hidden], false);
        let logits = h.tanh().matmul(&table.transpose(0, 1));
        logits.view([-1, vocab]).cross_entropy_for_logits(&tokens.view([-1]))
    }
}

fn ways(lab: &Lab, shape: &Shape) -> Vec<(&'static str, TensorCacheBuilder)> {
    let storage = (shape.batch * shape.block * shape.hidden * 4) as u64;
    let disk = || lab.cache().spill_to(env::temp_dir()).verify(Verify::Full);
    let largest = storage * (shape.vocab / shape.hidden).max(8) as u64;
    vec![
        (
            "host pool",
            lab.cache()
                .host_pool(8 * largest)
                .policy(Offload::default().device_budget(2 * storage).prefetch(storage)),
        ),
        (
            "host pool that is learned",
            lab.cache().policy(Offload::default().device_budget(2 * storage).prefetch(storage)),
        ),
        ("smallest budget, no prefetch", lab.cache().policy(Offload::default().device_budget(1).prefetch(0))),
        ("no limit", lab.cache().policy(Offload::default().device_budget(u64::MAX))),
        (
            "host pool and disk",
            disk().host_pool(largest).policy(Offload::default().device_budget(2 * storage).prefetch(storage)),
        ),
        ("bounce buffer and disk", disk().host_pool(0).policy(Offload::default().device_budget(1))),
    ]
}

fn parity(lab: &Lab, shape: Shape, kind: Kind) {
    agree(lab, shape, kind, ways(lab, &shape));
}

/// Runs the computation without a cache and with each of these: once with an immediate backward, once after
/// everything has been moved, and once more immediately, with what the cache has learned.
pub(crate) fn agree(lab: &Lab, shape: Shape, kind: Kind, ways: Vec<(&'static str, TensorCacheBuilder)>) {
    let sources = shape.sources(lab, kind);
    let plain = leaves(&sources);
    tch::manual_seed(7);
    let expected = shape.mixed(&plain);
    expected.backward();
    assert!(expected.double_value(&[]).is_finite(), "the loss is {expected:?}: the test would compare NaN");
    for (name, way) in ways {
        let cache = way.build().unwrap();
        for flush in [false, true, false] {
            let inputs = leaves(&sources);
            tch::manual_seed(7);
            let step = cache.step();
            let loss = shape.mixed(&inputs);
            if flush {
                step.flush();
            }
            step.backward(&loss).unwrap();
            step.finish().unwrap();
            let what = format!("{kind:?}, {name}, flush {flush}");
            assert_same_bits(&what, &[expected.shallow_clone()], &[loss]);
            assert_same_bits(&what, &grads(&plain), &grads(&inputs));
            assert_nothing_held(&cache);
        }
    }
}
