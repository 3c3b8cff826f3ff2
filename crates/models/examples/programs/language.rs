//! Language models.

use std::sync::Arc;

use parking_lot::Mutex;
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Tensor};

use crate::layers::{FLOAT, Gpt, VOCABULARY, linear, norm, sequences, shifted};
use crate::program::{Named, Program, Result};

/// The programs of this file.
pub(crate) const PROGRAMS: &[Named] = &[
    ("gpt", || gpt(0.0)),
    ("gpt-dropout", || gpt(0.1)),
    ("gpt-own-attention", own_attention),
    ("gpt-loss-in-chunks", loss_in_chunks),
    ("gpt-segments", segments),
    ("gpt-bf16", bf16),
    ("llama-tied-embeddings", llama),
];

const WIDTH: i64 = 128;

fn gpt(dropout: f64) -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let model = Gpt::new(&vs.root(), WIDTH, 3, dropout);
    trained(vs, 8, 128, move |batch| Ok(model.loss(batch)))
}

/// Trains with AdamW on `count` sequences of `length` tokens at a time.
fn trained(
    vs: nn::VarStore,
    count: i64,
    length: i64,
    loss: impl Fn(&Tensor) -> Result<Tensor> + 'static,
) -> Result<Program> {
    let mut optimizer = nn::AdamW::default().build(&vs, 3e-4)?;
    Program::new(vs, move |_, session| {
        let batch = sequences(count, length);
        session.step(|step| {
            let loss = loss(&batch)?;
            optimizer.zero_grad();
            step.backward(&loss)?;
            optimizer.step();
            Ok(())
        })
    })
}

/// What cross entropy makes of logits `[batch, length, VOCABULARY]`.
fn entropy(logits: &Tensor, targets: &Tensor) -> Tensor {
    logits.view([-1, VOCABULARY]).cross_entropy_for_logits(&targets.reshape(-1))
}

/// Attention in single operations, with a mask and dropout of the weights.
fn own_attention() -> Result<Program> {
    const LENGTH: i64 = 96;
    let vs = nn::VarStore::new(Device::Cpu);
    let root = vs.root();
    let model = Gpt::new(&(&root / "model"), WIDTH, 1, 0.0);
    let layers: Vec<_> = (0..2)
        .map(|index| {
            let path = &root / index;
            let qkv = linear(&path / "qkv", WIDTH, 3 * WIDTH);
            (norm(&path / "norm", WIDTH), qkv, linear(&path / "out", WIDTH, WIDTH))
        })
        .collect();
    let mask = Tensor::ones([LENGTH, LENGTH], FLOAT).triu(1).to_kind(Kind::Bool);
    trained(vs, 8, LENGTH, move |batch| {
        let (inputs, targets) = shifted(batch);
        let x = layers.iter().fold(model.hidden(&inputs), |x, (norm, qkv, out)| {
            let heads =
                qkv.forward(&norm.forward(&x)).view([-1, LENGTH, 3, 4, WIDTH / 4]).permute([2, 0, 3, 1, 4]);
            let (query, key, value) = (heads.get(0), heads.get(1), heads.get(2));
            let scores = query.matmul(&key.transpose(-2, -1)) / (WIDTH as f64 / 4.0).sqrt();
            let weights = scores.masked_fill(&mask, f64::NEG_INFINITY).softmax(-1, Kind::Float);
            let y = weights.dropout(0.1, true).matmul(&value).transpose(1, 2).reshape(x.size());
            x + out.forward(&y).dropout(0.1, true)
        });
        Ok(entropy(&model.logits(&x), &targets))
    })
}

/// The logits of a quarter of the tokens at a time.
fn loss_in_chunks() -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let model = Gpt::new(&vs.root(), WIDTH, 3, 0.0);
    trained(vs, 8, 128, move |batch| {
        let (inputs, targets) = shifted(batch);
        let hidden = model.hidden(&inputs);
        let chunks = hidden.chunk(4, 1).into_iter().zip(targets.chunk(4, 1));
        let losses: Vec<Tensor> =
            chunks.map(|(hidden, targets)| entropy(&model.logits(&hidden), &targets)).collect();
        Ok(Tensor::stack(&losses, 0).mean(Kind::Float))
    })
}

/// The user says that blocks are to be computed again.
fn segments() -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let mut model = Gpt::new(&vs.root(), WIDTH, 3, 0.1);
    let blocks: Vec<_> =
        std::mem::take(&mut model.blocks).into_iter().map(|block| Arc::new(Mutex::new(block))).collect();
    trained(vs, 8, 128, move |batch| {
        let (inputs, targets) = shifted(batch);
        let mut x = model.embed(&inputs);
        for (index, block) in blocks.iter().enumerate() {
            let block = Arc::clone(block);
            x = ssdtrain::segment(&format!("block {index}"), &x, move |x| Ok(block.lock().forward(x)))?;
        }
        Ok(entropy(&model.logits(&x), &targets))
    })
}

