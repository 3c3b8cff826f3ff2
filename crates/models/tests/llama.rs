//! The Llama against one written down in loops, and under a cache.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::collections::HashMap;
use std::num::NonZero;

use ssdtrain::{KIB, Offload, TensorCache};
use ssdtrain_models::{
    AdamW, AdamWConfig, Batch, Checkpoint, Corpus, Error, GptConfig, LanguageModel, Llama, LlamaConfig,
    ModelConfig, Optimizer, Recompute, Result, Sampling, TokenSet, Tokenizer, TrainState, accumulate,
    evaluate, sample,
};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};

fn tiny() -> LlamaConfig {
    LlamaConfig {
        vocab: 31,
        context: 16,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        hidden: 24,
        mlp: 40,
        rotary_base: 1e4,
    }
}

fn model(kind: Kind, config: LlamaConfig) -> Result<(VarStore, Llama)> {
    tch::manual_seed(3);
    let mut vs = VarStore::new(Device::Cpu);
    vs.set_kind(kind);
    let model = Llama::new(&vs.root(), config)?;
    Ok((vs, model))
}

fn batch(rows: i64, block: i64) -> Batch {
    let ids = || Tensor::randint(31, [rows, block], (Kind::Int64, Device::Cpu));
    Batch { inputs: ids(), targets: ids() }
}

/// A Llama of one sequence in loops over numbers.
struct Loops {
    config: LlamaConfig,
    parameters: HashMap<String, Vec<f64>>,
}

type Rows = Vec<Vec<f64>>;

impl Loops {
    fn new(vs: &VarStore, config: LlamaConfig) -> Loops {
        let numbers = |tensor: &Tensor| Vec::<f64>::try_from(tensor.detach().reshape([-1])).unwrap();
        let parameters = vs.variables().into_iter().map(|(name, tensor)| (name, numbers(&tensor)));
        Loops { config, parameters: parameters.collect() }
    }

    /// The logits at each position.
    fn logits(&self, ids: &[usize]) -> Rows {
        let hidden = self.config.hidden as usize;
        let tokens = &self.parameters["tokens.weight"];
        let mut x: Rows = ids.iter().map(|id| tokens[id * hidden..(id + 1) * hidden].to_vec()).collect();
        for layer in 0..self.config.layers {
            let block = format!("block.{layer}");
            let y = self.attention(&self.norm(&x, &format!("{block}.attn_norm")), &block);
            add(&mut x, y);
            let y = self.norm(&x, &format!("{block}.mlp_norm"));
            let gate = self.linear(&y, &format!("{block}.mlp.gate"));
            let mut wide = self.linear(&y, &format!("{block}.mlp.up"));
            for (up, gate) in wide.iter_mut().flatten().zip(gate.iter().flatten()) {
                *up *= gate / (1.0 + (-gate).exp());
            }
            add(&mut x, self.linear(&wide, &format!("{block}.mlp.down")));
        }
        self.linear(&self.norm(&x, "norm"), "head")
    }

    fn attention(&self, x: &Rows, block: &str) -> Rows {
        let (heads, kv_heads) = (self.config.heads as usize, self.config.kv_heads as usize);
        let width = self.config.hidden as usize / heads;
        let [query, key, value] = ["q", "k", "v"].map(|name| self.linear(x, &format!("{block}.attn.{name}")));
        let head = |row: &[f64], head: usize| row[head * width..(head + 1) * width].to_vec();
        let mut mixed = Vec::new();
        for (position, queries) in query.iter().enumerate() {
            let mut row = Vec::new();
            for index in 0..heads {
                let shared = index / (heads / kv_heads);
                let turned = self.turned(head(queries, index), position);
                let scores: Vec<f64> = (0..=position)
                    .map(|earlier| {
                        let key = self.turned(head(&key[earlier], shared), earlier);
                        let dot: f64 = turned.iter().zip(&key).map(|(query, key)| query * key).sum();
                        (dot / (width as f64).sqrt()).exp()
                    })
                    .collect();
                let total: f64 = scores.iter().sum();
                row.extend((0..width).map(|place| {
                    let weigh =
                        |(earlier, score): (usize, &f64)| score * value[earlier][shared * width + place];
                    scores.iter().enumerate().map(weigh).sum::<f64>() / total
                }));
            }
            mixed.push(row);
        }
        self.linear(&mixed, &format!("{block}.attn.o"))
    }

