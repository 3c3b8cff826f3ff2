//! A GPT and a Llama, their optimisers, data and checkpoints: everything needed to train a language model from Rust.
//!
//! ```no_run
//! use ssdtrain_models::{
//!     AdamW, AdamWConfig, Corpus, Gpt, GptConfig, LanguageModel, Optimizer, TokenSet, Tokenizer, seed_step,
//! };
//! use tch::{Device, nn};
//!
//! # fn main() -> ssdtrain_models::Result<()> {
//! let corpus = Corpus::cargo_registry(64 << 20)?;
//! let tokens = TokenSet::encode(&corpus, &Tokenizer::Bytes)?;
//! let (train, held_out) = tokens.split(0.1)?;
//! let mut batches = train.random_batches(8, 256, 1337, Device::Cpu)?;
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let model = Gpt::new(&vs.root(), GptConfig::preset("mini")?)?;
//! let mut optimizer = AdamW::new(&vs, AdamWConfig::default())?;
//! for step in 0..100 {
//!     seed_step(1337, step);
//!     let batch = batches.draw()?;
//!     optimizer.zero_grad();
//!     model.loss(&batch.inputs, &batch.targets, true)?.f_backward()?;
//!     optimizer.clip_grad_norm(1.0)?;
//!     optimizer.step(3e-4)?;
//! }
//! let loss = ssdtrain_models::evaluate(&model, held_out.sequential_batches(8, 256, Device::Cpu)?)?;
//! println!("held-out loss {loss:.3}");
//! # Ok(())
//! # }
//! ```

mod adamw;
mod blocks;
mod checkpoint;
mod corpus;
mod error;
#[cfg(any(fuzzing, test))]
pub mod fuzzing;
mod gpt;
mod head;
mod language_model;
mod layers;
mod llama;
mod loss;
mod model_config;
mod optimizer;
mod recompute;
mod sample;
mod schedule;
mod sgd;
mod shim;
mod tokenizer;
mod tokens;
mod train;

pub use adamw::{AdamW, AdamWConfig};
pub use checkpoint::{Checkpoint, TrainState};
pub use corpus::Corpus;
pub use error::{Error, Result};
pub use gpt::{Gpt, GptConfig};
pub use language_model::LanguageModel;
pub use llama::{Llama, LlamaConfig};
pub use loss::linear_cross_entropy;
pub use model_config::ModelConfig;
pub use optimizer::Optimizer;
pub use recompute::Recompute;
pub use sample::{Sampling, sample};
pub use schedule::Schedule;
pub use sgd::Sgd;
pub use shim::linear_in_place;
pub use tokenizer::{CharSet, Tokenizer};
pub use tokens::{Batch, RandomBatches, SequentialBatches, TokenSet};
pub use train::{accumulate, evaluate, seed_step};
