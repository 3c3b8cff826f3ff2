//! What is done with activations.

use clap::ValueEnum;
use ssdtrain_models::Recompute;

use crate::common::shape::Shape;

/// What becomes of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Strategy {
    /// tch without a cache: no hooks. The CPU allocator is ours in every strategy, since it serves the whole process:
    /// so memory is measured alike, and no strategy gets a faster one
    Plain,
    /// A cache that keeps everything in memory, and only counts
    Keep,
    /// The same, with each block computed again from its input in backward, whatever --recompute says of the others
    Recompute,
    /// A cache that moves activations: from the CPU to disk, from a GPU to pinned host memory and, once that is full, to disk
    Offload,
    /// A cache that moves them from a GPU to pinned host memory only
    OffloadHost,
    /// A cache that moves as much as is back in time, by the paper's measure: two steps move everything, the second is profiled, and
    /// from then on only so many of the first scopes move. Without --device-budget there is none on the CPU
    AdaptivePaper,
    /// A cache that plans for each storage, from one profiled step, what reaches the goal of --budget and --overhead best: keep it, move it,
    /// or compute it again
    Auto,
    /// A cache that moves them to disk; from a GPU through a host pool that is no larger than --host-pool, or than need be
    OffloadDisk,
}

impl Strategy {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Strategy::Plain => "plain",
            Strategy::Keep => "keep",
            Strategy::Recompute => "recompute",
            Strategy::Offload => "offload",
            Strategy::OffloadHost => "offload-host",
            Strategy::AdaptivePaper => "adaptive-paper",
            Strategy::Auto => "auto",
            Strategy::OffloadDisk => "offload-disk",
        }
    }

    /// What a model of this shape recomputes under this strategy.
    pub(crate) fn recompute(self, shape: &Shape) -> Recompute {
        match self {
            Strategy::Recompute => Recompute::Layer,
            _ => shape.recompute,
        }
    }
}
