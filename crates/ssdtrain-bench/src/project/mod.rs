//! `project`: whether offloading to SSDs is viable for a training run.

mod activations;
mod catalogue;
mod endurance;
mod gpt;
mod gpu;
mod largest_micro_batch;
mod llama;
#[cfg(test)]
mod measured;
mod megatron;
mod model;
mod parallelism;
mod presets;
mod projection;
mod saved;
mod scenario;

use anyhow::{Result, ensure};
use clap::value_parser;
use plotters::prelude::DrawingBackend;
use serde::Serialize;

use self::activations::Implementation;
use self::catalogue::find;
use self::endurance::{Array, Ssd};
use self::gpu::Gpu;
use self::model::Model;
use self::parallelism::{Batch, Parallelism};
use self::presets::{Preset, Run};
use self::projection::Projection;
use self::saved::Precision;
use self::scenario::Scenario;
use crate::common::drawing::{Bar, Bars, COLOURS, Canvas, DrawingArgs, Picture};
use crate::common::table::OutputArgs;
use crate::common::{float, table};

/// Project how fast SSDs must write and how long they last if a training run's activations go to them
///
/// Computed, not measured, and no GPU is needed. A step takes three times its forward pass, and half of it may be spent on writing.
/// The SSDs of a GPU last until they have written what their maker rates them for, corrected by write amplification: ratings
/// assume random writes, activations are written in large pieces one after the other.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
#[command(mut_arg("plot", |arg| arg.help("Draw bandwidth, lifespan and activation bytes into FILE, an SVG or a PNG; repeat it for more")))]
pub(crate) struct Args {
    /// Measured configurations to project
    #[arg(long, value_enum, default_value = "megatron-a100", conflicts_with = "model")]
    preset: Preset,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    drawing: DrawingArgs,
    #[command(flatten)]
    own: OwnArgs,
    #[command(flatten)]
    ssds: SsdArgs,
}

/// The arguments that make up a configuration of one's own.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "A configuration of your own")]
struct OwnArgs {
    /// Project this model instead of a preset: a name such as gpt2-xl, megatron-175b or llama-8b, or a file FILE.toml with layers,
    /// hidden, heads, vocab and sequence, and for a Llama also kv_heads and mlp, the width of its MLP. The presets of train have their
    /// names here too, but mini is the GPT: the Llama is llama-mini
    #[arg(long, value_name = "NAME|FILE")]
    model: Option<String>,
    /// Its GPUs: a100-40gb, a100-80gb, h100-80gb, h200-141gb, or a file with memory_gib and peak_tflops
    #[arg(long, value_name = "NAME|FILE", default_value = "a100-80gb", requires = "model")]
    gpu: String,
    /// 10^12 operations per second that a GPU reaches in training; default: 45 % of its peak, about what Megatron-LM reaches
    #[arg(long, value_name = "N", requires = "model", value_parser = float::positive)]
    tflops: Option<f64>,
    /// Number of GPUs; default: as many as one copy of the model takes
    #[arg(long, value_name = "N", requires = "model", value_parser = count())]
    gpus: Option<u64>,
    /// GPUs that share each layer
    #[arg(long, value_name = "N", default_value = "1", requires = "model", value_parser = count())]
    tensor_parallel: u64,
    /// Stages that share the layers
    #[arg(long, value_name = "N", default_value = "1", requires = "model", value_parser = count())]
    pipeline_parallel: u64,
    /// Keep a copy of what norms and dropout save on each GPU that shares a layer, instead of splitting it by sequence
    #[arg(long, requires = "model")]
    no_sequence_parallel: bool,
    /// Spread weights, gradients and optimizer states over all replicas (ZeRO stage 3)
    #[arg(long, requires = "model")]
    zero: bool,
    /// Sequences of one forward pass
    #[arg(long, value_name = "N", default_value = "1", requires = "model", value_parser = count())]
    micro_batch: u64,
    /// Sequences of a step on all GPUs; default: one micro-batch for each stage of each copy of the model
    #[arg(long, value_name = "N", requires = "model", value_parser = count())]
    batch: Option<u64>,
    /// Tokens per sequence; default: the model's
    #[arg(long, value_name = "TOKENS", requires = "model", value_parser = count())]
    sequence: Option<u64>,
    /// Bytes of a number
    #[arg(long, value_name = "N", default_value = "2", requires = "model", value_parser = ["2", "4"])]
    number_bytes: String,
    /// There is dropout, whose masks are saved; Llamas have none
    #[arg(long, requires = "model")]
    dropout: bool,
    /// Attention saves its scores
    #[arg(long, requires = "model")]
    unfused_attention: bool,
    /// Whose layers they are
    #[arg(long, value_enum, default_value = "megatron", requires = "model")]
    implementation: Implementation,
}

