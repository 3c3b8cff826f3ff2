//! io_uring: one thread owns the ring and keeps up to `depth` operations in flight.
//!
//! Submitters put operations into a queue. The thread moves them into the ring, enters the kernel once for all of
//! them, and sleeps there until an operation completes or, while the ring has room, a submitter signals the eventfd
//! that the ring polls. Nothing busy-waits and nothing uses a timeout.
//!
//! Operations that were given up stay in the ring, and others take their turns in place of them. When no more come, the
//! thread is left behind with them; it ends when they do.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::sync::{Condvar, Mutex};
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use slab::Slab;

use super::lost::{MAX_LOST, refusal, refuse};
use super::queue::Queue;
use super::{Backend, BackendInfo, Direction, Op};
use crate::completion::{contained, is_completing};
use crate::error::Result;
use crate::region::{Place, Region};
use crate::spill_file::SpillFile;
use crate::watch::OnLost;

/// The user data of the poll that wakes the thread; no slab key is as large.
const WAKE: u64 = u64::MAX;
/// How long the thread may take to notice that operations were given up before it counts as stuck in the kernel. It runs
/// completions meanwhile, which are short.
const PATIENCE: Duration = Duration::from_secs(10);

/// An io_uring and the thread `ssdtrain-uring` that owns it.
pub struct Uring {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    /// Signalled when the thread has noticed lost operations, has none but those, or ends.
    changed: Condvar,
    wake: OwnedFd,
}

#[derive(Default)]
struct State {
    queue: Queue,
    /// The thread sleeps in the kernel, or is about to, and would start an operation if it were woken.
    asleep: bool,
    /// No more operations will come.
    closed: bool,
    /// Nothing begins any more.
    ends: bool,
    /// The thread has ended.
    ended: bool,
    /// Operations were given up, and the thread has not noticed yet.
    loses: bool,
    /// It should have noticed by now: the kernel does not return from a call.
    stuck: bool,
    /// No more operations will come, and all that are left were given up.
    left_behind: bool,
}

/// The state that the thread owns.
struct Engine {
    shared: Arc<Shared>,
    ring: IoUring,
    in_flight: Slab<Op>,
    /// How many of them were given up.
    lost: usize,
    on_lost: OnLost,
    /// Finished by the kernel, but not completed yet.
    finished: Vec<(Op, io::Result<usize>)>,
    depth: usize,
    listening: bool,
}

impl Uring {
    /// Starts the thread. If the kernel refuses io_uring, its error is returned.
    pub fn new(depth: usize) -> io::Result<Uring> {
        let shared = Arc::new(Shared::new()?);
        let (started, outcome) = mpsc::sync_channel(1);
        let thread = thread::Builder::new().name("ssdtrain-uring".to_owned()).spawn({
            let shared = Arc::clone(&shared);
            move || serve(&shared, depth.max(1), &started)
        })?;
        // The ring is created on the thread: a ring with a single issuer belongs to the thread that created it.
        let uring = Uring { shared, thread: Some(thread) };
        outcome.recv().map_err(io::Error::other)??;
        Ok(uring)
    }
}

impl Backend for Uring {
    fn open(&self, place: Place<'_>, cap_bytes: u64) -> Result<Arc<dyn Region>> {
        Ok(Arc::new(SpillFile::create(place, cap_bytes)?))
    }

    /// Starts the operations. If the ring has failed or is stuck, they fail at once, on the calling thread.
    fn submit(&self, ops: Vec<Op>) {
        let mut state = self.shared.state.lock();
        if state.ends {
            drop(state);
            drop(ops);
            return;
        }
        if state.stuck {
            drop(state);
            return refuse(ops);
        }
        state.queue.extend(ops);
        let wake = std::mem::take(&mut state.asleep);
        drop(state);
        if wake {
            self.shared.signal();
        }
    }

    fn describe(&self) -> BackendInfo {
        BackendInfo::named("io_uring")
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.closed = true;
        self.shared.signal();
        let Some(thread) = self.thread.take() else { return };
        // It ends by itself.
        if is_completing() {
            return;
        }
        while !(state.ended || state.left_behind || state.stuck) {
            self.shared.changed.wait(&mut state);
        }
        let ended = state.ended;
        drop(state);
        if !ended {
            tracing::warn!("the io_uring thread is left behind: the disk has not answered it");
        } else if thread.join().is_err() {
            tracing::error!("the io_uring thread panicked");
        }
    }
}

impl Shared {
    fn new() -> io::Result<Shared> {
        // SAFETY: a plain system call.
        let wake = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if wake < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `wake` was just opened and nobody else has it.
        let wake = unsafe { OwnedFd::from_raw_fd(wake) };
        Ok(Shared { state: Mutex::default(), changed: Condvar::new(), wake })
    }

