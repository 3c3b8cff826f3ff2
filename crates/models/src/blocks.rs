//! A stack of transformer blocks, each of which adds to the residual stream.

use std::fmt::Debug;

use ssdtrain::segment;
use tch::{Kind, TchError, Tensor};

use crate::error::{Error, Result};
use crate::recompute::Recompute;

/// One block: attention and an MLP.
pub(crate) trait Block: Debug + Send + Sized + 'static {
    fn names(&self) -> &Names;

    /// The residual stream `[batch, block, hidden]` after this block, given the one before it.
    fn forward(&self, x: &Tensor, train: bool) -> Result<Tensor, TchError>;

    /// The same block, with shared parameters.
    fn shallow_clone(&self) -> Self;
}

/// What reports call a block and its parts.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    pub(crate) block: String,
    pub(crate) attention: String,
    pub(crate) mlp: String,
}

impl Names {
    pub(crate) fn of(index: i64) -> Names {
        Names {
            block: format!("block.{index}"),
            attention: format!("block.{index}.attn"),
            mlp: format!("block.{index}.mlp"),
        }
    }
}

/// The residual stream after all blocks; each is a segment if blocks are recomputed.
pub(crate) fn through(
    blocks: &[impl Block],
    mut x: Tensor,
    train: bool,
    recompute: Recompute,
) -> Result<Tensor> {
    for block in blocks {
        x = if recompute == Recompute::Layer {
            let held = block.shallow_clone();
            segment(&block.names().block, &x, move |x| held.forward(x, train))?
        } else {
            block.forward(&x, train)?
        };
    }
    Ok(x)
}

/// The length of the sequences in `inputs`, if these are ids `[batch, block]` that fit the context.
pub(crate) fn length(inputs: &Tensor, context: i64) -> Result<i64> {
    match inputs.size()[..] {
        [_, block] if (1..=context).contains(&block) && inputs.kind() == Kind::Int64 => Ok(block),
        _ => {
            let (kind, size) = (inputs.kind(), inputs.size());
            Err(Error::argument(format!(
                "inputs are {kind:?} {size:?}; the model takes Int64 [batch, 1 to {context}]"
            )))
        }
    }
}
