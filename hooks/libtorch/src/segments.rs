//! The segments of libtorch's caching allocator for CUDA: memory that it gets from the driver and hands out in
//! pieces.

use std::collections::HashSet;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

use parking_lot::Mutex;

use crate::error::{TorchError, check};
use crate::ffi::{self, StSegments};

/// Is told about segments, on any thread and with the allocator's lock held. It must not allocate or free device
/// memory, nor wait for a thread that does.
pub trait SegmentWatcher: Sync {
    /// There is a segment of `bytes` bytes at this address of the device.
    fn came(&self, device: usize, start: usize, bytes: usize);

    /// The segment that starts here is about to be freed; nothing in it is in use any more.
    fn goes(&self, device: usize, start: usize);
}

/// Puts the reports of the allocator's tracker into a consistent order.
struct Watch {
    watcher: &'static dyn SegmentWatcher,
    /// Addresses that were reported before all of the existing segments had been: what is known about these addresses
    /// is newer.
    heard: Mutex<Option<HashSet<usize>>>,
}

/// Tells `watcher` about all segments that exist now or later, until the process ends, through the allocator's trace
/// tracker. Segments that can grow (`expandable_segments:True`) are left out: the allocator reports their end too
/// late.
///
/// # Errors
///
/// CUDA is not loaded, or its allocator (`backend:cudaMallocAsync`) has no tracker.
pub fn watch_segments(watcher: &'static dyn SegmentWatcher) -> Result<(), TorchError> {
    // It is never freed, since the tracker is never removed.
    let watch: &'static Watch = Box::leak(Box::new(Watch::new(watcher)));
    let callbacks = StSegments { was, came, goes };
    // SAFETY: the callbacks and the context live as long as the process, and belong together.
    let watched = check(unsafe { ffi::st_segments_watch(callbacks, std::ptr::from_ref(watch).cast()) });
    watch.all_told();
    watched
}

impl Watch {
    fn new(watcher: &'static dyn SegmentWatcher) -> Watch {
        Watch { watcher, heard: Mutex::new(Some(HashSet::new())) }
    }

    /// Reports a segment that existed before.
    fn was(&self, device: usize, start: usize, bytes: usize) {
        let heard = self.heard.lock();
        if heard.as_ref().is_some_and(|heard| !heard.contains(&start)) {
            self.watcher.came(device, start, bytes);
        }
    }

    /// Handles an event at this address, which `tell` reports to the watcher.
    fn now(&self, start: usize, tell: impl FnOnce(&dyn SegmentWatcher)) {
        let mut heard = self.heard.lock();
        if let Some(heard) = heard.as_mut() {
            heard.insert(start);
        }
        tell(self.watcher);
    }

    fn all_told(&self) {
        *self.heard.lock() = None;
    }
}

extern "C" fn was(context: *const c_void, device: i8, start: usize, bytes: usize) {
    with(context, device, |watch, device| watch.was(device, start, bytes));
}

extern "C" fn came(context: *const c_void, device: i8, start: usize, bytes: usize) {
    with(context, device, |watch, device| watch.now(start, |watcher| watcher.came(device, start, bytes)));
}

extern "C" fn goes(context: *const c_void, device: i8, start: usize) {
    with(context, device, |watch, device| watch.now(start, |watcher| watcher.goes(device, start)));
}

/// Stops panics here: the allocator could not handle them.
fn with(context: *const c_void, device: i8, what: impl FnOnce(&Watch, usize)) {
    // SAFETY: the context is the one that `watch_segments` leaked.
    let watch = unsafe { &*context.cast::<Watch>() };
    if let Ok(device) = usize::try_from(device) {
        drop(catch_unwind(AssertUnwindSafe(|| what(watch, device))));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The existing segments, by address and size, according to the reports.
    #[derive(Default)]
    struct Live(Mutex<Vec<(usize, usize)>>);

    impl SegmentWatcher for Live {
        fn came(&self, _: usize, start: usize, bytes: usize) {
            self.0.lock().push((start, bytes));
        }

        fn goes(&self, device: usize, start: usize) {
            assert_eq!(device, 0, "a panic must not reach the allocator");
            self.0.lock().retain(|(other, _)| *other != start);
        }
    }

    fn watch() -> (&'static Live, Watch) {
        let live: &'static Live = Box::leak(Box::default());
        (live, Watch::new(live))
    }

    #[test]
    fn a_watcher_hears_of_its_segments_and_its_panics_stay_with_it() {
        let (live, watch) = watch();
        let context = std::ptr::from_ref(&watch).cast();
        was(context, 0, 10, 1);
        watch.all_told();
        came(context, 0, 20, 2);
        came(context, -1, 30, 3);
        goes(context, 1, 20);
        goes(context, 0, 10);
        assert_eq!(*live.0.lock(), [(20, 2)]);
    }

    #[test]
    fn what_happened_meanwhile_is_newer_than_what_was_there_before() {
        let (live, watch) = watch();
        let context = std::ptr::from_ref(&watch).cast();
        goes(context, 0, 10);
        goes(context, 0, 20);
        came(context, 0, 20, 5);
        for start in [10, 20, 30] {
            was(context, 0, start, 1);
        }
        assert_eq!(*live.0.lock(), [(20, 5), (30, 1)]);
    }

    #[test]
    fn without_cuda_there_is_nothing_to_watch() {
        let live: &'static Live = Box::leak(Box::default());
        assert!(!watch_segments(live).unwrap_err().to_string().is_empty());
    }
}
