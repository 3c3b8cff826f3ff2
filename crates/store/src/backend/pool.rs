//! A pool of threads, each of which waits for one operation at a time. The threads call `pread` and `pwrite`, where
//! io_uring is refused and for files in memory, or another [`Transport`] that blocks its caller.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use parking_lot::{Condvar, Mutex};

use super::queue::Queue;
use super::{Backend, BackendInfo, Direction, Op};
use crate::contained;
use crate::error::Result;
use crate::region::{Place, Region};
use crate::spill_file::SpillFile;

/// A pool of threads. Each carries out one operation at a time and sleeps when there is none.
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// Carries out one operation and blocks the calling thread meanwhile.
pub(crate) trait Transport: Send + Sync {
    /// As [`Backend::open`].
    fn open(&self, place: Place<'_>, cap_bytes: u64) -> Result<Arc<dyn Region>>;

    /// Moves up to [`Op::len`] bytes; returns how many.
    fn transfer(&self, op: &Op) -> io::Result<usize>;

    /// As [`Backend::describe`].
    fn describe(&self) -> BackendInfo;
}

/// `pread` and `pwrite`.
pub(super) struct SystemCalls;

struct Shared {
    transport: Box<dyn Transport>,
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Default)]
struct State {
    queue: Queue,
    closed: bool,
}

impl Pool {
    /// Starts `threads` threads, named `ssdtrain-io-N`.
    pub fn new(threads: usize) -> io::Result<Pool> {
        Pool::over(Box::new(SystemCalls), threads)
    }

    /// The same with another transport.
    pub(crate) fn over(transport: Box<dyn Transport>, threads: usize) -> io::Result<Pool> {
        let shared = Shared { transport, state: Mutex::default(), work: Condvar::new() };
        let mut pool = Pool { shared: Arc::new(shared), threads: Vec::new() };
        for index in 0..threads.max(1) {
            let shared = Arc::clone(&pool.shared);
            let builder = thread::Builder::new().name(format!("ssdtrain-io-{index}"));
            pool.threads.push(builder.spawn(move || shared.work())?);
        }
        Ok(pool)
    }
}

impl Backend for Pool {
    fn open(&self, place: Place<'_>, cap_bytes: u64) -> Result<Arc<dyn Region>> {
        self.shared.transport.open(place, cap_bytes)
    }

    fn submit(&self, ops: Vec<Op>) {
        self.shared.push(ops);
    }

    fn describe(&self) -> BackendInfo {
        self.shared.transport.describe()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.work.notify_all();
        let here = thread::current().id();
        if self.threads.iter().any(|thread| thread.thread().id() == here) {
            return;
        }
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("an I/O thread panicked");
            }
        }
    }
}

impl Shared {
    fn push(&self, ops: Vec<Op>) {
        let count = ops.len();
        self.state.lock().queue.extend(ops);
        for _ in 0..count {
            self.work.notify_one();
        }
    }

    /// Carries out operations until the pool is dropped and the queue is empty.
    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some(op) = state.queue.pop() {
                drop(state);
                // If anything panics, the operation fails as it is dropped, and the thread stays alive.
                let next = contained("an operation", || {
                    let result = self.transport.transfer(&op);
                    op.complete(result)
                });
                self.push(next.unwrap_or_default());
                state = self.state.lock();
            } else if state.closed {
                return;
            } else {
                self.work.wait(&mut state);
            }
        }
    }
}

impl SystemCalls {
    /// Moves up to [`Op::len`] bytes of the operation between its memory and `file`; returns how many.
    pub(super) fn transfer(op: &Op, file: &SpillFile) -> io::Result<usize> {
        let (fd, ptr, len) = (file.as_fd().as_raw_fd(), op.ptr(), op.len());
        let offset = libc::off_t::try_from(op.offset()).map_err(io::Error::other)?;
        let bytes = match op.direction() {
            // SAFETY: `op` owns `len` bytes at `ptr`, and its holder lets nobody else touch them meanwhile.
            Direction::Read => unsafe { libc::pread(fd, ptr.cast(), len, offset) },
            // SAFETY: as above, and nobody writes them meanwhile.
            Direction::Write => unsafe { libc::pwrite(fd, ptr.cast(), len, offset) },
        };
        usize::try_from(bytes).map_err(|_| io::Error::last_os_error())
    }
}

impl Transport for SystemCalls {
    fn open(&self, place: Place<'_>, cap_bytes: u64) -> Result<Arc<dyn Region>> {
        Ok(Arc::new(SpillFile::create(place, cap_bytes)?))
    }

    fn transfer(&self, op: &Op) -> io::Result<usize> {
        SystemCalls::transfer(op, op.region()?)
    }

    fn describe(&self) -> BackendInfo {
        BackendInfo::named("thread pool")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::mem::{AlignedBuf, BLOCK};

    struct Panics;

    impl Transport for Panics {
        fn open(&self, place: Place<'_>, cap_bytes: u64) -> Result<Arc<dyn Region>> {
            SystemCalls.open(place, cap_bytes)
        }

        fn transfer(&self, _op: &Op) -> io::Result<usize> {
            panic!("on purpose, in a transport");
        }

        fn describe(&self) -> BackendInfo {
            BackendInfo::named("panics")
        }
    }

    #[test]
    fn an_operation_that_panics_fails_and_its_thread_goes_on() {
        let pool = Pool::over(Box::new(Panics), 1).unwrap();
        let region = pool.open(Place::Memory, 1 << 20).unwrap();
        for _ in 0..2 {
            let (tell, told) = channel();
            let done = move |outcome: io::Result<()>| {
                tell.send(outcome).unwrap();
                Vec::new()
            };
            let memory = Arc::new(AlignedBuf::new(BLOCK).unwrap());
            let place = (Arc::clone(&region), 0);
            pool.submit(vec![Op::new(Direction::Write, place, (memory, 0, BLOCK), Box::new(done))]);
            assert!(told.recv().unwrap().is_err());
        }
    }

    #[test]
    fn its_threads_are_gone_after_drop() {
        let pool = Pool::new(4).unwrap();
        let shared = Arc::downgrade(&pool.shared);
        drop(pool);
        assert_eq!(shared.strong_count(), 0);
    }
}
