//! Configurations that others have measured.

use clap::ValueEnum;

use super::activations::Implementation;
use super::gpu::Gpu;
use super::model::{Architecture, Model};
use super::parallelism::{Batch, Parallelism};
use super::saved::Precision;
use super::scenario::Scenario;

/// A set of measured configurations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Preset {
    /// Those of the SSDTrain paper: 175 and 530 billion parameters on 384 to 2240 A100, with ZeRO-3 and with tensor and pipeline
    /// parallelism
    MegatronA100,
    /// Megatron-LM's growing models: 1.7 billion parameters on 32 A100 to a trillion on 3072
    MegatronA100Weak,
}

/// One configuration of a preset.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    /// Runs of one series differ in the number of GPUs.
    pub(crate) series: String,
    pub(crate) scenario: Scenario,
}

impl Run {
    /// Series and GPUs.
    pub(crate) fn label(&self) -> String {
        format!("{}, {}", self.series, self.gpus())
    }

    /// How many, with their unit.
    pub(crate) fn gpus(&self) -> String {
        let gpus = self.scenario.parallelism.gpus;
        format!("{gpus} {}", if gpus == 1 { "GPU" } else { "GPUs" })
    }
}

/// A model and the parallelism that it is trained with.
struct Shape {
    name: &'static str,
    hidden: u64,
    heads: u64,
    layers: u64,
    tensor: u64,
    pipeline: u64,
}

/// The measurements on this many GPUs.
#[derive(Clone, Copy)]
struct Measured {
    gpus: u64,
    /// Sequences per micro-batch.
    micro: u64,
    /// Sequences per step.
    global: u64,
    /// Achieved by each GPU.
    tflops: f64,
}

/// The strong-scaling table of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
/// Megatron-LM" (SC 2021, table 2). Models without tensor and pipeline parallelism are distributed by ZeRO-3.
const STRONG: [(Shape, [Measured; 3]); 4] = [
    (
        shape("175B", 12_288, 96, 96, 1, 1),
        [on(384, 4, 1536, 144.0), on(768, 2, 1536, 88.0), on(1536, 1, 1536, 44.0)],
    ),
    (
        shape("530B", 20_480, 128, 105, 1, 1),
        [on(640, 4, 2560, 138.0), on(1120, 2, 2240, 98.0), on(2240, 1, 2240, 48.0)],
    ),
    (
        shape("175B", 12_288, 96, 96, 8, 12),
        [on(384, 1, 1536, 153.0), on(768, 1, 1536, 149.0), on(1536, 1, 1536, 141.0)],
    ),
    (
        shape("530B", 20_480, 128, 105, 8, 35),
        [on(560, 1, 2240, 171.0), on(1120, 1, 2240, 167.0), on(2240, 1, 2240, 159.0)],
    ),
];

/// The weak-scaling table of the same work (table 1). It omits the micro-batch, which the bytes of a step do not
/// depend on.
const WEAK: [(Shape, Measured); 10] = [
    (shape("1.7B", 2_304, 24, 24, 1, 1), on(32, 1, 512, 137.0)),
    (shape("3.6B", 3_072, 32, 30, 2, 1), on(64, 1, 512, 138.0)),
    (shape("7.5B", 4_096, 32, 36, 4, 1), on(128, 1, 512, 142.0)),
    (shape("18.4B", 6_144, 48, 40, 8, 1), on(256, 1, 1024, 135.0)),
    (shape("39.1B", 8_192, 64, 48, 8, 2), on(512, 1, 1536, 138.0)),
    (shape("76.1B", 10_240, 80, 60, 8, 4), on(1024, 1, 1792, 140.0)),
    (shape("145.6B", 12_288, 96, 80, 8, 8), on(1536, 1, 2304, 148.0)),
    (shape("310.1B", 16_384, 128, 96, 8, 16), on(1920, 1, 2160, 155.0)),
    (shape("529.6B", 20_480, 128, 105, 8, 35), on(2520, 1, 2520, 163.0)),
    (shape("1008.0B", 25_600, 160, 128, 8, 64), on(3072, 1, 3072, 163.0)),
];

const fn shape(
    name: &'static str,
    hidden: u64,
    heads: u64,
    layers: u64,
    tensor: u64,
    pipeline: u64,
) -> Shape {
    Shape { name, hidden, heads, layers, tensor, pipeline }
}

const fn on(gpus: u64, micro: u64, global: u64, tflops: f64) -> Measured {
    Measured { gpus, micro, global, tflops }
}

/// Tokens per sequence and in the vocabulary, in all of them.
const SEQUENCE: u64 = 2_048;
const VOCAB: u64 = 51_200;

