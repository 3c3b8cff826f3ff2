//! A complete write or read of a blob: split into operations, joined, verified, retried, and given up when it takes too
//! long.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};

use crate::sync::Mutex;

use super::backend::{Backend, Direction, Op};
use super::blob::Blob;
use super::copies::{copy, payload_len, suits};
use super::failure::{Failure, READ_ATTEMPTS};
use super::gather::Gather;
use super::stats::Counters;
use super::{Completion, contained};
use crate::checksum::{checksum, chunks};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::{AlignedBuf, IoBuf};
use crate::watch::{Clock, GivenUp, Watcher};
use crate::workers::{Task, WorkQueue};

/// What all transfers of a store share.
pub(super) struct Rules {
    /// Whether checksums are taken of what is written.
    pub(super) checksums: AtomicBool,
    /// Largest operation, in bytes, and those of a checksum.
    pub(super) io_bytes: usize,
    pub(super) counters: Counters,
    pub(super) watcher: Arc<Watcher>,
    /// Threads that work on bytes, so that those of the backend need not.
    pub(super) workers: Arc<WorkQueue>,
    /// Takes the operations of another attempt.
    pub(super) backend: Weak<dyn Backend>,
}

/// A transfer between a blob and memory.
pub(super) struct Transfer {
    rules: Arc<Rules>,
    direction: Direction,
    blob: Arc<Blob>,
    /// The memory that the operations point at.
    buf: Arc<dyn IoBuf>,
    /// Where a read is copied to when `buf` is a bounce buffer.
    copy_to: Option<Arc<dyn IoBuf>>,
    attempt: u32,
    /// Whether checksums are taken of what is written.
    takes_checksums: bool,
    /// Those, once they are being taken.
    checksums: Option<Arc<Gather<u32>>>,
    done: Completion,
}

/// What the operations of one attempt share.
struct Attempt {
    given_up: Arc<GivenUp>,
    joined: Mutex<Joined>,
}

/// The last operation to end takes the transfer out and continues it.
struct Joined {
    pending: usize,
    failure: Option<Failure>,
    transfer: Option<Transfer>,
    /// In place of a transfer that was given up: what the kernel may still touch, until the last operation ends.
    lost: Option<(Arc<Blob>, Arc<dyn IoBuf>)>,
}

impl Transfer {
    /// A transfer of all of `blob`, which is not empty, from or to `user`.
    pub(super) fn new(
        rules: Arc<Rules>,
        direction: Direction,
        blob: Arc<Blob>,
        user: Arc<dyn IoBuf>,
        done: Completion,
    ) -> Result<Transfer, (Error, Completion)> {
        if (user.len() as u64) < blob.len() {
            let message = format!("memory of {} bytes cannot hold a blob of {blob}", user.len());
            return Err((Error::new(ErrorKind::Io, message), done));
        }
        let takes_checksums = direction == Direction::Write && rules.checksums.load(Relaxed) && user.stays();
        let is_checked = takes_checksums || direction == Direction::Read && blob.checksums().is_some();
        let suits = suits(&*user, &blob);
        if !user.is_on_host(0) && (is_checked || !suits) {
            let why = if is_checked { "checksums are taken of host memory only" } else { "it does not suit" };
            let message = format!("a blob of {blob} cannot be moved from or to a device's memory: {why}");
            return Err((Error::new(ErrorKind::Io, message), done));
        }
        let (mut buf, mut copy_to) = (user, None);
        if !suits {
            let len = payload_len(&blob);
            let Some(bounce) = AlignedBuf::new(len) else {
                let message = format!("out of memory for a bounce buffer of {len} bytes");
                return Err((Error::new(ErrorKind::Io, message), done));
            };
            rules.counters.bounced.fetch_add(1, Relaxed);
            let user = std::mem::replace(&mut buf, Arc::new(bounce));
            match direction {
                Direction::Read => copy_to = Some(user),
                Direction::Write => copy(&*user, &*buf, 0..len),
            }
        }
        let (attempt, checksums) = (1, None);
        Ok(Transfer { rules, direction, blob, buf, copy_to, attempt, takes_checksums, checksums, done })
    }

