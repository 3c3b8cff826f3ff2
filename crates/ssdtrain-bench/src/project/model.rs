//! What is trained.

use anyhow::{Result, ensure};
use serde::Deserialize;
use ssdtrain_models::{GptConfig, LlamaConfig, ModelConfig};

/// A decoder-only transformer.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "ModelFile")]
pub(crate) struct Model {
    pub(crate) name: String,
    pub(crate) architecture: Architecture,
    /// Transformer blocks.
    pub(crate) layers: u64,
    /// Width of the residual stream.
    pub(crate) hidden: u64,
    /// Attention heads per layer.
    pub(crate) heads: u64,
    /// Number of different tokens.
    pub(crate) vocab: u64,
    /// Tokens per sequence.
    pub(crate) sequence: u64,
}

/// What a model's layers are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Architecture {
    /// GPT-2's: an MLP four times as wide as the residual stream, learned positions, a head that shares the embedding's weights.
    Gpt,
    /// Llama's: grouped queries, rotary embedding, a gated MLP, a head with weights of its own.
    Llama {
        /// Heads of keys and values per layer, each of which serves as many heads of queries.
        kv_heads: u64,
        /// Width of the MLP.
        mlp: u64,
    },
}

/// A [`Model`] as written in files.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelFile {
    #[serde(default)]
    name: String,
    layers: u64,
    hidden: u64,
    heads: u64,
    kv_heads: Option<u64>,
    mlp: Option<u64>,
    vocab: u64,
    sequence: u64,
}

impl TryFrom<ModelFile> for Model {
    type Error = &'static str;

    fn try_from(file: ModelFile) -> Result<Model, Self::Error> {
        let architecture = match (file.kv_heads, file.mlp) {
            (None, None) => Architecture::Gpt,
            (Some(kv_heads), Some(mlp)) => Architecture::Llama { kv_heads, mlp },
            (Some(_), None) => return Err("kv_heads is for a Llama: add mlp, the width of its MLP"),
            (None, Some(_)) => return Err("mlp is for a Llama: add kv_heads, its heads of keys and values"),
        };
        let ModelFile { name, layers, hidden, heads, vocab, sequence, .. } = file;
        Ok(Model { name, architecture, layers, hidden, heads, vocab, sequence })
    }
}

/// Without a name, and with sequences that fill the context.
impl From<ModelConfig> for Model {
    fn from(config: ModelConfig) -> Model {
        let (architecture, sizes) = match config {
            ModelConfig::Gpt(GptConfig { layers, hidden, heads, vocab, context, .. }) => {
                (Architecture::Gpt, [layers, hidden, heads, vocab, context])
            }
            ModelConfig::Llama(LlamaConfig {
                layers, hidden, heads, kv_heads, mlp, vocab, context, ..
            }) => {
                let [kv_heads, mlp] = [kv_heads, mlp].map(i64::unsigned_abs);
                (Architecture::Llama { kv_heads, mlp }, [layers, hidden, heads, vocab, context])
            }
        };
        let [layers, hidden, heads, vocab, sequence] = sizes.map(i64::unsigned_abs);
        Model { name: String::new(), architecture, layers, hidden, heads, vocab, sequence }
    }
}

/// No argument may be larger, so that products of a few of them stay far from the limits of 64 bits.
const LARGEST: u64 = 1 << 24;

impl Model {
    /// Checks that each number is in range.
    ///
    /// # Errors
    /// Names the first that is not.
    pub(crate) fn check(&self) -> Result<()> {
        let Model { architecture, layers, hidden, heads, vocab, sequence, .. } = *self;
        let mut numbers = vec![
            ("layers", layers),
            ("hidden", hidden),
            ("heads", heads),
            ("vocab", vocab),
            ("sequence", sequence),
        ];
        if let Architecture::Llama { kv_heads, mlp } = architecture {
            numbers.extend([("kv_heads", kv_heads), ("mlp", mlp)]);
        }
        for (name, value) in numbers {
            ensure!((1..=LARGEST).contains(&value), "{name} is {value}; it must be from 1 to {LARGEST}");
        }
        ensure!(hidden.is_multiple_of(heads), "hidden {hidden} is not a multiple of heads {heads}");
        if let Architecture::Llama { kv_heads, .. } = architecture {
            ensure!(
                hidden.is_multiple_of(2 * heads),
                "hidden {hidden} is not a multiple of twice heads {heads}: a Llama's head turns pairs of numbers"
            );
            ensure!(heads.is_multiple_of(kv_heads), "heads {heads} is not a multiple of kv_heads {kv_heads}");
        }
        Ok(())
    }

