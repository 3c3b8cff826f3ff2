//! Plans in files: what one run has planned, for another to start with.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use ssdtrain::SavedPlan;

use super::file::{ensure_replaceable, replace};
use super::progress::Progress;
use super::strategy::Strategy;

/// The arguments that read and write plans.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Cache")]
pub(crate) struct SavedPlanArgs {
    /// Of auto: start with the plan in FILE, which a run with the same model, sizes and cache has saved by --save-plan. The first step follows
    /// it, and none is profiled. For another --budget or --overhead it is made anew; if steps save something else, they are profiled as
    /// without it, and a warning says so
    #[arg(long, value_name = "FILE", value_parser = read)]
    plan: Option<SavedPlan>,
    /// Of auto: save the last plan to FILE, for --plan FILE
    #[arg(long, value_name = "FILE")]
    save_plan: Option<PathBuf>,
}

impl SavedPlanArgs {
    /// The plan to start with, if one was given.
    pub(crate) fn start(&self) -> Option<&SavedPlan> {
        self.plan.as_ref()
    }

    /// Whether a plan is to be saved.
    pub(crate) fn saves(&self) -> bool {
        self.save_plan.is_some()
    }

    /// Checks that there will be a plan and a place for it, so that problems are reported before training begins.
    pub(crate) fn prepare(&self, strategies: &[Strategy]) -> Result<()> {
        let Some(path) = &self.save_plan else { return Ok(()) };
        ensure!(
            strategies.contains(&Strategy::Auto),
            "--save-plan saves a plan of the strategy auto: add it to the strategies"
        );
        ensure_replaceable(path).context("--save-plan")
    }

    /// Saves the plan, if that was asked for.
    pub(crate) fn save(&self, plan: Option<&SavedPlan>, progress: &Progress) -> Result<()> {
        let Some(path) = &self.save_plan else { return Ok(()) };
        let plan = plan.with_context(|| {
            format!(
                "--save-plan {}: no plan was made; take more steps, or a --min-bytes that is no larger than what autograd saves",
                path.display()
            )
        })?;
        replace(path, &(serde_json::to_string(plan)? + "\n"))?;
        progress.line(&format!("saved  {}; --plan starts with it", path.display()));
        Ok(())
    }
}

/// Reads a plan.
fn read(path: &str) -> Result<SavedPlan, String> {
    let text = fs::read_to_string(path).map_err(|error| error.to_string())?;
    serde_json::from_str(&text).map_err(|error| format!("it is no plan of --save-plan: {error}"))
}
