//! A training run whose activations may be offloaded.

use super::activations::Implementation;
use super::gpu::Gpu;
use super::model::Model;
use super::parallelism::{Batch, Parallelism};
use super::saved::Precision;

/// A training run on a machine.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) model: Model,
    pub(crate) gpu: Gpu,
    /// Floating-point operations per second that a GPU achieves.
    pub(crate) flops_per_s: f64,
    pub(crate) parallelism: Parallelism,
    pub(crate) batch: Batch,
    pub(crate) precision: Precision,
    pub(crate) implementation: Implementation,
}

impl Scenario {
    /// Bytes that a GPU saves for each sequence that its replica of the model is trained on: the mean over pipeline
    /// stages.
    pub(super) fn sequence_bytes(&self) -> f64 {
        let bytes = self.implementation.bytes(&self.model, &self.parallelism, &self.precision);
        (bytes.layer * self.model.layers as f64 + bytes.ends) / self.parallelism.pipeline as f64
    }
}
