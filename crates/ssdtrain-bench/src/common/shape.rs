//! Which model is trained, and on how many tokens at a time.

use std::num::NonZero;

use anyhow::{Result, ensure};
use clap::builder::PossibleValuesParser;
use clap::value_parser;
use ssdtrain_models::{Gpt, GptConfig, LanguageModel, Llama, LlamaConfig, ModelConfig, Recompute, Tokenizer};
use tch::{Device, nn};

use crate::common::model::{Family, ModelArgs};

/// The arguments that make up a [`Shape`].
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct ShapeArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Tokens per sequence
    #[arg(long, value_name = "TOKENS", value_parser = value_parser!(u32).range(1..=1 << 20))]
    block: Option<u32>,
    /// Sequences per micro-batch
    #[arg(long, value_name = "ROWS", value_parser = value_parser!(u32).range(1..=1 << 16))]
    batch: Option<u32>,
    /// Micro-batches per step: their gradients are summed up before the optimizer steps
    #[arg(long, value_name = "N", default_value = "1", value_parser = value_parser!(u32).range(1..=4096))]
    accumulate: u32,
    /// Compute the loss of so many tokens at a time, so that the logits of a micro-batch, a number for each token and
    /// each word of the vocabulary, never exist at once; 0: of all tokens at once
    #[arg(long, value_name = "TOKENS", default_value = "0", value_parser = value_parser!(u32))]
    loss_chunk: u32,
    /// Compute the gradients of the head with its loss and hold them until backward, which then has no conditions: --loss-chunk tokens at a
    /// time, or 2048. Takes a gradient of the head's weight more than --loss-chunk by itself, which adds to that gradient in forward
    #[arg(long)]
    fused_loss: bool,
    /// Add to the gradients of matrices in place, so that a second gradient as large as a matrix never exists beside the first
    #[arg(long)]
    grads_in_place: bool,
    /// What backward computes again, under every strategy that has a cache but recompute, instead of having it kept: each block from its
    /// input (layer), or, of gpt, the results of GELU and layer norms (cheap)
    #[arg(long, value_name = "WHAT", default_value = "none", value_parser = PossibleValuesParser::new(Recompute::NAMES))]
    recompute: String,
    /// How text becomes tokens
    #[arg(long, value_name = "KIND", value_parser = PossibleValuesParser::new(Tokenizer::NAMES))]
    tokens: Option<String>,
}

/// The chunks of a fused loss, in tokens, where no others are asked for.
const FUSED_CHUNK: NonZero<u32> = NonZero::new(2048).expect("not zero");

/// A model and its batches.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    /// Its vocabulary comes from the data and is not known yet; its context is the block.
    pub(crate) model: ModelConfig,
    /// Sequences per micro-batch.
    pub(crate) batch: usize,
    /// Micro-batches per step.
    pub(crate) accumulate: usize,
    /// Tokens whose loss is computed at a time.
    pub(crate) loss_chunk: Option<NonZero<u32>>,
    /// Whether gradients of the loss are computed with it and held until backward.
    pub(crate) fused_loss: bool,
    /// Whether backward adds to the gradients of matrices in place.
    pub(crate) grads_in_place: bool,
    /// What backward recomputes, unless the strategy decides otherwise.
    pub(crate) recompute: Recompute,
    /// The tokenizer's name.
    pub(crate) tokens: String,
}

impl ShapeArgs {
    /// The tokenizer asked for by name.
    pub(crate) fn tokens(&self) -> Option<&str> {
        self.tokens.as_deref()
    }

    /// The shape asked for; `otherwise` tells the one for a command that is given no preset.
    pub(crate) fn resolve(&self, otherwise: impl FnOnce(Family) -> Result<Shape>) -> Result<Shape> {
        let family = self.model.family().unwrap_or_default();
        let mut shape = match self.model.preset() {
            Some(name) => Shape::preset(family, name)?,
            None => otherwise(family)?,
        };
        self.model.change(&mut shape.model)?;
        if let Some(block) = self.block {
            shape.model.set_context(block.into());
        }
        shape.batch = self.batch.map_or(shape.batch, |rows| rows as usize);
        shape.accumulate = self.accumulate as usize;
        shape.loss_chunk = NonZero::new(self.loss_chunk);
        shape.fused_loss = self.fused_loss;
        if self.fused_loss {
            shape.loss_chunk = shape.loss_chunk.or(Some(FUSED_CHUNK));
        }
        shape.grads_in_place = self.grads_in_place;
        shape.recompute = self.recompute.parse()?;
        ensure!(
            shape.recompute != Recompute::Cheap || Family::of(&shape.model) == Family::Gpt,
            "--recompute cheap is for a GPT: a Llama marks nothing as cheap"
        );
        shape.tokens = self.tokens.clone().unwrap_or(shape.tokens);
        Ok(shape)
    }
}

