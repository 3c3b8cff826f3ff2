//! `rok`: the recompute-offload-keep curve, strategies over micro-batch sizes.

mod picture;
mod point;
mod record;

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Arg, value_parser};
use serde::Serialize;
use ssdtrain::SavedPlan;
use ssdtrain_models::ModelConfig;

pub(crate) use self::picture::RokPicture;
use self::point::{Point, frontier, render};
use self::record::Settings;
pub(crate) use self::record::{Record, parse_file};
use crate::common::cache::CacheArgs;
use crate::common::data::DataArgs;
use crate::common::drawing::DrawingArgs;
use crate::common::model_device::ModelDevice;
use crate::common::optimizer::OptimizerKind;
use crate::common::output::print;
use crate::common::progress::Progress;
use crate::common::shape::Shape;
use crate::common::strategy::Strategy;
use crate::common::table::OutputArgs;
use crate::common::task::{Task, TaskArgs};
use crate::common::turns::{Plan, TurnsArgs, Under, distinct, measure};
use crate::common::{defaults, failure, gpu, interrupt, table};

/// Measure how much memory each strategy takes and how fast it trains, over micro-batch sizes
///
/// A point is one strategy at one micro-batch size. The strategies of a size take turns step by step in one process, as with
/// compare; all of their models are in memory then. A strategy that runs out of memory is recorded as failed at that size, and the
/// others of that size are measured again without it.
///
/// Points are added to the file --out after each micro-batch size. What the file has already is not measured again, so a sweep that
/// was stopped goes on where it was, and more strategies and sizes can be added; table and plot show all that the file has. On the
/// frontier are the points that no other beats: none has a lower activation peak and as high a throughput, or the reverse.
///
/// Model TFLOP/s count the operations that forward and backward need, whatever is done twice: for each token six for every
/// weight in a matrix product, and 12 x layers x hidden x tokens per sequence for attention.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, mut_arg("batch", |arg| instead::<u32>(arg, "the sizes are swept: give --batches")))]
#[command(mut_arg("trace", |arg| instead::<PathBuf>(arg, "a trace shows few steps: take compare for it")))]
#[command(mut_arg("save_profile", |arg| instead::<PathBuf>(arg, "a profile is of one size: take plan or compare for it")))]
#[command(mut_arg("plan", |arg| instead::<SavedPlan>(arg, "a plan is of one size: take train or compare for it")))]
#[command(mut_arg("save_plan", |arg| instead::<PathBuf>(arg, "a plan is of one size: take plan, train or compare for it")))]
#[command(mut_arg("strategies", |arg| arg.default_value(STRATEGIES)))]
#[command(mut_arg("steps", |arg| arg.default_value(defaults::ROK_STEPS)))]
#[command(mut_arg("warmup", |arg| arg.default_value(defaults::ROK_WARMUP)))]
pub(crate) struct Args {
    #[command(flatten)]
    turns: TurnsArgs,
    /// Micro-batch sizes, in sequences
    #[arg(
        long,
        value_name = "ROWS",
        value_delimiter = ',',
        default_value = "2,4,8,16,32",
        value_parser = value_parser!(u32).range(1..=1 << 16)
    )]
    batches: Vec<u32>,
    /// File of the points, CSV or JSON; if it is there, the sweep goes on from it
    #[arg(long, value_name = "FILE", default_value = "rok.csv", value_parser = parse_file)]
    out: PathBuf,
    /// Forget what the file has, and measure all of it anew
    #[arg(long)]
    fresh: bool,
    #[command(flatten)]
    drawing: DrawingArgs,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    task: TaskArgs,
}

/// The strategies that are measured by default.
const STRATEGIES: &str = "keep,recompute,offload,adaptive-paper,auto";

const EXAMPLES: &str = "\
Examples:
  ssdtrain-bench rok --plot rok.svg                   five strategies, micro-batches of 2 to 32
  ssdtrain-bench rok --batches 2,4,8,16,32,64         the same and one size more: only that is measured
  ssdtrain-bench rok --strategies keep,offload --steps 20 --out two.json --plot two.png
  ssdtrain-bench rok --preset gpt2-small --device cuda --vocab 50304 --loss-chunk 2048 --optimizer sgd --out gpu.csv
  ssdtrain-bench plot rok.csv --plot rok.png          a picture of what was measured, without measuring

