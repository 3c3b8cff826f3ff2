//! The states of random number generators.

use std::ptr::NonNull;

use tch::Device;

use crate::error::{TorchError, check};
use crate::ffi::{self, StRandom};

/// The states that libtorch's default generators had at one moment.
pub struct RandomState(NonNull<StRandom>);

// SAFETY: generators and the tensors that hold their states have atomic counts. The states are never written to, and
// a generator is queried only under its own lock.
unsafe impl Send for RandomState {}

impl RandomState {
    /// The state of the CPU's generator and of the generator of each CUDA device among `devices`. A device that is
    /// not in use yet is initialised by this call.
    pub fn of(devices: &[Device]) -> Result<RandomState, TorchError> {
        let mut cuda: Vec<i8> = Vec::with_capacity(devices.len());
        for device in devices {
            let Device::Cuda(index) = *device else { continue };
            let index =
                i8::try_from(index).map_err(|_| TorchError(format!("there is no CUDA device {index}")))?;
            if !cuda.contains(&index) {
                cuda.push(index);
            }
        }
        let mut raw = std::ptr::null_mut();
        // SAFETY: the indices live through the call, and `raw` is a valid place for the result.
        check(unsafe { ffi::st_random_of(cuda.as_ptr(), cuda.len(), &raw mut raw) })?;
        NonNull::new(raw).map(RandomState).ok_or_else(|| TorchError("libtorch has no generators".to_owned()))
    }

    /// Makes the generators continue from these states.
    pub fn restore(&self) -> Result<(), TorchError> {
        // SAFETY: the states belong to this value.
        check(unsafe { ffi::st_random_restore(self.0.as_ptr()) })
    }
}

impl PartialEq for RandomState {
    fn eq(&self, other: &RandomState) -> bool {
        // SAFETY: the states belong to these values, and are only read.
        unsafe { ffi::st_random_same(self.0.as_ptr(), other.0.as_ptr()) }
    }
}

impl Drop for RandomState {
    fn drop(&mut self) {
        // SAFETY: the shim gave the states to this value, and nobody uses them after it.
        unsafe { ffi::st_random_free(self.0.as_ptr()) }
    }
}
