//! A pool of threads, each of which waits for one operation at a time. The threads call `pread` and `pwrite`, where
//! io_uring is refused and for files in memory, or another [`Transport`] that blocks its caller.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use crate::sync::{Condvar, Mutex};
use slab::Slab;

use super::lost::{MAX_LOST, refuse};
use super::queue::Queue;
use super::{Backend, BackendInfo, Direction, Op};
use crate::completion::{contained, is_completing};
use crate::error::Result;
use crate::region::{Place, Region};
use crate::spill_file::SpillFile;
use crate::watch::{GivenUp, OnLost};

/// A pool of threads. Each carries out one operation at a time and sleeps when there is none.
///
/// A thread whose operation was given up is replaced, up to 32 of them; it ends once its call returns after all.
/// Operations are refused while all threads are stuck.
pub struct Pool {
    shared: Arc<Shared>,
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
    /// How many threads carry out operations, apart from those that are stuck.
    threads: usize,
    state: Mutex<State>,
    work: Condvar,
    /// Signalled when a thread ends or is stuck.
    fewer: Condvar,
}

#[derive(Default)]
struct State {
    queue: Queue,
    closed: bool,
    workers: Slab<Worker>,
    /// The threads that have ended, or are about to, and nobody has joined yet.
    ended: Vec<JoinHandle<()>>,
    /// Threads started so far.
    started: usize,
}

struct Worker {
    /// `None` if it is stuck: then nobody waits for it.
    thread: Option<JoinHandle<()>>,
    /// The transfer of the operation that it carries out.
    on: Option<Arc<GivenUp>>,
}

impl Pool {
    /// Starts `threads` threads, named `ssdtrain-io-N`.
    pub fn new(threads: usize) -> io::Result<Pool> {
        Pool::over(Box::new(SystemCalls), threads)
    }

    /// The same with another transport.
    pub(crate) fn over(transport: Box<dyn Transport>, threads: usize) -> io::Result<Pool> {
        let threads = threads.max(1);
        let (state, work, fewer) = (Mutex::default(), Condvar::new(), Condvar::new());
        let pool = Pool { shared: Arc::new(Shared { transport, threads, state, work, fewer }) };
        let mut state = pool.shared.state.lock();
        for _ in 0..threads {
            pool.shared.start(&mut state)?;
        }
        drop(state);
        Ok(pool)
    }
}

impl Backend for Pool {
    fn open(&self, place: Place<'_>, cap_bytes: u64) -> Result<Arc<dyn Region>> {
        self.shared.transport.open(place, cap_bytes)
    }

    /// Starts the operations. While all threads are stuck they fail at once, on the calling thread.
    fn submit(&self, ops: Vec<Op>) {
        self.shared.push(ops);
    }

    fn describe(&self) -> BackendInfo {
        self.shared.transport.describe()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.closed = true;
        self.shared.work.notify_all();
        // The threads end by themselves.
        if is_completing() {
            return;
        }
        while state.running() > 0 {
            self.shared.fewer.wait(&mut state);
        }
        let (stuck, ended) = (state.workers.len(), std::mem::take(&mut state.ended));
        drop(state);
        if stuck > 0 {
            tracing::warn!(stuck, "I/O threads are left behind: the disk has not answered them");
        }
        for thread in ended {
            if thread.join().is_err() {
                tracing::error!("an I/O thread panicked");
            }
        }
    }
}

impl State {
    /// How many threads are not stuck.
    fn running(&self) -> usize {
        self.workers.iter().filter(|(_, worker)| worker.thread.is_some()).count()
    }
}

impl Shared {
    fn start(self: &Arc<Self>, state: &mut State) -> io::Result<()> {
        let shared = Arc::clone(self);
        let (slot, name) = (state.workers.vacant_entry(), format!("ssdtrain-io-{}", state.started));
        let key = slot.key();
        // It begins with taking the lock that the caller holds.
        let thread = thread::Builder::new().name(name).spawn(move || shared.work(key))?;
        slot.insert(Worker { thread: Some(thread), on: None });
        state.started += 1;
        Ok(())
    }

    fn push(&self, ops: Vec<Op>) {
        let count = ops.len();
        let mut state = self.state.lock();
        if state.running() == 0 {
            drop(state);
            return refuse(ops);
        }
        state.queue.extend(ops);
        drop(state);
        for _ in 0..count {
            self.work.notify_one();
        }
    }