    /// Makes the ring's poll complete.
    fn signal(&self) {
        // The write fails only when the counter is full, and then the poll has long completed.
        let one = 1_u64;
        // SAFETY: an eventfd takes 8 bytes, and `one` is that long.
        unsafe { libc::write(self.wake.as_raw_fd(), (&raw const one).cast(), size_of::<u64>()) };
    }

    /// Operations were given up: the thread is to begin others in place of them. If it is stuck in the kernel itself, what
    /// waits is refused.
    fn lose(&self) {
        let until = Instant::now() + PATIENCE;
        let mut state = self.state.lock();
        if state.stuck {
            return;
        }
        state.loses = true;
        self.signal();
        while state.loses && !state.ended {
            if self.changed.wait_until(&mut state, until) {
                break;
            }
        }
        if !state.loses || state.ended {
            return;
        }
        state.stuck = true;
        let refused = std::mem::take(&mut state.queue);
        drop(state);
        self.changed.notify_all();
        tracing::error!("the kernel does not return from io_uring_enter; transfers are refused");
        refuse(refused);
    }
}

/// Runs on the thread.
fn serve(shared: &Arc<Shared>, depth: usize, started: &mpsc::SyncSender<io::Result<()>>) {
    /// However the thread ends, queued operations fail and nothing more is queued.
    struct End<'a>(&'a Shared);
    impl Drop for End<'_> {
        fn drop(&mut self) {
            let mut state = self.0.state.lock();
            (state.ends, state.ended) = (true, true);
            let left = std::mem::take(&mut state.queue);
            drop(state);
            self.0.changed.notify_all();
            drop(left);
        }
    }

    let _end = End(shared);
    let mut engine = match Engine::new(Arc::clone(shared), depth) {
        Ok(engine) => engine,
        // If nobody receives the error, nobody is waiting for the ring either.
        Err(error) => return drop(started.send(Err(error))),
    };
    if started.send(Ok(())).is_ok()
        && let Err(error) = engine.run()
    {
        tracing::error!(%error, "io_uring failed, and its transfers fail from now on");
    }
}

impl Engine {
    fn new(shared: Arc<Shared>, depth: usize) -> io::Result<Engine> {
        let entries = u32::try_from(depth + 1).map_err(io::Error::other)?;
        let ring = build_ring(entries)?;
        if !ring.params().is_feature_resource_tagging() {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "it needs Linux 5.13"));
        }
        let (in_flight, finished) = (Slab::with_capacity(depth), Vec::with_capacity(depth));
        let loses = Arc::clone(&shared);
        let on_lost: OnLost = Arc::new(move || loses.lose());
        Ok(Engine { shared, ring, in_flight, lost: 0, on_lost, finished, depth, listening: false })
    }

    /// Carries out operations until the queue is closed and nothing is left.
    ///
    /// Freeing room comes first: the disk gets its next operations before the completions of the previous ones run.
    fn run(&mut self) -> io::Result<()> {
        while self.take_work() {
            self.enter(usize::from(self.finished.is_empty()))?;
            self.tell();
            self.reap()?;
        }
        Ok(())
    }

    /// Moves operations from the queue into the ring while it has room. Returns false when no more will come and none
    /// is left.
    fn take_work(&mut self) -> bool {
        if !self.listening {
            let poll = opcode::PollAdd::new(types::Fd(self.shared.wake.as_raw_fd()), libc::POLLIN as u32);
            // SAFETY: the poll uses no memory, and `shared` keeps its file open for longer than the ring exists.
            let pushed = unsafe { self.ring.submission().push(&poll.multi(true).build().user_data(WAKE)) };
            self.listening = pushed.is_ok();
        }
        let shared = Arc::clone(&self.shared);
        let mut state = shared.state.lock();
        self.notice(&mut state);
        while let Some(op) = self.next(&mut state.queue) {
            let entry = match describe(&op) {
                _ if op.is_given_up() => Err(io::ErrorKind::TimedOut.into()),
                _ if self.is_full_of_lost() => Err(refusal()),
                described => described,
            };
            let entry = match entry {
                Ok(entry) => entry,
                Err(error) => {
                    self.finished.push((op, Err(error)));
                    continue;
                }
            };
            let slot = self.in_flight.vacant_entry();
            let entry = entry.user_data(slot.key() as u64);
            // SAFETY: the slab keeps `op`, which owns the memory and the region, until its completion is handled; see
            // also the drop of `Engine`.
            if unsafe { self.ring.submission().push(&entry) }.is_err() {
                state.queue.push(op);
                break;
            }
            slot.insert(op).begin(&self.on_lost);
        }
        let idle = self.finished.is_empty();
        state.asleep = idle && self.takes_more();
        let over = state.closed && idle && state.queue.is_empty();
        if over && self.in_flight.len() == self.lost && self.lost > 0 {
            state.left_behind = true;
            self.shared.changed.notify_all();
        }
        !(over && self.in_flight.is_empty())
    }

    /// The next operation to begin, or to refuse.
    fn next(&self, queue: &mut Queue) -> Option<Op> {
        self.takes_more().then(|| queue.pop()).flatten()
    }

    /// Whether another operation may begin, or be refused.
    fn takes_more(&self) -> bool {
        let all = self.in_flight.len();
        let has_room = all - self.lost < self.depth && all < self.depth + MAX_LOST;
        has_room || self.is_full_of_lost()
    }

    /// Whether no operation can begin before one ends that was given up.
    fn is_full_of_lost(&self) -> bool {
        self.lost == self.depth + MAX_LOST
    }

    /// Counts the operations that were given up.
    fn notice(&mut self, state: &mut State) {
        if state.loses || self.lost > 0 {
            self.lost = self.in_flight.iter().filter(|(_, op)| op.is_given_up()).count();
        }
        if std::mem::take(&mut state.loses) {
            tracing::warn!(stuck = self.lost, "the disk has not answered operations in the ring");
            self.shared.changed.notify_all();
        }
        state.stuck = false;
    }

    /// Submits what is in the ring, and sleeps until `want` completions have arrived.
    fn enter(&self, want: usize) -> io::Result<()> {
        match self.ring.submit_and_wait(want) {
            Err(error) if !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => {
                Err(error)
            }
            _ => Ok(()),
        }
    }

    /// Takes finished operations out of the ring; the error is the poll's.
    fn reap(&mut self) -> io::Result<()> {
        let mut poll = Ok(());
        for completion in self.ring.completion() {
            let result = match completion.result() {
                code if code < 0 => Err(io::Error::from_raw_os_error(-code)),
                bytes => Ok(bytes as usize),
            };
            if completion.user_data() == WAKE {
                self.listening = cqueue::more(completion.flags());
                poll = result.map(drop);
            } else if let Some(op) = self.in_flight.try_remove(completion.user_data() as usize) {
                self.finished.push((op, result));
            }
        }
        poll
    }

    /// Completes the finished operations.
    fn tell(&mut self) {
        for (op, result) in self.finished.drain(..) {
            let next = contained("the end of an operation", || op.complete(result)).unwrap_or_default();
            if !next.is_empty() {
                self.shared.state.lock().queue.extend(next);
            }
        }
    }
}