impl Shape {
    /// The shape with this model name.
    pub(crate) fn preset(family: Family, name: &str) -> Result<Shape> {
        let (block, batch, tokens) = match name {
            "mini" => (256, 8, "bytes"),
            "nanogpt-cpu" => (64, 12, "chars"),
            "hidden512" => (512, 4, "bytes"),
            _ => (512, 4, "gpt2"),
        };
        let mut model = family.preset(name)?;
        model.set_context(block);
        Ok(Shape {
            model,
            batch,
            accumulate: 1,
            loss_chunk: None,
            fused_loss: false,
            grads_in_place: false,
            recompute: Recompute::None,
            tokens: tokens.to_owned(),
        })
    }

    /// The shape of `train` without options: a model that visibly learns within three minutes on two cores or, on a
    /// GPU, one that keeps the GPU busy and needs less than 16 GiB of its memory.
    pub(crate) fn quick(family: Family, device: Device) -> Result<Shape> {
        let mut shape = Shape::preset(family, "mini")?;
        let (layers, heads, hidden, context, batch) =
            if device.is_cuda() { (8, 16, 2048, 1024, 8) } else { (4, 4, 256, 128, 16) };
        shape.batch = batch;
        shape.model = match shape.model {
            ModelConfig::Gpt(mini) => GptConfig { layers, heads, hidden, context, ..mini }.into(),
            ModelConfig::Llama(mini) => {
                let (kv_heads, mlp) = (heads / 4, 7 * hidden / 2);
                LlamaConfig { layers, heads, kv_heads, hidden, mlp, context, ..mini }.into()
            }
        };
        Ok(shape)
    }

    /// A new model of this shape under `vs`.
    pub(crate) fn build(&self, vs: &nn::Path<'_>, recompute: Recompute) -> Result<Box<dyn LanguageModel>> {
        let (chunk, fused) = (self.loss_chunk, self.fused_loss);
        Ok(match &self.model {
            ModelConfig::Gpt(config) => {
                let model = Gpt::new(vs, config.clone())?;
                let model = if fused { model.with_fused_loss(chunk) } else { model.with_loss_chunk(chunk) };
                Box::new(model.with_grads_in_place(self.grads_in_place).with_recompute(recompute))
            }
            ModelConfig::Llama(config) => {
                let model = Llama::new(vs, config.clone())?;
                let model = if fused { model.with_fused_loss(chunk) } else { model.with_loss_chunk(chunk) };
                Box::new(model.with_grads_in_place(self.grads_in_place).with_recompute(recompute)?)
            }
        })
    }

    /// Tokens per sequence.
    pub(crate) fn block(&self) -> usize {
        self.model.context() as usize
    }

    /// Sequences per step.
    pub(crate) fn rows(&self) -> usize {
        self.batch * self.accumulate
    }

    /// Tokens per step.
    pub(crate) fn tokens_per_step(&self) -> usize {
        self.rows() * self.block()
    }

    /// The model in a few words.
    pub(crate) fn title(&self) -> String {
        match &self.model {
            ModelConfig::Gpt(GptConfig { layers, hidden, context, .. }) => {
                format!("{layers} layers, hidden {hidden}, {context} tokens")
            }
            ModelConfig::Llama(LlamaConfig { layers, hidden, context, .. }) => {
                format!("Llama, {layers} layers, hidden {hidden}, {context} tokens")
            }
        }
    }

    /// A description in words.
    pub(crate) fn describe(&self) -> String {
        self.describe_with(&self.batch.to_string())
    }

    /// The same, with other micro-batch sizes.
    pub(crate) fn describe_with(&self, batch: &str) -> String {
        let heads = match &self.model {
            ModelConfig::Gpt(GptConfig { heads, .. }) => format!("{heads} heads"),
            ModelConfig::Llama(LlamaConfig { heads, kv_heads, mlp, .. }) => {
                format!("{heads} heads ({kv_heads} of keys and values), MLP {mlp}")
            }
        };
        let accumulate = match self.accumulate {
            1 => String::new(),
            parts => format!(", {parts} micro-batches per step"),
        };
        let fused = if self.fused_loss { "fused " } else { "" };
        let of_chunks = |chunk| format!(", {fused}loss of {chunk} tokens at a time");
        let loss = self.loss_chunk.map_or_else(String::new, of_chunks);
        let loss = if self.grads_in_place { format!("{loss}, gradients in place") } else { loss };
        let loss = match self.recompute {
            Recompute::None => loss,
            Recompute::Layer => format!("{loss}, blocks recomputed"),
            Recompute::Cheap => format!("{loss}, GELU and layer norms recomputed"),
        };
        format!(
            "{}, {heads}, batch {batch}{accumulate}{loss}: {:.1} M parameters",
            self.title(),
            self.model.parameters() as f64 / 1e6
        )
    }
}
