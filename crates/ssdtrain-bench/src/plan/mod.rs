//! `plan`: what auto would do, and what that would cost.

mod largest;
mod saved;

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use clap::value_parser;
use serde::Serialize;
use ssdtrain::{PlanReport, TensorCache};
use ssdtrain_models::seed_step;
use ssdtrain_plan::Profile;
use tch::nn::VarStore;

use self::largest::Largest;
use crate::common::interrupt::{self, Interrupted};
use crate::common::learner::Learner;
use crate::common::output::print;
use crate::common::progress::Progress;
use crate::common::shape::Shape;
use crate::common::strategy::Strategy;
use crate::common::strategy_run::{Planned, Row, StrategyRun};
use crate::common::table::{ExplainArgs, OutputArgs};
use crate::common::task::{Task, TaskArgs};
use crate::common::{size, table};

/// Profile a step, plan it, and hold the plan beside what the step then does
///
/// A model is trained for some steps under auto, until its plan is settled; then come the figures that were planned, and those that
/// were measured. With --save the plan is kept for other runs (train --plan FILE). With --budget the activation peak stays under it, with --overhead the step's time; see docs/planning.md. With --profile
/// nothing is trained: what another run has saved is planned.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, mut_arg("save_plan", |arg| arg.visible_alias("save")))]
pub(crate) struct Args {
    /// Plan what a run has saved by --save-profile, without training: for other goals, another --host-pool, a slower disk (--disk-rate).
    /// Repeat it with a profile of another --batch for --largest-batch
    #[arg(long, value_name = "FILE", conflicts_with_all = TRAINING)]
    profile: Vec<PathBuf>,
    #[command(flatten)]
    explain: ExplainArgs,
    /// Tell the largest micro-batch that reaches the goal, of at most ROWS sequences: from profiles of --batch and of half of it,
    /// and without trying larger ones
    #[arg(long, value_name = "ROWS", value_parser = value_parser!(u64).range(2..=1 << 20), conflicts_with = "plan")]
    largest_batch: Option<u64>,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    task: TaskArgs,
}

/// The arguments that say how to train; they mean nothing if a profile is given.
const TRAINING: &[&str] = &[
    "ShapeArgs",
    "ModelArgs",
    "DataArgs",
    "DeviceArgs",
    "seed",
    "threads",
    "vocab",
    "optimizer",
    "deterministic",
    "save_profile",
    "plan",
];

const EXAMPLES: &str = "\
Examples:
  ssdtrain-bench plan --explain
  ssdtrain-bench plan --preset gpt2-small --budget 1GiB --explain
  ssdtrain-bench plan --device cuda --budget 20GiB --largest-batch 256
  ssdtrain-bench plan --preset gpt2-small --save plan.json
  ssdtrain-bench plan --preset gpt2-small --save-profile step.json
  ssdtrain-bench plan --profile step.json --overhead 0.1 --disk-rate 500MiB --explain

JSON: planned {step_ms, peak_bytes, stall_ms, in_reach, plans}, step_ms, act_peak_bytes, largest_batch {rows, step_ms, peak_bytes}
(null without --largest-batch, and where not even one sequence reaches the goal); with --explain also plan, which is all that it prints.
With --profile: of, batch, micro_batches, goal {peak, step},
in_reach, plan {placements, budgets, prediction} and kept (the same prediction with everything kept), each of a micro-batch, and largest_batch; with --explain
also explanation {peak {moment, bytes, extra, holders}, stored, reruns}, where activations are told by their index in the profile.";

/// The most steps before a plan is considered settled, and those among which one follows it then: others keep everything for comparison.
const MOST_STEPS: usize = 80;
const SEVERAL: usize = 6;

/// The JSON contract.
#[derive(Serialize)]
struct Outcome {
    planned: Planned,
    step_ms: f64,
    act_peak_bytes: u64,
    largest_batch: Option<Largest>,
    #[serde(skip_serializing_if = "Option::is_none")]
    plan: Option<Arc<PlanReport>>,
}

