//! What tch does not offer: a sum with a factor, a linear layer that creates no second gradient of its weight, and a
//! value whose gradients are known already.

use std::ffi::{CStr, c_char};
use std::ptr;

use tch::{TchError, Tensor};
use torch_sys::C_tensor;

// As declared in `csrc/shim.h`.
unsafe extern "C" {
    fn ssdtrain_axpy(alpha: f64, x: *const C_tensor, y: *const C_tensor) -> *const c_char;
    fn ssdtrain_linear(
        input: *const C_tensor,
        weight: *const C_tensor,
        bias: *const C_tensor,
        out: *mut *mut C_tensor,
    ) -> *const c_char;
    fn ssdtrain_is_recorded(tensor: *const C_tensor) -> bool;
    fn ssdtrain_known(
        value: *const C_tensor,
        count: usize,
        inputs: *const *const C_tensor,
        gradients: *const *const C_tensor,
        out: *mut *mut C_tensor,
    ) -> *const c_char;
}

/// `input · weightᵀ + bias`, as computed by libtorch's own `linear` (`input` is `[.., inputs]`, `weight` `[outputs,
/// inputs]`, `bias` `[outputs]`), under autocast too. Backward adds the weight's gradient to `weight.grad()` in
/// place, whereas autograd would first create one as large as the weight. Several backward passes may run at once. A
/// gradient that is requested by itself (`run_backward`), recorded (`create_graph`) or hooked is computed by autograd
/// as usual. `weight` must be a leaf.
///
/// # Errors
/// If the weight is not a leaf, and whatever libtorch reports about shapes, kinds or devices that do not match.
pub fn linear_in_place(input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor, TchError> {
    if !weight.is_leaf() {
        let said = "linear_in_place: the weight is not a leaf, so it has no gradient to add to";
        return Err(TchError::Torch(said.to_owned()));
    }
    let bias = bias.map_or(ptr::null(), Tensor::as_ptr);
    let mut raw = ptr::null_mut();
    // SAFETY: the tensors are borrowed, `bias` may be null, and `raw` is a valid place for the result.
    let message = unsafe { ssdtrain_linear(input.as_ptr(), weight.as_ptr(), bias, &raw mut raw) };
    // SAFETY: that call's message, and the next thing done with it.
    unsafe { check(message) }?;
    // SAFETY: the shim created the tensor and gave it to us.
    Ok(unsafe { Tensor::from_ptr(raw) })
}

/// Whether autograd records operations on `tensor` now.
pub(crate) fn is_recorded(tensor: &Tensor) -> bool {
    // SAFETY: the tensor is borrowed for the call, which only reads a flag of it and one of the thread.
    unsafe { ssdtrain_is_recorded(tensor.as_ptr()) }
}

/// A tensor with the numbers of `value`, a scalar, whose gradient with respect to each of these tensors is the one next
/// to it. Backward scales it by the gradient that comes in, in place if it releases the graph.
pub(crate) fn known(value: &Tensor, gradients: Vec<(&Tensor, Tensor)>) -> Result<Tensor, TchError> {
    let inputs: Vec<_> = gradients.iter().map(|(input, _)| input.as_ptr()).collect();
    let known: Vec<_> = gradients.iter().map(|(_, gradient)| gradient.as_ptr()).collect();
    let mut raw = ptr::null_mut();
    // SAFETY: the tensors are borrowed, both arrays have as many of them as is said, and `raw` is a valid place for the
    // result. The node that keeps the gradients has handles of its own; these ones end with the call.
    let message = unsafe {
        ssdtrain_known(
            value.as_ptr(),
            gradients.len(),
            inputs.as_ptr().cast(),
            known.as_ptr().cast(),
            &raw mut raw,
        )
    };
    // SAFETY: that call's message, and the next thing done with it.
    unsafe { check(message) }?;
    // SAFETY: the shim created the tensor and gave it to us.
    Ok(unsafe { Tensor::from_ptr(raw) })
}

/// `y += alpha · x`, in place and without a temporary, for tensors of the same shape; autograd does not record it.
/// Whatever has saved `y` for backward notices that it has changed.
pub(crate) fn axpy(alpha: f64, x: &Tensor, y: &mut Tensor) -> Result<(), TchError> {
    // SAFETY: both tensors are borrowed for the call, and both handles are of tch.
    let message = unsafe { ssdtrain_axpy(alpha, x.as_ptr(), y.as_ptr()) };
    // SAFETY: that call's message, and the next thing done with it.
    unsafe { check(message) }
}

/// Turns what a function of the shim returned into a result.
///
/// # Safety
/// `message` is what the shim returned to this thread, and no other of its functions was called since.
unsafe fn check(message: *const c_char) -> Result<(), TchError> {
    if message.is_null() {
        return Ok(());
    }
    // SAFETY: the shim's messages are C strings that live until this thread's next failed call, which the caller did not make.
    let message = unsafe { CStr::from_ptr(message) };
    Err(TchError::Torch(message.to_string_lossy().trim_end().to_owned()))
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    #[test]
    fn what_libtorch_refuses_is_an_error_in_its_words() {
        let [two, three] = [2, 3].map(|length| Tensor::ones([length], (Kind::Float, Device::Cpu)));
        let error = axpy(1.0, &two, &mut three.shallow_clone()).unwrap_err().to_string();
        assert!(error.contains("must match the size"), "{error}");
        let matrix = Tensor::ones([3, 3], (Kind::Float, Device::Cpu));
        let error = linear_in_place(&two, &matrix, None).unwrap_err().to_string();
        assert!(error.contains("size mismatch") || error.contains("shape"), "{error}");
        axpy(2.0, &three, &mut three.shallow_clone()).unwrap();
        assert_eq!(three, &three.ones_like() * 3.0, "and the next call is as good as ever");
    }
}
