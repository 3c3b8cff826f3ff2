//! What is saved, and in which number format.

use anyhow::{Result, ensure};

use super::model::{Architecture, Model};

/// The number format and the operations that a model is trained with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Precision {
    /// Bytes of a number: 2 or 4.
    pub(crate) number_bytes: u64,
    /// Whether one kernel computes attention and keeps one number per row of scores instead of the scores.
    pub(crate) fused_attention: bool,
    /// Whether there is dropout: its masks take a byte for each number.
    pub(crate) dropout: bool,
}

impl Precision {
    /// Checks that the model can be trained so.
    ///
    /// # Errors
    /// Names the argument that the model does not have.
    pub(crate) fn check(&self, model: &Model) -> Result<()> {
        let is_gpt = model.architecture == Architecture::Gpt;
        ensure!(is_gpt || !self.dropout, "--dropout is for a GPT: a Llama has none");
        Ok(())
    }
}

/// Bytes saved on a GPU for each sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SavedBytes {
    /// In each layer.
    pub(crate) layer: f64,
    /// In embedding, head and loss together.
    pub(crate) ends: f64,
}

/// Bytes of a number in 32 bits.
pub(crate) const SINGLE: f64 = 4.0;

/// Bytes of a token's id.
pub(crate) const TOKEN_ID: f64 = 8.0;