    /// Each pair of numbers as a complex one, turned by its angle.
    fn turned(&self, mut head: Vec<f64>, position: usize) -> Vec<f64> {
        let pairs = head.len() / 2;
        for pair in 0..pairs {
            let angle = position as f64 / self.config.rotary_base.powf(pair as f64 / pairs as f64);
            let (real, imaginary) = (head[pair], head[pair + pairs]);
            head[pair] = real * angle.cos() - imaginary * angle.sin();
            head[pair + pairs] = real * angle.sin() + imaginary * angle.cos();
        }
        head
    }

    fn norm(&self, x: &Rows, name: &str) -> Rows {
        let weight = &self.parameters[&format!("{name}.weight")];
        let normed = |row: &Vec<f64>| {
            let square = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
            row.iter().zip(weight).map(|(x, weight)| weight * x / (square + 1e-5).sqrt()).collect()
        };
        x.iter().map(normed).collect()
    }

    fn linear(&self, x: &Rows, name: &str) -> Rows {
        let weight = &self.parameters[&format!("{name}.weight")];
        let product = |row: &Vec<f64>| {
            let dot = |line: &[f64]| line.iter().zip(row).map(|(weight, x)| weight * x).sum();
            weight.chunks(row.len()).map(dot).collect()
        };
        x.iter().map(product).collect()
    }
}

fn add(x: &mut Rows, y: Rows) {
    x.iter_mut().flatten().zip(y.into_iter().flatten()).for_each(|(x, y)| *x += y);
}

#[test]
fn it_computes_what_its_definition_says() -> Result<()> {
    for (heads, kv_heads) in [(4, 4), (4, 2), (4, 1), (2, 1)] {
        let config = LlamaConfig { heads, kv_heads, ..tiny() };
        let (vs, model) = model(Kind::Double, config.clone())?;
        // Weights other than the initial ones, under which norms do nothing and softmax is almost flat.
        no_grad(|| vs.trainable_variables().iter_mut().for_each(|weight| drop(weight.uniform_(-1.0, 1.0))));
        let ids = [3_usize, 1, 4, 1, 5, 9, 2, 6];
        let inputs = Tensor::from_slice(&ids.map(|id| id as i64)).unsqueeze(0);
        let expected = Loops::new(&vs, config).logits(&ids).concat();
        let expected = Tensor::from_slice(&expected).view([1, 8, 31]);
        let logits = model.forward(&inputs, true)?;
        assert!(logits.allclose(&expected, 1e-9, 1e-9, false), "{heads} heads, {kv_heads} shared");
        assert!(model.next_logits(&inputs)?.allclose(&expected.select(1, -1).squeeze(), 1e-9, 1e-9, false));
    }
    Ok(())
}

#[test]
fn no_position_sees_what_comes_after_it() -> Result<()> {
    let (_vs, model) = model(Kind::Float, tiny())?;
    let logits = |ids: &[i64]| model.forward(&Tensor::from_slice(ids).unsqueeze(0), false);
    let (left, right) = (logits(&[1, 2, 3, 4, 5])?, logits(&[1, 2, 3, 9, 0])?);
    assert_eq!(left.narrow(1, 0, 3), right.narrow(1, 0, 3));
    assert_ne!(left.narrow(1, 3, 1), right.narrow(1, 3, 1));
    Ok(())
}

