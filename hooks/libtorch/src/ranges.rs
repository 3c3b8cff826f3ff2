//! Named ranges for NVIDIA's tools (NVTX), through the NVTX that comes with libtorch's CUDA library.
//!
//! That library looks for a tool by itself: Nsight Systems names its own library in `NVTX_INJECTION64_PATH`, and
//! without a tool a range costs one call that returns at once. If the CUDA library is not loaded, there are no
//! ranges.

use std::ffi::CString;
use std::marker::PhantomData;

use crate::ffi;

/// Guard of [`range`].
#[derive(Debug)]
#[must_use = "the range ends when this guard is dropped"]
pub struct Range {
    /// Ranges form a stack on the thread that pushed them.
    thread_bound: PhantomData<*const ()>,
}

/// Begins a range on the calling thread; `None` without libtorch's CUDA library ([`load_cuda`](crate::load_cuda)).
pub fn range(name: &str) -> Option<Range> {
    if !ffi::st_ranges() {
        return None;
    }
    // Only a name that contains a NUL cannot be a C string.
    let name = CString::new(name).unwrap_or_default();
    // SAFETY: the name is a C string that lives through the call; the tool copies it.
    let status = unsafe { ffi::st_range_push(name.as_ptr()) };
    (status == 0).then_some(Range { thread_bound: PhantomData })
}

impl Drop for Range {
    fn drop(&mut self) {
        // If the tool refuses, the range is missing from its display; nothing else is affected.
        _ = ffi::st_range_pop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_cuda_there_are_no_ranges() {
        assert!(range("a step").is_none());
        // The shim returns an error too, and libtorch's exception does not get through.
        assert_ne!(ffi::st_range_pop(), 0);
    }
}
