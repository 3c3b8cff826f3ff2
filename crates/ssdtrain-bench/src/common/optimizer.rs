//! How parameters are updated.

use anyhow::Result;
use clap::ValueEnum;
use serde::Serialize;
use ssdtrain_models::{AdamW, AdamWConfig, Optimizer, Sgd};
use tch::nn::VarStore;

/// An optimizer by name, with its default settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum OptimizerKind {
    /// Keeps two numbers per parameter
    #[value(name = "adamw")]
    AdamW,
    /// Plain gradient descent, which keeps nothing
    Sgd,
}

impl OptimizerKind {
    /// An optimizer of the parameters in `vs`.
    pub(crate) fn build(self, vs: &VarStore) -> Result<Box<dyn Optimizer>> {
        Ok(match self {
            OptimizerKind::AdamW => Box::new(AdamW::new(vs, AdamWConfig::for_kind(vs.kind()))?),
            OptimizerKind::Sgd => Box::new(Sgd::new(vs)),
        })
    }
}