    /// The operations of the next attempt. When the last of them ends, the transfer continues by itself.
    pub(super) fn start(mut self) -> Vec<Op> {
        if self.direction == Direction::Write {
            self.blob.set_checksums(None);
            self.checksums = self.takes_checksums.then(|| self.begin_checksums());
        }
        let (rules, blob, buf) = (Arc::clone(&self.rules), Arc::clone(&self.blob), Arc::clone(&self.buf));
        let direction = self.direction;
        let longest = |start: u64| rules.io_bytes.min(buf.part(start as usize).1) as u64;
        let spans: Vec<_> = blob.spans(longest).collect();
        rules.counters.operations.fetch_add(spans.len() as u64, Relaxed);
        rules.counters.begin(direction);
        let given_up = rules.watcher.transfer();
        let joined = Joined { pending: spans.len(), failure: None, transfer: Some(self), lost: None };
        let attempt = Arc::new(Attempt { given_up, joined: Mutex::new(joined) });
        let ops = spans.into_iter().map(|span| {
            let piece = &blob.pieces()[span.piece];
            let offset = piece.offset() + span.offset;
            let memory = (Arc::clone(&buf), span.start as usize, span.len as usize);
            let (ends, overdue) = (Arc::clone(&attempt), Arc::clone(&attempt));
            let volume = Arc::clone(piece.volume());
            let follow = move |outcome: io::Result<()>| {
                // Also one that ends late has written.
                if direction == Direction::Write && outcome.is_ok() {
                    volume.has_written(span.len);
                }
                drop(volume);
                ends.end(outcome.map_err(|error| Failure::Io { error, piece: span.piece, offset }))
            };
            let give_up = move |on_lost: &dyn Fn()| overdue.give_up(span.piece, offset, on_lost);
            let clock = Clock::new(&attempt.given_up, give_up);
            Op::new(direction, (Arc::clone(piece.volume().region()), offset), memory, Box::new(follow))
                .timed(clock)
        });
        ops.collect()
    }

    /// Has the workers take the checksums of what is written, while the disk writes it.
    fn begin_checksums(&self) -> Arc<Gather<u32>> {
        let chunks = self.chunks();
        let gather = Arc::new(Gather::new(chunks.len()));
        let task = |(index, bytes)| {
            let (buf, gather) = (Arc::clone(&self.buf), Arc::clone(&gather));
            let take = move || {
                let checksum = checksum(&*buf, bytes);
                // The end may be that of the transfer, which holds no memory then.
                drop(buf);
                // A write that has ended has nothing left to do.
                drop(gather.end(index, checksum));
            };
            Box::new(take) as Task
        };
        let tasks = || chunks.clone().enumerate().map(task).collect::<Vec<_>>();
        if !self.rules.workers.give(chunks.len(), tasks) {
            tasks().into_iter().for_each(|task| task());
        }
        gather
    }

    /// Continues after all operations of an attempt have ended.
    fn settle(mut self, failure: Option<Failure>) -> Vec<Op> {
        self.rules.counters.end(self.direction);
        let outcome = failure.map_or(Ok(()), Err);
        match (self.direction, self.checksums.take()) {
            (Direction::Write, Some(checksums)) => checksums.then(move |checksums| {
                if outcome.is_ok() {
                    self.blob.set_checksums(Some(checksums.into()));
                }
                self.conclude(outcome)
            }),
            (Direction::Read, _) if outcome.is_ok() => self.examine(),
            _ => self.conclude(outcome),
        }
    }

    /// Has the workers compare what was read with its checksums, and copy it out of a bounce buffer; then continues.
    fn examine(self) -> Vec<Op> {
        let written = self.blob.checksums();
        if written.is_none() && self.copy_to.is_none() {
            return self.conclude(Ok(()));
        }
        let (chunks, workers) = (self.chunks(), Arc::clone(&self.rules.workers));
        let mut left = Some(self);
        let tasks = || left.take().map_or_else(Vec::new, |transfer| transfer.examination(written.as_deref()));
        if workers.give(chunks.len(), tasks) {
            return Vec::new();
        }
        // The thread of the backend does it, so that what is read again need not be handed to one that is being dropped.
        let Some(transfer) = left else { return Vec::new() };
        let (buf, copy_to) = (&*transfer.buf, transfer.copy_to.as_deref());
        let mut chunks = chunks.enumerate();
        let outcome = chunks.try_for_each(|(index, bytes)| {
            examine_chunk(buf, copy_to, bytes, written.as_deref().map(|written| written[index]))
        });
        transfer.conclude(outcome)
    }

    /// The tasks of the workers. After the last of them, the transfer continues.
    fn examination(self, written: Option<&[u32]>) -> Vec<Task> {
        let gather = Arc::new(Gather::new(self.chunks().len()));
        let task = |(index, bytes): (usize, Range<usize>)| {
            let (buf, copy_to) = (Arc::clone(&self.buf), self.copy_to.clone());
            let (gather, backend) = (Arc::clone(&gather), self.rules.backend.upgrade());
            let written = written.map(|written| written[index]);
            let examine = move || {
                let outcome = examine_chunk(&*buf, copy_to.as_deref(), bytes, written);
                // The end may be that of the transfer, which holds no memory then.
                drop((buf, copy_to));
                let next = gather.end(index, outcome);
                // The store, which has it, is not dropped before its workers have their tasks.
                if let Some(backend) = backend.filter(|_| !next.is_empty()) {
                    backend.submit(next);
                }
            };
            Box::new(examine) as Task
        };
        let tasks = self.chunks().enumerate().map(task).collect();
        // No task has begun: there is nothing to carry out next.
        drop(gather.then(move |outcomes| self.conclude(outcomes.into_iter().collect())));
        tasks
    }

