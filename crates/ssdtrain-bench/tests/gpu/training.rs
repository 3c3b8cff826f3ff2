//! Training a GPT: every loss and every gradient of every step has the same bits as in training without moving
//! anything.

use std::env;
use std::num::NonZero;

use ssdtrain::{KIB, Keep, MIB, Offload, TensorCache, TensorCacheBuilder};
use ssdtrain_models::{
    AdamW, AdamWConfig, Batch, Gpt, GptConfig, Optimizer, Recompute, accumulate, seed_step,
};
use tch::nn::VarStore;
use tch::{Kind, Tensor};

use crate::lab::{Lab, assert_nothing_held, assert_same_bits, grads};

on_both!(
    a_gpt_trains_to_the_same_bits,
    a_gpt_trains_to_the_same_bits_with_its_loss_in_chunks,
    a_gpt_trains_to_the_same_bits_with_parts_recomputed,
    chunks_of_a_loss_agree_with_the_whole
);

const SEED: u64 = 11;
const BATCH: i64 = 8;

fn a_gpt_trains_to_the_same_bits(lab: &Lab) {
    train(lab, None);
}

fn a_gpt_trains_to_the_same_bits_with_its_loss_in_chunks(lab: &Lab) {
    train(lab, NonZero::new(100));
}

fn a_gpt_trains_to_the_same_bits_with_parts_recomputed(lab: &Lab) {
    let keep = || TensorCache::builder().policy(Keep);
    let pool =
        || lab.cache().host_pool(64 * MIB).policy(Offload::default().device_budget(1).prefetch(512 * KIB));
    let ways = [
        ("keep", keep(), Recompute::None),
        ("keep, layers recomputed", keep(), Recompute::Layer),
        ("keep, cheap recomputed", keep(), Recompute::Cheap),
        ("host pool, layers recomputed", pool(), Recompute::Layer),
        ("host pool, cheap recomputed", pool(), Recompute::Cheap),
    ];
    agree(lab, ways.map(|(way, cache, recompute)| Learner::new(lab, way, cache, None, recompute)).into());
}

/// They agree up to rounding: the device multiplies in other shapes, and chunks round their logits less.
fn chunks_of_a_loss_agree_with_the_whole(lab: &Lab) {
    for (kind, tolerance) in [(Kind::Float, 1e-3), (Kind::BFloat16, 0.03), (Kind::Half, 0.01)] {
        let mut vs = VarStore::new(lab.device);
        vs.set_kind(kind);
        let model = Gpt::new(&vs.root(), GptConfig { dropout: 0.0, ..shape(lab) }).unwrap();
        let step = |model: &Gpt| {
            vs.variables().values_mut().for_each(Tensor::zero_grad);
            let loss = accumulate(model, &batch(lab, 0), |loss| {
                loss.backward();
                Ok::<_, ssdtrain_models::Error>(())
            });
            let gradient = |parameter: &Tensor| parameter.grad().to_kind(Kind::Double).flatten(0, -1);
            let gradients: Vec<_> = vs.trainable_variables().iter().map(gradient).collect();
            (loss.unwrap(), Tensor::cat(&gradients, 0))
        };
        let (whole, expected) = step(&model);
        let (chunked, got) = step(&model.with_loss_chunk(NonZero::new(100)));
        assert!((whole - chunked).abs() < tolerance, "{kind:?}: the loss is {chunked}, not {whole}");
        let off = ((got - &expected).norm() / expected.norm()).double_value(&[]);
        assert!(off < tolerance, "{kind:?}: gradients are off by {off} of their norm");
    }
}

/// A shape whose steps save more than the smallest host pool holds.
fn shape(lab: &Lab) -> GptConfig {
    GptConfig {
        layers: 4,
        heads: 4,
        hidden: 128,
        context: lab.suited(128, 48),
        dropout: 0.1,
        ..GptConfig::preset("mini").unwrap()
    }
}

/// A model being trained through a cache.
struct Learner {
    way: &'static str,
    vs: VarStore,
    model: Gpt,
    optimizer: AdamW,
    cache: TensorCache,
}

