//! What a backend needs to know about a GPU whose memory it accesses.

use std::fmt;

/// A GPU whose memory transfers can access. It is implemented by whoever opens the store and knows the GPU's driver
/// and allocator.
///
/// # Safety
///
/// Every watcher passed to `watch` hears that a segment is about to go before any of the segment's memory is freed,
/// and it hears only of segments that exist: memory is registered with cuFile for as long as the segment lives.
pub unsafe trait Gpu: fmt::Debug + Send + Sync {
    /// Runs `work` with the GPU's context current on the calling thread, then restores the context that was current
    /// before. The error says why `work` did not run.
    fn within(&self, work: &mut dyn FnMut()) -> Result<(), String>;

    /// Tells `watcher` about all segments that the GPU memory allocator holds now or will hold, until the process
    /// ends. The error says why that is not possible.
    fn watch(&self, watcher: &'static dyn SegmentWatcher) -> Result<(), String>;
}

/// Is told about the segments that a GPU memory allocator holds. It must neither allocate nor free such memory
/// itself.
pub trait SegmentWatcher: Sync {
    /// There is a segment of `bytes` bytes at this address.
    fn came(&self, start: usize, bytes: usize);

    /// The segment that starts here is about to be freed; nothing in it is in use any more.
    fn goes(&self, start: usize);
}
