//! What a run prints: its latest steps, a sample, and a comparison of its step with keep's.

use std::path::Path;

use anyhow::{Context, Result};
use bytesize::ByteSize;
use serde::Serialize;
use ssdtrain::{DiskReport, StepReport, Tally};
use ssdtrain_models::{Sampling, sample};

use super::Run;
use super::averages::StepAverages;
use crate::common::learner::Outcome;
use crate::common::optimizer::OptimizerKind;
use crate::common::strategy::Strategy;
use crate::common::{size, strategy_run, turns};

/// What a run reports to programs, one line each.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(super) enum Event<'a> {
    /// The steps since the last of these lines.
    Step {
        step: u64,
        loss: f64,
        learning_rate: f64,
        step_ms: f64,
        tokens_per_s: f64,
        act_peak_bytes: u64,
        step_peak_bytes: u64,
        stall_ms: f64,
        /// The report of the last of them; `None` without a cache.
        report: Option<&'a StepReport>,
    },
    Eval {
        step: u64,
        held_out_loss: f64,
    },
    Checkpoint {
        step: u64,
        path: &'a Path,
    },
    Sample {
        text: &'a str,
    },
}

impl Run {
    /// The latest steps, for people.
    pub(super) fn show(&self, averages: &StepAverages, last: &Outcome) {
        let mut text = format!(
            "step {:>6}  loss {:.4}  {:.0} tokens/s  peak {}",
            self.step,
            last.loss,
            averages.tokens_per_s(&self.shape),
            size::format(averages.act_peak_bytes)
        );
        if let Some(report) = &last.report {
            text += &format!(
                "  {} moved, {} back, {} forwarded  stall {:.1} ms",
                size::format(report.offloaded.bytes),
                size::format(report.loaded.bytes),
                size::format(report.forwarded.bytes),
                averages.stall_ms(),
            );
        }
        self.progress.status(text);
    }

    /// The same for programs.
    pub(super) fn log(&self, averages: &StepAverages, last: &Outcome, learning_rate: f64) -> Result<()> {
        self.progress.event(&Event::Step {
            step: self.step,
            loss: last.loss,
            learning_rate,
            step_ms: averages.step_ms(),
            tokens_per_s: averages.tokens_per_s(&self.shape),
            act_peak_bytes: averages.act_peak_bytes,
            step_peak_bytes: averages.step_peak_bytes,
            stall_ms: averages.stall_ms(),
            report: last.report.as_ref(),
        })
    }

    /// What the run has written to the disks.
    pub(super) fn show_disks(&self) {
        let disks = self.last_report.iter().flat_map(|report| &report.disks);
        disks.filter(|disk| disk.by_run > 0).for_each(|disk| self.progress.line(&wear(disk)));
    }

    pub(super) fn show_sample(&self) -> Result<()> {
        if self.args.sample_tokens == 0 {
            return Ok(());
        }
        let sampling = Sampling { seed: self.seed, ..Sampling::default() };
        let mut tokens = self.prompt.clone();
        tokens.extend(sample(
            self.learner.model.as_ref(),
            &self.prompt,
            self.args.sample_tokens as usize,
            &sampling,
        )?);
        let text = self.data.tokenizer.decode(&tokens)?;
        self.progress.line(&format!("\nA sample:\n{}", indented(&text)));
        self.progress.event(&Event::Sample { text: &text })
    }

    /// Trains fresh models of the same shape, so the run's own model is dropped first.
    pub(super) fn show_comparison(self) -> Result<()> {
        let Run { args, strategy, model_device, shape, data, learner, progress, seed, .. } = self;
        drop(learner);
        if args.compare_steps == 0 {
            return Ok(());
        }
        let strategy = match strategy {
            Strategy::Plain | Strategy::Keep => Strategy::Offload,
            other => other,
        };
        progress.line(&format!(
            "\nThe same step under {} and with all activations on the device (keep), in turns:",
            strategy.name()
        ));
        let plan = turns::Plan {
            strategies: vec![Strategy::Keep, strategy],
            steps: args.compare_steps as usize,
            warmup: 2,
            in_a_row: 1,
            check: !model_device.device.is_cuda(),
            exact: !model_device.device.is_cuda(),
            seed,
            optimizer: OptimizerKind::AdamW,
            model_device,
        };
        let cache = args.setup.cache.untraced();
        let measured = turns::measure(&plan, &shape, &cache, &data.train, &progress)?;
        if progress.is_json() {
            measured.rows.iter().try_for_each(|row| progress.event(row))?;
        } else if !measured.rows.is_empty() {
            progress.line(&strategy_run::render(&measured.rows));
        }
        measured.ensure_complete(&plan).context("the run is done and saved")
    }
}

/// Where the activations of a step went.
pub(super) fn whereabouts(report: &StepReport) -> String {
    let bytes = |tally: Tally| size::format(tally.bytes);
    let kept = &report.kept;
    let mut text = format!(
        "saved {} in {} tensors: {} left the device ({} came back, {} were still there when asked for), {} were in the cache \
         already. On the device stayed {} of parameters, {} of small tensors",
        bytes(report.saved),
        report.saved.count,
        bytes(report.offloaded),
        bytes(report.loaded),
        bytes(report.forwarded),
        bytes(report.deduplicated),
        bytes(kept.parameters),
        bytes(kept.small),
    );
    for (tally, why) in [
        (kept.policy, "as planned or asked for"),
        (kept.ineligible, "that cannot be moved"),
        (kept.no_room, "for want of room elsewhere"),
    ] {
        if tally.count > 0 {
            text += &format!(", {} {why}", bytes(tally));
        }
    }
    if report.recomputed.count > 0 {
        text += &format!("; {} were computed again", bytes(report.recomputed));
    }
    text + "."
}

/// What a run has written to a disk.
fn wear(disk: &DiskReport) -> String {
    let shown = |bytes: u64| ByteSize(bytes).display().si();
    let DiskReport { name, by_run, today, by_all_runs, .. } = disk;
    let mut text = format!(
        "disk   {name}: this run has written {}, all runs {} today and {} in all",
        shown(*by_run),
        shown(*today),
        shown(*by_all_runs)
    );
    if let Some(life) = disk.life {
        text += &format!("; at this rate it lasts {:.0} more days", life.as_secs_f64() / 86_400.0);
    }
    text
}

/// Text of a model for a terminal: what it makes up may be control characters.
fn indented(text: &str) -> String {
    let shown = text.replace(|c: char| c.is_control() && c != '\n' && c != '\t', "\u{fffd}");
    shown.lines().map(|line| format!("    {line}")).collect::<Vec<_>>().join("\n")
}
