//! What the result of a computation depends on besides its inputs and random numbers.

use std::marker::PhantomData;
use std::ptr::NonNull;

use tch::Tensor;

use crate::error::{TorchError, check};
use crate::ffi::{self, StEntered, StModes};

/// Whether the calling thread records gradients.
pub fn is_recording() -> bool {
    ffi::st_recording()
}

/// The version counter of `tensor`; `None` for an inference-mode tensor.
pub fn version(tensor: &Tensor) -> Option<u32> {
    let mut version = 0;
    // SAFETY: the tensor is borrowed, and `version` is a valid place for the result.
    check(unsafe { ffi::st_tensor_version(tensor.as_ptr(), &raw mut version) }).ok()?;
    Some(version)
}

/// Whether `tensor` passes a gradient on to anything. A view of a leaf that was made without recording requires a
/// gradient but passes none on.
pub fn takes_gradient(tensor: &Tensor) -> Result<bool, TorchError> {
    let mut takes = false;
    // SAFETY: the tensor is borrowed, and `takes` is a valid place for the result.
    check(unsafe { ffi::st_tensor_takes_gradient(tensor.as_ptr(), &raw mut takes) })?;
    Ok(takes)
}

/// A hash that almost certainly differs between tensors with different kinds, devices, sizes, strides or offsets.
/// `None` if `tensor` has no strides or no storage: it is sparse in any format, nested, a oneDNN tensor, or
/// undefined.
pub fn layout(tensor: &Tensor) -> Option<u64> {
    let mut layout = 0;
    // SAFETY: the tensor is borrowed, and `layout` is a valid place for the result.
    check(unsafe { ffi::st_tensor_layout(tensor.as_ptr(), &raw mut layout) }).ok()?;
    Some(layout)
}

/// The modes of a thread: whether it records gradients, autocast, and whatever else libtorch carries over from
/// forward to backward.
pub struct Modes(NonNull<StModes>);

// SAFETY: it is made to be moved to other threads, and never changes.
unsafe impl Send for Modes {}

impl Modes {
    /// The modes of the calling thread.
    pub fn of_thread() -> Result<Modes, TorchError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a valid place for the result.
        check(unsafe { ffi::st_modes_of_thread(&raw mut raw) })?;
        NonNull::new(raw).map(Modes).ok_or_else(|| TorchError("libtorch has no thread modes".to_owned()))
    }

    /// Puts the calling thread into these modes until the guard is dropped. Guards must be dropped newest first.
    pub fn enter(&self) -> Result<Entered, TorchError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the modes are this value's, and `raw` is a valid place for the result.
        check(unsafe { ffi::st_modes_enter(self.0.as_ptr(), &raw mut raw) })?;
        NonNull::new(raw)
            .map(|raw| Entered { raw, thread_bound: PhantomData })
            .ok_or_else(|| TorchError("libtorch entered no modes".to_owned()))
    }
}

impl Drop for Modes {
    fn drop(&mut self) {
        // SAFETY: the shim gave the modes to this value; a guard has a copy of what it needs.
        unsafe { ffi::st_modes_free(self.0.as_ptr()) }
    }
}

/// Guard of [`Modes::enter`].
#[must_use = "the thread leaves the modes when this guard is dropped"]
pub struct Entered {
    raw: NonNull<StEntered>,
    thread_bound: PhantomData<*const ()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        // SAFETY: the shim gave the guard to this value, which is bound to the thread that entered.
        unsafe { ffi::st_modes_leave(self.raw.as_ptr()) }
    }
}

/// An autocast region for what the calling thread computes on the CPU; `tch::autocast` supports only GPUs. Regions
/// must be left newest first.
#[must_use = "the thread leaves the region when this guard is dropped"]
pub struct CpuAutocast {
    before: bool,
    thread_bound: PhantomData<*const ()>,
}

impl CpuAutocast {
    /// Begins a region: matrices are multiplied in bfloat16 from now on.
    pub fn enter() -> CpuAutocast {
        CpuAutocast { before: ffi::st_cpu_autocast_enter(), thread_bound: PhantomData }
    }
}

impl Drop for CpuAutocast {
    fn drop(&mut self) {
        ffi::st_cpu_autocast_leave(self.before);
    }
}
