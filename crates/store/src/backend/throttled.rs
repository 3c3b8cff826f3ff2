//! A limit on bytes per second, for a disk that others use too.

use std::collections::VecDeque;
use std::io;
use std::num::NonZero;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::sync::{Condvar, Mutex};

use bytesize::ByteSize;

use super::{Backend, BackendInfo, Op};
use crate::contained;
use crate::error::Result;
use crate::region::{Place, Region};

/// Passes operations on to another backend at a limited number of bytes per second, reads and writes together.
///
/// An operation is passed on at the time when a disk of that speed would have finished it, so none finishes sooner.
pub struct Throttled {
    inner: Arc<dyn Backend>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Op>,
    /// Bytes per second; `None` for as many as the inner backend can move.
    limit: Option<NonZero<u64>>,
    closed: bool,
}

impl Throttled {
    /// Starts the thread `ssdtrain-pace`, which sleeps until the next operation is due.
    pub fn new(inner: Arc<dyn Backend>, bytes_per_s: NonZero<u64>) -> io::Result<Throttled> {
        let shared = Arc::new(Shared::default());
        shared.state.lock().limit = Some(bytes_per_s);
        let (passing, queued) = (Arc::clone(&inner), Arc::clone(&shared));
        let thread = thread::Builder::new().name("ssdtrain-pace".to_owned());
        let thread = thread.spawn(move || queued.pass_on(&*passing))?;
        Ok(Throttled { inner, shared, thread: Some(thread) })
    }

    /// Changes the limit from now on; `None` passes operations on as fast as they come.
    pub fn set_limit(&self, bytes_per_s: Option<NonZero<u64>>) {
        self.shared.state.lock().limit = bytes_per_s;
        self.shared.changed.notify_one();
    }
}

impl Backend for Throttled {
    fn open(&self, place: Place<'_>, cap_bytes: u64) -> Result<Arc<dyn Region>> {
        self.inner.open(place, cap_bytes)
    }

    fn submit(&self, ops: Vec<Op>) {
        self.shared.state.lock().queue.extend(ops);
        self.shared.changed.notify_one();
    }

    fn describe(&self) -> BackendInfo {
        let mut info = self.inner.describe();
        if let Some(limit) = self.shared.state.lock().limit {
            info.notes.push(format!("limited to {}/s", ByteSize(limit.get())));
        }
        info
    }
}

impl Drop for Throttled {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.changed.notify_one();
        let Some(thread) = self.thread.take() else { return };
        // An operation that fails at once completes on that thread, and its completion may drop the store.
        if thread.thread().id() != thread::current().id() && thread.join().is_err() {
            tracing::error!("the thread that paces transfers panicked");
        }
    }
}

impl Shared {
    /// Passes operations on, each when it is due, until no more come. What is then left is passed on at once.
    fn pass_on(&self, inner: &dyn Backend) {
        let mut free = Instant::now();
        let mut state = self.state.lock();
        loop {
            let Some(op) = state.queue.pop_front() else {
                if state.closed {
                    return;
                }
                self.changed.wait(&mut state);
                continue;
            };
            let begun = free.max(Instant::now());
            free = begun;
            while let Some(limit) = state.limit.filter(|_| !state.closed) {
                free = begun + Duration::from_secs_f64(op.len() as f64 / limit.get() as f64);
                if self.changed.wait_until(&mut state, free) {
                    break;
                }
            }
            drop(state);
            // If that panics, the operation fails and the following ones continue.
            contained("a submission", || inner.submit(vec![op]));
            state = self.state.lock();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::backend::{Direction, Pool};
    use crate::mem::{AlignedBuf, BLOCK, IoBuf};

    fn write(count: u64, region: &Arc<dyn Region>, done: &mpsc::Sender<Instant>) -> Vec<Op> {
        let op = |index: u64| {
            let buf: Arc<dyn IoBuf> = Arc::new(AlignedBuf::new(BLOCK).unwrap());
            let done = done.clone();
            let follow = move |outcome: io::Result<()>| {
                outcome.unwrap();
                done.send(Instant::now()).unwrap();
                Vec::new()
            };
            let place = (Arc::clone(region), index * BLOCK as u64);
            Op::new(Direction::Write, place, (buf, 0, BLOCK), Box::new(follow))
        };
        (0..count).map(op).collect()
    }

    #[test]
    fn nothing_ends_sooner_than_a_disk_of_that_speed_would_end_it() {
        let inner = Arc::new(Pool::new(2).unwrap());
        let region = inner.open(Place::Memory, 1 << 20).unwrap();
        let throttled = Throttled::new(inner, NonZero::new(100 * BLOCK as u64).unwrap()).unwrap();
        let ((done, ended), start) = (mpsc::channel(), Instant::now());
        throttled.submit(write(3, &region, &done));
        for operation in 1..=3 {
            assert!(ended.recv().unwrap() - start >= operation * Duration::from_millis(10));
        }
    }

    #[test]
    fn a_limit_that_is_lifted_holds_nothing_back() {
        let inner = Arc::new(Pool::new(1).unwrap());
        let region = inner.open(Place::Memory, 1 << 20).unwrap();
        // Otherwise the first operation alone would take an hour.
        let throttled = Throttled::new(inner, NonZero::new(1).unwrap()).unwrap();
        let (done, ended) = mpsc::channel();
        throttled.submit(write(2, &region, &done));
        throttled.set_limit(None);
        assert!((0..2).all(|_| ended.recv().is_ok()));
    }

    #[test]
    fn what_is_left_goes_at_once_when_it_is_dropped() {
        let inner = Arc::new(Pool::new(1).unwrap());
        let region = inner.open(Place::Memory, 1 << 20).unwrap();
        // Otherwise the first operation alone would take an hour.
        let throttled = Throttled::new(inner, NonZero::new(1).unwrap()).unwrap();
        let (done, ended) = mpsc::channel();
        throttled.submit(write(2, &region, &done));
        drop((throttled, done));
        assert_eq!(ended.iter().count(), 2);
    }
}
