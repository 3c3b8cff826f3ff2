//! What Megatron-LM's layers save for backward.

use super::model::{Architecture, Model};
use super::parallelism::Parallelism;
use super::saved::{Precision, SavedBytes};

/// In 16 bits, for each layer of a GPT with dropout and scores: `s h (10 + 24 / t + 5 a s / h t)`.
///
/// The 10 are the inputs of two norms, of the projection to query, key and value and of the MLP, and two masks; the 24 are query, key,
/// value, the output projection's input, and both sides of GELU. Splitting sequences, too, divides the 10 by `t`.
///
/// A Llama is counted in the same way; with fused attention it has `8 s h + s (4 h + 4 k + 6 m + 4 a) / t`, where `k` is the width of
/// keys and of values, and `m` that of the MLP. The 8 are the inputs that a GPT has too. Split are query and the output
/// projection's input, key and value, gate and up (SwiGLU is one kernel), and SwiGLU's output. Where scores are saved, keys
/// and values were repeated for each head of queries.
pub(crate) fn saved(model: &Model, parallelism: &Parallelism, precision: &Precision) -> SavedBytes {
    let (sequence, hidden, heads) = (model.sequence as f64, model.hidden as f64, model.heads as f64);
    let number = precision.number_bytes as f64;
    let mask = if precision.dropout { 1.0 } else { 0.0 };
    let tensor = parallelism.tensor as f64;
    let copies = if parallelism.sequence_parallel { 1.0 / tensor } else { 1.0 };

    let stream = sequence * hidden;
    let copied = stream * (4.0 * number + 2.0 * mask);
    let kv = if precision.fused_attention { model.kv_width() } else { model.hidden };
    let mlp = match model.architecture {
        // Both sides of GELU.
        Architecture::Gpt => 8.0 * hidden,
        Architecture::Llama { mlp, .. } => 3.0 * mlp as f64,
    };
    let split = sequence * (2.0 * hidden + 2.0 * kv as f64 + mlp) * number;
    let attention = if precision.fused_attention {
        // The logarithm of the sum of a row's exponentials, in 32 bits.
        4.0 * heads * sequence
    } else {
        // Softmax's output; with dropout also its mask and its result.
        heads * sequence * sequence * (number + mask * (1.0 + number))
    };
    // Dropout's mask after the embedding; inputs of the last norm and the head; the logits, in 32 bits.
    let ends_copied = stream * (mask + 2.0 * number);
    let logits = 4.0 * sequence * model.vocab as f64;
    SavedBytes {
        layer: copied * copies + (split + attention) / tensor,
        ends: ends_copied * copies + logits / tensor,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HALF: Precision = Precision { number_bytes: 2, fused_attention: false, dropout: true };

    /// GPT-3 in the shape of the paper that counts it.
    fn model() -> Model {
        let (architecture, name) = (Architecture::Gpt, String::new());
        Model { name, architecture, layers: 96, hidden: 12_288, heads: 96, vocab: 51_200, sequence: 2_048 }
    }

    fn layer(tensor: u64, sequence_parallel: bool, precision: Precision) -> f64 {
        let parallelism = Parallelism { tensor, pipeline: 1, gpus: tensor, sequence_parallel, zero: false };
        saved(&model(), &parallelism, &precision).layer
    }

    /// The table of Korthikanti et al., with `5 a s / h = 80` here.
    #[test]
    fn a_layer_saves_what_has_been_counted() {
        let stream = 2_048.0 * 12_288.0;
        assert_eq!(layer(1, false, HALF), stream * (34.0 + 80.0));
        assert_eq!(layer(8, false, HALF), stream * (10.0 + 24.0 / 8.0 + 80.0 / 8.0));
        assert_eq!(layer(8, true, HALF), stream * (34.0 + 80.0) / 8.0);
    }

    /// By hand, for Llama 3 of 8 billion parameters: keys and values of 1,024 numbers each, an MLP of 14,336.
    #[test]
    fn a_llamas_layer_is_counted_alike() {
        let architecture = Architecture::Llama { kv_heads: 8, mlp: 14_336 };
        let llama = Model { architecture, layers: 32, hidden: 4_096, heads: 32, ..model() };
        let layer = |tensor, sequence_parallel, fused_attention| {
            let parallelism =
                Parallelism { tensor, pipeline: 1, gpus: tensor, sequence_parallel, zero: false };
            let precision = Precision { number_bytes: 2, fused_attention, dropout: false };
            saved(&llama, &parallelism, &precision).layer / 2_048.0
        };
        let copied = 2.0 * 4.0 * 4_096.0;
        let split = 2.0 * (2.0 * 4_096.0 + 2.0 * 1_024.0 + 3.0 * 14_336.0) + 4.0 * 32.0;
        assert_eq!(layer(1, false, true), copied + split);
        assert_eq!(layer(8, false, true), copied + split / 8.0);
        assert_eq!(layer(8, true, true), (copied + split) / 8.0);
        let scores = 2.0 * 32.0 * 2_048.0;
        let widened = 2.0 * 2.0 * (4_096.0 - 1_024.0);
        assert_eq!(layer(1, false, false) - layer(1, false, true), scores + widened - 4.0 * 32.0);
    }

    #[test]
    fn fused_attention_saves_a_number_for_each_row_of_scores() {
        let fused = Precision { fused_attention: true, ..HALF };
        let stream = 2_048.0 * 12_288.0;
        assert_eq!(layer(8, true, fused), (stream * 34.0 + 4.0 * 96.0 * 2_048.0) / 8.0);
    }

    #[test]
    fn masks_take_a_byte_and_numbers_their_own_size() {
        let plain = Precision { dropout: false, ..HALF };
        let single = Precision { number_bytes: 4, ..plain };
        assert_eq!(layer(8, true, single), 2.0 * layer(8, true, plain));
        // Two masks on the stream; one on the scores, and what is left of them.
        let (stream, scores) = (2_048.0 * 12_288.0, 96.0 * 2_048.0 * 2_048.0);
        assert_eq!(layer(1, false, HALF) - layer(1, false, plain), 2.0 * stream + 3.0 * scores);
    }
}
