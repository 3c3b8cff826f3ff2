//! The process in which something was made, which may have been forked since.

#![expect(clippy::disallowed_types, reason = "see `Lock`")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

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

/// In a child process: what was made until now is its parent's.
pub(crate) fn is_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
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
