//! What is trained.

use std::fmt;
use std::num::NonZero;
use std::thread;

use ssdtrain::{Step, StepHandle};
use ssdtrain_models::{AdamW, AdamWConfig, LanguageModel, Llama, LlamaConfig, Optimizer, Sgd};
use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::lora::Adapted;

const VOCABULARY: i64 = 32_000;
/// Different lengths are multiples of it.
const GRAIN: i64 = 16;
const SEED: i64 = 2026;
/// The width of a head of attention.
pub(crate) const HEAD: i64 = 128;
/// The shortest context whose eighths are lengths.
pub(crate) const LEAST_CONTEXT: i64 = 8 * GRAIN;

/// The size of the models, and where they are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) device: Device,
    pub(crate) kind: Kind,
    pub(crate) layers: i64,
    pub(crate) hidden: i64,
    /// The longest sequence, in tokens.
    pub(crate) context: i64,
    pub(crate) batch: i64,
}

impl Shape {
    pub(crate) fn of(device: Device, layers: i64) -> Shape {
        match device {
            Device::Cuda(_) => {
                Shape { device, kind: Kind::BFloat16, layers, hidden: 4096, context: 4096, batch: 4 }
            }
            _ => Shape { device, kind: Kind::Float, layers, hidden: 256, context: 128, batch: 2 },
        }
    }

    pub(crate) fn mlp(&self) -> i64 {
        self.hidden * 7 / 2
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { layers, hidden, context, batch, .. } = self;
        write!(f, "a Llama of {layers} layers, hidden {hidden}, {batch} x at most {context} tokens")
    }
}

/// A program that trains.
pub(crate) struct Program {
    pub(crate) shape: Shape,
    pub(crate) weights: VarStore,
    /// The lengths of its sequences, in turn.
    pub(crate) lengths: Vec<i64>,
    /// One for each thread.
    models: Vec<Model>,
    optimizer: Box<dyn Optimizer>,
    how: How,
    tokens: Tensor,
}

enum Model {
    Llama(Llama),
    /// Frozen matrices with small ones beside them that are trained.
    Lora(Adapted),
}

#[derive(Clone, Copy)]
enum How {
    Whole,
    MicroBatches,
    Threads,
}

impl Program {
    pub(crate) fn new(name: &str, shape: &Shape) -> Result<Program> {
        tch::manual_seed(SEED);
        let mut weights = VarStore::new(shape.device);
        weights.set_kind(shape.kind);
        let count = if name == "threads" { 2 } else { 1 };
        let models = (0..count).map(|index| Model::new(name, &(weights.root() / index), shape));
        let models = models.collect::<Result<_>>()?;
        let optimizer: Box<dyn Optimizer> = match name {
            "micro-batches" => Box::new(AdamW::new(&weights, AdamWConfig::for_kind(shape.kind))?),
            _ => Box::new(Sgd::new(&weights)),
        };
        let how = match name {
            "micro-batches" => How::MicroBatches,
            "threads" => How::Threads,
            _ => How::Whole,
        };
        let size = [shape.batch, shape.context + 1];
        let tokens = Tensor::f_randint(VOCABULARY, size, (Kind::Int64, shape.device))?;
        Ok(Program {
            shape: *shape,
            weights,
            lengths: lengths(name, shape.context),
            models,
            optimizer,
            how,
            tokens,
        })
    }

    /// The length of the sequences of iteration `number`.
    pub(crate) fn length(&self, number: usize) -> i64 {
        self.lengths[number % self.lengths.len()]
    }

    /// Drops the gradients.
    pub(crate) fn clear(&mut self) {
        self.optimizer.zero_grad();
    }

    /// Forward and backward of iteration `number`.
    pub(crate) fn compute(&mut self, number: usize, step: Option<&Step<'_>>) -> Result<()> {
        let tokens = self.tokens.narrow(1, 0, self.length(number) + 1);
        match self.how {
            How::Whole => backward(step, &self.models[0].loss(&tokens)?),
            How::MicroBatches => {
                for part in tokens.chunk(2, 0) {
                    backward(step, &(self.models[0].loss(&part)? / 2.0))?;
                }
                Ok(())
            }
            How::Threads => {
                let handle = step.map(Step::handle);
                let losses = thread::scope(|scope| -> Result<Vec<Tensor>> {
                    let mut threads = Vec::new();
                    for (model, part) in self.models.iter_mut().zip(tokens.chunk(2, 0)) {
                        let handle = handle.as_ref();
                        threads.push(scope.spawn(move || {
                            let _entered = handle.map(StepHandle::enter);
                            model.loss(&part).map_err(|error| error.to_string())
                        }));
                    }
                    let joined = threads.into_iter().map(|thread| match thread.join() {
                        Ok(loss) => Ok(loss?),
                        Err(_) => Err("a thread panicked".into()),
                    });
                    joined.collect()
                })?;
                backward(step, &((&losses[0] + &losses[1]) / 2.0))
            }
        }
    }

    pub(crate) fn update(&mut self) -> Result<()> {
        Ok(self.optimizer.step(1e-5)?)
    }
}

impl Model {
    fn new(name: &str, vs: &nn::Path<'_>, shape: &Shape) -> Result<Model> {
        Ok(match name {
            "lora" => Model::Lora(Adapted::new(vs, shape)),
            _ => Model::Llama(Llama::new(vs, llama(shape))?),
        })
    }

    fn loss(&self, tokens: &Tensor) -> Result<Tensor> {
        let length = tokens.size()[1] - 1;
        let (inputs, targets) = (tokens.narrow(1, 0, length), tokens.narrow(1, 1, length));
        match self {
            Model::Llama(model) => Ok(model.training_loss(&inputs, &targets, NonZero::<usize>::MIN)?),
            Model::Lora(model) => model.loss(&inputs, &targets),
        }
    }
}

fn backward(step: Option<&Step<'_>>, loss: &Tensor) -> Result<()> {
    match step {
        Some(step) => Ok(step.backward(loss)?),
        None => Ok(loss.f_backward()?),
    }
}

fn llama(shape: &Shape) -> LlamaConfig {
    let heads = shape.hidden / HEAD;
    LlamaConfig {
        vocab: VOCABULARY,
        context: shape.context,
        layers: shape.layers,
        heads,
        kv_heads: (heads / 4).max(1),
        hidden: shape.hidden,
        mlp: shape.mlp(),
        rotary_base: 1e4,
    }
}

fn lengths(name: &str, context: i64) -> Vec<i64> {
    let least = context / 8;
    match name {
        "random" | "budget-random" => {
            let mut state: u64 = 2026;
            let mut draw = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                least + (state >> 33) as i64 % ((context - least) / GRAIN + 1) * GRAIN
            };
            (0..997).map(|_| draw()).collect()
        }
        "in-turn" => [5, 2, 8, 3, 1, 7, 4, 6].map(|eighths| least * eighths).to_vec(),
        "alternating" => vec![context, context / 2],
        _ => vec![context],
    }
}
