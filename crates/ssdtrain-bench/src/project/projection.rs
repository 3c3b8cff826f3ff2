//! Whether offloading a training run's activations to SSDs is viable: how fast the disks must write, and how long
//! they last.
//!
//! This is the model of section 5.3.6 of the SSDTrain work. A step takes three times its forward pass, and half of it
//! may be spent on writing: bandwidth is activation bytes divided by half a step, and the SSDs of a GPU last for as
//! many steps as their lifetime writes hold its activations. All of it is pure; `project` itself reads arguments and
//! prints.

use anyhow::Result;

use super::endurance::{Array, SECONDS_PER_YEAR};
use super::largest_micro_batch::LargestMicroBatch;
use super::scenario::Scenario;

/// What offloading all activations of a [`Scenario`] requires of the SSDs of one GPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Projection {
    /// Bytes that a GPU saves for backward in a step: the mean over pipeline stages.
    pub(crate) activation_bytes: f64,
    /// Seconds of a step's forward passes.
    pub(crate) forward_s: f64,
    /// Seconds of a step.
    pub(crate) step_s: f64,
    /// Bytes per second to be written to the SSDs of a GPU.
    pub(crate) write_bytes_per_s: f64,
    /// Years of training until they have written as much as they are rated for.
    pub(crate) lifespan_years: f64,
    /// The largest micro-batch that fits when only two layers are in memory; `None` if not even one sequence does.
    pub(crate) room: Option<LargestMicroBatch>,
}

/// A step takes this many times its forward pass: backward costs two of them.
const STEP_TO_FORWARD: f64 = 3.0;

/// The share of a step in which activations are written: writing may continue into early backward.
const WRITING_SHARE: f64 = 0.5;

