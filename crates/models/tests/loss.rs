//! The loss in chunks compared with the loss of all tokens at once, and 16-bit models.

use std::num::NonZero;

use ssdtrain_models::{
    AdamW, AdamWConfig, Batch, Error, Gpt, GptConfig, LanguageModel, Optimizer, Result, Sampling, accumulate,
    evaluate, sample,
};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};

fn tiny() -> GptConfig {
    GptConfig {
        vocab: 61,
        context: 16,
        layers: 2,
        heads: 2,
        hidden: 32,
        dropout: 0.0,
        tied: true,
        bias: true,
    }
}

fn batch(rows: i64, block: i64) -> Batch {
    let ids = || Tensor::randint(61, [rows, block], (Kind::Int64, Device::Cpu));
    Batch { inputs: ids(), targets: ids() }
}

fn model(kind: Kind, config: GptConfig) -> Result<(VarStore, Gpt)> {
    let mut vs = VarStore::new(Device::Cpu);
    vs.set_kind(kind);
    let model = Gpt::new(&vs.root(), config)?;
    Ok((vs, model))
}

/// In the order of names.
fn gradients(vs: &VarStore) -> Vec<(String, Tensor)> {
    let mut all: Vec<_> = vs.variables().into_iter().map(|(name, v)| (name, v.grad().copy())).collect();
    all.sort_by(|(left, _), (right, _)| left.cmp(right));
    all
}

/// The loss and gradients of a step that follows another one, so that there are gradients to add to.
fn step(vs: &VarStore, model: &Gpt, batch: &Batch, parts: usize) -> Result<(f64, Vec<(String, Tensor)>)> {
    let backward = |loss: &Tensor| loss.f_backward().map_err(Error::from);
    accumulate(model, &batch.split(parts)?, backward)?;
    for mut variable in vs.trainable_variables() {
        variable.zero_grad();
    }
    let loss = accumulate(model, &batch.split(parts)?, backward)?;
    Ok((loss, gradients(vs)))
}

#[test]
fn chunks_have_the_loss_and_the_gradients_of_the_whole() -> Result<()> {
    let batch = batch(6, 4);
    for tied in [true, false] {
        let (vs, mut model) = model(Kind::Double, GptConfig { tied, ..tiny() })?;
        for parts in [1, 3] {
            model = model.with_loss_chunk(None);
            let (expected_loss, expected) = step(&vs, &model, &batch, parts)?;
            for (chunk, fused) in [1, 7, 1000].into_iter().flat_map(|chunk| [(chunk, false), (chunk, true)]) {
                let size = NonZero::new(chunk);
                model = if fused { model.with_fused_loss(size) } else { model.with_loss_chunk(size) };
                let (loss, gradients) = step(&vs, &model, &batch, parts)?;
                assert!((loss - expected_loss).abs() < 1e-12, "{loss} instead of {expected_loss}");
                for ((name, gradient), (_, expected)) in gradients.iter().zip(&expected) {
                    assert!(
                        gradient.allclose(expected, 1e-9, 1e-12, false),
                        "{name}, tied {tied}, {parts} parts, chunks of {chunk}, fused {fused}"
                    );
                }
            }
        }
    }
    Ok(())
}

#[test]
fn chunks_agree_with_the_whole_in_every_kind() -> Result<()> {
    let batch = batch(3, 16);
    for (kind, tolerance) in [(Kind::Float, 1e-4), (Kind::BFloat16, 0.03), (Kind::Half, 0.01)] {
        let (vs, model) = model(kind, tiny())?;
        let (expected_loss, expected) = step(&vs, &model, &batch, 3)?;
        let model = model.with_loss_chunk(NonZero::new(5));
        let (loss, gradients) = step(&vs, &model, &batch, 3)?;
        assert!((loss - expected_loss).abs() < tolerance, "{kind:?}: {loss} instead of {expected_loss}");
        for ((name, gradient), (_, expected)) in gradients.iter().zip(&expected) {
            assert_eq!(gradient.kind(), kind, "{name}");
            let wide = |tensor: &Tensor| tensor.to_kind(Kind::Double);
            let off = (wide(gradient) - wide(expected)).norm() / wide(expected).norm();
            assert!(off.double_value(&[]) < tolerance, "{name} of {kind:?} is off by {off:?}");
        }
    }
    Ok(())
}

#[test]
fn a_frozen_head_gets_no_gradient() -> Result<()> {
    let (vs, model) = model(Kind::Float, GptConfig { tied: false, ..tiny() })?;
    let model = model.with_loss_chunk(NonZero::new(5));
    let head = vs.variables().remove("head.weight").unwrap().set_requires_grad(false);
    let batch = batch(2, 16);
    model.training_loss(&batch.inputs, &batch.targets, NonZero::<usize>::MIN)?.f_backward()?;
    assert!(!head.grad().defined());
    assert!(vs.variables()["wte.weight"].grad().defined());
    Ok(())
}

#[test]
fn evaluation_in_chunks_is_that_of_the_whole_and_leaves_no_gradient() -> Result<()> {
    let (vs, model) = model(Kind::Double, tiny())?;
    let batch = batch(3, 16);
    let loss = |model: &Gpt| evaluate(model, [batch.split(1).map(|mut parts| parts.remove(0))]);
    let expected = loss(&model)?;
    let model = model.with_loss_chunk(NonZero::new(7));
    assert!((loss(&model)? - expected).abs() < 1e-12);
    let share = no_grad(|| model.training_loss(&batch.inputs, &batch.targets, NonZero::<usize>::MIN))?;
    assert!((share.double_value(&[]) - expected).abs() < 1e-12);
    assert!(vs.trainable_variables().iter().all(|variable| !variable.grad().defined()));
    Ok(())
}

#[test]
fn the_ordinary_loss_does_its_work_in_backward_whatever_the_chunk() -> Result<()> {
    let (vs, model) = model(Kind::Float, tiny())?;
    let model = model.with_loss_chunk(NonZero::new(7));
    let batch = batch(2, 16);
    let loss = model.loss(&batch.inputs, &batch.targets, true)?;
    assert!(vs.trainable_variables().iter().all(|variable| !variable.grad().defined()));
    loss.f_backward()?;
    assert!(vs.trainable_variables().iter().all(|variable| variable.grad().defined()));
    Ok(())
}

#[test]
fn models_of_16_bits_learn() -> Result<()> {
    for kind in [Kind::BFloat16, Kind::Half] {
        for chunk in [None, NonZero::new(11)] {
            let (vs, model) = model(kind, GptConfig { dropout: 0.1, tied: false, layers: 1, ..tiny() })?;
            let model = model.with_loss_chunk(chunk);
            assert!(vs.trainable_variables().iter().all(|variable| variable.kind() == kind));
            let mut optimizer = AdamW::new(&vs, AdamWConfig::for_kind(kind))?;
            let batch = batch(4, 8);
            let held = || evaluate(&model, [batch.split(1).map(|mut parts| parts.remove(0))]);
            let before = held()?;
            for _ in 0..10 {
                optimizer.zero_grad();
                accumulate(&model, &batch.split(2)?, |loss| loss.f_backward().map_err(Error::from))?;
                optimizer.clip_grad_norm(1.0)?;
                optimizer.step(1e-2)?;
            }
            let after = held()?;
            assert!(after < before - 0.5, "{kind:?} in chunks of {chunk:?}: {before} to {after}");
            assert_eq!(sample(&model, &[1, 2], 4, &Sampling::default())?.len(), 4);
        }
    }
    Ok(())
}
