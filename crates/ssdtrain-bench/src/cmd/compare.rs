//! `compare`: the same training step under each strategy, side by side.

use std::fmt;

use anyhow::{Context, Result, bail, ensure};
use clap::value_parser;
use ssdtrain_models::{TokenSet, seed_step};
use tch::nn::VarStore;

use crate::cache::CacheArgs;
use crate::learner::Learner;
use crate::optimizer::OptimizerKind;
use crate::placement::Placement;
use crate::progress::Progress;
use crate::shape::Shape;
use crate::side::{Row, Side, render};
use crate::strategy::Strategy;
use crate::task::{Task, TaskArgs};
use crate::{defaults, interrupt, table};

/// Measure a training step with activations on disk beside the same step with activations in memory
///
/// Each strategy trains a model of its own, from the same weights on the same batches, so the models stay the same to
/// the bit. The strategies take turns step by step in one process, in an order that changes from round to round, so
/// that a noisy machine hits all alike. Losses are always compared to the bit, and gradients with --check; on a GPU
/// only in deterministic mode, which --check turns on.
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
    /// Steps of each strategy before those; more where a plan of auto is not settled by then, at most 24
    #[arg(long, value_name = "N", default_value = defaults::COMPARE_WARMUP, value_parser = value_parser!(u32).range(0..=1_000_000))]
    warmup: u32,
    /// Print auto's plan: what goes where, by scope, and what it counts on
    #[arg(long)]
    explain: bool,
    /// Compare every gradient after every step to the bit; a difference is an error. It implies --deterministic
    #[arg(long)]
    check: bool,
    /// Print one JSON object per strategy, each on one line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    task: TaskArgs,
}

const EXAMPLES: &str = "\
Examples:
  ssdtrain-bench compare                              6 layers, hidden 384, 256 tokens, batch 8
  ssdtrain-bench compare --steps 50 --check           every loss and every gradient, to the bit
  ssdtrain-bench compare --preset gpt2-small --strategies keep,offload
  ssdtrain-bench compare --preset gpt2-small --device cuda --vocab 50304 --loss-chunk 2048
  ssdtrain-bench compare --strategies keep,recompute,offload
  ssdtrain-bench compare --recompute layer --device-budget 16MiB
  ssdtrain-bench compare --spill-dir /mnt/a --spill-dir /mnt/b --device-budget 48MiB --json
  ssdtrain-bench compare --strategies keep,offload,adaptive-paper --disk-rate 150MiB
  ssdtrain-bench compare --steps 3 --strategies keep,offload --trace trace.json

JSON: strategy, step_ms_median, tokens_per_s, act_peak_bytes, act_peak_spread_bytes (highest less lowest step),
act_peak_to_keep, step_peak_bytes (gradients counted too), saved_bytes, offloaded_bytes, recomputed_bytes, rerun_ms (of the host), deduplicated_bytes, forwarded_bytes,
stall_ms, stall_ms_by_cause {device_budget, host_pool, load, copy_in}, pinned_bytes (pinned while measured), disk
{written_bytes_per_step, read_bytes_per_step, busy_bytes_per_s, busy_share}, planned {step_ms, peak_bytes, stall_ms, in_reach, plans}, adaptive {scopes, offloaded_scopes, last_scope,
required_bytes_per_s, measured_bytes_per_s}, ratio_to_keep {median, low, high}, loss_last, io_path. Per step, where that applies.
saved_bytes counts each save, so one tensor may count more than once; it is null for plain, which counts nothing.
ratio_to_keep is null without keep.";

