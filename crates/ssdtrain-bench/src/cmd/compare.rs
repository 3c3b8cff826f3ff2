//! `compare`: the same training step under each strategy, side by side.

use anyhow::{Result, bail, ensure};
use clap::value_parser;
use serde::Serialize;
use ssdtrain::StepReport;
use ssdtrain_models::{Batch, Optimizer, TokenSet, seed_step};
use tch::nn::VarStore;

use crate::cache::CacheArgs;
use crate::data::DataArgs;
use crate::optimizer::OptimizerKind;
use crate::placement::{Placement, PlacementArgs};
use crate::progress::Progress;
use crate::shape::{Shape, ShapeArgs};
use crate::stats::{Estimate, median, ratio_of_medians};
use crate::strategy::{Learner, Outcome, Strategy, Update};
use crate::{defaults, interrupt, size, table};

/// All strategies train with it; what they compute does not hang on it.
const LEARNING_RATE: f64 = 3e-4;

/// Measure a training step with activations on disk beside the same step with activations in memory
///
/// Each strategy trains a model of its own, from the same weights on the same batches, so the models stay the same to
/// the bit. The strategies take turns step by step in one process, in an order that changes from round to round, so
/// that a noisy machine hits all alike. Losses are always compared to the bit, and gradients with --check.
///
/// A step is: clear gradients, forward, backward, optimizer, wait for the last transfer and for the device. Step times are medians;
/// activation peak is the highest of any measured step, and the other figures are medians too. The ratio is that of
/// the medians, with a 95 % interval (bootstrap over rounds).
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// What to compare
    #[arg(
        long,
        value_name = "NAMES",
        value_enum,
        value_delimiter = ',',
        default_value = "plain,keep,offload"
    )]
    strategies: Vec<Strategy>,
    /// Measured steps of each strategy
    #[arg(long, value_name = "N", default_value = defaults::COMPARE_STEPS, value_parser = value_parser!(u32).range(1..=1_000_000))]
    steps: u32,
    /// Steps of each strategy before those
    #[arg(long, value_name = "N", default_value = defaults::COMPARE_WARMUP, value_parser = value_parser!(u32).range(0..=1_000_000))]
    warmup: u32,
    /// Compare every gradient after every step to the bit; a difference is an error
    #[arg(long)]
    check: bool,
    /// Print one JSON object per strategy, each on one line
    #[arg(long)]
    json: bool,
    /// Seed of weights, batches, dropout and the bootstrap
    #[arg(long, value_name = "N", default_value_t = defaults::SEED)]
    seed: u64,
    /// Threads that compute; default: as many as libtorch takes
    #[arg(long, value_name = "N", value_parser = value_parser!(i32).range(1..=1024))]
    threads: Option<i32>,
    /// How parameters follow their gradients
    #[arg(long, value_enum, default_value = "adamw")]
    optimizer: OptimizerKind,
    /// Size of the vocabulary, if larger than the tokenizer's: 50304 suits a GPU better than GPT-2's 50257
    #[arg(long, value_name = "N", help_heading = "Model", value_parser = value_parser!(i64).range(1..=1 << 20))]
    vocab: Option<i64>,
    #[command(flatten)]
    placement: PlacementArgs,
    #[command(flatten)]
    shape: ShapeArgs,
    #[command(flatten)]
    data: DataArgs,
    #[command(flatten)]
    cache: CacheArgs,
}

const EXAMPLES: &str = "\
Examples:
  ssdtrain-bench compare                              6 layers, hidden 384, 256 tokens, batch 8
  ssdtrain-bench compare --steps 50 --check           every loss and every gradient, to the bit
  ssdtrain-bench compare --preset gpt2-small --strategies keep,offload
  ssdtrain-bench compare --preset gpt2-small --device cuda --vocab 50304 --loss-chunk 2048
  ssdtrain-bench compare --spill-dir /mnt/a --spill-dir /mnt/b --device-budget 48MiB --json

JSON: strategy, step_ms_median, tokens_per_s, act_peak_bytes, saved_bytes, offloaded_bytes, deduplicated_bytes,
forwarded_bytes, stall_ms, ratio_to_keep {median, low, high}, loss_last, io_path. Per step, where that applies.
saved_bytes counts each save, so one tensor may count more than once; it is null for plain, which counts nothing.
ratio_to_keep is null without keep.";

