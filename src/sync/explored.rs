//! The same locks, channels and threads under loom, which runs all orders in which threads can get them. What is created outside an
//! exploration behaves as it does outside tests.
//!
//! A thread that sleeps and that nobody will wake ends the exploration with `deadlock`.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvError, SendError};
use std::time::Duration;

thread_local! {
    /// Whether this thread explores. The explorer runs all its threads on the thread that it was called on.
    static EXPLORING: Cell<bool> = const { Cell::new(false) };
    /// How many locks this thread has, but for those of explorations.
    static HELD: Cell<usize> = const { Cell::new(0) };
}

/// Fails if the calling thread has a lock. Exploring threads are not known to.
pub(crate) fn assert_nothing_is_locked() {
    assert_eq!(HELD.get(), 0, "a thread does with a lock what it must not");
}

/// Counts a lock as one of this thread's.
pub(crate) struct Held;

impl Held {
    fn new() -> Held {
        HELD.set(HELD.get() + 1);
        Held
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        HELD.set(HELD.get() - 1);
    }
}

pub(super) fn is_exploring() -> bool {
    EXPLORING.get()
}

/// Runs `scene`, which may start three threads, in every order in which its threads can get their locks, with at most `preemptions`
/// switches away from a thread that could have continued. Returns the number of orders.
pub(crate) fn explore(preemptions: usize, scene: impl Fn() + Send + Sync + 'static) -> usize {
    struct Exploring;
    impl Drop for Exploring {
        fn drop(&mut self) {
            EXPLORING.set(false);
        }
    }
    let orders = Arc::new(AtomicUsize::new(0));
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 100_000;
    EXPLORING.set(true);
    let exploring = Exploring;
    let (counted, scene) = (Arc::clone(&orders), Arc::new(scene));
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        let scene = Arc::clone(&scene);
        // The explorer's first thread has a small stack.
        Thread::start(move || scene()).join().unwrap();
    });
    drop(exploring);
    orders.load(Ordering::Relaxed)
}

/// Prints how many orders a test has explored. Fails if they are fewer than `floor`: then the test no longer has the threads, the locks or
/// the switches that it was written for.
#[track_caller]
pub(crate) fn assert_explored(orders: usize, floor: usize) {
    println!("{orders} orders explored, at least {floor} expected");
    assert!(orders >= floor, "{orders} orders were explored, and {floor} are expected at least");
}

pub(crate) enum Mutex<T> {
    Plain(ssdtrain_store::sync::Mutex<T>),
    Explored(loom::sync::Mutex<T>),
}

pub(crate) enum MutexGuard<'a, T> {
    Plain(ssdtrain_store::sync::MutexGuard<'a, T>, Held),
    /// `None` only while it is unlocked, or waits.
    Explored(&'a loom::sync::Mutex<T>, Option<loom::sync::MutexGuard<'a, T>>),
}

pub(crate) enum Condvar {
    Plain(ssdtrain_store::sync::Condvar),
    Explored(loom::sync::Condvar),
}

/// An explored channel does not notice that all senders are gone.
pub(crate) fn channel<T>() -> (Sender<T>, Receiver<T>) {
    if is_exploring() {
        let (sender, receiver) = loom::sync::mpsc::channel();
        (Sender::Explored(sender), Receiver::Explored(receiver))
    } else {
        let (sender, receiver) = mpsc::channel();
        (Sender::Plain(sender), Receiver::Plain(receiver))
    }
}

pub(crate) enum Sender<T> {
    Plain(mpsc::Sender<T>),
    Explored(loom::sync::mpsc::Sender<T>),
}

pub(crate) enum Receiver<T> {
    Plain(mpsc::Receiver<T>),
    Explored(loom::sync::mpsc::Receiver<T>),
}

/// In words.
const STACK: usize = 1 << 18;

pub(super) struct Thread(loom::thread::JoinHandle<()>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Mutex<T> {
        if is_exploring() {
            Mutex::Explored(loom::sync::Mutex::new(value))
        } else {
            Mutex::Plain(ssdtrain_store::sync::Mutex::new(value))
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        match self {
            Mutex::Plain(mutex) => MutexGuard::Plain(mutex.lock(), Held::new()),
            Mutex::Explored(mutex) => MutexGuard::Explored(mutex, Some(mutex.lock().unwrap())),
        }
    }

    /// Under the explorer, which has no time, this is [`lock`](Mutex::lock).
    pub(crate) fn try_lock_for(&self, patience: Duration) -> Option<MutexGuard<'_, T>> {
        match self {
            Mutex::Plain(mutex) => {
                mutex.try_lock_for(patience).map(|guard| MutexGuard::Plain(guard, Held::new()))
            }
            Mutex::Explored(_) => Some(self.lock()),
        }
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        match self {
            Mutex::Plain(mutex) => mutex.get_mut(),
            Mutex::Explored(mutex) => mutex.get_mut().unwrap(),
        }
    }
}

