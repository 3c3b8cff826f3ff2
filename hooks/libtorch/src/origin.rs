//! The process in which something was made, which may have been forked since.

#![expect(clippy::disallowed_types, reason = "see `Lock`")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

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

/// Something that each process has to itself: a child does not see that of its parent, nor waits for what other threads of its parent
/// were doing with it.
pub struct PerProcess<T> {
    origin: Origin,
    here: T,
    in_child: OnceLock<Box<PerProcess<T>>>,
}

impl<T: Default> PerProcess<T> {
    /// That of the first process. Children begin with a default one.
    pub const fn new(first: T) -> PerProcess<T> {
        PerProcess { origin: Origin(0), here: first, in_child: OnceLock::new() }
    }

    /// That of this process.
    pub fn here(&self) -> &T {
        if !self.origin.is_parent() {
            return &self.here;
        }
        let new = || PerProcess { origin: Origin::default(), here: T::default(), in_child: OnceLock::new() };
        once(&self.in_child, || Box::new(new())).here()
    }
}

/// What the threads that make something hold, and the thread that forks.
static MAKING: Lock<()> = Lock::new(());

/// While it exists, no other thread makes anything [once].
pub(crate) type Making = RwLockWriteGuard<'static, ()>;

/// Keeps others from making things [once] until the result is dropped.
pub(crate) fn lock() -> Making {
    MAKING.write()
}

/// What is at `place`, made by the first thread that asks for it. No process is forked off meanwhile: there it would stay half made, and
/// whoever asks for it would wait for ever. So `make` takes little time, and itself makes nothing once.
pub fn once<T>(place: &OnceLock<T>, make: impl FnOnce() -> T) -> &T {
    place.get().unwrap_or_else(|| {
        let _making = lock();
        place.get_or_init(make)
    })
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
