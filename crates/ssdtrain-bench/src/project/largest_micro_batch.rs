//! The largest micro-batch that offloading makes room for.

use super::scenario::Scenario;

/// What fits when GPU memory holds only the activations of two layers and of the ends at a time: the upper end of
/// section 5.3.6. With pipeline parallelism the batch size stays the same, and there must still be a micro-batch for
/// each stage; without it, the batch grows with the micro-batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LargestMicroBatch {
    /// Sequences.
    pub(crate) micro_batch: u64,
    /// Bytes that a GPU saves in a step with such micro-batches, as many as there are pipeline stages.
    pub(crate) activation_bytes: f64,
}

/// Bytes of weight, gradient and Adam's states for each parameter in mixed precision: 2 and 2, and 12 for the 32-bit copy, mean and
/// variance (Rajbhandari et al., "ZeRO").
const STATE_BYTES: f64 = 16.0;

/// Bytes of a weight in 16 bits.
const WEIGHT_BYTES: f64 = 2.0;

/// Layers whose activations are in memory at the same time.
const LAYERS_IN_MEMORY: f64 = 2.0;

impl LargestMicroBatch {
    /// `None` if not even one sequence fits.
    pub(crate) fn of(scenario: &Scenario) -> Option<LargestMicroBatch> {
        let Scenario { model, gpu, parallelism, precision, implementation, .. } = scenario;
        let spread =
            if parallelism.zero { parallelism.gpus } else { parallelism.tensor * parallelism.pipeline };
        let states = STATE_BYTES * model.parameters() / spread as f64;
        // ZeRO gathers the weights of the current layer and of the next one.
        let gathered = LAYERS_IN_MEMORY * WEIGHT_BYTES * model.layer_weights() / parallelism.tensor as f64;
        let weights = states + if parallelism.zero { gathered } else { 0.0 };
        let bytes = implementation.bytes(model, parallelism, precision);
        let resident = LAYERS_IN_MEMORY * bytes.layer + bytes.ends;
        let pipeline = parallelism.pipeline as f64;
        let by_memory = (gpu.memory_bytes() - weights) / resident;
        let by_batch = scenario.batch.per_replica(parallelism) / pipeline;
        let micro_batch = if pipeline > 1.0 { by_memory.min(by_batch) } else { by_memory }.floor();
        (micro_batch >= 1.0).then(|| LargestMicroBatch {
            micro_batch: micro_batch as u64,
            activation_bytes: micro_batch * pipeline * scenario.sequence_bytes(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::presets::Preset;
    use super::*;

    fn scenario(index: usize) -> Scenario {
        Preset::MegatronA100.runs().swap_remove(index).scenario
    }

    #[test]
    fn more_memory_makes_more_room_and_too_little_makes_none() {
        for mut scenario in (0..6).map(scenario) {
            let room = LargestMicroBatch::of(&scenario).unwrap();
            scenario.gpu.memory_gib *= 2.0;
            assert!(LargestMicroBatch::of(&scenario).unwrap().micro_batch > 2 * room.micro_batch);
            scenario.gpu.memory_gib = 1.0;
            assert_eq!(LargestMicroBatch::of(&scenario), None);
        }
    }

    /// By hand: 175 billion parameters on 384 GPUs take 7.3 GB of each, and 7.2 GB for two layers brought together. That leaves 71.3
    /// of 85.9 GB; two layers take 1.71 GB a sequence, the ends 0.55 GB.
    #[test]
    fn room_is_what_weights_leave() {
        assert_eq!(LargestMicroBatch::of(&scenario(0)).unwrap().micro_batch, 31);
    }

    /// Section 5.3.6 has micro-batches of eight to 32.
    #[test]
    fn a_pipeline_stays_filled() {
        let largest: Vec<_> =
            (6..12).map(|index| LargestMicroBatch::of(&scenario(index)).unwrap().micro_batch).collect();
        assert_eq!(largest, [32, 16, 8, 32, 16, 8]);
    }
}
