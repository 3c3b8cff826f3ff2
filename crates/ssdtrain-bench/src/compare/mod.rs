//! `compare`: the same training step under each strategy, side by side.

use anyhow::Result;
use serde::Serialize;
use ssdtrain::PlanReport;

use crate::common::interrupt;
use crate::common::output::print;
use crate::common::progress::Progress;
use crate::common::strategy_run::{Row, render};
use crate::common::table::{self, ExplainArgs, OutputArgs};
use crate::common::task::{Task, TaskArgs};
use crate::common::turns::{Plan, TurnsArgs, measure};

/// Measure a training step with activations on disk beside the same step with activations in memory
///
/// Each strategy trains a model of its own, from the same weights on the same batches, so the models stay the same to
/// the bit. The strategies take turns step by step in one process (--in-a-row gives each more), in an order that changes from
/// round to round, so that a noisy machine hits all alike. Losses are always compared to the bit, and gradients with --check; on a GPU
/// only in deterministic mode, which --check turns on.
///
/// A step is: clear gradients, forward, backward, optimizer, wait for the last transfer and for the device. Step times are medians;
/// activation peak is the highest of any measured step, and the other figures are medians too. The ratio is that of
/// the medians, with a 95 % interval (bootstrap over rounds).
///
/// Ctrl-C, or kill, ends it after the round under way, with the figures of the steps measured so far and the signal's exit code.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    turns: TurnsArgs,
    #[command(flatten)]
    explain: ExplainArgs,
    /// Compare every gradient after every step to the bit; a difference is an error. It implies --deterministic
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    output: OutputArgs,
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
  ssdtrain-bench compare --model llama --preset hidden512 --strategies keep,auto
  ssdtrain-bench compare --model llama --device cuda --strategies plain,auto --in-a-row 8
  ssdtrain-bench compare --recompute layer --device-budget 16MiB
  ssdtrain-bench compare --spill-dir /mnt/a --spill-dir /mnt/b --device-budget 48MiB --json
  ssdtrain-bench compare --strategies keep,offload,adaptive-paper --disk-rate 150MiB
  ssdtrain-bench compare --steps 3 --strategies keep,offload --trace trace.json
  ssdtrain-bench compare --strategies keep,auto --save-profile step.json
  ssdtrain-bench compare --strategies keep,auto --plan plan.json

JSON, for each strategy: strategy, step_ms_median, tokens_per_s, act_peak_bytes, act_peak_spread_bytes (highest less lowest step),
act_peak_to_keep, step_peak_bytes (gradients counted too), saved_bytes, offloaded_bytes, recomputed_bytes, rerun_ms (of the host), deduplicated_bytes, forwarded_bytes,
stall_ms, stall_ms_by_cause {device_budget, host_pool, load, copy_in, memory}, pinned_bytes (pinned while measured), disk
{written_bytes_per_step, read_bytes_per_step, busy_bytes_per_s, busy_share}, planned {step_ms, peak_bytes, stall_ms, in_reach, plans}, adaptive {scopes, offloaded_scopes, last_scope,
required_bytes_per_s, measured_bytes_per_s}, ratio_to_keep {median, low, high}, loss_last, io_path. Per step, where that applies.
saved_bytes counts each save, so one tensor may count more than once; it is null for plain, which counts nothing.
ratio_to_keep is null without keep. With --explain also plan, which is all that it prints (null if nothing was planned): rows by scope, operations that
are recomputed, peak {phase, scope, operation, bytes, extra, holders}, kept_peak, and what the plan counts on.";

pub(crate) fn run(args: &Args) -> Result<()> {
    interrupt::listen()?;
    let task = args.task.prepare(args.check)?;
    let Task { model_device, shape, data, .. } = &task;
    let cache = &args.task.setup.cache;
    cache.prepare(&args.turns.strategies)?;
    let progress = Progress::new(args.output.json);
    progress.line(&format!("data   {}", data.describe()));
    progress.line(&format!("model  {}, {model_device}", shape.describe()));
    progress.line(&format!("spill  {}", cache.describe()?));
    let plan = Plan { check: args.check, ..Plan::new(&args.turns, &args.task, &task) };
    progress.line(&format!("plan   {} steps of each strategy, after {} of warm-up", plan.steps, plan.warmup));
    let measured = measure(&plan, shape, cache, &data.train, &progress)?;
    show(args, &measured.rows)?;
    let seen = measured.rows.iter().find_map(|row| row.profile.clone());
    let saved = cache.profile.save(seen, shape, *model_device, &progress);
    let saved = saved.and_then(|()| {
        let planned = measured.rows.iter().find_map(|row| row.saved_plan.as_ref());
        cache.policy.saved.save(planned, &progress)
    });
    measured.ensure_complete(&plan).and(saved)
}

/// A row with the whole plan.
#[derive(Serialize)]
struct Explained<'a> {
    #[serde(flatten)]
    row: &'a Row,
    plan: Option<&'a PlanReport>,
}

/// Prints the measurements, even if there are fewer steps than asked for.
fn show(args: &Args, rows: &[Row]) -> Result<()> {
    if args.output.json {
        return rows.iter().try_for_each(|row| match args.explain.explain {
            true => table::print_json(&Explained { row, plan: row.explained.as_deref() }),
            false => table::print_json(row),
        });
    }
    if !rows.is_empty() {
        print(&format!("\n{}", render(rows)));
    }
    for explained in rows.iter().filter_map(|row| row.explained.as_ref()).filter(|_| args.explain.explain) {
        print(&format!("\n{explained}"));
    }
    Ok(())
}
