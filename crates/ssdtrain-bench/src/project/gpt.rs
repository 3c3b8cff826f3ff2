//! What the GPT of this project saves for backward.

use super::model::Model;
use super::saved::{Precision, SavedBytes};

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

/// Bytes of a number in 32 bits.
const SINGLE: f64 = 4.0;

/// Bytes of a token's id.
const TOKEN_ID: f64 = 8.0;

#[cfg(test)]
mod tests {
    use ssdtrain::{Offload, StepReport, TensorCache};
    use ssdtrain_models::{Gpt, GptConfig, LanguageModel};
    use tch::nn::VarStore;
    use tch::{Device, Kind, Tensor};

    use super::*;

    /// By hand, for one token: 2 bytes each for sixteen times 8 numbers, two norms, a sum for each of two heads.
    #[test]
    fn a_layer_is_sixteen_streams() {
        let model = Model { name: String::new(), layers: 1, hidden: 8, heads: 2, vocab: 10, sequence: 1 };
        let precision = Precision { number_bytes: 2, fused_attention: true, dropout: false };
        let bytes = saved(&model, &precision);
        assert_eq!(bytes, SavedBytes { layer: 256.0 + 16.0 + 8.0, ends: 52.0 + 8.0 + 16.0 });
        let masked = saved(&model, &Precision { dropout: true, ..precision });
        assert_eq!((masked.layer - bytes.layer, masked.ends - bytes.ends), (16.0, 8.0));
    }

    /// What a step of `batch` sequences actually saved: each storage once, and no parameters.
    fn measured(model: &Model, kind: Kind, batch: i64) -> StepReport {
        let mut vs = VarStore::new(Device::Cpu);
        vs.set_kind(kind);
        let [layers, heads, hidden, vocab, context] =
            [model.layers, model.heads, model.hidden, model.vocab, model.sequence].map(|size| size as i64);
        let config =
            GptConfig { vocab, context, layers, heads, hidden, dropout: 0.0, tied: true, bias: true };
        let gpt = Gpt::new(&vs.root(), config).unwrap();
        let place = tempfile::tempdir().unwrap();
        let builder = TensorCache::builder().policy(Offload::default()).spill_to(place.path());
        let cache = builder.parameters(&vs).min_bytes(0).build().unwrap();
        let tokens = || Tensor::randint(vocab, [batch, context], (Kind::Int64, Device::Cpu));
        let (inputs, targets) = (tokens(), tokens());
        let step = cache.step();
        let loss = gpt.loss(&inputs, &targets, true).unwrap();
        step.backward(&loss).unwrap();
        step.finish().unwrap()
    }

    #[test]
    fn a_step_on_the_cpu_saves_what_the_formula_says() {
        let shapes = [
            (
                Model { name: "a".into(), layers: 2, hidden: 64, heads: 4, vocab: 256, sequence: 64 },
                Kind::Float,
                4,
            ),
            (
                Model { name: "b".into(), layers: 3, hidden: 96, heads: 2, vocab: 50, sequence: 48 },
                Kind::Float,
                2,
            ),
            (
                Model { name: "c".into(), layers: 4, hidden: 128, heads: 8, vocab: 1000, sequence: 96 },
                Kind::BFloat16,
                3,
            ),
        ];
        for (model, kind, batch) in shapes {
            let report = measured(&model, kind, batch);
            let number_bytes = kind.elt_size_in_bytes() as u64;
            let precision = Precision { number_bytes, fused_attention: true, dropout: false };
            let SavedBytes { layer, ends } = saved(&model, &precision);
            let formula = batch as f64 * (layer * model.layers as f64 + ends);
            let unique = report.saved.bytes - report.deduplicated.bytes - report.kept.parameters.bytes;
            let ratio = unique as f64 / formula;
            assert!((0.95..=1.05).contains(&ratio), "{}: {ratio}", model.name);
        }
    }
}
