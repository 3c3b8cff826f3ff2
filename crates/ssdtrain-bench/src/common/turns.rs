//! Strategies that take turns in one process.

use std::fmt;
use std::ops::Range;

use anyhow::{Context, Result, bail};
use clap::value_parser;
use ssdtrain_models::{TokenSet, seed_step};
use tch::nn::VarStore;

use super::cache::CacheArgs;
use super::defaults;
use super::interrupt::{self, Interrupted};
use super::learner::Learner;
use super::model_device::ModelDevice;
use super::optimizer::OptimizerKind;
use super::progress::Progress;
use super::shape::Shape;
use super::strategy::Strategy;
use super::strategy_run::{Row, StrategyRun};
use super::task::{Task, TaskArgs};

/// The arguments that say which strategies take turns, and how often.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct TurnsArgs {
    /// What to measure: strategies that take turns
    #[arg(
        long,
        value_name = "NAMES",
        value_enum,
        value_delimiter = ',',
        default_value = "plain,keep,offload"
    )]
    pub(crate) strategies: Vec<Strategy>,
    /// Measured steps of each strategy
    #[arg(long, value_name = "N", default_value = defaults::COMPARE_STEPS, value_parser = value_parser!(u32).range(1..=1_000_000))]
    pub(crate) steps: u32,
    /// Steps of each strategy before those; more where a plan of auto is not settled by then, at most 96
    #[arg(long, value_name = "N", default_value = defaults::COMPARE_WARMUP, value_parser = value_parser!(u32).range(0..=1_000_000))]
    pub(crate) warmup: u32,
    /// Steps that a strategy takes before it is the next one's turn. A GPU at its power limit runs faster after lighter steps; with 8 or
    /// more in a row, each strategy is measured as it would run alone
    #[arg(long, value_name = "N", default_value = "1", value_parser = value_parser!(u32).range(1..=1_000))]
    pub(crate) in_a_row: u32,
}

/// The most steps by which warm-up is extended while plans are still being corrected.
const SETTLING: usize = 96;

/// What is measured.
pub(crate) struct Plan {
    pub(crate) strategies: Vec<Strategy>,
    pub(crate) steps: usize,
    pub(crate) warmup: usize,
    /// Steps of each strategy in a turn.
    pub(crate) in_a_row: usize,
    /// Whether gradients are compared, too.
    pub(crate) check: bool,
    /// Whether the same computation gives the same bits, so that losses can be compared.
    pub(crate) exact: bool,
    pub(crate) seed: u64,
    pub(crate) optimizer: OptimizerKind,
    pub(crate) model_device: ModelDevice,
}

impl Plan {
    /// The plan that the arguments ask for; gradients are not compared.
    pub(crate) fn new(turns: &TurnsArgs, args: &TaskArgs, task: &Task) -> Plan {
        Plan {
            strategies: distinct(&turns.strategies),
            steps: turns.steps as usize,
            warmup: turns.warmup as usize,
            in_a_row: turns.in_a_row as usize,
            check: false,
            exact: task.exact,
            seed: args.setup.seed(),
            optimizer: args.optimizer,
            model_device: task.model_device,
        }
    }
}

/// The strategy that failed, for callers that can continue without it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Under(pub(crate) Strategy);

impl fmt::Display for Under {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "under {}", self.0.name())
    }
}

/// The measurements of strategies that took turns.
pub(crate) struct Measured {
    /// One for each strategy; empty if no step was measured.
    pub(crate) rows: Vec<Row>,
    /// Measured steps of each strategy.
    steps: usize,
    /// Set if it was stopped before everything was done.
    stopped: Option<Interrupted>,
}

impl Measured {
    /// An error if it was stopped; it says how far it got.
    pub(crate) fn ensure_complete(&self, plan: &Plan) -> Result<()> {
        let Some(stopped) = self.stopped.clone() else { return Ok(()) };
        Err(stopped)
            .with_context(|| format!("measured {} of {} steps of each strategy", self.steps, plan.steps))
    }
}