impl Drop for Engine {
    /// The kernel may use an operation's memory until it completes: waits for all of them, even if `run` failed. What has not begun fails.
    fn drop(&mut self) {
        self.shared.state.lock().ends = true;
        self.tell();
        while !self.in_flight.is_empty() {
            let shared = Arc::clone(&self.shared);
            let mut state = shared.state.lock();
            self.notice(&mut state);
            state.left_behind = self.lost == self.in_flight.len();
            let left = std::mem::take(&mut state.queue);
            drop(state);
            // The kernel may still use what is in flight, so nothing may unwind from here.
            for op in left {
                let _ = contained("the end of an operation", || drop(op));
            }
            shared.changed.notify_all();
            let entered = self.enter(1);
            self.reap().ok();
            self.tell();
            if let Err(error) = entered {
                tracing::error!(
                    "io_uring lost {} transfers; their memory is kept: {error}",
                    self.in_flight.len()
                );
                Box::leak(Box::new(std::mem::take(&mut self.in_flight)));
            }
        }
    }
}

/// Builds the ring, with the flags that avoid interrupts where the kernel supports them (6.1, 5.19).
fn build_ring(entries: u32) -> io::Result<IoUring> {
    let mut deferred = IoUring::builder();
    deferred.setup_single_issuer().setup_defer_taskrun();
    let mut cooperative = IoUring::builder();
    cooperative.setup_coop_taskrun();
    for builder in [deferred, cooperative] {
        match builder.build(entries) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            built => return built,
        }
    }
    IoUring::new(entries)
}

/// The operation as a submission entry.
fn describe(op: &Op) -> io::Result<squeue::Entry> {
    let fd = types::Fd(op.region::<SpillFile>()?.as_fd().as_raw_fd());
    // A single operation is never longer than `io_bytes`; if it were, it would come back short and continue.
    let len = u32::try_from(op.len()).unwrap_or(1 << 30);
    Ok(match op.direction() {
        Direction::Read => opcode::Read::new(fd, op.ptr(), len).offset(op.offset()).build(),
        Direction::Write => opcode::Write::new(fd, op.ptr(), len).offset(op.offset()).build(),
    })
}

#[cfg(test)]
mod tests;