pub(crate) fn run(args: &Args) -> Result<()> {
    let Task { placement, shape, data, exact } = args.task.prepare(args.check)?;
    args.task.cache.prepare_trace(&args.strategies)?;
    let progress = Progress::new(args.json);
    progress.line(&format!("data   {}", data.describe()));
    progress.line(&format!("model  {}, {placement}", shape.describe()));
    progress.line(&format!("spill  {}", args.task.cache.describe()?));
    let plan = Plan {
        strategies: distinct(&args.strategies),
        steps: args.steps as usize,
        warmup: args.warmup as usize,
        check: args.check,
        exact,
        seed: args.task.seed,
        optimizer: args.task.optimizer,
        placement,
    };
    progress.line(&format!("plan   {} steps of each strategy, after {} of warm-up", plan.steps, plan.warmup));
    let rows = measure(&plan, &shape, &args.task.cache, &data.train, &progress)?;
    if args.json {
        return rows.iter().try_for_each(table::print_json);
    }
    println!("\n{}", render(&rows));
    for explained in rows.iter().filter_map(|row| row.explained.as_ref()).filter(|_| args.explain) {
        println!("\n{explained}");
    }
    Ok(())
}

/// Most steps that warm-up is longer while plans are still corrected.
const SETTLING: usize = 24;

/// What is measured.
pub(crate) struct Plan {
    pub(crate) strategies: Vec<Strategy>,
    pub(crate) steps: usize,
    pub(crate) warmup: usize,
    /// Whether gradients are compared, too.
    pub(crate) check: bool,
    /// Whether the same computation gives the same bits, so that losses can be compared.
    pub(crate) exact: bool,
    pub(crate) seed: u64,
    pub(crate) optimizer: OptimizerKind,
    pub(crate) placement: Placement,
}

/// The strategy whose error it is; for whoever can go on without it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Under(pub(crate) Strategy);

impl fmt::Display for Under {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "under {}", self.0.name())
    }
}

/// Trains one model per strategy, in turns. An error of one of them has [`Under`] as its context.
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
        let learner = Learner::new(strategy, shape, plan.placement, cache, optimizer, plan.seed)
            .with_context(|| Under(strategy))?;
        sides.push(Side::new(strategy, learner));
    }
    let mut batches = tokens.random_batches(shape.rows(), shape.block(), plan.seed, plan.placement.device)?;
    let (mut warmup, mut round) = (plan.warmup, 0);
    progress.start();
    while round < warmup + plan.steps {
        let rounds = warmup + plan.steps;
        ensure!(!interrupt::requested(), "interrupted after {round} of {rounds} rounds");
        progress.at(round as f64 / rounds as f64);
        let micro_batches = batches.draw()?.split(shape.accumulate)?;
        for index in order(sides.len(), round) {
            seed_step(plan.seed, round as u64);
            let side = &mut sides[index];
            side.step(&micro_batches).with_context(|| Under(side.strategy))?;
        }
        if plan.exact {
            verify(&sides, plan.check, round + 1)?;
        }
        round += 1;
        if round <= warmup {
            sides.iter_mut().for_each(Side::begin);
        }
        let settles = plan.warmup > 0 && sides.iter().any(|side| !side.is_settled());
        if round == warmup && settles && warmup < plan.warmup + SETTLING {
            warmup += 1;
        }
    }
    let rounds = round;
    progress.clear();
    if sides.len() > 1 && plan.exact {
        let names: Vec<_> = plan.strategies.iter().map(|strategy| strategy.name()).collect();
        let what = if plan.check { "every loss and every gradient" } else { "every loss" };
        progress
            .line(&format!("check  {rounds} steps: {what} the same to the bit under {}", names.join(", ")));
    }
    let caches = sides.iter().filter_map(|side| Some((side.strategy.name(), side.learner.cache()?)));
    cache.write_trace(&caches.collect::<Vec<_>>(), progress)?;
    let keep = sides.iter().find(|side| side.strategy == Strategy::Keep);
    Ok(sides.iter().map(|side| side.row(shape.tokens_per_step(), keep, plan.seed)).collect())
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
    for side in sides.iter().filter(|side| side.strategy != reference.strategy) {
        let (name, base) = (side.strategy.name(), reference.strategy.name());
        let (loss, expected) = (side.loss(), reference.loss());
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

/// Each of them once, in the order of their definition.
pub(crate) fn distinct(strategies: &[Strategy]) -> Vec<Strategy> {
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
