//! What the GPT of this project saves for backward.

use super::model::Model;
use super::saved::{Precision, SINGLE, SavedBytes, TOKEN_ID};

/// Sizes are numbers per token, with `h` as the width of the residual stream; storages that are saved twice count
/// once.
///
/// | saved by | what | numbers |
/// |---|---|---|
/// | norm before attention | the residual stream | h |
/// | projection to query, key and value | the norm's output | h |
/// | attention | query, key and value, views of one storage; its output | 3h, h |
/// | output projection | attention's output again | - |
/// | norm before the MLP | the residual stream | h |
/// | MLP | the norm's output, GELU's input and output | h, 4h, 4h |
/// | norm before the head | the residual stream | h |
/// | head | the norm's output | h |
/// | loss | log-probabilities | V |
///
/// Besides, in 32 bits, a mean and a deviation for each norm and, for each head, a row's sum; in 64 bits token ids and targets.
/// With dropout, a byte for each number of the stream after the embedding, attention and MLP, as a GPU's fused kernels save it;
/// on the CPU masks are of the numbers' own kind, and attention is not fused.
pub(crate) fn saved(model: &Model, precision: &Precision) -> SavedBytes {
    let (hidden, heads, vocab) = (model.hidden as f64, model.heads as f64, model.vocab as f64);
    let number = precision.number_bytes as f64;
    let mask = if precision.dropout { hidden } else { 0.0 };
    let norm = 2.0 * SINGLE;
    let layer = 16.0 * hidden * number + 2.0 * (norm + mask) + heads * SINGLE;
    let ends = (2.0 * hidden + vocab) * number + norm + mask + 2.0 * TOKEN_ID;
    let sequence = model.sequence as f64;
    SavedBytes { layer: sequence * layer, ends: sequence * ends }
}

#[cfg(test)]
mod tests {
    use ssdtrain_models::{GptConfig, ModelConfig};
    use tch::Kind;

    use super::super::measured::measured_bytes;
    use super::*;

    fn config(layers: i64, hidden: i64, heads: i64, context: i64, vocab: i64) -> GptConfig {
        GptConfig { vocab, context, layers, heads, hidden, dropout: 0.0, tied: true, bias: true }
    }

    /// By hand, for one token: 2 bytes each for sixteen times 8 numbers, two norms, a sum for each of two heads.
    #[test]
    fn a_layer_is_sixteen_streams() {
        let model = Model::from(ModelConfig::from(config(1, 8, 2, 1, 10)));
        let precision = Precision { number_bytes: 2, fused_attention: true, dropout: false };
        let bytes = saved(&model, &precision);
        assert_eq!(bytes, SavedBytes { layer: 256.0 + 16.0 + 8.0, ends: 52.0 + 8.0 + 16.0 });
        let masked = saved(&model, &Precision { dropout: true, ..precision });
        assert_eq!((masked.layer - bytes.layer, masked.ends - bytes.ends), (16.0, 8.0));
    }

    #[test]
    fn a_step_on_the_cpu_saves_what_the_formula_says() {
        let shapes = [
            (config(2, 64, 4, 64, 256), Kind::Float, 4),
            (config(3, 96, 2, 48, 50), Kind::Float, 2),
            (config(4, 128, 8, 96, 1000), Kind::BFloat16, 3),
        ];
        for (config, kind, batch) in shapes {
            let config = ModelConfig::from(config);
            let model = Model::from(config.clone());
            let number_bytes = kind.elt_size_in_bytes() as u64;
            let precision = Precision { number_bytes, fused_attention: true, dropout: false };
            let SavedBytes { layer, ends } = saved(&model, &precision);
            let formula = batch as f64 * (layer * model.layers as f64 + ends);
            let ratio = measured_bytes(&config, kind, batch) as f64 / formula;
            assert!((0.95..=1.05).contains(&ratio), "{model:?}: {ratio}");
        }
    }
}
