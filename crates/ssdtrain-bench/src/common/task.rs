//! The steps that a command measures: model, data, device and cache.

use anyhow::{Result, ensure};
use clap::value_parser;

use crate::common::data::Data;
use crate::common::model_device::ModelDevice;
use crate::common::optimizer::OptimizerKind;
use crate::common::setup::SetupArgs;
use crate::common::shape::Shape;

/// The arguments that make up a [`Task`].
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct TaskArgs {
    /// Take kernels that give the same bits each time; on a GPU they are slower
    #[arg(long)]
    deterministic: bool,
    /// How parameters follow their gradients
    #[arg(long, value_enum, default_value = "adamw")]
    pub(crate) optimizer: OptimizerKind,
    /// Size of the vocabulary, if larger than the tokenizer's: 50304 suits a GPU better than GPT-2's 50257
    #[arg(long, value_name = "N", help_heading = "Model", value_parser = value_parser!(i64).range(1..=1 << 20))]
    vocab: Option<i64>,
    #[command(flatten)]
    pub(crate) setup: SetupArgs,
}

/// Steps that are ready to be measured.
#[derive(Debug)]
pub(crate) struct Task {
    pub(crate) model_device: ModelDevice,
    /// With the vocabulary of the data.
    pub(crate) shape: Shape,
    pub(crate) data: Data,
    /// Whether the same computation gives the same bits, so that losses can be compared.
    pub(crate) exact: bool,
}

impl TaskArgs {
    /// Reads the data and prepares the device, so that problems are reported before measuring begins. `check`:
    /// whether bits will be compared.
    pub(crate) fn prepare(&self, check: bool) -> Result<Task> {
        let SetupArgs { shape, data, .. } = &self.setup;
        let model_device = self.setup.place()?;
        let gpu = model_device.device.is_cuda();
        // The processor's kernels give the same bits in any case.
        let exact = check || self.deterministic || !gpu;
        if exact && gpu {
            ssdtrain_libtorch::make_deterministic()?;
        }
        let mut shape = shape.resolve(|family| Shape::preset(family, "mini"))?;
        let data = data.load(&shape.tokens)?;
        data.require(shape.block())?;
        let tokens = data.tokenizer.vocab() as i64;
        let vocab = self.vocab.unwrap_or(tokens);
        ensure!(vocab >= tokens, "--vocab {vocab} is less than the {tokens} tokens of the tokenizer");
        shape.model.set_vocab(vocab);
        Ok(Task { model_device, shape, data, exact })
    }
}
