//! What the Llama of this project saves for backward.

use super::model::Model;
use super::saved::{Precision, SINGLE, SavedBytes, TOKEN_ID};

/// Sizes are numbers per token, with `h` as the width of the residual stream, `k` as that of keys and of values, and `m`
/// as that of the MLP (`mlp`); storages that are saved twice count once.
///
/// | saved by | what | numbers |
/// |---|---|---|
/// | norm before attention | its input; the same divided by its root mean square | h in 32 bits, h |
/// | projections to query, key and value | the norm's output | h |
/// | attention | query and key after the rotary embedding; value; its output | h + k, k, h |
/// | output projection | attention's output again | - |
/// | norm before the MLP | as before attention | h in 32 bits, h |
/// | projections to gate and up | the norm's output | h |
/// | SwiGLU | gate, SiLU of the gate, and up | m, m, m |
/// | projection down | SwiGLU's output | m |
/// | norm before the head | as before attention | h in 32 bits, h |
/// | head | the norm's output | h |
/// | loss | log-probabilities | V in 32 bits |
///
/// A norm's input is the residual stream itself, or its copy in 32 bits. Besides, in 32 bits, the reciprocal of a root mean square
/// for each norm and, for each head, a row's sum; in 64 bits token ids and targets. The rotary embedding itself saves only its
/// cosines and sines, which are the model's.
pub(crate) fn saved(model: &Model, mlp: u64, precision: &Precision) -> SavedBytes {
    let [hidden, heads, kv, mlp, vocab] =
        [model.hidden, model.heads, model.kv_width(), mlp, model.vocab].map(|size| size as f64);
    let number = precision.number_bytes as f64;
    // With its output, which what follows saves.
    let norm = (2.0 * number + SINGLE) * hidden + SINGLE;
    let layer = 2.0 * norm + (2.0 * hidden + 2.0 * kv + 4.0 * mlp) * number + heads * SINGLE;
    let ends = norm + vocab * SINGLE + 2.0 * TOKEN_ID;
    let sequence = model.sequence as f64;
    SavedBytes { layer: sequence * layer, ends: sequence * ends }
}

#[cfg(test)]
mod tests {
    use ssdtrain_models::{LlamaConfig, ModelConfig};
    use tch::Kind;

    use super::super::measured::measured_bytes;
    use super::*;

    fn config(
        [heads, kv_heads]: [i64; 2],
        layers: i64,
        hidden: i64,
        mlp: i64,
        context: i64,
        vocab: i64,
    ) -> LlamaConfig {
        LlamaConfig { vocab, context, layers, heads, kv_heads, hidden, mlp, rotary_base: 1e4 }
    }

    /// By hand, for one token: streams of 8 numbers, a key and a value of 4 each, and an MLP of 12.
    #[test]
    fn keys_are_as_narrow_as_their_heads_and_the_mlp_as_wide_as_given() {
        let model = Model::from(ModelConfig::from(config([2, 1], 1, 8, 12, 1, 10)));
        let precision = Precision { number_bytes: 2, fused_attention: true, dropout: false };
        let norm = 2.0 * 16.0 + 4.0 * 8.0 + 4.0;
        let layer = 2.0 * norm + 2.0 * (16.0 + 8.0 + 48.0) + 8.0;
        assert_eq!(saved(&model, 12, &precision), SavedBytes { layer, ends: norm + 40.0 + 16.0 });
    }

    /// Apart from two numbers of the loss: how many targets count, and what they weigh together.
    #[test]
    fn a_step_on_the_cpu_saves_what_the_formula_says() {
        let shapes = [
            (config([4, 2], 2, 64, 200, 64, 256), Kind::Float, 4),
            (config([2, 2], 3, 96, 256, 48, 50), Kind::Float, 2),
            (config([8, 2], 4, 128, 320, 96, 1000), Kind::BFloat16, 3),
        ];
        for (config, kind, batch) in shapes {
            let mlp = config.mlp as u64;
            let config = ModelConfig::from(config);
            let model = Model::from(config.clone());
            let number_bytes = kind.elt_size_in_bytes() as u64;
            let precision = Precision { number_bytes, fused_attention: true, dropout: false };
            let SavedBytes { layer, ends } = saved(&model, mlp, &precision);
            let formula = batch as f64 * (layer * model.layers as f64 + ends);
            let difference = measured_bytes(&config, kind, batch) as f64 - formula;
            assert!((0.0..=8.0).contains(&difference), "{model:?}: {formula}, {difference} more measured");
        }
    }
}