#[test]
fn the_parameter_count_is_that_of_the_variables() -> Result<()> {
    for kv_heads in [1, 2, 4] {
        let config = LlamaConfig { kv_heads, ..tiny() };
        let (vs, _model) = model(Kind::Float, config.clone())?;
        let counted: usize = vs.trainable_variables().iter().map(Tensor::numel).sum();
        assert_eq!(counted as i64, config.parameters(), "{kv_heads} shared heads");
    }
    assert_eq!(LlamaConfig::preset("llama-7b")?.parameters(), 6_738_415_616);
    assert_eq!(LlamaConfig::preset("llama-8b")?.parameters(), 8_030_261_248);
    Ok(())
}

type Change = fn(Llama) -> Result<Llama>;

/// Loss and gradients, in the order of names, of the second of two alike steps of two micro-batches.
fn step(kind: Kind, change: Change, cached: bool) -> Result<(f64, Vec<(String, Tensor)>)> {
    let (vs, llama) = model(kind, tiny())?;
    let llama = change(llama)?;
    let parts = batch(4, 16).split(2)?;
    let cache = TensorCache::builder()
        .spill_to(std::env::temp_dir())
        .disk_cap(1 << 28)
        .min_bytes(KIB)
        .policy(Offload::default().device_budget(1))
        .parameters(&vs)
        .build()
        .unwrap();
    let mut loss = 0.0;
    for _ in 0..2 {
        vs.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
        if !cached {
            loss = accumulate(&llama, &parts, |loss| loss.f_backward().map_err(Error::from))?;
            continue;
        }
        let step = cache.step();
        loss = accumulate(&llama, &parts, |loss| {
            step.backward(loss).unwrap();
            Ok::<_, Error>(())
        })?;
        let report = step.finish().unwrap();
        assert!(report.offloaded.bytes > 0, "{report}");
    }
    let mut named: Vec<_> = vs.variables().into_iter().filter(|(_, v)| v.requires_grad()).collect();
    named.sort_by(|(left, _), (right, _)| left.cmp(right));
    Ok((loss, named.into_iter().map(|(name, variable)| (name, variable.grad())).collect()))
}

#[test]
fn a_cache_changes_no_bit() -> Result<()> {
    let changes: [Change; 5] = [
        Ok,
        |llama| Ok(llama.with_fused_loss(NonZero::new(5))),
        |llama| Ok(llama.with_grads_in_place(true)),
        |llama| Ok(llama.with_loss_chunk(NonZero::new(5))),
        |llama| llama.with_recompute(Recompute::Layer),
    ];
    for kind in [Kind::Float, Kind::BFloat16] {
        for (index, change) in changes.into_iter().enumerate() {
            let (expected, gradients) = step(kind, change, false)?;
            let (loss, others) = step(kind, change, true)?;
            assert_eq!(loss.to_bits(), expected.to_bits(), "{kind:?}, change {index}");
            assert_eq!(gradients, others, "{kind:?}, change {index}");
        }
    }
    Ok(())
}

#[test]
fn options_leave_its_gradients_as_they_are() -> Result<()> {
    let (expected_loss, expected) = step(Kind::Double, Ok, false)?;
    let changes: [Change; 3] = [
        |llama| Ok(llama.with_grads_in_place(true)),
        |llama| Ok(llama.with_loss_chunk(NonZero::new(5))),
        |llama| Ok(llama.with_fused_loss(NonZero::new(5))),
    ];
    for change in changes {
        let (loss, gradients) = step(Kind::Double, change, false)?;
        assert!((loss - expected_loss).abs() < 1e-12);
        for ((name, gradient), (_, expected)) in gradients.iter().zip(&expected) {
            assert!(gradient.allclose(expected, 1e-9, 1e-12, false), "{name}");
        }
    }
    Ok(())
}

