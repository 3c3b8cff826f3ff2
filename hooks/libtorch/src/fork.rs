//! Forks. A child process has the memory of its parent, but none of its threads: what they were doing never ends there, and locks that
//! they held are never released.
//!
//! So a child uses nothing that its parent made, and drops nothing of it. Locks that it needs all the same, since they belong to the
//! process, are held across the fork by the thread that forks.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::{ffi, hooks, observer, origin, recording, shortage};

thread_local! {
    /// What the thread that forks holds meanwhile.
    static HELD: Cell<Option<(origin::Making, observer::Locked, shortage::Locked)>> = const { Cell::new(None) };
}

/// From now on, a process that is forked off from this one leaves to it what is its own: hooks, handles and observers
/// ([`install`](crate::install), [`observe_writes`](crate::observe_writes)). It may be called repeatedly.
pub fn notice_forks() {
    // Not a `Once`: a process that is forked off meanwhile would wait for it.
    static NOTICED: AtomicBool = AtomicBool::new(false);
    if !NOTICED.swap(true, Ordering::Relaxed) {
        // It fails only without memory for three pointers.
        // SAFETY: the functions live as long as the process, and do not unwind.
        unsafe { libc::pthread_atfork(Some(begins), Some(goes_on), Some(is_child)) };
    }
}

extern "C" fn begins() {
    // In the order in which other threads take them, if they hold several.
    let making = origin::lock();
    ffi::st_fork_begins();
    let locked = (making, observer::lock(), shortage::lock());
    // A thread that is shutting down keeps nothing; its observers are unlocked already then.
    HELD.try_with(|held| held.set(Some(locked))).ok();
}

extern "C" fn goes_on() {
    ffi::st_fork_ends();
    drop(HELD.try_with(Cell::take));
}

extern "C" fn is_child() {
    origin::is_child();
    ffi::st_fork_is_child();
    ffi::st_fork_ends();
    hooks::leave_to_parent();
    recording::leave_to_parent();
    if let Ok(Some((_making, observers, relievers))) = HELD.try_with(Cell::take) {
        observer::leave_to_parent(observers);
        shortage::leave_to_parent(relievers);
    }
}