Columns, and JSON for each point: micro_batch, strategy, step_ms_median, ratio_to_keep (of medians) with its 95 % interval ratio_low to ratio_high,
tokens_per_s, model_tflops, act_peak_bytes, act_peak_to_keep, step_peak_bytes (with gradients), offloaded_bytes, recomputed_bytes, stall_ms, predicted_step_ms,
predicted_peak_bytes (of auto), failed (why there is no measurement); in JSON frontier, too. Ratios are empty where keep
did not take turns with it. The first line of a CSV file is a comment with title and settings.";

pub(crate) fn run(args: &Args) -> Result<()> {
    interrupt::listen()?;
    let task = args.task.prepare(false)?;
    args.task.setup.cache.prepare(&args.turns.strategies)?;
    let settings = args.settings(&task)?;
    let title = title(&task);
    let mut record =
        if args.fresh { Record::new(title, settings) } else { Record::resume(&args.out, title, settings)? };
    // So that an unwritable path is reported before measuring begins.
    record.write(&args.out)?;

    let mut progress = Progress::new(args.output.json);
    let sizes = args.sizes();
    let names: Vec<_> = sizes.iter().map(ToString::to_string).collect();
    let Task { model_device, shape, data, .. } = &task;
    progress.line(&format!("data   {}", data.describe()));
    progress.line(&format!("model  {}, {model_device}", shape.describe_with(&names.join(", "))));
    progress.line(&format!("spill  {}", args.task.setup.cache.describe()?));
    progress.line(&format!(
        "plan   {} steps of each point, after {} of warm-up",
        args.turns.steps, args.turns.warmup
    ));
    let strategies = distinct(&args.turns.strategies);
    for (index, &size) in sizes.iter().enumerate() {
        let missing: Vec<_> = strategies
            .iter()
            .copied()
            .filter(|strategy| record.point(size, strategy.name()).is_none())
            .collect();
        if missing.is_empty() {
            progress.line(&format!("batch  {size}: {} has it", args.out.display()));
            continue;
        }
        progress.part(index, sizes.len(), format!("micro-batch {size}"));
        let turns = with_keep(&missing, &strategies, record.point(size, Strategy::Keep.name()));
        let points = sweep(args, &task, size, turns, &progress).with_context(|| {
            let file = args.out.display();
            format!("micro-batch {size} is not measured ({file} has those before; run it again, without --fresh, to go on)")
        })?;
        let wanted = |point: &Point| missing.iter().any(|strategy| strategy.name() == point.strategy);
        record.add(points.into_iter().filter(wanted));
        record.write(&args.out)?;
        progress.line(&format!("batch  {size}: {}", list(&missing)));
    }
    args.show(&record, &progress)
}

/// Measures strategies at one micro-batch size; those that run out of memory are measured separately.
fn sweep(
    args: &Args,
    task: &Task,
    size: usize,
    strategies: Vec<Strategy>,
    progress: &Progress,
) -> Result<Vec<Point>> {
    let shape = Shape { batch: size, ..task.shape.clone() };
    let mut plan = Plan { strategies, ..Plan::new(&args.turns, &args.task, task) };
    let mut points = Vec::new();
    while !plan.strategies.is_empty() {
        let error = match measure(&plan, &shape, &args.task.setup.cache, &task.data.train, progress) {
            Ok(measured) => {
                measured.ensure_complete(&plan)?;
                let flops = shape.model.flops_per_token(shape.model.context()) as f64;
                let flops_per_step = flops * shape.tokens_per_step() as f64;
                points.extend(measured.rows.iter().map(|row| Point::measured(size, row, flops_per_step)));
                break;
            }
            Err(error) => error,
        };
        let Some(&Under(failed)) = error.downcast_ref().filter(|_| failure::is_out_of_memory(&error)) else {
            return Err(error);
        };
        let why = failure::root_line(&error);
        progress.line(&format!("batch  {size}: {} failed: {why}", failed.name()));
        points.push(Point::failed(size, failed.name(), why));
        plan.strategies.retain(|&strategy| strategy != failed);
    }
    Ok(points)
}

