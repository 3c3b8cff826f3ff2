//! Which model is trained, and on how many tokens at a time.

use std::num::NonZero;

use anyhow::{Result, ensure};
use clap::builder::PossibleValuesParser;
use clap::value_parser;
use ssdtrain_models::{GptConfig, Recompute, Tokenizer};
use tch::Device;

use crate::common::float;

/// The arguments that make up a [`Shape`].
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct ShapeArgs {
    /// A known shape to start from; the options below change parts of it
    #[arg(long, value_parser = PossibleValuesParser::new(GptConfig::PRESETS))]
    preset: Option<String>,
    /// Transformer blocks
    #[arg(long, value_name = "N", value_parser = value_parser!(i64).range(1..=4096))]
    layers: Option<i64>,
    /// Attention heads per block; must divide --hidden
    #[arg(long, value_name = "N", value_parser = value_parser!(i64).range(1..=4096))]
    heads: Option<i64>,
    /// Width of the residual stream
    #[arg(long, value_name = "N", value_parser = value_parser!(i64).range(1..=1 << 20))]
    hidden: Option<i64>,
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
    /// Add to the gradients of matrices in place, so that a second gradient as large as a matrix never exists beside the first
    #[arg(long)]
    grads_in_place: bool,
    /// What backward computes again, under every strategy that has a cache but recompute, instead of having it kept: each block from its
    /// input (layer), or the results of GELU and layer norms (cheap)
    #[arg(long, value_name = "WHAT", default_value = "none", value_parser = PossibleValuesParser::new(Recompute::NAMES))]
    recompute: String,
    /// Rate of dropout
    #[arg(long, value_name = "RATE", value_parser = float::below_one)]
    dropout: Option<f64>,
    /// Leave out the biases of linear layers and layer norms
    #[arg(long)]
    no_bias: bool,
    /// Give the head weights of its own instead of the token embedding's
    #[arg(long)]
    untied: bool,
    /// How text becomes tokens
    #[arg(long, value_name = "KIND", value_parser = PossibleValuesParser::new(Tokenizer::NAMES))]
    tokens: Option<String>,
}

/// A model and its batches.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    /// Its vocabulary comes from the data and is not known yet; its context is the block.
    pub(crate) model: GptConfig,
    /// Sequences per micro-batch.
    pub(crate) batch: usize,
    /// Micro-batches per step.
    pub(crate) accumulate: usize,
    /// Tokens whose loss is computed at a time.
    pub(crate) loss_chunk: Option<NonZero<u32>>,
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

    /// The shape asked for; `otherwise` is the shape for a command that is given no preset.
    pub(crate) fn resolve(&self, otherwise: Shape) -> Result<Shape> {
        let mut shape = match &self.preset {
            Some(name) => Shape::preset(name)?,
            None => otherwise,
        };
        let model = &mut shape.model;
        model.layers = self.layers.unwrap_or(model.layers);
        model.heads = self.heads.unwrap_or(model.heads);
        model.hidden = self.hidden.unwrap_or(model.hidden);
        model.context = self.block.map_or(model.context, i64::from);
        model.dropout = self.dropout.unwrap_or(model.dropout);
        model.bias &= !self.no_bias;
        model.tied &= !self.untied;
        ensure!(
            model.hidden % model.heads == 0,
            "--hidden {} is not a multiple of --heads {}",
            model.hidden,
            model.heads
        );
        shape.batch = self.batch.map_or(shape.batch, |rows| rows as usize);
        shape.accumulate = self.accumulate as usize;
        shape.loss_chunk = NonZero::new(self.loss_chunk);
        shape.grads_in_place = self.grads_in_place;
        shape.recompute = self.recompute.parse()?;
        shape.tokens = self.tokens.clone().unwrap_or(shape.tokens);
        Ok(shape)
    }
}

impl Shape {
    /// The shape with this model name.
    pub(crate) fn preset(name: &str) -> Result<Shape> {
        let (block, batch, tokens) = match name {
            "mini" => (256, 8, "bytes"),
            "nanogpt-cpu" => (64, 12, "chars"),
            _ => (512, 4, "gpt2"),
        };
        let model = GptConfig { context: block, ..GptConfig::preset(name)? };
        Ok(Shape {
            model,
            batch,
            accumulate: 1,
            loss_chunk: None,
            grads_in_place: false,
            recompute: Recompute::None,
            tokens: tokens.to_owned(),
        })
    }

    /// The shape of `train` without options: a model that visibly learns within three minutes on two cores or, on a
    /// GPU, one that keeps the GPU busy and needs less than 16 GiB of its memory.
    pub(crate) fn quick(device: Device) -> Result<Shape> {
        let mini = Shape::preset("mini")?;
        let (layers, heads, hidden, context, batch) =
            if device.is_cuda() { (8, 16, 2048, 1024, 8) } else { (4, 4, 256, 128, 16) };
        let model = GptConfig { layers, heads, hidden, context, ..mini.model };
        Ok(Shape { model, batch, ..mini })
    }

    /// Tokens per sequence.
    pub(crate) fn block(&self) -> usize {
        self.model.context as usize
    }

    /// Sequences per step.
    pub(crate) fn rows(&self) -> usize {
        self.batch * self.accumulate
    }

    /// Tokens per step.
    pub(crate) fn tokens_per_step(&self) -> usize {
        self.rows() * self.block()
    }

    /// A description in words.
    pub(crate) fn describe(&self) -> String {
        self.describe_with(&self.batch.to_string())
    }

    /// The same, with other micro-batch sizes.
    pub(crate) fn describe_with(&self, batch: &str) -> String {
        let GptConfig { layers, heads, hidden, context, .. } = self.model;
        let accumulate = match self.accumulate {
            1 => String::new(),
            parts => format!(", {parts} micro-batches per step"),
        };
        let loss =
            self.loss_chunk.map_or_else(String::new, |chunk| format!(", loss of {chunk} tokens at a time"));
        let loss = if self.grads_in_place { format!("{loss}, gradients in place") } else { loss };
        let loss = match self.recompute {
            Recompute::None => loss,
            Recompute::Layer => format!("{loss}, blocks recomputed"),
            Recompute::Cheap => format!("{loss}, GELU and layer norms recomputed"),
        };
        format!(
            "{layers} layers, hidden {hidden}, {heads} heads, {context} tokens, batch {batch}{accumulate}{loss}: {:.1} M parameters",
            self.model.parameters() as f64 / 1e6
        )
    }
}
