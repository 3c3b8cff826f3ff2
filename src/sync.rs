//! Locks, condition variables, channels and threads: those of the store and of std. A test that explores interleavings uses the explorer's
//! instead, under the same code.

#[cfg(test)]
mod explored;

use std::io;
use std::thread;

#[cfg(not(test))]
pub(crate) use ssdtrain_store::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(test))]
pub(crate) use std::sync::mpsc::{Sender, channel};

#[cfg(test)]
pub(crate) use self::explored::{
    Condvar, Mutex, MutexGuard, Sender, assert_explored, assert_nothing_is_locked, channel, explore,
};

/// A named thread, which ends before the value that started it does.
pub(crate) struct Thread(Handle);

enum Handle {
    System(thread::JoinHandle<()>),
    #[cfg(test)]
    Explored(explored::Thread),
}

impl Thread {
    pub(crate) fn start(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<Thread> {
        #[cfg(test)]
        if explored::is_exploring() {
            return Ok(Thread(Handle::Explored(explored::Thread::start(run))));
        }
        thread::Builder::new().name(name.to_owned()).spawn(run).map(|thread| Thread(Handle::System(thread)))
    }

    /// Waits for its end, unless it is the calling thread, which ends later by itself. Fails if the thread has panicked.
    pub(crate) fn join(self) -> thread::Result<()> {
        match self.0 {
            Handle::System(thread) if thread.thread().id() == thread::current().id() => Ok(()),
            Handle::System(thread) => thread.join(),
            #[cfg(test)]
            Handle::Explored(thread) => thread.join(),
        }
    }
}