/// How the runs of a preset save: in 16 bits, with fused attention and dropout, and with sequence parallelism if
/// there is tensor parallelism.
const PRECISION: Precision = Precision { number_bytes: 2, fused_attention: true, dropout: true };

impl Preset {
    /// All of them.
    pub(crate) const ALL: [Preset; 2] = [Preset::MegatronA100, Preset::MegatronA100Weak];

    /// Its configurations, by series and by increasing number of GPUs.
    pub(crate) fn runs(self) -> Vec<Run> {
        match self {
            Preset::MegatronA100 => strong(),
            Preset::MegatronA100Weak => weak(),
        }
    }

    /// One line for people.
    pub(crate) fn describe(self) -> &'static str {
        match self {
            Preset::MegatronA100 => "Megatron-LM and ZeRO-3 on A100 (Narayanan et al. 2021, table 2)",
            Preset::MegatronA100Weak => "Megatron-LM on A100 (Narayanan et al. 2021, table 1)",
        }
    }
}

fn strong() -> Vec<Run> {
    let runs =
        |(shape, measured): &(Shape, [Measured; 3])| measured.map(|on| shape.run(on, shape.tensor == 1));
    STRONG.iter().flat_map(runs).collect()
}

fn weak() -> Vec<Run> {
    WEAK.iter().map(|(shape, measured)| shape.run(*measured, false)).collect()
}

impl Shape {
    fn run(&self, measured: Measured, zero: bool) -> Run {
        let Shape { name, hidden, heads, layers, tensor, pipeline } = *self;
        let Measured { gpus, micro, global, tflops } = measured;
        let scheme = if zero { "ZeRO-3".to_owned() } else { format!("TP{tensor} PP{pipeline}") };
        let model = format!("megatron-{}", name.to_ascii_lowercase());
        let scenario = Scenario {
            model: Model {
                name: model,
                architecture: Architecture::Gpt,
                layers,
                hidden,
                heads,
                vocab: VOCAB,
                sequence: SEQUENCE,
            },
            gpu: Gpu { name: "a100-80gb".to_owned(), memory_gib: 80.0, peak_tflops: 312.0 },
            flops_per_s: tflops * 1e12,
            parallelism: Parallelism { tensor, pipeline, gpus, sequence_parallel: tensor > 1, zero },
            batch: Batch { micro, global },
            precision: PRECISION,
            implementation: Implementation::Megatron,
        };
        Run { series: format!("{name} {scheme}"), scenario }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_run_is_possible() {
        for run in Preset::ALL.into_iter().flat_map(Preset::runs) {
            let Scenario { model, parallelism, batch, .. } = &run.scenario;
            model.check().unwrap();
            parallelism.check(model, batch).unwrap();
        }
    }

    /// The names of the weak-scaling table are its numbers of parameters.
    #[test]
    fn shapes_have_the_parameters_they_are_named_for() {
        for ((shape, _), run) in WEAK.iter().zip(weak()) {
            let named: f64 = shape.name.trim_end_matches('B').parse().unwrap();
            let billions = run.scenario.model.parameters() / 1e9;
            assert!((billions - named).abs() < 0.06, "{named}: {billions}");
        }
    }

    /// The same table gives the throughput of all GPUs, too.
    #[test]
    fn throughputs_add_up_to_those_of_the_table() {
        let petaflops = [4.4, 8.8, 18.2, 34.6, 70.8, 143.8, 227.1, 297.4, 410.2, 502.0];
        for ((shape, measured), total) in WEAK.iter().zip(petaflops) {
            let sum = measured.gpus as f64 * measured.tflops / 1e3;
            assert!((sum / total - 1.0).abs() < 0.01, "{}: {sum} {total}", shape.name);
        }
    }

    /// The strong-scaling table gives the days that 300 billion tokens take, with recomputation.
    #[test]
    fn throughputs_give_the_training_times_of_the_table() {
        let days = [90.0, 74.0, 74.0, 169.0, 137.0, 140.0, 84.0, 43.0, 23.0, 156.0, 80.0, 42.0];
        for (run, expected) in strong().iter().zip(days) {
            let Scenario { model, parallelism, flops_per_s, .. } = &run.scenario;
            let head = 2.0 * (SEQUENCE * model.hidden * VOCAB) as f64;
            let flops = (4.0 * model.forward_flops() - head) * 300e9 / SEQUENCE as f64;
            let found = flops / (parallelism.gpus as f64 * flops_per_s) / 86_400.0;
            assert!((found / expected - 1.0).abs() < 0.04, "{}: {found:.1} {expected}", run.label());
        }
    }
}
