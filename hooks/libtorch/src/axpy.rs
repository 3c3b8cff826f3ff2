//! A sum with a factor.

use tch::Tensor;

use crate::error::{TorchError, check};
use crate::ffi;

/// `y += alpha · x`, in place and without a temporary, of tensors of one shape; autograd does not record it. What has saved `y` for
/// backward learns that it changed.
///
/// # Errors
/// What libtorch says of shapes, kinds or devices that do not go together.
pub fn axpy(alpha: f64, x: &Tensor, y: &mut Tensor) -> Result<(), TorchError> {
    // SAFETY: both tensors are borrowed for the call, and both handles are of tch.
    check(unsafe { ffi::st_axpy(alpha, x.as_ptr(), y.as_ptr()) })
}
