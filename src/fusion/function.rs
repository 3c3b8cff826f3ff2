//! What operations compute for each element, and of what.

use std::borrow::Cow;

use ssdtrain_libtorch::View;

/// What an operation computes for each element. Operands are 32 bits wide, and so is the result before it is rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Function {
    /// The same value, maybe of another type.
    Convert,
    /// The first plus the second times the third.
    Add,
    Multiply,
    Divide,
    Negate,
    Absolute,
    Reciprocal,
    Square,
    SquareRoot,
    ReciprocalRoot,
    Exponential,
    HyperbolicTangent,
    Sigmoid,
    Silu,
    Relu,
    Gelu,
    GeluByTangent,
    /// Of rows, from their means and reciprocal deviations, with weights and biases.
    LayerNorm,
    /// Of rows, from their reciprocal roots of mean squares, with weights.
    RootMeanSquareNorm,
    /// Of channels, as layer norms.
    BatchNorm,
    /// The same, rounded as cuDNN does for small images.
    BatchNormFolded,
}

/// What an operation is given.
pub(super) enum Given<'a> {
    Tensor(Cow<'a, View>),
    Number(f32),
}

impl<'a> From<&'a View> for Given<'a> {
    fn from(view: &'a View) -> Given<'a> {
        Given::Tensor(Cow::Borrowed(view))
    }
}

impl Function {
    /// Whether a GPU computes it in more time than its operands take to come from memory, if these have 16 bits.
    pub(crate) fn is_heavy(self) -> bool {
        matches!(self, Function::Gelu | Function::GeluByTangent)
    }

    /// Whether even one processor computes it in less time than its operands take to come from memory.
    pub(crate) fn is_light(self) -> bool {
        match self {
            Function::Convert
            | Function::Add
            | Function::Multiply
            | Function::Divide
            | Function::Negate
            | Function::Absolute
            | Function::Reciprocal
            | Function::Square
            | Function::SquareRoot
            | Function::ReciprocalRoot
            | Function::Relu
            | Function::LayerNorm
            | Function::RootMeanSquareNorm
            | Function::BatchNorm
            | Function::BatchNormFolded => true,
            Function::Exponential
            | Function::HyperbolicTangent
            | Function::Sigmoid
            | Function::Silu
            | Function::Gelu
            | Function::GeluByTangent => false,
        }
    }
}