pub(crate) fn run(args: &Args) -> Result<()> {
    if let Some(threads) = args.threads {
        tch::set_num_threads(threads);
    }
    let placement = args.placement.resolve()?;
    let mut shape = args.shape.resolve(Shape::preset("mini")?)?;
    let data = args.data.load(&shape.tokens)?;
    data.require(shape.block())?;
    let tokens = data.tokenizer.vocab() as i64;
    shape.model.vocab = args.vocab.unwrap_or(tokens);
    ensure!(
        shape.model.vocab >= tokens,
        "--vocab {} is less than the {tokens} tokens of the tokenizer",
        shape.model.vocab
    );

    let progress = Progress::new(args.json);
    progress.line(&format!("data   {}", data.describe()));
    progress.line(&format!("model  {}, {placement}", shape.describe()));
    progress.line(&format!("spill  {}", args.cache.describe()?));
    let plan = Plan {
        strategies: distinct(&args.strategies),
        steps: args.steps as usize,
        warmup: args.warmup as usize,
        check: args.check,
        seed: args.seed,
        optimizer: args.optimizer,
        placement,
    };
    progress.line(&format!("plan   {} steps of each strategy, after {} of warm-up", plan.steps, plan.warmup));
    let rows = measure(&plan, &shape, &args.cache, &data.train, &progress)?;
    if args.json {
        return rows.iter().try_for_each(table::print_json);
    }
    println!("\n{}", render(&rows));
    Ok(())
}

/// What is measured.
pub(crate) struct Plan {
    pub(crate) strategies: Vec<Strategy>,
    pub(crate) steps: usize,
    pub(crate) warmup: usize,
    /// Whether gradients are compared, too.
    pub(crate) check: bool,
    pub(crate) seed: u64,
    pub(crate) optimizer: OptimizerKind,
    pub(crate) placement: Placement,
}

/// What was measured of one strategy; the fields are the JSON contract.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    strategy: &'static str,
    step_ms_median: f64,
    tokens_per_s: f64,
    act_peak_bytes: u64,
    saved_bytes: Option<u64>,
    offloaded_bytes: u64,
    deduplicated_bytes: u64,
    forwarded_bytes: u64,
    stall_ms: f64,
    ratio_to_keep: Option<Estimate>,
    loss_last: f64,
    io_path: String,
}

/// Trains one model per strategy, in turns.
pub(crate) fn measure(
    plan: &Plan,
    shape: &Shape,
    cache: &CacheArgs,
    tokens: &TokenSet,
    progress: &Progress,
) -> Result<Vec<Row>> {
    let mut sides = Vec::new();
    for &strategy in &plan.strategies {
        let optimizer = |vs: &VarStore| plan.optimizer.build(vs);
        let learner = Learner::new(strategy, shape, plan.placement, cache, optimizer, plan.seed)?;
        sides.push(Side { strategy, learner, outcomes: Vec::new() });
    }
    let mut batches = tokens.random_batches(shape.rows(), shape.block(), plan.seed, plan.placement.device)?;
    let rounds = plan.warmup + plan.steps;
    progress.start();
    for round in 0..rounds {
        ensure!(!interrupt::requested(), "interrupted after {round} of {rounds} rounds");
        progress.at(round as f64 / rounds as f64);
        let micro_batches = batches.draw()?.split(shape.accumulate)?;
        for index in order(sides.len(), round) {
            seed_step(plan.seed, round as u64);
            sides[index].step(&micro_batches)?;
        }
        verify(&sides, plan.check, round + 1)?;
        if round < plan.warmup {
            sides.iter_mut().for_each(|side| side.outcomes.clear());
        }
    }
    progress.clear();
    if sides.len() > 1 {
        let names: Vec<_> = plan.strategies.iter().map(|strategy| strategy.name()).collect();
        let what = if plan.check { "every loss and every gradient" } else { "every loss" };
        progress
            .line(&format!("check  {rounds} steps: {what} the same to the bit under {}", names.join(", ")));
    }
    let keep = sides.iter().find(|side| side.strategy == Strategy::Keep).map(Side::walls);
    Ok(sides.iter().map(|side| side.row(shape.tokens_per_step(), keep.as_deref(), plan.seed)).collect())
}

/// A table for people.
pub(crate) fn render(rows: &[Row]) -> String {
    let header = [
        "per step",
        "ms",
        "ratio to keep (95 %)",
        "tokens/s",
        "activation peak",
        "saved",
        "to disk",
        "dedup",
        "forward",
        "stall ms",
    ];
    let body = rows.iter().map(|row| {
        let ratio = row.ratio_to_keep.map_or_else(
            || "-".to_owned(),
            |ratio| format!("{:.3} ({:.3}-{:.3})", ratio.median, ratio.low, ratio.high),
        );
        [
            row.strategy.to_owned(),
            format!("{:.1}", row.step_ms_median),
            ratio,
            format!("{:.0}", row.tokens_per_s),
            size::format(row.act_peak_bytes),
            row.saved_bytes.map_or_else(|| "-".to_owned(), size::format),
            size::format(row.offloaded_bytes),
            size::format(row.deduplicated_bytes),
            size::format(row.forwarded_bytes),
            format!("{:.1}", row.stall_ms),
        ]
    });
    let mut text = table::render(header, body);
    if let Some(last) = rows.last() {
        text += &format!("\nLast loss {:.4}.", last.loss_last);
    }
    let peak = |name| rows.iter().find(|row| row.strategy == name).map(|row| row.act_peak_bytes as f64);
    if let (Some(offload), Some(keep)) = (peak("offload"), peak("keep")) {
        text += &format!(" Activation peak, offload / keep: {:.3}.", offload / keep);
    }
    if let Some(offload) = rows.iter().find(|row| row.strategy == "offload") {
        text += &format!(" Bytes went through {}.", offload.io_path);
    }
    text
}