impl Scenario {
    /// Projects the run onto `ssds`, those of one GPU.
    ///
    /// # Errors
    /// If the parallelism does not fit the model, the batch, or the implementation, or the precision not the model.
    pub(crate) fn project(&self, ssds: &Array) -> Result<Projection> {
        self.parallelism.check(&self.model, &self.batch)?;
        self.precision.check(&self.model)?;
        self.implementation.check(&self.parallelism, &self.precision)?;
        let activation_bytes = self.batch.per_replica(&self.parallelism) * self.sequence_bytes();
        let flops = self.model.forward_flops() * self.batch.global as f64;
        let forward_s = flops / (self.parallelism.gpus as f64 * self.flops_per_s);
        let step_s = STEP_TO_FORWARD * forward_s;
        Ok(Projection {
            activation_bytes,
            forward_s,
            step_s,
            write_bytes_per_s: activation_bytes / (WRITING_SHARE * step_s),
            lifespan_years: ssds.lifetime_writes() * step_s / activation_bytes / SECONDS_PER_YEAR,
            room: LargestMicroBatch::of(self),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::endurance::Ssd;
    use super::super::model::{Architecture, Model};
    use super::super::parallelism::{Batch, Parallelism};
    use super::super::presets::{Preset, Run};
    use super::*;

    fn array() -> Array {
        Array { ssd: Ssd::named("d7-p5620-12.8tb").unwrap(), count: 4, waf: 1.0, retention_relaxation: 1.0 }
    }

    fn projections(preset: Preset) -> Vec<(Run, Projection)> {
        preset
            .runs()
            .into_iter()
            .map(|run| {
                let projection = run.scenario.project(&array()).unwrap();
                (run, projection)
            })
            .collect()
    }

    /// Section 5.3.6: more than three years, and at most 12.1 GB/s, in every case.
    #[test]
    fn the_papers_bounds_hold_for_its_configurations() {
        for (run, projection) in projections(Preset::MegatronA100) {
            assert!(projection.lifespan_years > 3.0, "{}: {projection:?}", run.label());
            assert!(projection.write_bytes_per_s <= 12.1e9, "{}: {projection:?}", run.label());
        }
    }

    /// Section 5.3.6: the larger the system, and the larger the model, the less bandwidth and the longer the lifespan.
    #[test]
    fn bandwidth_falls_and_lifespan_rises_with_the_number_of_gpus_and_with_the_model() {
        let all = projections(Preset::MegatronA100);
        let rank = |run: &Run| {
            let series = all.iter().filter(|(other, _)| other.series == run.series);
            series.take_while(|(other, _)| other.label() != run.label()).count()
        };
        let mut compared = 0;
        for (small, of_small) in &all {
            for (large, of_large) in &all {
                let (left, right) = (&small.scenario, &large.scenario);
                let more_gpus =
                    small.series == large.series && left.parallelism.gpus < right.parallelism.gpus;
                let larger_model = left.parallelism.zero == right.parallelism.zero
                    && left.model.hidden < right.model.hidden
                    && rank(small) == rank(large);
                if more_gpus || larger_model {
                    compared += 1;
                    let (small, large) = (small.label(), large.label());
                    assert!(of_large.write_bytes_per_s < of_small.write_bytes_per_s, "{small}, {large}");
                    assert!(of_large.lifespan_years > of_small.lifespan_years, "{small}, {large}");
                }
            }
        }
        // Three pairs of sizes in each of four series, and three pairs of models in each of two schemes.
        assert_eq!(compared, 4 * 3 + 2 * 3);
    }

    /// The paper's bounds are those of large models: they do not hold for small ones.
    #[test]
    fn growing_models_need_ever_less_bandwidth() {
        let all = projections(Preset::MegatronA100Weak);
        let bandwidths: Vec<_> = all.iter().map(|(_, projection)| projection.write_bytes_per_s).collect();
        assert!(bandwidths.is_sorted_by(|small, large| small > large), "{bandwidths:?}");
        let lasting = all.iter().filter(|(_, projection)| projection.lifespan_years > 3.0);
        let names: Vec<_> = lasting.map(|(run, _)| run.scenario.model.name.as_str()).collect();
        assert_eq!(names[0], "megatron-76.1b", "{names:?}");
        assert_eq!(bandwidths.iter().filter(|&&bandwidth| bandwidth <= 12.1e9).count(), 4);
    }

    /// Section 5.4.4: with retention relaxed to a day, four Samsung 980 PRO of 1 TB last more than two years.
    #[test]
    fn cheap_ssds_last_two_years_with_relaxed_retention() {
        let ssd = Ssd::named("980-pro-1tb").unwrap();
        for run in Preset::MegatronA100.runs() {
            let years = |retention_relaxation| {
                let ssds = Array { ssd: ssd.clone(), retention_relaxation, ..array() };
                run.scenario.project(&ssds).unwrap().lifespan_years
            };
            assert!(years(86.0) > 2.0 && years(1.0) < 2.0, "{}", run.label());
        }
    }

    /// By hand: 175 billion parameters on 384 GPUs, tensors over 8 and pipeline over 12.
    #[test]
    fn the_largest_bandwidth_is_that_computed_by_hand() {
        let (run, projection) = projections(Preset::MegatronA100).swap_remove(6);
        assert_eq!(run.label(), "175B TP8 PP12, 384 GPUs");
        // 34 bytes for each of 2048 x 12288 numbers and 4 for each head's row sum; eight layers and an eighth of each.
        let layers = 2048.0 * (34.0 * 12288.0 + 4.0 * 96.0);
        // Dropout's mask, the last norm, the head's input, and logits in 32 bits; a twelfth of an eighth of it.
        let ends = 2048.0 * (12288.0 * 5.0 + 4.0 * 51200.0) / 96.0;
        // 1536 sequences are 384 for each of the four replicas.
        let bytes = 384.0 * (layers + ends);
        assert!((projection.activation_bytes / bytes - 1.0).abs() < 1e-12, "{projection:?}");
        let layer_flops = 24.0 * 2048.0 * 12288_f64.powi(2) * (1.0 + 2048.0 / (6.0 * 12288.0));
        let flops = 1536.0 * (96.0 * layer_flops + 2.0 * 2048.0 * 12288.0 * 51200.0);
        let forward = flops / (384.0 * 153e12);
        assert!((projection.forward_s / forward - 1.0).abs() < 1e-12);
        assert!((projection.write_bytes_per_s / (bytes / (1.5 * forward)) - 1.0).abs() < 1e-12);
    }

    fn scenarios() -> impl Strategy<Value = Scenario> {
        let shape = (1_u64..=16, 1_u64..=64, 1_u64..=8, 1_u64..=4096);
        let split = (0_u32..=3, 0_u32..=2, 1_u64..=64, any::<[bool; 3]>());
        (shape, split, 1_u64..=4, 1_u64..=8, 1e12..1e15_f64).prop_map(
            |((stages, heads, width, sequence), (tensor, pipeline, replicas, flags), micro, parts, flops)| {
                let (tensor, pipeline) = (1 << tensor, 1 << pipeline);
                let mut scenario = Preset::MegatronA100.runs().swap_remove(0).scenario;
                scenario.model = Model {
                    name: "any".to_owned(),
                    architecture: Architecture::Gpt,
                    layers: pipeline * stages,
                    hidden: 8 * heads * width * 16,
                    heads: 8 * heads,
                    vocab: 51_200,
                    sequence,
                };
                let gpus = tensor * pipeline * replicas;
                let [sequence_parallel, zero, dropout] = flags;
                scenario.parallelism = Parallelism { tensor, pipeline, gpus, sequence_parallel, zero };
                scenario.batch = Batch { micro, global: micro * parts * replicas };
                scenario.precision.dropout = dropout;
                scenario.flops_per_s = flops;
                scenario
            },
        )
    }

    proptest! {
        /// The disks are written to for half of the time, at the bandwidth, until their rating is used up.
        #[test]
        fn lifespan_times_half_the_bandwidth_is_lifetime_writes(scenario in scenarios()) {
            let projection = scenario.project(&array()).unwrap();
            let written = projection.lifespan_years * SECONDS_PER_YEAR * projection.write_bytes_per_s / 2.0;
            prop_assert!((written / array().lifetime_writes() - 1.0).abs() < 1e-9);
        }

        #[test]
        fn faster_gpus_need_more_bandwidth_and_wear_disks_faster(scenario in scenarios(), factor in 1.01..10.0_f64) {
            let faster = Scenario { flops_per_s: factor * scenario.flops_per_s, ..scenario.clone() };
            let (slow, fast) = (scenario.project(&array()).unwrap(), faster.project(&array()).unwrap());
            prop_assert!((fast.write_bytes_per_s / slow.write_bytes_per_s / factor - 1.0).abs() < 1e-9);
            prop_assert!((slow.lifespan_years / fast.lifespan_years / factor - 1.0).abs() < 1e-9);
        }

        /// Twice the batch is twice the bytes in twice the time.
        #[test]
        fn bandwidth_does_not_hang_on_the_batch(scenario in scenarios()) {
            let mut larger = scenario.clone();
            larger.batch.global *= 2;
            let (one, two) = (scenario.project(&array()).unwrap(), larger.project(&array()).unwrap());
            prop_assert!((two.activation_bytes / one.activation_bytes / 2.0 - 1.0).abs() < 1e-9);
            prop_assert!((two.write_bytes_per_s / one.write_bytes_per_s - 1.0).abs() < 1e-9);
        }

        #[test]
        fn splitting_sequences_too_never_adds_bytes(scenario in scenarios()) {
            let mut split = scenario.clone();
            split.parallelism.sequence_parallel = true;
            let (any, split) = (scenario.project(&array()).unwrap(), split.project(&array()).unwrap());
            prop_assert!(split.activation_bytes <= any.activation_bytes * (1.0 + 1e-12));
        }
    }
}