impl<T: Default> Default for Mutex<T> {
    fn default() -> Mutex<T> {
        Mutex::new(T::default())
    }
}

impl<T> MutexGuard<'_, T> {
    pub(crate) fn unlocked<U>(this: &mut Self, run: impl FnOnce() -> U) -> U {
        match this {
            MutexGuard::Plain(guard, _) => {
                let before = HELD.replace(HELD.get() - 1);
                let outcome = ssdtrain_store::sync::MutexGuard::unlocked(guard, run);
                HELD.set(before);
                outcome
            }
            MutexGuard::Explored(mutex, guard) => {
                drop(guard.take());
                let outcome = run();
                *guard = Some(mutex.lock().unwrap());
                outcome
            }
        }
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        match self {
            MutexGuard::Plain(guard, _) => guard,
            MutexGuard::Explored(_, guard) => guard.as_ref().unwrap(),
        }
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        match self {
            MutexGuard::Plain(guard, _) => guard,
            MutexGuard::Explored(_, guard) => guard.as_mut().unwrap(),
        }
    }
}

impl Condvar {
    pub(crate) fn new() -> Condvar {
        if is_exploring() {
            Condvar::Explored(loom::sync::Condvar::new())
        } else {
            Condvar::Plain(ssdtrain_store::sync::Condvar::new())
        }
    }

    pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        match (self, guard) {
            (Condvar::Plain(condvar), MutexGuard::Plain(guard, _)) => condvar.wait(guard),
            (Condvar::Explored(condvar), MutexGuard::Explored(_, guard)) => {
                *guard = guard.take().map(|guard| condvar.wait(guard).unwrap());
            }
            _ => panic!("a lock and its condition variable are made in the same place"),
        }
    }

    pub(crate) fn notify_all(&self) {
        match self {
            Condvar::Plain(condvar) => condvar.notify_all(),
            Condvar::Explored(condvar) => condvar.notify_all(),
        }
    }
}

impl Default for Condvar {
    fn default() -> Condvar {
        Condvar::new()
    }
}

impl<T> Sender<T> {
    pub(crate) fn send(&self, message: T) -> Result<(), SendError<T>> {
        match self {
            Sender::Plain(sender) => sender.send(message),
            Sender::Explored(sender) => sender.send(message),
        }
    }
}

impl<T> Receiver<T> {
    pub(crate) fn recv(&self) -> Result<T, RecvError> {
        match self {
            Receiver::Plain(receiver) => receiver.recv(),
            Receiver::Explored(receiver) => receiver.recv(),
        }
    }
}

impl Thread {
    pub(super) fn start(run: impl FnOnce() + Send + 'static) -> Thread {
        Thread(loom::thread::Builder::new().stack_size(STACK).spawn(run).unwrap())
    }

    pub(super) fn join(self) -> std::thread::Result<()> {
        if self.0.thread().id() == loom::thread::current().id() { Ok(()) } else { self.0.join() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Thread;
    use super::*;

    /// One thread waits for what another does, and is notified if `tells`.
    fn wait_for_another(tells: bool) -> usize {
        explore(2, move || {
            let shared = Arc::new((Mutex::new(false), Condvar::new()));
            let other = Arc::clone(&shared);
            let thread = Thread::start("other", move || {
                *other.0.lock() = true;
                if tells {
                    other.1.notify_all();
                }
            });
            let mut done = shared.0.lock();
            while !*done {
                shared.1.wait(&mut done);
            }
            drop(done);
            thread.unwrap().join().unwrap();
        })
    }

    #[test]
    fn both_orders_of_two_threads_are_explored() {
        assert!(wait_for_another(true) > 1);
    }

    #[test]
    fn a_thread_that_has_a_lock_is_found() {
        let lock = Mutex::new(());
        let mut guard = lock.lock();
        let finds = || std::panic::catch_unwind(assert_nothing_is_locked).is_err();
        assert!(finds() && !MutexGuard::unlocked(&mut guard, finds) && finds());
        drop(guard);
        assert!(!finds());
    }

    #[test]
    #[should_panic(expected = "deadlock")]
    fn a_thread_that_nobody_wakes_is_found() {
        wait_for_another(false);
    }
}