#[test]
fn training_on_the_alphabet_learns_it() -> Result<()> {
    let alphabet = "abcdefghijklmnopqrstuvwxyz ";
    let corpus = Corpus::from_text("alphabet", alphabet.repeat(20));
    let tokens = TokenSet::encode(&corpus, &Tokenizer::Bytes)?;
    let (vs, model) = model(Kind::Float, LlamaConfig { vocab: 256, ..tiny() })?;
    let mut optimizer = AdamW::new(&vs, AdamWConfig::default())?;
    let mut batches = tokens.random_batches(8, 16, 1, Device::Cpu)?;
    for _ in 0..60 {
        let batch = batches.draw()?;
        optimizer.zero_grad();
        model.loss(&batch.inputs, &batch.targets, true)?.backward();
        optimizer.step(1e-2)?;
    }
    let loss = evaluate(&model, tokens.sequential_batches(8, 16, Device::Cpu)?)?;
    assert!(loss < 0.5, "loss is {loss}");
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    let continued = sample(&model, &Tokenizer::Bytes.encode("stuv")?, 30, &greedy)?;
    assert_eq!(
        Tokenizer::Bytes.decode(&continued)?,
        "wxyz abcdefghijklmnopqrstuvwxy",
        "beyond its context, too"
    );
    Ok(())
}

#[test]
fn a_checkpoint_has_its_shape_and_is_not_a_gpts() -> Result<()> {
    let path = tempfile::tempdir().unwrap().keep().join("run.safetensors");
    let (vs, saved) = model(Kind::Float, tiny())?;
    let optimizer = AdamW::new(&vs, AdamWConfig::default())?;
    Checkpoint::save(&path, saved.config(), &vs, &optimizer, &TrainState::default())?;
    let checkpoint = Checkpoint::open(&path)?;
    std::fs::remove_dir_all(path.parent().unwrap()).unwrap();
    assert_eq!(*checkpoint.config(), ModelConfig::from(tiny()));

    let mut other = VarStore::new(Device::Cpu);
    tch::manual_seed(4);
    let restored = Llama::new(&other.root(), tiny())?;
    checkpoint.restore(tiny(), &other, None)?;
    let inputs = batch(1, 8).inputs;
    assert_eq!(restored.forward(&inputs, false)?, saved.forward(&inputs, false)?);

    other.freeze();
    let refused = checkpoint.restore(GptConfig::preset("mini")?, &other, None).unwrap_err().to_string();
    assert!(refused.ends_with("is of a Llama; this one is a GPT"), "{refused}");
    let deeper = LlamaConfig { layers: 3, ..tiny() };
    let refused = checkpoint.restore(deeper, &other, None).unwrap_err().to_string();
    assert!(refused.ends_with("is of a model with layers 2; this one has layers 3"), "{refused}");
    Ok(())
}

#[test]
fn bad_arguments_are_named() -> Result<()> {
    let vs = VarStore::new(Device::Cpu);
    let refused = |config| Llama::new(&vs.root(), config).unwrap_err().to_string();
    assert_eq!(refused(LlamaConfig { kv_heads: 3, ..tiny() }), "heads 4 is not a multiple of kv_heads 3");
    assert!(
        refused(LlamaConfig { heads: 8, ..tiny() }).contains("hidden 24 is not a multiple of twice heads 8")
    );
    assert!(refused(LlamaConfig { mlp: 0, ..tiny() }).contains("mlp is 0"));
    assert!(refused(LlamaConfig { rotary_base: f64::NAN, ..tiny() }).contains("rotary_base is NaN"));
    assert!(vs.is_empty(), "a refused model leaves no variables");
    assert!(LlamaConfig::preset("llama-9b").is_err());
    for name in LlamaConfig::PRESETS {
        LlamaConfig::preset(name)?.validate()?;
    }
    let model = Llama::new(&vs.root(), tiny())?;
    let long = Tensor::zeros([1, 17], (Kind::Int64, Device::Cpu));
    assert!(model.forward(&long, false).unwrap_err().to_string().contains("1 to 16"));
    let refused = model.with_recompute(Recompute::Cheap).unwrap_err().to_string();
    assert!(refused.contains("marks no operation"), "{refused}");
    Ok(())
}
