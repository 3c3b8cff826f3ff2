//! What is trained.

use anyhow::{Result, ensure};
use serde::Deserialize;

/// A decoder-only transformer whose MLP is four times as wide as its residual stream.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Model {
    #[serde(default)]
    pub(crate) name: String,
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

/// No argument may be larger, so that products of a few of them stay far from the limits of 64 bits.
const LARGEST: u64 = 1 << 24;

impl Model {
    /// Checks that each number is in range.
    ///
    /// # Errors
    /// Names the first that is not.
    pub(crate) fn check(&self) -> Result<()> {
        let Model { layers, hidden, heads, vocab, sequence, .. } = *self;
        for (name, value) in [
            ("layers", layers),
            ("hidden", hidden),
            ("heads", heads),
            ("vocab", vocab),
            ("sequence", sequence),
        ] {
            ensure!((1..=LARGEST).contains(&value), "{name} is {value}; it must be from 1 to {LARGEST}");
        }
        ensure!(hidden.is_multiple_of(heads), "hidden {hidden} is not a multiple of heads {heads}");
        Ok(())
    }

    /// Parameters, the head sharing the embedding's: `12 l h^2 (1 + 13 / 12h + (V + s) / 12lh)`.
    pub(crate) fn parameters(&self) -> f64 {
        let (layers, hidden) = (self.layers as f64, self.hidden as f64);
        self.layer_weights() * layers + 13.0 * layers * hidden + (self.vocab + self.sequence) as f64 * hidden
    }

    /// Weights of a layer's four matrices.
    pub(crate) fn layer_weights(&self) -> f64 {
        12.0 * (self.hidden as f64).powi(2)
    }

    /// Floating-point operations of the forward pass of one sequence: `24 s l h^2 (1 + s / 6h)` in the layers and `2 s h V` in
    /// the head, as Megatron-LM counts them.
    pub(crate) fn forward_flops(&self) -> f64 {
        let (sequence, hidden) = (self.sequence as f64, self.hidden as f64);
        let layer = 2.0 * sequence * self.layer_weights() * (1.0 + sequence / (6.0 * hidden));
        layer * self.layers as f64 + 2.0 * sequence * hidden * self.vocab as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> Model {
        Model { name: String::new(), layers: 4, hidden: 64, heads: 8, vocab: 100, sequence: 16 }
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
    fn a_model_out_of_range_is_named() {
        let wrong = [
            (Model { layers: 0, ..model() }, "layers is 0"),
            (Model { vocab: u64::MAX, ..model() }, "vocab is"),
            (Model { heads: 7, ..model() }, "heads 7"),
        ];
        for (model, expected) in wrong {
            let error = model.check().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