/// The strategies that take turns: the missing ones and, for their ratios, keep, unless it is known to fail.
fn with_keep(missing: &[Strategy], all: &[Strategy], keep: Option<&Point>) -> Vec<Strategy> {
    let mut turns = missing.to_vec();
    if all.contains(&Strategy::Keep) && keep.is_none_or(|keep| keep.failed.is_none()) {
        turns.push(Strategy::Keep);
    }
    distinct(&turns)
}

/// Everything except strategies and sizes that may affect the measurement. A difference is reported under these
/// names.
#[derive(Serialize)]
struct Measured<'a> {
    model: &'a ModelConfig,
    tokens: &'a str,
    accumulate: usize,
    loss_chunk: Option<u32>,
    /// Only if it is on, so that older files go on.
    fused_loss: Option<bool>,
    grads_in_place: bool,
    recompute: String,
    device: String,
    gpu: Option<String>,
    threads: i32,
    deterministic: bool,
    optimizer: OptimizerKind,
    seed: u64,
    steps: u32,
    warmup: u32,
    data: &'a DataArgs,
    cache: &'a CacheArgs,
}

impl Args {
    fn settings(&self, task: &Task) -> Result<Settings> {
        let Task { model_device, shape, .. } = task;
        Settings::of(&Measured {
            model: &shape.model,
            tokens: &shape.tokens,
            accumulate: shape.accumulate,
            loss_chunk: shape.loss_chunk.map(Into::into),
            fused_loss: shape.fused_loss.then_some(true),
            grads_in_place: shape.grads_in_place,
            recompute: shape.recompute.to_string(),
            device: model_device.to_string(),
            gpu: gpu_name(*model_device)?,
            threads: tch::get_num_threads(),
            deterministic: task.exact,
            optimizer: self.task.optimizer,
            seed: self.task.setup.seed(),
            steps: self.turns.steps,
            warmup: self.turns.warmup,
            data: &self.task.setup.data,
            cache: &self.task.setup.cache,
        })
    }

    /// The micro-batch sizes, each once, in increasing order.
    fn sizes(&self) -> Vec<usize> {
        let mut sizes: Vec<_> = self.batches.iter().map(|&size| size as usize).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    fn show(&self, record: &Record, progress: &Progress) -> Result<()> {
        let drawn = self.drawing.draw(&RokPicture(record))?;
        if self.output.json {
            for (point, frontier) in record.points.iter().zip(frontier(&record.points)) {
                table::print_json(&Line { point, frontier })?;
            }
        } else {
            print(&format!("\n{}\n", render(&record.points)));
        }
        progress.line(&format!("points {}", self.out.display()));
        drawn.iter().for_each(|line| progress.line(line));
        Ok(())
    }
}

/// A point as it is printed.
#[derive(Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    point: &'a Point,
    frontier: bool,
}

/// The model's description in the picture.
fn title(task: &Task) -> String {
    format!("{}, {}", task.shape.title(), task.model_device)
}

fn gpu_name(model_device: ModelDevice) -> Result<Option<String>> {
    match model_device.device {
        tch::Device::Cuda(index) => Ok(Some(gpu::properties(index)?.name)),
        _ => Ok(None),
    }
}

fn list(strategies: &[Strategy]) -> String {
    strategies.iter().map(|strategy| strategy.name()).collect::<Vec<_>>().join(", ")
}

/// Turns an argument of other commands into an error that says what to do instead.
fn instead<T: Clone + Send + Sync + 'static>(arg: Arg, advice: &'static str) -> Arg {
    arg.hide(true).value_parser(move |_: &str| Err::<T, _>(advice))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keep_takes_a_turn_for_the_ratios_of_others() {
        use Strategy::{Keep, Offload, Recompute};
        let all = [Keep, Recompute, Offload];
        let there = Point { step_ms_median: Some(1.0), ..Point::default() };
        assert_eq!(with_keep(&[Offload], &all, Some(&there)), [Keep, Offload]);
        assert_eq!(with_keep(&all, &all, None), all);
        assert_eq!(with_keep(&[Offload], &[Recompute, Offload], None), [Offload]);
        let failed = Point::failed(8, "keep", "out of memory".to_owned());
        assert_eq!(with_keep(&[Offload], &all, Some(&failed)), [Offload]);
    }
}