/// The arguments that make up the SSDs of a GPU.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "SSDs")]
struct SsdArgs {
    /// d7-p5620-12.8tb, 980-pro-1tb, p5800x-1.6tb, or a file with capacity_tb and either drive_writes_per_day and warranty_years or
    /// petabytes_written
    #[arg(long, value_name = "NAME|FILE", default_value = "d7-p5620-12.8tb")]
    ssd: String,
    /// SSDs of each GPU
    #[arg(long, value_name = "N", default_value = "4", value_parser = value_parser!(u64).range(1..=1024))]
    ssds_per_gpu: u64,
    /// Media writes for each host write in use; 1: large sequential writes
    #[arg(long, value_name = "FACTOR", default_value = "1", value_parser = float::factor)]
    waf: f64,
    /// Media writes for each host write under the workload of the rating; default: the SSD's, 2.5 for most
    #[arg(long, value_name = "FACTOR", value_parser = float::factor)]
    rated_waf: Option<f64>,
    /// How many times as many writes cells take because data need not last as long as rated: about 86 for a day instead of three years
    #[arg(long, value_name = "FACTOR", default_value = "1", value_parser = float::factor)]
    retention_relaxation: f64,
}

const EXAMPLES: &str = "\
Examples:
  ssdtrain-bench project                                      the paper's configurations
  ssdtrain-bench project --plot viability.png                 and a picture of them
  ssdtrain-bench project --ssd 980-pro-1tb --retention-relaxation 86
  ssdtrain-bench project --model megatron-175b --tensor-parallel 8 --pipeline-parallel 12 --gpus 384 --batch 1536
  ssdtrain-bench project --model llama-8b --tensor-parallel 8 --gpus 64 --batch 512 --gpu h100-80gb
  ssdtrain-bench project --model mine.toml --gpu h100-80gb --ssd my-ssd.toml --json
  ssdtrain-bench project --model gpt2-xl --implementation ssdtrain --micro-batch 8 --gpu h200-141gb

JSON, for each configuration: configuration, model, gpus, tensor_parallel, pipeline_parallel, zero, micro_batch, batch, tflops (achieved, per GPU), activation_bytes
(per GPU and step), forward_s, step_s, write_bytes_per_s (per GPU), lifespan_years, largest {micro_batch, activation_bytes}: with
two layers in memory at a time; null if not even one sequence fits.";

/// What a configuration without measurements is taken to reach of its GPU's peak; Megatron-LM measured 0.43 to 0.55.
const SHARE_OF_PEAK: f64 = 0.45;

pub(crate) fn run(args: &Args) -> Result<()> {
    let ssds = args.ssds.resolve()?;
    let runs = args.own.resolve()?.map_or_else(|| args.preset.runs(), |run| vec![run]);
    let rows = runs.iter().map(|run| Row::of(run, &ssds)).collect::<Result<Vec<_>>>()?;
    let drawn = args.drawing.draw(&Viability { runs: &runs, rows: &rows, ssds: &ssds })?;
    if args.output.json {
        return rows.iter().try_for_each(table::print_json);
    }
    if args.own.model.is_none() {
        println!("runs   {}", args.preset.describe());
    }
    println!("ssds   {}", describe(&ssds));
    println!("\n{}", render(&rows));
    drawn.iter().for_each(|line| println!("\n{line}"));
    Ok(())
}

