//! The shape of a Llama.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The shape of a [`Llama`](super::Llama).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LlamaConfig {
    /// Number of different tokens.
    pub vocab: i64,
    /// Longest sequence, in tokens.
    pub context: i64,
    /// Number of transformer blocks.
    pub layers: i64,
    /// Heads of queries per block; divides `hidden` into an even width per head.
    pub heads: i64,
    /// Heads of keys and values per block, each of which serves as many heads of queries; divides `heads`.
    pub kv_heads: i64,
    /// Width of the residual stream.
    pub hidden: i64,
    /// Width of the MLP.
    pub mlp: i64,
    /// Base of the wavelengths by which the rotary embedding turns queries and keys.
    pub rotary_base: f64,
}

impl LlamaConfig {
    /// The names that [`LlamaConfig::preset`] accepts.
    pub const PRESETS: &[&str] = &["mini", "hidden512", "llama-7b", "llama-8b"];

    /// Width of a head where nothing else is asked for.
    pub const HEAD_WIDTH: i64 = 128;

    /// A shape by name: Meta's Llama 2 of 7 billion parameters and Llama 3 of 8 billion; "hidden512", four layers
    /// with the heads of the large ones; or "mini", a byte-level model of 11 million parameters.
    ///
    /// # Errors
    /// [`Error::Argument`] for any other name.
    pub fn preset(name: &str) -> Result<LlamaConfig> {
        let llama = |layers, hidden, [heads, kv_heads]: [i64; 2], mlp| LlamaConfig {
            vocab: 32_000,
            context: 4_096,
            layers,
            heads,
            kv_heads,
            hidden,
            mlp,
            rotary_base: 1e4,
        };
        Ok(match name {
            "mini" => LlamaConfig { vocab: 256, context: 256, ..llama(6, 384, [6, 2], 1_344) },
            "hidden512" => LlamaConfig { context: 512, ..llama(4, 512, [4, 2], 1_792) },
            "llama-7b" => llama(32, 4_096, [32, 32], 11_008),
            "llama-8b" => {
                let llama3 = llama(32, 4_096, [32, 8], 14_336);
                LlamaConfig { vocab: 128_256, context: 8_192, rotary_base: 5e5, ..llama3 }
            }
            _ => {
                let known = LlamaConfig::PRESETS.join(", ");
                return Err(Error::argument(format!("unknown model \"{name}\"; known are {known}")));
            }
        })
    }

    /// Width of a head.
    pub fn head_width(&self) -> i64 {
        self.hidden / self.heads
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
            ("kv_heads", self.kv_heads, WIDEST),
            ("hidden", self.hidden, WIDEST),
            ("mlp", self.mlp, WIDEST),
        ];
        for (name, value, most) in bounds {
            if !(1..=most).contains(&value) {
                return Err(Error::argument(format!("{name} is {value}; it must be from 1 to {most}")));
            }
        }
        let LlamaConfig { hidden, heads, kv_heads, rotary_base, .. } = *self;
        if hidden % (2 * heads) != 0 {
            return Err(Error::argument(format!(
                "hidden {hidden} is not a multiple of twice heads {heads}: a head turns pairs of numbers"
            )));
        }
        if heads % kv_heads != 0 {
            return Err(Error::argument(format!("heads {heads} is not a multiple of kv_heads {kv_heads}")));
        }
        if !(rotary_base.is_finite() && rotary_base > 0.0) {
            return Err(Error::argument(format!("rotary_base is {rotary_base}; it must be above 0")));
        }
        Ok(())
    }

    /// Number of trainable parameters.
    pub fn parameters(&self) -> i64 {
        let norms = (2 * self.layers + 1) * self.hidden;
        self.matrices() + self.vocab * self.hidden + norms
    }

    /// Floating-point operations of forward and backward per token, for a sequence of `block` tokens: six for every
    /// weight of a matrix product, plus those of attention.
    pub fn flops_per_token(&self, block: i64) -> i64 {
        6 * self.matrices() + 12 * self.layers * self.hidden * block
    }

    /// Weights used in matrix products: those of queries and output, of keys and values, of the MLP, and of the head.
    fn matrices(&self) -> i64 {
        let key_value = self.kv_heads * self.head_width();
        let block = 2 * self.hidden + 2 * key_value + 3 * self.mlp;
        (self.layers * block + self.vocab) * self.hidden
    }
}
