//! The shapes of all models.

use serde::{Deserialize, Serialize};

use crate::gpt::GptConfig;
use crate::llama::LlamaConfig;

/// The shape of a model, whichever it is. serde writes the fields of the shape itself, whose names tell which it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ModelConfig {
    /// Of a [`Gpt`](crate::Gpt).
    Gpt(GptConfig),
    /// Of a [`Llama`](crate::Llama).
    Llama(LlamaConfig),
}

impl ModelConfig {
    /// The model's name: GPT or Llama.
    pub fn family(&self) -> &'static str {
        match self {
            ModelConfig::Gpt(_) => "GPT",
            ModelConfig::Llama(_) => "Llama",
        }
    }

    /// Longest sequence, in tokens.
    pub fn context(&self) -> i64 {
        match self {
            ModelConfig::Gpt(config) => config.context,
            ModelConfig::Llama(config) => config.context,
        }
    }

    /// Sets the longest sequence, in tokens.
    pub fn set_context(&mut self, context: i64) {
        match self {
            ModelConfig::Gpt(config) => config.context = context,
            ModelConfig::Llama(config) => config.context = context,
        }
    }

    /// Sets the number of different tokens.
    pub fn set_vocab(&mut self, vocab: i64) {
        match self {
            ModelConfig::Gpt(config) => config.vocab = vocab,
            ModelConfig::Llama(config) => config.vocab = vocab,
        }
    }

    /// Number of trainable parameters.
    pub fn parameters(&self) -> i64 {
        match self {
            ModelConfig::Gpt(config) => config.parameters(),
            ModelConfig::Llama(config) => config.parameters(),
        }
    }

    /// Floating-point operations of forward and backward per token, for a sequence of `block` tokens.
    pub fn flops_per_token(&self, block: i64) -> i64 {
        match self {
            ModelConfig::Gpt(config) => config.flops_per_token(block),
            ModelConfig::Llama(config) => config.flops_per_token(block),
        }
    }
}

impl From<GptConfig> for ModelConfig {
    fn from(config: GptConfig) -> ModelConfig {
        ModelConfig::Gpt(config)
    }
}

impl From<LlamaConfig> for ModelConfig {
    fn from(config: LlamaConfig) -> ModelConfig {
        ModelConfig::Llama(config)
    }
}

impl From<&GptConfig> for ModelConfig {
    fn from(config: &GptConfig) -> ModelConfig {
        config.clone().into()
    }
}

impl From<&LlamaConfig> for ModelConfig {
    fn from(config: &LlamaConfig) -> ModelConfig {
        config.clone().into()
    }
}

impl From<&ModelConfig> for ModelConfig {
    fn from(config: &ModelConfig) -> ModelConfig {
        config.clone()
    }
}
