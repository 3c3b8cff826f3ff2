//! A linear layer that makes no second gradient of its weight.

use tch::Tensor;

use crate::error::{TorchError, check};
use crate::ffi;

/// `input · weightᵀ + bias`, as libtorch's own `linear` computes it (`input` is `[.., inputs]`, `weight` `[outputs, inputs]`, `bias`
/// `[outputs]`), under autocast too. Backward adds the weight's gradient to `weight.grad()` in place, where autograd would first make one
/// as large as the weight. Several backwards may run at once. A gradient that is asked for by itself (`run_backward`), recorded
/// (`create_graph`) or hooked goes autograd's own way. `weight` must be a leaf.
pub fn linear_in_place(input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor, TorchError> {
    if !weight.is_leaf() {
        return Err(TorchError(
            "linear_in_place: the weight is not a leaf, so it has no gradient to add to".to_owned(),
        ));
    }
    let bias = bias.map_or(std::ptr::null(), Tensor::as_ptr);
    let mut raw = std::ptr::null_mut();
    // SAFETY: the tensors are borrowed, `bias` may be null, and `raw` is a valid place for the result.
    check(unsafe { ffi::st_linear(input.as_ptr(), weight.as_ptr(), bias, &raw mut raw) })?;
    // SAFETY: the shim made a tensor and gave it to us.
    Ok(unsafe { Tensor::from_ptr(raw) })
}