impl OwnArgs {
    /// The configuration, if one is asked for.
    fn resolve(&self) -> Result<Option<Run>> {
        let Some(model) = &self.model else { return Ok(None) };
        let mut model: Model = find("--model", model)?;
        model.sequence = self.sequence.unwrap_or(model.sequence);
        let gpu: Gpu = find("--gpu", &self.gpu)?;
        let (tensor, pipeline) = (self.tensor_parallel, self.pipeline_parallel);
        let gpus = self.gpus.unwrap_or(tensor * pipeline);
        let sequence_parallel = tensor > 1 && !self.no_sequence_parallel;
        let parallelism = Parallelism { tensor, pipeline, gpus, sequence_parallel, zero: self.zero };
        let filled = || self.micro_batch * pipeline * parallelism.replicas();
        let global = self.batch.unwrap_or_else(filled);
        let precision = Precision {
            number_bytes: if self.number_bytes == "4" { 4 } else { 2 },
            fused_attention: !self.unfused_attention,
            dropout: self.dropout,
        };
        let zero = if self.zero { " ZeRO-3" } else { "" };
        let series = format!("{} TP{tensor} PP{pipeline}{zero}", model.name);
        let flops_per_s = 1e12 * self.tflops.unwrap_or(SHARE_OF_PEAK * gpu.peak_tflops);
        let batch = Batch { micro: self.micro_batch, global };
        let implementation = self.implementation;
        let scenario = Scenario { model, gpu, flops_per_s, parallelism, batch, precision, implementation };
        Ok(Some(Run { series, scenario }))
    }
}

impl SsdArgs {
    fn resolve(&self) -> Result<Array> {
        let mut ssd: Ssd = find("--ssd", &self.ssd)?;
        ssd.rated_waf = self.rated_waf.unwrap_or(ssd.rated_waf);
        let Self { ssds_per_gpu: count, waf, retention_relaxation, .. } = *self;
        Ok(Array { ssd, count, waf, retention_relaxation })
    }
}

/// What was projected for a configuration; the fields are the JSON contract.
#[derive(Clone, Debug, Serialize)]
struct Row {
    configuration: String,
    model: String,
    gpus: u64,
    tensor_parallel: u64,
    pipeline_parallel: u64,
    zero: bool,
    micro_batch: u64,
    batch: u64,
    /// Achieved by each GPU.
    tflops: f64,
    activation_bytes: u64,
    forward_s: f64,
    step_s: f64,
    write_bytes_per_s: f64,
    lifespan_years: f64,
    largest: Option<Largest>,
}

/// With two layers in memory at a time.
#[derive(Clone, Copy, Debug, Serialize)]
struct Largest {
    micro_batch: u64,
    activation_bytes: u64,
}

impl Row {
    fn of(run: &Run, ssds: &Array) -> Result<Row> {
        let Scenario { model, parallelism, batch, flops_per_s, .. } = &run.scenario;
        let projection = run.scenario.project(ssds)?;
        let Projection { activation_bytes, forward_s, step_s, write_bytes_per_s, lifespan_years, room } =
            projection;
        ensure!(
            step_s.is_normal(),
            "--tflops {:e} makes a step of {step_s} s; give another",
            flops_per_s / 1e12
        );
        Ok(Row {
            configuration: run.label(),
            model: model.name.clone(),
            gpus: parallelism.gpus,
            tensor_parallel: parallelism.tensor,
            pipeline_parallel: parallelism.pipeline,
            zero: parallelism.zero,
            micro_batch: batch.micro,
            batch: batch.global,
            tflops: flops_per_s / 1e12,
            activation_bytes: activation_bytes.round() as u64,
            forward_s,
            step_s,
            write_bytes_per_s,
            lifespan_years,
            largest: room.map(|room| Largest {
                micro_batch: room.micro_batch,
                activation_bytes: room.activation_bytes.round() as u64,
            }),
        })
    }
}

fn describe(ssds: &Array) -> String {
    let Array { ssd, count, waf, retention_relaxation } = ssds;
    let relaxed = if *retention_relaxation == 1.0 {
        String::new()
    } else {
        format!(", {retention_relaxation} times that for relaxed retention")
    };
    format!(
        "{count} {} per GPU, rated for {:.1} PB each; write amplification {} in the rating and {waf} here{relaxed}: {:.0} PB",
        ssd.name,
        ssd.rated_writes() / 1e15,
        ssd.rated_waf,
        ssds.lifetime_writes() / 1e15
    )
}

