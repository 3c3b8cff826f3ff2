//! How a run's parameters are updated: AdamW with a schedule.

use std::time::Duration;

use anyhow::{Context, Result};
use ssdtrain_models::{AdamWConfig, Schedule};
use tch::Kind;

use super::stopping::StoppingRule;
use crate::common::learner::Update;
use crate::common::{defaults, float};

/// The arguments of the optimizer and its learning rate.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Optimizer")]
pub(crate) struct OptimizerArgs {
    /// Learning rate after warm-up
    #[arg(long, value_name = "RATE", default_value = "1e-3", value_parser = float::positive)]
    lr: f64,
    /// Learning rate at the end of the run, which a half cosine leads down to; default: a tenth of --lr
    #[arg(long, value_name = "RATE", value_parser = float::non_negative)]
    min_lr: Option<f64>,
    /// Steps over which the learning rate rises; default: 100, or a tenth of the run if that is less
    #[arg(long, value_name = "STEPS")]
    warmup_steps: Option<u64>,
    /// Decay of the mean gradient
    #[arg(long, value_name = "RATE", default_value = "0.9", value_parser = float::below_one)]
    beta1: f64,
    /// Decay of the mean squared gradient
    #[arg(long, value_name = "RATE", default_value = "0.99", value_parser = float::below_one)]
    beta2: f64,
    /// Weight decay of matrices and embeddings
    #[arg(long, value_name = "RATE", default_value = "0.1", value_parser = float::non_negative)]
    weight_decay: f64,
    /// Scale gradients down to this norm; 0 leaves them alone
    #[arg(long, value_name = "NORM", default_value = "1.0", value_parser = float::non_negative)]
    clip: f64,
}

impl OptimizerArgs {
    /// The settings that stay constant over the run of a model of `kind`.
    pub(crate) fn adamw(&self, kind: Kind) -> AdamWConfig {
        AdamWConfig {
            beta1: self.beta1,
            beta2: self.beta2,
            weight_decay: self.weight_decay,
            ..AdamWConfig::for_kind(kind)
        }
    }

    /// How to take the step after `step` others, `elapsed` after the run began.
    pub(crate) fn update(&self, stopping: &StoppingRule, step: u64, elapsed: Duration) -> Result<Update> {
        let total = stopping.total(step, elapsed);
        let warmup = self.warmup_steps.unwrap_or_else(|| defaults::WARMUP_STEPS.min(total / 10));
        // The length of a timed run is only an estimate, and no reason to reject a warm-up.
        let warmup = if stopping.is_exact() { warmup } else { warmup.min(total) };
        let schedule = Schedule::new(self.lr, self.min_lr.unwrap_or(self.lr / 10.0), warmup, total)
            .context("--lr, --min-lr and --warmup-steps")?;
        Ok(Update {
            learning_rate: schedule.learning_rate(step),
            clip: (self.clip > 0.0).then_some(self.clip),
        })
    }
}
