//! Locks and condition variables: those of std, without poisoning.
//!
//! They are not those of parking_lot, which keeps all threads of a process that sleep in one table. A process that is forked
//! off inherits the table with threads that it does not have, so its own may never be woken. Threads that wait for those of std
//! sleep in the kernel, by the address of what they wait for.
#![expect(clippy::disallowed_types, reason = "a lock that is poisoned is taken all the same")]
#![expect(clippy::expect_used, reason = "a guard has its lock whenever somebody can reach it")]

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{self, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

/// Between two attempts of [`Mutex::try_lock_for`].
const PAUSE: Duration = Duration::from_millis(1);

/// A lock. A panic of its owner leaves it as it is: whoever locks it next finds what the owner left.
#[derive(Default)]
pub struct Mutex<T>(sync::Mutex<T>);

/// Holds a [`Mutex`] until it is dropped.
pub struct MutexGuard<'a, T> {
    mutex: &'a sync::Mutex<T>,
    /// `None` only while [`Condvar::wait`] or [`MutexGuard::unlocked`] has released the lock, when nobody can reach it.
    held: Option<sync::MutexGuard<'a, T>>,
}

/// Where threads sleep until another one notifies them.
#[derive(Default)]
pub struct Condvar(sync::Condvar);

impl<T> Mutex<T> {
    /// A lock around `value`, which nobody holds.
    pub const fn new(value: T) -> Mutex<T> {
        Mutex(sync::Mutex::new(value))
    }

    /// What it protects.
    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Mutex<T> {
    /// Sleeps until the lock is free, and takes it.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.guard(self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes the lock if it is free.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(held) => Some(self.guard(held)),
            Err(TryLockError::Poisoned(poisoned)) => Some(self.guard(poisoned.into_inner())),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Takes the lock if it becomes free within `patience`. For locks that nobody holds for long: it tries every millisecond.
    pub fn try_lock_for(&self, patience: Duration) -> Option<MutexGuard<'_, T>> {
        let begin = Instant::now();
        loop {
            match self.try_lock() {
                None if begin.elapsed() < patience => thread::sleep(PAUSE),
                tried => return tried,
            }
        }
    }

    /// What it protects, which nobody else can reach now.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    fn guard<'a>(&'a self, held: sync::MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        MutexGuard { mutex: &self.0, held: Some(held) }
    }
}

impl<'a, T> MutexGuard<'a, T> {
    /// Runs `run` without the lock, and takes it again, also if `run` panics.
    pub fn unlocked<R>(guard: &mut MutexGuard<'a, T>, run: impl FnOnce() -> R) -> R {
        struct Again<'g, 'a, T>(&'g mut MutexGuard<'a, T>);
        impl<T> Drop for Again<'_, '_, T> {
            fn drop(&mut self) {
                self.0.held = Some(self.0.mutex.lock().unwrap_or_else(PoisonError::into_inner));
            }
        }
        guard.held = None;
        let _again = Again(guard);
        run()
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.held.as_deref().expect("whoever has the guard has the lock")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.held.as_deref_mut().expect("whoever has the guard has the lock")
    }
}

impl Condvar {
    /// One that nobody sleeps in.
    pub const fn new() -> Condvar {
        Condvar(sync::Condvar::new())
    }

    /// Releases the lock, sleeps until notified, and takes the lock again. May return without a notification.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        if let Some(held) = guard.held.take() {
            guard.held = Some(self.0.wait(held).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Sleeps while `condition` holds.
    pub fn wait_while<T>(&self, guard: &mut MutexGuard<'_, T>, mut condition: impl FnMut(&mut T) -> bool) {
        while condition(guard) {
            self.wait(guard);
        }
    }

    /// As [`Condvar::wait`], but only until `end`. Returns whether it slept until then.
    pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, end: Instant) -> bool {
        let Some(held) = guard.held.take() else { return true };
        let left = end.saturating_duration_since(Instant::now());
        let (held, outcome) = self.0.wait_timeout(held, left).unwrap_or_else(PoisonError::into_inner);
        guard.held = Some(held);
        outcome.timed_out()
    }

    /// Wakes one of the threads that sleep here.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all threads that sleep here.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

impl<T: fmt::Debug> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<T: fmt::Debug> fmt::Debug for MutexGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl fmt::Debug for Condvar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_panic_leaves_the_lock_to_others() {
        let mutex = Mutex::new(1);
        let panics = catch_unwind(AssertUnwindSafe(|| {
            let mut guard = mutex.lock();
            *guard = 2;
            MutexGuard::unlocked(&mut guard, || panic!("on purpose"))
        }));
        assert!(panics.is_err());
        assert_eq!(*mutex.lock(), 2);
        assert!(mutex.try_lock().is_some_and(|guard| *guard == 2));
        assert_eq!(mutex.into_inner(), 2);
    }

    #[test]
    fn a_lock_that_is_held_is_not_taken_until_it_is_released() {
        let mutex = Mutex::new(());
        let mut guard = mutex.lock();
        assert!(mutex.try_lock().is_none() && mutex.try_lock_for(Duration::ZERO).is_none());
        MutexGuard::unlocked(&mut guard, || assert!(mutex.try_lock().is_some()));
        assert!(mutex.try_lock().is_none());
    }

    #[test]
    fn who_waits_sleeps_until_notified_or_until_the_end() {
        let (mutex, changed) = (Mutex::new(0), Condvar::new());
        let (tell, told) = channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut guard = mutex.lock();
                tell.send(()).unwrap();
                changed.wait_while(&mut guard, |number| *number < 2);
                *guard += 1;
            });
            told.recv().unwrap();
            for _ in 0..2 {
                *mutex.lock() += 1;
                changed.notify_all();
            }
        });
        let mut guard = mutex.lock();
        assert_eq!(*guard, 3);
        assert!(changed.wait_until(&mut guard, Instant::now()));
    }
}