/// Trains one model per strategy, in turns, until everything is done or the user asks to stop. If one of them fails,
/// the error has [`Under`] as its context.
pub(crate) fn measure(
    plan: &Plan,
    shape: &Shape,
    cache: &CacheArgs,
    tokens: &TokenSet,
    progress: &Progress,
) -> Result<Measured> {
    let mut runs = Vec::new();
    for &strategy in &plan.strategies {
        let optimizer = |vs: &VarStore| plan.optimizer.build(vs);
        let learner = Learner::new(strategy, shape, plan.model_device, cache, optimizer, plan.seed)
            .with_context(|| Under(strategy))?;
        runs.push(StrategyRun::new(strategy, learner));
    }
    let mut batches =
        tokens.random_batches(shape.rows(), shape.block(), plan.seed, plan.model_device.device)?;
    let (mut warmup, mut done, mut stopped) = (plan.warmup, 0, None);
    progress.start();
    for round in 0.. {
        let all = warmup + plan.steps;
        if done == all {
            break;
        }
        if interrupt::requested() {
            stopped = Some(Interrupted::new(format!("interrupted after {done} of {all} steps")));
            break;
        }
        progress.at(done as f64 / all as f64);
        let end = if done < warmup { warmup } else { all };
        let turn =
            (done..end).take(plan.in_a_row).map(|step| Ok((step, batches.draw()?.split(shape.accumulate)?)));
        let turn = turn.collect::<Result<Vec<_>>>()?;
        for index in order(runs.len(), round) {
            let run = &mut runs[index];
            for (step, micro_batches) in &turn {
                seed_step(plan.seed, *step as u64);
                run.step(micro_batches).with_context(|| Under(run.strategy))?;
            }
        }
        done += turn.len();
        if plan.exact {
            verify(&runs, plan.check, done - turn.len()..done)?;
        }
        if done <= warmup {
            runs.iter_mut().for_each(StrategyRun::begin);
        }
        let settles = plan.warmup > 0 && runs.iter().any(|run| !run.is_settled());
        if done == warmup && settles && warmup < plan.warmup + SETTLING {
            warmup = (warmup + plan.in_a_row).min(plan.warmup + SETTLING);
        }
    }
    progress.clear();
    if runs.len() > 1 && plan.exact && done > 0 {
        let names: Vec<_> = plan.strategies.iter().map(|strategy| strategy.name()).collect();
        let what = match plan.check {
            true if plan.in_a_row > 1 => "every loss, and the gradients of the last step of each turn,",
            true => "every loss and every gradient",
            false => "every loss",
        };
        progress.line(&format!("check  {done} steps: {what} the same to the bit under {}", names.join(", ")));
    }
    let caches = runs.iter().filter_map(|run| Some((run.strategy.name(), run.learner.cache()?)));
    cache.write_trace(&caches.collect::<Vec<_>>(), progress)?;
    let keep = runs.iter().find(|run| run.strategy == Strategy::Keep);
    let steps = done.saturating_sub(warmup);
    let measured = runs.iter().filter(|_| steps > 0);
    let rows = measured.map(|run| run.row(shape.tokens_per_step(), keep, plan.seed)).collect();
    Ok(Measured { rows, steps, stopped })
}

/// The order of the runs in a round. Six rounds of three runs, or four of two, use every order equally often, and no
/// run finds caches warmed by its own previous step more often than another.
fn order(runs: usize, round: usize) -> Vec<usize> {
    let mut order: Vec<_> = (0..runs).collect();
    order.rotate_left(round / 2 % runs.max(1));
    if round % 2 == 1 {
        order.reverse();
    }
    order
}

/// Compares what the runs computed in their last `steps` with `keep`, or otherwise with the first of them.
fn verify(runs: &[StrategyRun], gradients: bool, steps: Range<usize>) -> Result<()> {
    let reference = runs.iter().find(|run| run.strategy == Strategy::Keep).or_else(|| runs.first());
    let Some(reference) = reference else { return Ok(()) };
    for run in runs.iter().filter(|run| run.strategy != reference.strategy) {
        let (name, base) = (run.strategy.name(), reference.strategy.name());
        let losses = run.losses(steps.len()).zip(reference.losses(steps.len()));
        for (step, (loss, expected)) in steps.clone().zip(losses) {
            if loss.to_bits() != expected.to_bits() {
                bail!("step {}: the loss under {name} is {loss}, and {expected} under {base}", step + 1);
            }
        }
        if !gradients {
            continue;
        }
        if let Some(parameter) = run.learner.differing_gradient(&reference.learner)? {
            let step = steps.end;
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
        for (runs, rounds, orders) in [(1, 2, 1), (2, 4, 2), (3, 6, 6)] {
            let mut counts = HashMap::new();
            for round in 0..rounds {
                *counts.entry(order(runs, round)).or_insert(0) += 1;
            }
            assert_eq!(counts.len(), orders, "{runs} runs: {counts:?}");
            assert!(counts.values().all(|&count| count == rounds / orders), "{runs} runs: {counts:?}");
        }
    }

    #[test]
    fn no_side_follows_itself_more_often_than_another() {
        for (runs, rounds) in [(2, 4), (3, 6)] {
            let turns: Vec<_> = (0..=rounds).flat_map(|round| order(runs, round)).collect();
            let turns = &turns[..=runs * rounds];
            let mut repeats = vec![0; runs];
            turns.windows(2).filter(|pair| pair[0] == pair[1]).for_each(|pair| repeats[pair[0]] += 1);
            assert!(repeats.iter().all(|&count| count == repeats[0]), "{runs} runs: {repeats:?}");
        }
    }
}