    /// Carries out operations until the pool is dropped and the queue is empty, or until another thread does so instead.
    fn work(self: &Arc<Self>, key: usize) {
        /// However the thread ends, nobody waits for it. Another one takes its place if it was not replaced yet.
        struct End<'a>(&'a Arc<Shared>, usize);
        impl Drop for End<'_> {
            fn drop(&mut self) {
                let mut state = self.0.state.lock();
                let thread = state.workers.try_remove(self.1).and_then(|worker| worker.thread);
                state.ended.extend(thread);
                if !(state.closed && state.queue.is_empty()) {
                    self.0.replenish(&mut state);
                }
                drop(state);
                self.0.fewer.notify_all();
            }
        }

        let _end = End(self, key);
        let shared = Arc::clone(self);
        let on_lost: OnLost = Arc::new(move || shared.replace_lost());
        let mut state = self.state.lock();
        loop {
            if let Some(op) = state.queue.pop() {
                state.workers[key].on = op.transfer();
                drop(state);
                // If anything panics, the operation fails as it is dropped, and the thread stays alive.
                let next = contained("an operation", || {
                    if op.is_given_up() {
                        return Vec::new();
                    }
                    op.begin(&on_lost);
                    let result = self.transport.transfer(&op);
                    op.complete(result)
                });
                self.push(next.unwrap_or_default());
                state = self.state.lock();
                state.workers[key].on = None;
                if state.workers[key].thread.is_none() {
                    return;
                }
            } else if state.closed {
                return;
            } else {
                self.work.wait(&mut state);
            }
        }
    }

    /// Threads whose operations were given up are replaced, as far as the bound allows. If none is left that is not
    /// stuck, what waits is refused.
    fn replace_lost(self: &Arc<Self>) {
        let mut state = self.state.lock();
        for (_, worker) in &mut state.workers {
            if worker.on.as_ref().is_some_and(|transfer| transfer.is_given_up()) {
                worker.thread = None;
            }
        }
        self.replenish(&mut state);
        let (running, stuck) = (state.running(), state.workers.len() - state.running());
        let refused = if running == 0 { std::mem::take(&mut state.queue) } else { Queue::default() };
        drop(state);
        tracing::warn!(stuck, running, "the disk has not answered I/O threads; the others go on");
        self.fewer.notify_all();
        refuse(refused);
    }

    /// Starts threads in place of those that are stuck, as far as the bound allows.
    fn replenish(self: &Arc<Self>, state: &mut State) {
        while state.running() < self.threads && state.workers.len() < self.threads + MAX_LOST {
            if let Err(error) = self.start(state) {
                tracing::warn!(%error, "an I/O thread that is stuck cannot be replaced");
                return;
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
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use super::*;
    use crate::error::ErrorKind;
    use crate::mem::{AlignedBuf, BLOCK};
    use crate::{BackendKind, Completion, Store, StoreConfig};

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

    /// Its calls return when the test says so: with the message, or when the sender goes.
    struct Stuck(Mutex<Receiver<()>>);

    impl Transport for Stuck {
        fn open(&self, place: Place<'_>, cap_bytes: u64) -> Result<Arc<dyn Region>> {
            SystemCalls.open(place, cap_bytes)
        }

        fn transfer(&self, op: &Op) -> io::Result<usize> {
            if op.direction() == Direction::Read {
                self.0.lock().recv().ok();
            }
            Ok(op.len())
        }

        fn describe(&self) -> BackendInfo {
            BackendInfo::named("stuck")
        }
    }

    /// A pool whose reads are stuck until the sender is dropped, and a store over it that gives them up soon.
    fn stuck(threads: usize) -> (Store, Arc<Shared>, Sender<()>) {
        let (go, gone) = channel();
        let pool = Pool::over(Box::new(Stuck(Mutex::new(gone))), threads).unwrap();
        let shared = Arc::clone(&pool.shared);
        let config = StoreConfig {
            backend: BackendKind::Memory,
            cap_bytes: 1 << 20,
            timeout: Duration::from_millis(20),
            ..StoreConfig::default()
        };
        (Store::open_with(config, Arc::new(pool)).unwrap(), shared, go)
    }

    fn transfer(store: &Store, direction: Direction) -> Receiver<Result<()>> {
        let (blob, memory) = (store.reserve(1).unwrap(), Arc::new(AlignedBuf::new(BLOCK).unwrap()));
        let (tell, told) = channel();
        let done = Completion::new(move |outcome| tell.send(outcome).unwrap());
        match direction {
            Direction::Read => store.read(blob, memory, done),
            Direction::Write => store.write(blob, memory, done),
        }
        told
    }

    /// How many threads are not stuck, and how many there are.
    fn threads(shared: &Shared) -> (usize, usize) {
        let state = shared.state.lock();
        (state.running(), state.workers.len())
    }

    #[test]
    fn threads_that_are_stuck_are_replaced_and_end_when_their_calls_return() {
        let (store, shared, go) = stuck(2);
        let reads = [(); 3].map(|()| transfer(&store, Direction::Read));
        let write = transfer(&store, Direction::Write);
        for outcome in reads {
            assert_eq!(outcome.recv().unwrap().unwrap_err().kind(), ErrorKind::TimedOut);
        }
        write.recv().unwrap().unwrap();
        assert_eq!(threads(&shared), (2, 5));
        assert_eq!(store.stats().reserved_bytes, 3 * BLOCK as u64);
        drop(go);
        let mut state = shared.state.lock();
        shared.fewer.wait_while(&mut state, |state| state.workers.len() > 2);
        drop(state);
        assert_eq!(store.stats().reserved_bytes, 0);
        transfer(&store, Direction::Write).recv().unwrap().unwrap();
    }

    #[test]
    fn with_too_many_threads_stuck_operations_are_refused_until_one_returns() {
        let (store, shared, go) = stuck(1);
        let reads: Vec<_> = (0..MAX_LOST + 3).map(|_| transfer(&store, Direction::Read)).collect();
        // As many as there may be, each of which is given up a moment after the one before.
        for outcome in reads {
            assert_eq!(outcome.recv().unwrap().unwrap_err().kind(), ErrorKind::TimedOut);
        }
        assert_eq!(threads(&shared), (0, MAX_LOST + 1));
        let error = transfer(&store, Direction::Write).recv().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!(error.to_string().contains("too many earlier operations"), "{error}");
        go.send(()).unwrap();
        let mut state = shared.state.lock();
        shared.fewer.wait_while(&mut state, |state| state.running() == 0);
        drop(state);
        transfer(&store, Direction::Write).recv().unwrap().unwrap();
    }

    #[test]
    fn a_drop_leaves_threads_behind_that_are_stuck() {
        let (store, shared, go) = stuck(1);
        let (read, write) = (transfer(&store, Direction::Read), transfer(&store, Direction::Write));
        drop(store);
        assert_eq!(read.try_recv().unwrap().unwrap_err().kind(), ErrorKind::TimedOut);
        write.try_recv().unwrap().unwrap();
        assert_eq!(shared.state.lock().workers.len(), 1);
        drop(go);
        let mut state = shared.state.lock();
        shared.fewer.wait_while(&mut state, |state| !state.workers.is_empty());
    }

    #[test]
    fn a_completion_of_what_was_given_up_may_drop_the_store_while_more_never_ends() {
        let (store, shared, go) = stuck(2);
        let (blob, memory) = (store.reserve(1).unwrap(), Arc::new(AlignedBuf::new(BLOCK).unwrap()));
        let (tell, told) = channel();
        let (last, (begun, all_begun)) = (store.clone(), channel::<()>());
        let done = move |outcome| {
            // The test has dropped its handle when this returns.
            assert!(all_begun.recv().is_err());
            drop(last);
            tell.send(outcome).unwrap();
        };
        store.read(blob, memory, Completion::new(done));
        let second = transfer(&store, Direction::Read);
        drop(store);
        drop(begun);
        for outcome in [told, second] {
            assert_eq!(outcome.recv().unwrap().unwrap_err().kind(), ErrorKind::TimedOut);
        }
        drop(go);
        let mut state = shared.state.lock();
        shared.fewer.wait_while(&mut state, |state| !state.workers.is_empty());
    }

    #[test]
    fn its_threads_are_gone_after_drop() {
        let pool = Pool::new(4).unwrap();
        let shared = Arc::downgrade(&pool.shared);
        drop(pool);
        assert_eq!(shared.strong_count(), 0);
    }
}