/// Products in 16 bits, by casts of weights and inputs, and everything else in 32.
fn bf16() -> Result<Program> {
    let vs = nn::VarStore::new(Device::Cpu);
    let root = vs.root();
    let model = Gpt::new(&(&root / "model"), WIDTH, 0, 0.0);
    let layers: Vec<_> = (0..4)
        .map(|index| {
            let path = &root / index;
            let up = path.kaiming_uniform("up", &[4 * WIDTH, WIDTH]);
            (norm(&path / "norm", WIDTH), up, path.kaiming_uniform("down", &[WIDTH, 4 * WIDTH]))
        })
        .collect();
    let product =
        |x: &Tensor, weight: &Tensor| x.to_kind(Kind::BFloat16).matmul(&weight.to_kind(Kind::BFloat16).tr());
    trained(vs, 16, 128, move |batch| {
        let (inputs, targets) = shifted(batch);
        let x = layers.iter().fold(model.embed(&inputs), |x, (norm, up, down)| {
            let hidden = product(&norm.forward(&x), up).gelu("tanh");
            x + product(&hidden, down).to_kind(Kind::Float)
        });
        Ok(entropy(&model.logits(&x), &targets))
    })
}

/// A block of a Llama: RMS norms, rotary positions, and a gated perceptron.
struct LlamaBlock {
    norms: [Tensor; 2],
    qkv: Tensor,
    out: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
}

impl LlamaBlock {
    fn new(vs: &nn::Path<'_>) -> LlamaBlock {
        let weight = |name: &str, outputs, inputs| vs.randn(name, &[outputs, inputs], 0.0, 0.02);
        LlamaBlock {
            norms: [vs.ones("norm1", &[WIDTH]), vs.ones("norm2", &[WIDTH])],
            qkv: weight("qkv", 3 * WIDTH, WIDTH),
            out: weight("out", WIDTH, WIDTH),
            gate: weight("gate", 3 * WIDTH, WIDTH),
            up: weight("up", 3 * WIDTH, WIDTH),
            down: weight("down", WIDTH, 3 * WIDTH),
        }
    }

    fn forward(&self, x: &Tensor, cos: &Tensor, sin: &Tensor) -> Tensor {
        let (batch, length, _) = x.size3().unwrap_or_default();
        let qkv = root_mean_square(x, &self.norms[0]).matmul(&self.qkv.tr());
        let heads = qkv.view([batch, length, 3, 4, WIDTH / 4]).transpose(1, 3).unbind(2);
        let rotated = |x: &Tensor| {
            let halves = x.chunk(2, -1);
            x * cos + Tensor::cat(&[&halves[1].neg(), &halves[0]], -1) * sin
        };
        let (query, key) = (rotated(&heads[0]), rotated(&heads[1]));
        let none = None::<&Tensor>;
        let y = Tensor::scaled_dot_product_attention(&query, &key, &heads[2], none, 0.0, true, None, false);
        let x = x + y.transpose(1, 2).reshape([batch, length, WIDTH]).matmul(&self.out.tr());
        let inputs = root_mean_square(&x, &self.norms[1]);
        let hidden = inputs.matmul(&self.gate.tr()).silu() * inputs.matmul(&self.up.tr());
        x + hidden.matmul(&self.down.tr())
    }
}

fn root_mean_square(x: &Tensor, weight: &Tensor) -> Tensor {
    let mean = x.square().mean_dim([-1i64].as_slice(), true, Kind::Float);
    x * (mean + 1e-5).rsqrt() * weight
}

/// A small Llama, whose head is the matrix of its embeddings.
fn llama() -> Result<Program> {
    const LENGTH: i64 = 128;
    let vs = nn::VarStore::new(Device::Cpu);
    let root = vs.root();
    let embedding = root.randn("embedding", &[VOCABULARY, WIDTH], 0.0, 0.02);
    let blocks: Vec<_> = (0..3).map(|index| LlamaBlock::new(&(&root / index))).collect();
    let last = root.ones("norm", &[WIDTH]);
    let speeds = (Tensor::arange(WIDTH / 8, FLOAT) * (-9.2 / (WIDTH as f64 / 8.0))).exp();
    let angles = Tensor::arange(LENGTH, FLOAT).outer(&speeds).repeat([1, 2]);
    let (cos, sin) = (angles.cos(), angles.sin());
    trained(vs, 8, LENGTH, move |batch| {
        let (inputs, targets) = shifted(batch);
        let x = Tensor::embedding(&embedding, &inputs, -1, false, false);
        let x = blocks.iter().fold(x, |x, block| block.forward(&x, &cos, &sin));
        Ok(entropy(&root_mean_square(&x, &last).matmul(&embedding.tr()), &targets))
    })
}
