//! Named ranges that NVIDIA's tools show (NVTX), through the NVTX that libtorch's CUDA half brings along.
//!
//! That half looks for a tool by itself: Nsight Systems names its library in `NVTX_INJECTION64_PATH`, and without one a
//! range costs a call that returns at once. Where the CUDA half is not loaded there are no ranges.

use std::ffi::CString;
use std::marker::PhantomData;

use crate::ffi;

/// Guard of [`range`].
#[derive(Debug)]
#[must_use = "the range ends when this guard is dropped"]
pub struct Range {
    /// Ranges are a stack of the thread that pushed them.
    thread_bound: PhantomData<*const ()>,
}

/// Begins a range on the calling thread; none without libtorch's CUDA half ([`load_cuda`](crate::load_cuda)).
pub fn range(name: &str) -> Option<Range> {
    if !ffi::st_ranges() {
        return None;
    }
    // Only a name with a NUL in it has no C string.
    let name = CString::new(name).unwrap_or_default();
    // SAFETY: the name is a C string that lives through the call; the tool copies it.
    let status = unsafe { ffi::st_range_push(name.as_ptr()) };
    (status == 0).then_some(Range { thread_bound: PhantomData })
}

impl Drop for Range {
    fn drop(&mut self) {
        // What a tool refuses is missing in its picture, and changes nothing here.
        _ = ffi::st_range_pop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_cuda_there_are_no_ranges() {
        assert!(range("a step").is_none());
        // The shim says so too, rather than let libtorch's exception through.
        assert_ne!(ffi::st_range_pop(), 0);
    }
}
