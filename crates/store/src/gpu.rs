//! A GPU, as far as a backend that reaches its memory has to know it.

use std::fmt;

/// A GPU whose memory transfers reach. Whoever opens the store knows its driver and its allocator.
///
/// # Safety
///
/// Whatever `watch` was given hears that a segment goes before any of its memory is freed, and of no segment that is not there: memory is
/// registered with cuFile for as long as the segment lives.
pub unsafe trait Gpu: fmt::Debug + Send + Sync {
    /// Runs `work` with the GPU's context current on the calling thread; what was current before is so again afterwards. The error says
    /// why `work` did not run.
    fn within(&self, work: &mut dyn FnMut()) -> Result<(), String>;

    /// Has `watcher` hear of all segments that the allocator of GPU memory holds and will hold, until the process ends. The error
    /// says why that cannot be.
    fn watch(&self, watcher: &'static dyn SegmentWatcher) -> Result<(), String>;
}

/// Hears of the segments that an allocator of GPU memory holds. It must neither allocate nor free such memory itself.
pub trait SegmentWatcher: Sync {
    /// A segment of `bytes` bytes at this address is there.
    fn came(&self, start: usize, bytes: usize);

    /// The segment that starts here is about to be freed; nothing in it is in use any more.
    fn goes(&self, start: usize);
}
