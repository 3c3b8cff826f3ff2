//! How many bytes a training step saves for backward.

use anyhow::{Result, ensure};
use clap::ValueEnum;

use super::model::{Architecture, Model};
use super::parallelism::Parallelism;
use super::saved::{Precision, SavedBytes};
use super::{gpt, llama, megatron};

/// Whose layers they are: what is saved depends on how they are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Implementation {
    /// Megatron-LM's, by the count of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"; Llamas are
    /// counted in the same way
    Megatron,
    /// The GPT or Llama that train and compare run, with fused attention, on one GPU; GPTs have biases
    Ssdtrain,
}

impl Implementation {
    /// Checks that the implementation supports this parallelism and this precision.
    ///
    /// # Errors
    /// Names the argument that is not supported.
    pub(crate) fn check(self, parallelism: &Parallelism, precision: &Precision) -> Result<()> {
        if self == Implementation::Megatron {
            return Ok(());
        }
        let Parallelism { tensor, pipeline, .. } = *parallelism;
        ensure!(
            tensor == 1 && pipeline == 1,
            "--implementation ssdtrain has no --tensor-parallel {tensor} and --pipeline-parallel {pipeline}; leave them at 1"
        );
        ensure!(
            precision.fused_attention,
            "--implementation ssdtrain has fused attention only; leave out --unfused-attention"
        );
        Ok(())
    }

    /// The bytes saved for each sequence.
    pub(crate) fn bytes(self, model: &Model, parallelism: &Parallelism, precision: &Precision) -> SavedBytes {
        match self {
            Implementation::Megatron => megatron::saved(model, parallelism, precision),
            Implementation::Ssdtrain => match model.architecture {
                Architecture::Gpt => gpt::saved(model, precision),
                Architecture::Llama { mlp, .. } => llama::saved(model, mlp, precision),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HALF: Precision = Precision { number_bytes: 2, fused_attention: false, dropout: true };

    #[test]
    fn ssdtrain_refuses_what_it_does_not_do() {
        let fused = Precision { fused_attention: true, ..HALF };
        let spread = |tensor, pipeline| Parallelism {
            tensor,
            pipeline,
            gpus: tensor * pipeline,
            sequence_parallel: false,
            zero: false,
        };
        let check = |parallelism, precision| Implementation::Ssdtrain.check(&parallelism, &precision);
        assert!(check(spread(1, 1), fused).is_ok());
        assert!(check(spread(2, 1), fused).unwrap_err().to_string().contains("--tensor-parallel 2"));
        assert!(check(spread(1, 2), fused).unwrap_err().to_string().contains("--pipeline-parallel 2"));
        assert!(check(spread(1, 1), HALF).unwrap_err().to_string().contains("--unfused-attention"));
    }
}