    /// Width of a layer's keys, and of its values.
    pub(crate) fn kv_width(&self) -> u64 {
        match self.architecture {
            Architecture::Gpt => self.hidden,
            Architecture::Llama { kv_heads, .. } => kv_heads * (self.hidden / self.heads),
        }
    }

    /// Of a GPT `12 l h^2 (1 + 13 / 12h + (V + s) / 12lh)`; of a Llama its matrices, twice `V h`, and `(2l + 1) h` for norms.
    pub(crate) fn parameters(&self) -> f64 {
        let [layers, hidden, vocab, sequence] =
            [self.layers, self.hidden, self.vocab, self.sequence].map(|size| size as f64);
        let others = match self.architecture {
            Architecture::Gpt => 13.0 * layers + vocab + sequence,
            Architecture::Llama { .. } => 2.0 * layers + 1.0 + 2.0 * vocab,
        };
        self.layer_weights() * layers + others * hidden
    }

    /// Weights of a layer's matrices: four of a GPT, seven of a Llama.
    pub(crate) fn layer_weights(&self) -> f64 {
        let hidden = self.hidden as f64;
        match self.architecture {
            Architecture::Gpt => 12.0 * hidden * hidden,
            Architecture::Llama { mlp, .. } => {
                hidden * (2.0 * hidden + 2.0 * self.kv_width() as f64 + 3.0 * mlp as f64)
            }
        }
    }

    /// Floating-point operations of the forward pass of one sequence: two per token for each weight of the layers and
    /// of the head, and `4 s^2 h` a layer in attention. For a GPT that is `24 s l h^2 (1 + s / 6h) + 2 s h V`, as Megatron-LM counts.
    pub(crate) fn forward_flops(&self) -> f64 {
        let [layers, hidden, vocab, sequence] =
            [self.layers, self.hidden, self.vocab, self.sequence].map(|size| size as f64);
        let token = layers * (2.0 * self.layer_weights() + 4.0 * sequence * hidden) + 2.0 * hidden * vocab;
        sequence * token
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> Model {
        let architecture = Architecture::Gpt;
        Model { name: String::new(), architecture, layers: 4, hidden: 64, heads: 8, vocab: 100, sequence: 16 }
    }

    #[test]
    fn operations_with_recomputation_are_those_of_megatron_lm() {
        let Model { layers, hidden, vocab, sequence, .. } = model();
        let (l, h, v, s) = (layers as f64, hidden as f64, vocab as f64, sequence as f64);
        let megatron = 96.0 * s * l * h * h * (1.0 + s / (6.0 * h) + v / (16.0 * l * h));
        // Forward twice and backward, which is two forward; the head's forward only once.
        let ours = 4.0 * model().forward_flops() - 2.0 * s * h * v;
        assert!((ours / megatron - 1.0).abs() < 1e-12);
    }

    #[test]
    fn a_llama_has_the_parameters_and_operations_of_the_one_that_is_trained() {
        for name in LlamaConfig::PRESETS {
            let config = LlamaConfig::preset(name).unwrap();
            let parameters = config.parameters() as f64;
            // Of forward and backward, and so of three times forward.
            let flops = config.flops_per_token(config.context) as f64 * config.context as f64;
            let model = Model::from(ModelConfig::from(config));
            assert_eq!(model.parameters(), parameters, "{name}");
            assert_eq!(3.0 * model.forward_flops(), flops, "{name}");
        }
    }

    #[test]
    fn a_model_out_of_range_is_named() {
        let llama = |kv_heads, mlp| Model { architecture: Architecture::Llama { kv_heads, mlp }, ..model() };
        let wrong = [
            (Model { layers: 0, ..model() }, "layers is 0"),
            (Model { vocab: u64::MAX, ..model() }, "vocab is"),
            (Model { heads: 7, ..model() }, "heads 7"),
            (Model { heads: 64, ..llama(2, 96) }, "twice heads 64"),
            (llama(3, 96), "kv_heads 3"),
            (llama(0, 96), "kv_heads is 0"),
            (llama(2, u64::MAX), "mlp is"),
        ];
        for (model, expected) in wrong {
            let error = model.check().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
