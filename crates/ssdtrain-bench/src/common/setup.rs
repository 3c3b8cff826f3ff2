//! The arguments of every command that trains: model, data, device and cache.

use anyhow::Result;
use clap::value_parser;

use super::cache::CacheArgs;
use super::data::DataArgs;
use super::defaults;
use super::model_device::{DeviceArgs, ModelDevice};
use super::shape::ShapeArgs;

/// The arguments that say what is trained, on what and where.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct SetupArgs {
    /// Seed of weights, batches, dropout and whatever else is drawn; default: 1337, or the checkpoint's where a run goes on from one
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Threads that compute; default: as many as libtorch takes
    #[arg(long, value_name = "N", value_parser = value_parser!(i32).range(1..=1024))]
    threads: Option<i32>,
    #[command(flatten)]
    model_device: DeviceArgs,
    #[command(flatten)]
    pub(crate) shape: ShapeArgs,
    #[command(flatten)]
    pub(crate) data: DataArgs,
    #[command(flatten)]
    pub(crate) cache: CacheArgs,
}

impl SetupArgs {
    /// The seed of a new run.
    pub(crate) fn seed(&self) -> u64 {
        self.seed_or(defaults::SEED)
    }

    /// The seed asked for, or otherwise that of the run that is resumed.
    pub(crate) fn seed_or(&self, before: u64) -> u64 {
        self.seed.unwrap_or(before)
    }

    /// Prepares the device and the computing threads.
    pub(crate) fn place(&self) -> Result<ModelDevice> {
        if let Some(threads) = self.threads {
            tch::set_num_threads(threads);
        }
        self.model_device.resolve()
    }
}
