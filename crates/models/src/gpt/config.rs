//! The shape of a GPT.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The shape of a [`Gpt`](super::Gpt).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GptConfig {
    /// Number of different tokens.
    pub vocab: i64,
    /// Longest sequence, in tokens.
    pub context: i64,
    /// Number of transformer blocks.
    pub layers: i64,
    /// Attention heads per block; divides `hidden`.
    pub heads: i64,
    /// Width of the residual stream; the MLP is four times as wide.
    pub hidden: i64,
    /// Dropout rate for embedding, attention and residuals, in `0.0..1.0`.
    pub dropout: f64,
    /// Whether the head shares the token embedding's weights.
    pub tied: bool,
    /// Whether linear layers and layer norms have biases.
    pub bias: bool,
}

impl GptConfig {
    /// The names that [`GptConfig::preset`] accepts.
    pub const PRESETS: &[&str] =
        &["mini", "nanogpt-cpu", "gpt2-small", "gpt2-medium", "gpt2-large", "gpt2-xl"];

    /// A shape by name: OpenAI's four GPT-2 sizes; nanoGPT's character model for a CPU; or "mini", a
    /// byte-level model of 11 million parameters.
    ///
    /// # Errors
    /// [`Error::Argument`] for any other name.
    pub fn preset(name: &str) -> Result<GptConfig> {
        let gpt2 = |layers, heads, hidden| GptConfig {
            vocab: 50_257,
            context: 1_024,
            layers,
            heads,
            hidden,
            dropout: 0.0,
            tied: true,
            bias: true,
        };
        Ok(match name {
            "mini" => GptConfig { vocab: 256, context: 256, ..gpt2(6, 6, 384) },
            "nanogpt-cpu" => GptConfig { vocab: 65, context: 64, bias: false, ..gpt2(4, 4, 128) },
            "gpt2-small" => gpt2(12, 12, 768),
            "gpt2-medium" => gpt2(24, 16, 1_024),
            "gpt2-large" => gpt2(36, 20, 1_280),
            "gpt2-xl" => gpt2(48, 25, 1_600),
            _ => {
                let known = GptConfig::PRESETS.join(", ");
                return Err(Error::argument(format!("unknown model \"{name}\"; known are {known}")));
            }
        })
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::Argument`], naming the first field that is out of range.
    pub fn validate(&self) -> Result<()> {
        const WIDEST: i64 = 1 << 20;
        const DEEPEST: i64 = 1 << 12;
        let bounds = [
            ("vocab", self.vocab, WIDEST),
            ("context", self.context, WIDEST),
            ("layers", self.layers, DEEPEST),
            ("heads", self.heads, WIDEST),
            ("hidden", self.hidden, WIDEST),
        ];
        for (name, value, most) in bounds {
            if !(1..=most).contains(&value) {
                return Err(Error::argument(format!("{name} is {value}; it must be from 1 to {most}")));
            }
        }
        if self.hidden % self.heads != 0 {
            let (hidden, heads) = (self.hidden, self.heads);
            return Err(Error::argument(format!("hidden {hidden} is not a multiple of heads {heads}")));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            let dropout = self.dropout;
            return Err(Error::argument(format!("dropout is {dropout}; it must be at least 0 and below 1")));
        }
        Ok(())
    }

    /// Number of trainable parameters.
    pub fn parameters(&self) -> i64 {
        self.matrices() + self.vectors() + self.context * self.hidden + self.lookup_only()
    }

    /// Floating-point operations of forward and backward per token, for a sequence of `block` tokens: six for every
    /// weight of a matrix product, plus those of attention.
    pub fn flops_per_token(&self, block: i64) -> i64 {
        6 * self.matrices() + 12 * self.layers * self.hidden * block
    }

    /// Weights used in matrix products: four projections in attention, the equivalent of eight in the MLP, and the
    /// head.
    fn matrices(&self) -> i64 {
        12 * self.layers * self.hidden * self.hidden + self.vocab * self.hidden
    }

    /// Layer norms and biases.
    fn vectors(&self) -> i64 {
        let norms = (2 * self.layers + 1) * self.hidden;
        let linear_biases = 9 * self.layers * self.hidden;
        if self.bias { 2 * norms + linear_biases } else { norms }
    }

    /// The token embedding, unless it is also the head.
    fn lookup_only(&self) -> i64 {
        if self.tied { 0 } else { self.vocab * self.hidden }
    }
}
