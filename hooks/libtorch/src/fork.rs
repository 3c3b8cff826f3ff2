//! Forks. A child process has the memory of its parent, but none of its threads: what they were doing never ends there, and locks that
//! they held are never released.
//!
//! So a child uses nothing that its parent made, and drops nothing of it. Locks that it needs all the same, since they belong to the
//! process, are held across the fork by the thread that forks.

#![expect(clippy::disallowed_types, reason = "see `Lock`")]

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Once, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::{ffi, hooks, observer, recording};

/// Part of the error of a backward that asks, in a child process, for a tensor that its parent saved.
pub const SAVED_BY_PARENT: &str = "was saved by the process that this one was forked from";

/// How many forks lie between the first process of this program and this one.
static GENERATION: AtomicU64 = AtomicU64::new(0);

/// The process in which something was made. Telling whether that is still the current one takes a nanosecond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin(u64);

impl Origin {
    /// Whether this is not the process it was made in, but one that was forked from that. Children of `vfork` and `clone`, which must not
    /// compute, count as their parents.
    pub fn is_parent(self) -> bool {
        self != Origin::default()
    }
}

impl Default for Origin {
    /// The current process.
    fn default() -> Origin {
        Origin(GENERATION.load(Ordering::Relaxed))
    }
}

/// A lock that is never held by another thread when the process forks. It is not one of parking_lot's: with threads waiting, those
/// need a table that other threads may have locked.
pub(crate) struct Lock<T>(RwLock<T>);

impl<T> Lock<T> {
    pub(crate) const fn new(value: T) -> Lock<T> {
        Lock(RwLock::new(value))
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

thread_local! {
    /// What the thread that forks holds meanwhile.
    static HELD: Cell<Option<observer::Locked>> = const { Cell::new(None) };
}

/// From now on, forks of this process are noticed. It may be called repeatedly.
pub(crate) fn notice() {
    static NOTICED: Once = Once::new();
    NOTICED.call_once(|| {
        // It fails only without memory for three pointers.
        // SAFETY: the functions live as long as the process, and do not unwind.
        unsafe { libc::pthread_atfork(Some(begins), Some(goes_on), Some(is_child)) };
    });
}

extern "C" fn begins() {
    let observers = observer::lock();
    ffi::st_fork_begins();
    // A thread that is shutting down keeps nothing; its observers are unlocked already then.
    HELD.try_with(|held| held.set(Some(observers))).ok();
}

extern "C" fn goes_on() {
    ffi::st_fork_ends();
    drop(HELD.try_with(Cell::take));
}

extern "C" fn is_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    ffi::st_fork_ends();
    hooks::leave_to_parent();
    recording::leave_to_parent();
    if let Ok(Some(observers)) = HELD.try_with(Cell::take) {
        observer::leave_to_parent(observers);
    }
}