/// A table for people.
fn render(rows: &[Row]) -> String {
    let header = [
        "configuration",
        "TFLOP/s",
        "batch",
        "step s",
        "activations GB",
        "write GB/s",
        "lifespan years",
        "largest micro-batch",
        "its activations TB",
    ];
    let body = rows.iter().map(|row| {
        let dash = || "-".to_owned();
        [
            row.configuration.clone(),
            format!("{:.0}", row.tflops),
            row.batch.to_string(),
            format!("{:.*}", if row.step_s < 1.0 { 3 } else { 1 }, row.step_s),
            format!(
                "{:.*}",
                if row.activation_bytes < 10_000_000_000 { 2 } else { 0 },
                row.activation_bytes as f64 / 1e9
            ),
            format!("{:.2}", row.write_bytes_per_s / 1e9),
            format!("{:.2}", row.lifespan_years),
            row.largest.map_or_else(dash, |largest| largest.micro_batch.to_string()),
            row.largest.map_or_else(dash, |largest| format!("{:.2}", largest.activation_bytes as f64 / 1e12)),
        ]
    });
    let notes = "Per GPU; activations are those of a step. The largest micro-batch is that with two layers' activations in GPU memory at a time and\n\
                 the pipeline filled; its activations are those of a step that fills the pipeline once.";
    format!("{}\n{notes}", table::render(header, body))
}

/// Three rows of bars: bandwidth, lifespan and activation bytes.
struct Viability<'a> {
    runs: &'a [Run],
    rows: &'a [Row],
    ssds: &'a Array,
}

impl Picture for Viability<'_> {
    fn size(&self) -> (u32, u32) {
        (u32::max(900, 100 + 112 * self.rows.len() as u32), 1_000)
    }

    fn draw<B: DrawingBackend<ErrorType: 'static>>(&self, canvas: &Canvas<B>) -> Result<()> {
        let (_, height) = self.size();
        let each = (height - Bars::LABELS) / 3;
        let (bandwidth, rest) = canvas.split_vertically(each);
        let (lifespan, activations) = rest.split_vertically(each);
        let draw = |area: &Canvas<B>, title: &str, labels, value: &dyn Fn(&Row) -> (f64, Option<f64>)| {
            let bars: Vec<_> =
                self.runs.iter().zip(self.rows).map(|(run, row)| self.bar(run, value(row))).collect();
            Bars { title, bars: &bars, labels }.draw(area)
        };
        draw(&bandwidth, "Required write bandwidth per GPU, GB/s", false, &|row| {
            (row.write_bytes_per_s / 1e9, None)
        })?;
        let Array { ssd, count, .. } = self.ssds;
        let title = format!("Lifespan of {count} {} per GPU, years", ssd.name);
        draw(&lifespan, &title, false, &|row| (row.lifespan_years, None))?;
        let most = self.rows.iter().map(|row| row.activation_bytes).max().unwrap_or_default();
        let (unit, name) = if most < 50_000_000_000 { (1e9, "GB") } else { (1e12, "TB") };
        let title = format!("Activations per GPU and step, {name}; diamonds: with the largest micro-batch");
        draw(&activations, &title, true, &|row| {
            let largest = row.largest.map(|largest| largest.activation_bytes as f64 / unit);
            (row.activation_bytes as f64 / unit, largest)
        })
    }
}

impl Viability<'_> {
    fn bar(&self, run: &Run, (value, mark): (f64, Option<f64>)) -> Bar {
        let mut series: Vec<_> = self.runs.iter().map(|run| &run.series).collect();
        series.dedup();
        let index = series.iter().position(|&name| *name == run.series).unwrap_or_default();
        let (model, scheme) = run.series.split_once(' ').unwrap_or((&run.series, ""));
        Bar {
            value,
            shown: format!("{value:.*}", if value < 1.0 { 2 } else { 1 }),
            label: vec![model.to_owned(), scheme.to_owned(), run.gpus()],
            colour: COLOURS[index % COLOURS.len()],
            mark,
        }
    }
}

fn count() -> clap::builder::RangedU64ValueParser<u64> {
    value_parser!(u64).range(1..=1 << 20)
}