/// One strategy's model and what its steps did.
struct Side {
    strategy: Strategy,
    learner: Learner<Box<dyn Optimizer>>,
    outcomes: Vec<Outcome>,
}

impl Side {
    fn step(&mut self, micro_batches: &[Batch]) -> Result<()> {
        let update = Update { learning_rate: LEARNING_RATE, clip: None };
        self.outcomes.push(self.learner.step(micro_batches, update)?);
        Ok(())
    }

    /// In milliseconds.
    fn walls(&self) -> Vec<f64> {
        self.outcomes.iter().map(|outcome| outcome.wall.as_secs_f64() * 1e3).collect()
    }

    fn row(&self, tokens: usize, keep: Option<&[f64]>, seed: u64) -> Row {
        let walls = self.walls();
        let reports: Vec<_> = self.outcomes.iter().filter_map(|outcome| outcome.report.as_ref()).collect();
        let of = |figure: fn(&StepReport) -> f64| {
            let figures: Vec<_> = reports.iter().map(|report| figure(report)).collect();
            if figures.is_empty() { 0.0 } else { median(&figures) }
        };
        let step_ms_median = median(&walls);
        Row {
            strategy: self.strategy.name(),
            step_ms_median,
            tokens_per_s: tokens as f64 / step_ms_median * 1e3,
            act_peak_bytes: self.outcomes.iter().map(|outcome| outcome.act_peak_bytes).max().unwrap_or(0),
            saved_bytes: (!reports.is_empty()).then(|| of(|report| report.saved.bytes as f64) as u64),
            offloaded_bytes: of(|report| report.offloaded.bytes as f64) as u64,
            deduplicated_bytes: of(|report| report.deduplicated.bytes as f64) as u64,
            forwarded_bytes: of(|report| report.forwarded.bytes as f64) as u64,
            stall_ms: of(|report| report.stall.total().as_secs_f64() * 1e3),
            ratio_to_keep: keep.map(|keep| ratio_of_medians(&walls, keep, seed)),
            loss_last: self.outcomes.last().map_or(f64::NAN, |outcome| outcome.loss),
            io_path: self.learner.io_path(),
        }
    }
}

/// The order of the sides in a round. Six rounds of three sides, or four of two, have every order equally often, and
/// no side more often than another the caches warm from its own step before.
fn order(sides: usize, round: usize) -> Vec<usize> {
    let mut order: Vec<_> = (0..sides).collect();
    order.rotate_left(round / 2 % sides.max(1));
    if round % 2 == 1 {
        order.reverse();
    }
    order
}

/// Compares what the sides computed in `step` with `keep`, or else with the first of them.
fn verify(sides: &[Side], gradients: bool, step: usize) -> Result<()> {
    let reference = sides.iter().find(|side| side.strategy == Strategy::Keep).or_else(|| sides.first());
    let Some(reference) = reference else { return Ok(()) };
    let loss_of = |side: &Side| side.outcomes.last().map_or(f64::NAN, |outcome| outcome.loss);
    for side in sides.iter().filter(|side| side.strategy != reference.strategy) {
        let (name, base) = (side.strategy.name(), reference.strategy.name());
        let (loss, expected) = (loss_of(side), loss_of(reference));
        if loss.to_bits() != expected.to_bits() {
            bail!("step {step}: the loss under {name} is {loss}, and {expected} under {base}");
        }
        if !gradients {
            continue;
        }
        if let Some(parameter) = side.learner.differing_gradient(&reference.learner)? {
            bail!("step {step}: the gradient of {parameter} under {name} has other bits than under {base}");
        }
    }
    Ok(())
}

fn distinct(strategies: &[Strategy]) -> Vec<Strategy> {
    let mut distinct = strategies.to_vec();
    distinct.sort_unstable();
    distinct.dedup();
    distinct
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn every_order_comes_equally_often() {
        for (sides, rounds, orders) in [(1, 2, 1), (2, 4, 2), (3, 6, 6)] {
            let mut counts = HashMap::new();
            for round in 0..rounds {
                *counts.entry(order(sides, round)).or_insert(0) += 1;
            }
            assert_eq!(counts.len(), orders, "{sides} sides: {counts:?}");
            assert!(counts.values().all(|&count| count == rounds / orders), "{sides} sides: {counts:?}");
        }
    }

    #[test]
    fn no_side_follows_itself_more_often_than_another() {
        for (sides, rounds) in [(2, 4), (3, 6)] {
            let turns: Vec<_> = (0..=rounds).flat_map(|round| order(sides, round)).collect();
            let turns = &turns[..=sides * rounds];
            let mut repeats = vec![0; sides];
            turns.windows(2).filter(|pair| pair[0] == pair[1]).for_each(|pair| repeats[pair[0]] += 1);
            assert!(repeats.iter().all(|&count| count == repeats[0]), "{sides} sides: {repeats:?}");
        }
    }
}
