//! The segments of libtorch's caching allocator for CUDA: memory that it has of the driver, and gives out in pieces.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::{TorchError, check};
use crate::ffi::{self, StSegments};

/// Hears of segments, from any thread and with the allocator's lock held: it must not allocate or free memory of the device, nor wait for
/// a thread that does.
pub trait SegmentWatcher: Sync {
    /// A segment of `bytes` bytes at this address of the device is there. One that was there before the watcher may be told twice.
    fn came(&self, device: usize, start: usize, bytes: usize);

    /// The segment that starts here is about to be freed; nothing in it is in use any more.
    fn goes(&self, device: usize, start: usize);
}

/// Has `watcher` hear of all segments there are and will be, until the process ends, by the allocator's trace tracker. Segments that grow
/// (`expandable_segments:True`) are left out: the allocator tells of their end too late.
///
/// # Errors
///
/// CUDA is not loaded, or its allocator (`backend:cudaMallocAsync`) has no tracker.
pub fn watch_segments(watcher: &'static dyn SegmentWatcher) -> Result<(), TorchError> {
    // A thin pointer to the fat one; both stay, as the tracker does.
    let context: &'static &'static dyn SegmentWatcher = Box::leak(Box::new(watcher));
    let callbacks = StSegments { came, goes };
    // SAFETY: the callbacks and the context are there as long as the process, and belong together.
    check(unsafe { ffi::st_segments_watch(callbacks, std::ptr::from_ref(context).cast()) })
}

extern "C" fn came(context: *const c_void, device: i8, start: usize, bytes: usize) {
    tell(context, device, |watcher, device| watcher.came(device, start, bytes));
}

extern "C" fn goes(context: *const c_void, device: i8, start: usize) {
    tell(context, device, |watcher, device| watcher.goes(device, start));
}

/// A panic ends here: the allocator could not make anything of it.
fn tell(context: *const c_void, device: i8, what: impl FnOnce(&dyn SegmentWatcher, usize)) {
    // SAFETY: the context is what `watch_segments` leaked.
    let watcher = unsafe { *context.cast::<&'static dyn SegmentWatcher>() };
    if let Ok(device) = usize::try_from(device) {
        drop(catch_unwind(AssertUnwindSafe(|| what(watcher, device))));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[derive(Default)]
    struct Adding(AtomicUsize);

    impl SegmentWatcher for Adding {
        fn came(&self, device: usize, start: usize, bytes: usize) {
            self.0.fetch_add(device + start + bytes, Ordering::Relaxed);
        }

        fn goes(&self, _: usize, _: usize) {
            panic!("it must not reach the allocator");
        }
    }

    #[test]
    fn a_watcher_hears_of_its_segments_and_its_panics_stay_with_it() {
        let adding: &'static Adding = Box::leak(Box::default());
        let context: &'static dyn SegmentWatcher = adding;
        let context = std::ptr::from_ref(&context).cast();
        came(context, 1, 20, 300);
        came(context, -1, 5, 5);
        goes(context, 0, 20);
        assert_eq!(adding.0.load(Ordering::Relaxed), 321);
    }

    #[test]
    fn without_cuda_there_is_nothing_to_watch() {
        let adding: &'static Adding = Box::leak(Box::default());
        assert!(!watch_segments(adding).unwrap_err().to_string().is_empty());
    }
}
