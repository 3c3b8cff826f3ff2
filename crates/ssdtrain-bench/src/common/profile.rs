//! Profiles in files: what one run has measured, for another to plan with.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use ssdtrain_plan::Profile;

use super::file::{ensure_replaceable, replace};
use super::model_device::ModelDevice;
use super::progress::Progress;
use super::shape::Shape;
use super::strategy::Strategy;

/// The argument that has a profile saved.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct SaveArgs {
    /// Of auto: save the profile that its plan was made of to FILE, for `plan --profile FILE`
    #[arg(long, value_name = "FILE")]
    save_profile: Option<PathBuf>,
}

/// A profile, and what it was measured on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedProfile {
    /// The model and where it was trained, in words.
    pub(crate) of: String,
    /// Sequences per micro-batch.
    pub(crate) batch: u64,
    pub(crate) profile: Profile,
}

impl SaveArgs {
    /// Whether a profile is to be saved.
    pub(crate) fn saves(&self) -> bool {
        self.save_profile.is_some()
    }

    /// Checks that there will be a profile and a place for it, so that problems are reported before training begins.
    pub(crate) fn prepare(&self, strategies: &[Strategy]) -> Result<()> {
        let Some(path) = &self.save_profile else { return Ok(()) };
        ensure!(
            strategies.contains(&Strategy::Auto),
            "--save-profile saves what the strategy auto has seen: add it to the strategies"
        );
        ensure_replaceable(path).context("--save-profile")
    }

    /// Saves the profile, if that was asked for.
    pub(crate) fn save(
        &self,
        seen: Option<Profile>,
        shape: &Shape,
        model_device: ModelDevice,
        progress: &Progress,
    ) -> Result<()> {
        let Some(path) = &self.save_profile else { return Ok(()) };
        let profile = seen.with_context(|| {
            format!(
                "--save-profile {}: no plan was made; take more steps, or a --min-bytes that is no larger than what autograd saves",
                path.display()
            )
        })?;
        let of = format!("{}, {model_device}", shape.describe());
        SavedProfile { of, batch: shape.batch as u64, profile }.write(path)?;
        progress.line(&format!("saved  {}; plan --profile makes plans of it", path.display()));
        Ok(())
    }
}

impl SavedProfile {
    /// Reads a profile.
    ///
    /// # Errors
    /// If there is none, or it cannot be planned with.
    pub(crate) fn read(path: &Path) -> Result<SavedProfile> {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_str(&text)
            .with_context(|| format!("{} is no profile of --save-profile", path.display()))
    }

    fn write(&self, path: &Path) -> Result<()> {
        replace(path, &(serde_json::to_string(self)? + "\n"))
    }
}