impl Learner {
    fn new(
        lab: &Lab,
        way: &'static str,
        cache: TensorCacheBuilder,
        chunk: Option<NonZero<u32>>,
        recompute: Recompute,
    ) -> Learner {
        let mut vs = VarStore::new(lab.device);
        vs.set_kind(Kind::BFloat16);
        tch::manual_seed(SEED as i64);
        let model = Gpt::new(&vs.root(), shape(lab)).unwrap();
        let model = model.with_loss_chunk(chunk).with_recompute(recompute);
        let optimizer = AdamW::new(&vs, AdamWConfig::for_kind(Kind::BFloat16)).unwrap();
        let cache = cache.parameters(&vs).build().unwrap();
        Learner { way, vs, model, optimizer, cache }
    }

    /// Computes the gradients of a step, and returns its loss.
    fn gradients(&mut self, batch: &[Batch], index: u64) -> f64 {
        seed_step(SEED, index);
        self.optimizer.zero_grad();
        let step = self.cache.step();
        let loss = accumulate(&self.model, batch, |loss| {
            step.backward(loss).expect("the cache serves all");
            Ok::<_, ssdtrain_models::Error>(())
        });
        let report = step.finish().unwrap();
        assert_eq!(report.store_failures.count, 0, "{}: {report}", self.way);
        loss.unwrap()
    }
}

fn train(lab: &Lab, chunk: Option<NonZero<u32>>) {
    let disk = || lab.cache().spill_to(env::temp_dir());
    let ways = [
        (
            "host pool",
            lab.cache().host_pool(64 * MIB).policy(Offload::default().device_budget(1).prefetch(0)),
        ),
        (
            "host pool, ahead",
            lab.cache()
                .host_pool(64 * MIB)
                .policy(Offload::default().device_budget(2 * MIB).prefetch(512 * KIB)),
        ),
        ("disk", disk().host_pool(2 * MIB).policy(Offload::default().device_budget(1).prefetch(0))),
        (
            "disk, ahead",
            disk().host_pool(2 * MIB).policy(Offload::default().device_budget(2 * MIB).prefetch(512 * KIB)),
        ),
    ];
    agree_with_keep(lab, chunk, ways);
}

/// Trains side by side with a cache that keeps everything.
pub(crate) fn agree_with_keep<const N: usize>(
    lab: &Lab,
    chunk: Option<NonZero<u32>>,
    ways: [(&'static str, TensorCacheBuilder); N],
) {
    let keep = ("keep", TensorCache::builder().policy(Keep));
    let learner = |(way, cache)| Learner::new(lab, way, cache, chunk, Recompute::None);
    agree(lab, [keep].into_iter().chain(ways).map(learner).collect());
}

/// Trains side by side; the others must agree with the first.
fn agree(lab: &Lab, mut learners: Vec<Learner>) {
    for index in 0..lab.suited(200, 2) {
        let batch = batch(lab, index);
        let losses: Vec<_> = learners.iter_mut().map(|learner| learner.gradients(&batch, index)).collect();
        let (keep, others) = learners.split_first_mut().unwrap();
        let expected = grads(&keep.optimizer.parameters());
        for (learner, loss) in others.iter_mut().zip(&losses[1..]) {
            let when = format!("{}, step {index}", learner.way);
            assert_eq!(losses[0].to_bits(), loss.to_bits(), "{when}: the loss is {loss}, not {}", losses[0]);
            assert_same_bits(&when, &expected, &grads(&learner.optimizer.parameters()));
        }
        for learner in &mut learners {
            learner.optimizer.step(1e-3).unwrap();
        }
    }
    for Learner { way, vs, cache, .. } in &learners {
        assert_nothing_held(cache);
        assert!(!vs.is_empty());
        let read = cache.store_stats().map_or(0, |stats| stats.bytes_read);
        assert_eq!(read > 0, way.starts_with("disk"), "{way}: {read} bytes were read from the disk");
    }
}

/// Two micro-batches of tokens that are not quite random.
fn batch(lab: &Lab, index: u64) -> Vec<Batch> {
    let GptConfig { context, vocab, .. } = shape(lab);
    seed_step(SEED + 1, index);
    let tokens = Tensor::randint(vocab / 4, [BATCH, context + 1], (Kind::Int64, lab.device));
    let whole = Batch { inputs: tokens.narrow(1, 0, context), targets: tokens.narrow(1, 1, context) };
    whole.split(2).unwrap()
}