/// What was measured on a model with one micro-batch size.
struct Seen {
    row: Row,
    profile: Profile,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if !args.profile.is_empty() {
        return saved::run(args);
    }
    interrupt::listen()?;
    args.task.setup.cache.prepare(&[Strategy::Auto])?;
    let task = args.task.prepare(false)?;
    let Task { model_device, shape, data, .. } = &task;
    let progress = Progress::new(args.output.json);
    progress.line(&format!("data   {}", data.describe()));
    progress.line(&format!("model  {}, {model_device}", shape.describe()));
    progress.line(&format!("spill  {}", args.task.setup.cache.describe()?));
    let seen = settle(args, &task, shape.batch, &progress)?;
    let largest = match args.largest_batch {
        Some(most) => largest(args, &task, &seen, most, &progress)?,
        None => None,
    };
    let planned = seen.row.planned.clone().context("there is no plan")?;
    let outcome = Outcome {
        planned,
        step_ms: seen.row.step_ms_median,
        act_peak_bytes: seen.row.act_peak_bytes,
        largest_batch: largest,
        plan: seen.row.explained.clone().filter(|_| args.explain.explain),
    };
    if args.output.json {
        table::print_json(&outcome)?;
    } else {
        outcome.show(args.largest_batch);
        if let Some(plan) = &outcome.plan {
            print(&format!("\n{plan}"));
        }
    }
    let cache = &args.task.setup.cache;
    cache.policy.saved.save(seen.row.saved_plan.as_ref(), &progress)?;
    cache.profile.save(Some(seen.profile), shape, *model_device, &progress)
}

/// Trains with micro-batches of `batch` sequences until the plan is settled, and measures the steps after that.
fn settle(args: &Args, task: &Task, batch: usize, progress: &Progress) -> Result<Seen> {
    let shape = Shape { batch, ..task.shape.clone() };
    let (seed, model_device) = (args.task.setup.seed(), task.model_device);
    let optimizer = |vs: &VarStore| args.task.optimizer.build(vs);
    let learner =
        Learner::new(Strategy::Auto, &shape, model_device, &args.task.setup.cache, optimizer, seed)?;
    let mut side = StrategyRun::new(Strategy::Auto, learner);
    let mut batches =
        task.data.train.random_batches(shape.rows(), shape.block(), seed, model_device.device)?;
    progress.start();
    let (mut measured, mut profile) = (0, None);
    for round in 0..MOST_STEPS + SEVERAL {
        if interrupt::requested() {
            bail!(Interrupted::new(format!("interrupted after {round} steps")));
        }
        progress.at(round as f64 / MOST_STEPS as f64);
        seed_step(seed, round as u64);
        if round < MOST_STEPS && !side.is_settled() {
            side.begin();
            measured = 0;
        }
        side.step(&batches.draw()?.split(shape.accumulate)?)?;
        profile = side.learner.cache().and_then(TensorCache::profile).or(profile);
        measured += 1;
        if measured >= SEVERAL && side.has_planned() {
            break;
        }
    }
    progress.clear();
    let profile = profile.context(
        "no plan was made: nothing that autograd saves is as large as --min-bytes, or no step ran backward",
    )?;
    Ok(Seen { row: side.row(shape.tokens_per_step(), None, seed), profile })
}

fn largest(args: &Args, task: &Task, seen: &Seen, most: u64, progress: &Progress) -> Result<Option<Largest>> {
    let batch = task.shape.batch;
    ensure!(batch > 1, "--largest-batch needs profiles of two sizes: give a --batch of 2 or more");
    let half = settle(args, task, batch / 2, progress)?;
    let cache = &args.task.setup.cache;
    let (less, more) = (((batch / 2) as u64, &half.profile), (batch as u64, &seen.profile));
    Largest::between(less, more, &seen.profile.machine, cache, most)
}

impl Outcome {
    fn show(&self, largest_asked: Option<u64>) {
        let header = ["", "step ms", "activation peak"];
        let row =
            |name: &str, ms: f64, bytes: u64| [name.to_owned(), format!("{ms:.1}"), size::format(bytes)];
        let mut rows = vec![
            row("planned", self.planned.step_ms, self.planned.peak_bytes),
            row("measured", self.step_ms, self.act_peak_bytes),
        ];
        let largest = self.largest_batch.as_ref();
        rows.extend(largest.map(|largest| row(&largest.name(), largest.step_ms, largest.peak_bytes)));
        print(&format!("\n{}", table::render(header, rows.into_iter())));
        if !self.planned.in_reach {
            print("The goal is out of reach: this is the lowest activation peak there is.");
        }
        if largest_asked.is_some() {
            print(&largest::report(self.largest_batch.as_ref()));
        }
    }
}