    /// Tries again, or finishes the transfer.
    fn conclude(mut self, outcome: Result<(), Failure>) -> Vec<Op> {
        match outcome {
            Err(failure) if self.direction == Direction::Read && self.attempt < READ_ATTEMPTS => {
                let before = self.rules.counters.retried.fetch_add(1, Relaxed);
                let error = failure.into_error(self.direction, self.attempt, &self.blob);
                // A disk that fails once may fail in every step: the statistics count the others.
                match before {
                    0 => tracing::warn!(%error, "a read failed and is tried again"),
                    _ => tracing::debug!(%error, "a read failed and is tried again"),
                }
                self.attempt += 1;
                self.start()
            }
            outcome => {
                self.finish(outcome);
                Vec::new()
            }
        }
    }

    /// The chunks of the payload, of each of which a checksum is taken.
    fn chunks(&self) -> impl ExactSizeIterator<Item = Range<usize>> + Clone + use<> {
        chunks(payload_len(&self.blob), self.rules.io_bytes)
    }

    /// Counts the outcome, then reports it once the transfer holds neither the blob nor any memory.
    fn finish(self, outcome: Result<(), Failure>) {
        let Transfer { rules, direction, blob, buf, copy_to, attempt, done, .. } = self;
        let counters = &rules.counters;
        let result = outcome.map_err(|failure| failure.into_error(direction, attempt, &blob));
        match (&result, direction) {
            (Ok(()), Direction::Write) => count(&counters.writes, &counters.bytes_written, blob.len()),
            (Ok(()), Direction::Read) => {
                count(&counters.reads, &counters.bytes_read, blob.len());
                if blob.checksums().is_some() {
                    count(&counters.reads_checked, &counters.bytes_checked, blob.len());
                }
            }
            (Err(error), _) => {
                counters.failures.fetch_add(1, Relaxed);
                counters.timed_out.fetch_add(u64::from(error.kind() == ErrorKind::TimedOut), Relaxed);
            }
        }
        drop((blob, buf, copy_to));
        done.call(result);
    }
}

impl Attempt {
    /// Ends one operation.
    fn end(&self, outcome: Result<(), Failure>) -> Vec<Op> {
        let mut joined = self.joined.lock();
        if let Err(failure) = outcome {
            joined.failure.get_or_insert(failure);
        }
        joined.pending -= 1;
        if joined.pending > 0 {
            return Vec::new();
        }
        let (transfer, failure, lost) = (joined.transfer.take(), joined.failure.take(), joined.lost.take());
        drop(joined);
        if let Some((blob, buf)) = lost {
            tracing::info!(%blob, "the disk has answered after all, too late");
            drop((blob, buf));
        }
        let Some(transfer) = transfer else { return Vec::new() };
        self.given_up.end();
        transfer.settle(failure)
    }

    /// Ends the transfer because of an operation that the disk has not answered in time, unless it has ended. The backend
    /// goes on without its operations before anybody hears of that.
    fn give_up(&self, piece: usize, offset: u64, on_lost: &dyn Fn()) {
        let mut joined = self.joined.lock();
        let Some(transfer) = joined.transfer.take() else { return };
        joined.lost = Some((Arc::clone(&transfer.blob), Arc::clone(&transfer.buf)));
        self.given_up.give_up();
        drop(joined);
        // Whatever the backend does, the transfer is answered.
        contained("a backend that was told of lost operations", on_lost);
        let limit = transfer.rules.watcher.limit();
        transfer.rules.counters.end(transfer.direction);
        let failure = Failure::TimedOut { limit, piece, offset };
        contained("the end of a transfer that was given up", || transfer.finish(Err(failure)));
        self.given_up.end();
    }
}

fn count(transfers: &AtomicU64, bytes: &AtomicU64, len: u64) {
    transfers.fetch_add(1, Relaxed);
    bytes.fetch_add(len, Relaxed);
}

/// Compares some bytes that were read with their checksum, and copies them to where they belong.
fn examine_chunk(
    buf: &dyn IoBuf,
    copy_to: Option<&dyn IoBuf>,
    bytes: Range<usize>,
    written: Option<u32>,
) -> Result<(), Failure> {
    if let Some(written) = written {
        let read = checksum(buf, bytes.clone());
        if read != written {
            return Err(Failure::Corrupt { written, read, offset: bytes.start });
        }
    }
    if let Some(user) = copy_to {
        copy(buf, user, bytes);
    }
    Ok(())
}
