//! The arguments that say which model is trained.

use anyhow::{Result, ensure};
use clap::builder::PossibleValuesParser;
use clap::{ValueEnum, value_parser};
use ssdtrain_models::{GptConfig, LlamaConfig, ModelConfig};

use crate::common::float;

/// A kind of model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Family {
    /// GPT-2
    #[default]
    Gpt,
    /// Llama: root-mean-square norms, rotary embedding, grouped queries and SwiGLU, all in plain operations
    Llama,
}

/// The arguments that make up a [`ModelConfig`], apart from its context and vocabulary.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelArgs {
    /// Kind of model; default: gpt, or the checkpoint's where a run goes on from one
    #[arg(long, value_enum)]
    model: Option<Family>,
    /// A known shape to start from; the options below change parts of it. Of gpt: mini, nanogpt-cpu and gpt2-*; of llama: mini,
    /// hidden512 and llama-*
    #[arg(long, value_parser = PossibleValuesParser::new(presets()))]
    preset: Option<String>,
    /// Transformer blocks
    #[arg(long, value_name = "N", value_parser = value_parser!(i64).range(1..=4096))]
    layers: Option<i64>,
    /// Attention heads per block; must divide --hidden. Where --hidden is given, llama has one for every 128 of it
    #[arg(long, value_name = "N", value_parser = value_parser!(i64).range(1..=4096))]
    heads: Option<i64>,
    /// Heads of keys and values of llama; must divide --heads. Where --heads or --hidden is given: a quarter of the heads, if they can be
    /// divided by four
    #[arg(long, value_name = "N", value_parser = value_parser!(i64).range(1..=4096))]
    kv_heads: Option<i64>,
    /// Width of the residual stream
    #[arg(long, value_name = "N", value_parser = value_parser!(i64).range(1..=1 << 20))]
    hidden: Option<i64>,
    /// Width of the MLP of llama; where --hidden is given, three and a half times that
    #[arg(long, value_name = "N", value_parser = value_parser!(i64).range(1..=1 << 20))]
    mlp: Option<i64>,
    /// Rate of dropout; llama has none
    #[arg(long, value_name = "RATE", value_parser = float::below_one)]
    dropout: Option<f64>,
    /// Leave out the biases of linear layers and layer norms; llama has none
    #[arg(long)]
    no_bias: bool,
    /// Give the head weights of its own instead of the token embedding's; llama's has them
    #[arg(long)]
    untied: bool,
}

impl Family {
    /// The kind of a model.
    pub(crate) fn of(model: &ModelConfig) -> Family {
        match model {
            ModelConfig::Gpt(_) => Family::Gpt,
            ModelConfig::Llama(_) => Family::Llama,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Family::Gpt => "gpt",
            Family::Llama => "llama",
        }
    }

    fn presets(self) -> &'static [&'static str] {
        match self {
            Family::Gpt => GptConfig::PRESETS,
            Family::Llama => LlamaConfig::PRESETS,
        }
    }

    /// The shape of this kind with this name.
    pub(crate) fn preset(self, name: &str) -> Result<ModelConfig> {
        ensure!(
            self.presets().contains(&name),
            "--preset {name} is not of --model {}, whose presets are {}",
            self.name(),
            self.presets().join(", ")
        );
        Ok(match self {
            Family::Gpt => GptConfig::preset(name)?.into(),
            Family::Llama => LlamaConfig::preset(name)?.into(),
        })
    }
}

impl ModelArgs {
    /// The kind asked for by name.
    pub(crate) fn family(&self) -> Option<Family> {
        self.model
    }

    /// The preset asked for.
    pub(crate) fn preset(&self) -> Option<&str> {
        self.preset.as_deref()
    }

    /// Changes the parts of a shape that were given, and checks what it is then.
    pub(crate) fn change(&self, model: &mut ModelConfig) -> Result<()> {
        let family = Family::of(model);
        ensure!(
            self.model.is_none_or(|asked| asked == family),
            "--model {}: the checkpoint is of a {}",
            self.model.unwrap_or_default().name(),
            model.family()
        );
        match model {
            ModelConfig::Gpt(model) => self.change_gpt(model),
            ModelConfig::Llama(model) => self.change_llama(model),
        }
    }

    fn change_gpt(&self, model: &mut GptConfig) -> Result<()> {
        for (option, given) in [("--kv-heads", self.kv_heads), ("--mlp", self.mlp)] {
            ensure!(given.is_none(), "{option} is for a Llama: add --model llama");
        }
        model.layers = self.layers.unwrap_or(model.layers);
        model.heads = self.heads.unwrap_or(model.heads);
        model.hidden = self.hidden.unwrap_or(model.hidden);
        model.dropout = self.dropout.unwrap_or(model.dropout);
        model.bias &= !self.no_bias;
        model.tied &= !self.untied;
        let GptConfig { hidden, heads, .. } = *model;
        ensure!(hidden % heads == 0, "--hidden {hidden} is not a multiple of --heads {heads}");
        Ok(())
    }

    fn change_llama(&self, model: &mut LlamaConfig) -> Result<()> {
        ensure!(self.dropout.is_none_or(|rate| rate == 0.0), "--dropout is for a GPT: a Llama has none");
        model.layers = self.layers.unwrap_or(model.layers);
        if let Some(hidden) = self.hidden {
            model.hidden = hidden;
            model.heads = (hidden / LlamaConfig::HEAD_WIDTH).max(1);
            model.mlp = (7 * hidden / 2).max(1);
        }
        model.heads = self.heads.unwrap_or(model.heads);
        model.mlp = self.mlp.unwrap_or(model.mlp);
        if self.hidden.or(self.heads).is_some() {
            model.kv_heads = if model.heads % 4 == 0 { model.heads / 4 } else { model.heads };
        }
        model.kv_heads = self.kv_heads.unwrap_or(model.kv_heads);
        let LlamaConfig { hidden, heads, kv_heads, .. } = *model;
        ensure!(hidden % (2 * heads) == 0, "--hidden {hidden} is not a multiple of twice --heads {heads}");
        ensure!(heads % kv_heads == 0, "--heads {heads} is not a multiple of --kv-heads {kv_heads}");
        Ok(())
    }
}

/// The names of all kinds, each once.
fn presets() -> Vec<&'static str> {
    let mut names = GptConfig::PRESETS.to_vec();
    names.extend(LlamaConfig::PRESETS.iter().filter(|name| !GptConfig::PRESETS.contains(name)));
    names
}
