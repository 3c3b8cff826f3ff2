//! What is saved, and in which number format.

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

/// Bytes saved on a GPU for each sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SavedBytes {
    /// In each layer.
    pub(crate) layer: f64,
    /// In embedding, head and loss together.
    pub(crate) ends: f64,
}
