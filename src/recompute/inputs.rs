//! The forms in which a segment's inputs may be given.

use tch::Tensor;

/// The inputs of a [`segment`](crate::segment): one tensor, an array of them (`[&x, &y]`), or a slice. Its function gets them in the same
/// form.
pub trait Inputs {
    /// The form, borrowed for one call of the function.
    type Given<'a>;

    /// The tensors, in an order that depends on nothing else.
    fn tensors(&self) -> Vec<&Tensor>;

    /// What the function gets; `tensors` are in the order of [`tensors`](Inputs::tensors). `None` if there are more or fewer than that.
    fn given<'a>(tensors: &'a [&'a Tensor]) -> Option<Self::Given<'a>>;
}

impl Inputs for &Tensor {
    type Given<'a> = &'a Tensor;

    fn tensors(&self) -> Vec<&Tensor> {
        vec![self]
    }

    fn given<'a>(tensors: &'a [&'a Tensor]) -> Option<&'a Tensor> {
        tensors.first().copied()
    }
}

impl<const N: usize> Inputs for [&Tensor; N] {
    type Given<'a> = [&'a Tensor; N];

    fn tensors(&self) -> Vec<&Tensor> {
        self.to_vec()
    }

    fn given<'a>(tensors: &'a [&'a Tensor]) -> Option<[&'a Tensor; N]> {
        tensors.try_into().ok()
    }
}

impl Inputs for &[&Tensor] {
    type Given<'a> = &'a [&'a Tensor];

    fn tensors(&self) -> Vec<&Tensor> {
        self.to_vec()
    }

    fn given<'a>(tensors: &'a [&'a Tensor]) -> Option<&'a [&'a Tensor]> {
        Some(tensors)
    }
}
