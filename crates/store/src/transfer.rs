//! A complete write or read of a blob: encrypted if the store does that, split into operations, joined, verified, retried, and
//! given up when it takes too long.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Weak};

use crate::sync::Mutex;

use super::backend::{Backend, Direction, Op};
use super::blob::Blob;
use super::copies::{copy, payload_len, suits};
use super::encryption::{Encryption, bounce};
use super::failure::{Failure, READ_ATTEMPTS};
use super::gather::Gather;
use super::stats::{Counters, count};
use super::{Completion, contained};
use crate::checksum::{checksum, chunks};
use crate::error::{Error, ErrorKind, Result};
use crate::marks::{self, Marks};
use crate::mem::IoBuf;
use crate::seal::{SEALED_BYTES, Seal, Sealer};
use crate::watch::{Clock, GivenUp, Watcher};
use crate::workers::{Task, WorkQueue};

/// What all transfers of a store share.
pub(super) struct Rules {
    /// Whether checksums are taken of what is written.
    pub(super) checksums: AtomicBool,
    /// What seals all that is written, if the store encrypts.
    pub(super) encryption: Option<Encryption>,
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
    /// The caller's memory, if `buf` is a bounce buffer and bytes are still to be copied between the two.
    user: Option<Arc<dyn IoBuf>>,
    attempt: u32,
    /// Bytes of a chunk, of which the workers do one at a time.
    chunk_bytes: usize,
    /// Whether checksums are taken of what is written.
    takes_checksums: bool,
    /// Those, once they are being taken.
    checksums: Option<Arc<Gather<u32>>>,
    /// Seals what is written before it is.
    sealer: Option<Arc<Sealer>>,
    /// What is known of the bytes: of a read, what was noted when they were written; of a write, the seals once it has them. A write that
    /// begins during a read, against the rules, changes nothing of what the read demands.
    marks: Option<Marks>,
    busy: Option<Busy>,
    done: Completion,
}

/// Counts a transfer as busy until it is dropped.
struct Busy(Arc<Rules>, Direction);

impl Busy {
    fn begin(rules: &Arc<Rules>, direction: Direction) -> Busy {
        rules.counters.begin(direction);
        Busy(Arc::clone(rules), direction)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.counters.end(self.1);
    }
}

/// The memory that a task works on.
struct Memory {
    buf: Arc<dyn IoBuf>,
    user: Option<Arc<dyn IoBuf>>,
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
        let encryption = rules.encryption.as_ref().filter(|_| direction == Direction::Write);
        if encryption.is_some_and(|encryption| !encryption.sealer.seals_here()) {
            let message = format!(
                "{blob} is not encrypted: the key is of the process that this one was forked from; open a store here"
            );
            return Err((Error::new(ErrorKind::Config, message), done));
        }
        let marks = if direction == Direction::Read { blob.marks() } else { None };
        if direction == Direction::Read && rules.encryption.is_some() && marks.is_none() {
            let message = format!(
                "{blob} cannot be decrypted: it was not written, or its last write failed; write it first"
            );
            return Err((Error::new(ErrorKind::Io, message), done));
        }
        let takes_checksums = direction == Direction::Write
            && encryption.is_none()
            && rules.checksums.load(Relaxed)
            && user.stays();
        let is_sealed = encryption.is_some() || marks.as_ref().is_some_and(Marks::are_seals);
        let is_checked = takes_checksums || marks.is_some();
        let len = payload_len(&blob);
        let suits = match (direction, is_sealed) {
            // What is the caller's is not encrypted where it is.
            (Direction::Write, true) => false,
            (Direction::Read, true) => suits(&*user, &blob) && marks::opens_in_place(&*user, len),
            (_, false) => suits(&*user, &blob),
        };
        if !user.is_on_host(0) && (is_checked || !suits) {
            let why = match (is_sealed, is_checked) {
                (true, _) => "only host memory is encrypted and decrypted",
                (_, true) => "checksums are taken of host memory only",
                _ => "it does not suit",
            };
            let message = format!("a blob of {blob} cannot be moved from or to a device's memory: {why}");
            return Err((Error::new(ErrorKind::Io, message), done));
        }
        let sealer = encryption.map(|encryption| Arc::clone(&encryption.sealer));
        let (mut buf, mut other) = (user, None);
        if !suits {
            let Some(bounce) = bounce(encryption, len) else {
                let message = format!(
                    "{blob} cannot be moved: there is no memory for a bounce buffer of {len} bytes; free memory, or raise \
                     its limit (ulimit -v)"
                );
                let cause = io::Error::from_raw_os_error(libc::ENOMEM);
                return Err((Error::io(ErrorKind::NoSpace, message, cause), done));
            };
            rules.counters.bounced.fetch_add(1, Relaxed);
            let user = std::mem::replace(&mut buf, bounce);
            if direction == Direction::Read || is_sealed && user.stays() {
                other = Some(user);
            } else {
                copy(&*user, &*buf, 0..len);
            }
        }
        let chunk_bytes =
            if is_sealed { rules.io_bytes.next_multiple_of(SEALED_BYTES) } else { rules.io_bytes };
        let (user, attempt, checksums, busy) = (other, 1, None, None);
        Ok(Transfer {
            rules,
            direction,
            blob,
            buf,
            user,
            attempt,
            chunk_bytes,
            takes_checksums,
            checksums,
            sealer,
            marks,
            busy,
            done,
        })
    }

    /// The first operations. What is to be encrypted is sealed before: then the workers submit them.
    pub(super) fn begin(mut self) -> Vec<Op> {
        if self.direction == Direction::Write {
            self.blob.set_marks(None);
        }
        match self.sealer.clone() {
            Some(sealer) => {
                // The disk waits for it, so it counts as time that writes take.
                self.busy = Some(Busy::begin(&self.rules, self.direction));
                self.seal(sealer)
            }
            None => self.start(),
        }
    }

    /// Has the workers encrypt what is to be written, from the caller's memory into the bounce buffer; then continues.
    fn seal(self, sealer: Arc<Sealer>) -> Vec<Op> {
        let with = Arc::clone(&sealer);
        let each = move |memory: &Memory, _: usize, chunk: Range<usize>| {
            let fill = |piece: Range<usize>| {
                memory.user.iter().for_each(|user| copy(&**user, &*memory.buf, piece.clone()))
            };
            marks::seal(&with, &*memory.buf, chunk, fill)
        };
        self.work(each, move |mut transfer, seals: Vec<Vec<Seal>>| {
            transfer.marks = Some(Marks::Seals(sealer, seals.concat().into()));
            transfer.user = None;
            transfer.start()
        })
    }

    /// The operations of the next attempt. When the last of them ends, the transfer continues by itself.
    fn start(mut self) -> Vec<Op> {
        self.checksums = self.takes_checksums.then(|| self.begin_checksums());
        self.busy = self.busy.take().or_else(|| Some(Busy::begin(&self.rules, self.direction)));
        let (rules, blob, buf) = (Arc::clone(&self.rules), Arc::clone(&self.blob), Arc::clone(&self.buf));
        let direction = self.direction;
        let longest = |start: u64| rules.io_bytes.min(buf.part(start as usize).1) as u64;
        let spans: Vec<_> = blob.spans(longest).collect();
        rules.counters.operations.fetch_add(spans.len() as u64, Relaxed);
        let given_up = rules.watcher.transfer();
        let joined = Joined { pending: spans.len(), failure: None, transfer: Some(self), lost: None };
        let attempt = Arc::new(Attempt { given_up, joined: Mutex::new(joined) });
        let ops = spans.into_iter().map(|span| {
            let piece = &blob.pieces()[span.piece];
            let offset = piece.offset() + span.offset;
            let memory = (Arc::clone(&buf), span.start as usize, span.len as usize);
            let (ends, overdue) = (Arc::clone(&attempt), Arc::clone(&attempt));
            let (volume, grant) = (Arc::clone(piece.volume()), blob.grant().cloned());
            let follow = move |outcome: io::Result<()>| {
                // Also one that ends late has written.
                if direction == Direction::Write && outcome.is_ok() {
                    volume.has_written(span.len);
                    // After it is counted, so that a limit that is set meanwhile counts it twice rather than not at all.
                    grant.iter().for_each(|grant| grant.written(span.len));
                }
                drop((volume, grant));
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
        let outcome = failure.map_or(Ok(()), Err);
        // Whoever reads waits for what is decrypted then.
        let opens = self.direction == Direction::Read && self.marks.as_ref().is_some_and(Marks::are_seals);
        drop(self.busy.take_if(|_| !opens));
        match (self.direction, self.checksums.take()) {
            (Direction::Write, Some(checksums)) => checksums.then(move |checksums| {
                if outcome.is_ok() {
                    self.blob.set_marks(Some(Marks::Checksums(checksums.into())));
                }
                self.conclude(outcome)
            }),
            (Direction::Write, None) => {
                let seals = self.marks.take().filter(|_| outcome.is_ok());
                self.blob.set_marks(seals);
                self.conclude(outcome)
            }
            (Direction::Read, _) if outcome.is_ok() => self.examine(),
            _ => self.conclude(outcome),
        }
    }

    /// Has the workers compare what was read with what was noted of it, and copy it out of a bounce buffer; then continues.
    fn examine(self) -> Vec<Op> {
        let marks = self.marks.clone();
        if marks.is_none() && self.user.is_none() {
            return self.conclude(Ok(()));
        }
        let each = move |memory: &Memory, index: usize, chunk: Range<usize>| {
            let examined =
                marks.as_ref().map_or(Ok(()), |marks| marks.examine(&*memory.buf, index, chunk.clone()));
            examined.map_err(|(offset, difference)| Failure::Corrupt { difference, offset })?;
            memory.user.iter().for_each(|user| copy(&*memory.buf, &**user, chunk.clone()));
            Ok(())
        };
        self.work(each, |transfer, outcomes: Vec<_>| transfer.conclude(outcomes.into_iter().collect()))
    }

    /// Has the workers do `each` chunk of the payload, with its index, then goes on with the results.
    fn work<R: Send + 'static>(
        self,
        each: impl Fn(&Memory, usize, Range<usize>) -> R + Clone + Send + 'static,
        then: impl FnOnce(Transfer, Vec<R>) -> Vec<Op> + Send + 'static,
    ) -> Vec<Op> {
        let (chunks, workers) = (self.chunks(), Arc::clone(&self.rules.workers));
        let mut left = Some((self, each, then));
        let tasks =
            || left.take().map_or_else(Vec::new, |(transfer, each, then)| transfer.tasks(&each, then));
        if workers.give(chunks.len(), tasks) {
            return Vec::new();
        }
        // The calling thread does it, so that what is read again need not be handed to one that is being dropped.
        let Some((transfer, each, then)) = left else { return Vec::new() };
        let memory = transfer.memory();
        let results = chunks.enumerate().map(|(index, chunk)| each(&memory, index, chunk)).collect();
        drop(memory);
        then(transfer, results)
    }

    /// The tasks of the workers. After the last of them, the transfer continues.
    fn tasks<R: Send + 'static>(
        self,
        each: &(impl Fn(&Memory, usize, Range<usize>) -> R + Clone + Send + 'static),
        then: impl FnOnce(Transfer, Vec<R>) -> Vec<Op> + Send + 'static,
    ) -> Vec<Task> {
        let gather = Arc::new(Gather::new(self.chunks().len()));
        let task = |(index, chunk): (usize, Range<usize>)| {
            let (memory, each) = (self.memory(), each.clone());
            let (gather, backend) = (Arc::clone(&gather), self.rules.backend.upgrade());
            let work = move || {
                let result = each(&memory, index, chunk);
                // The end may be that of the transfer, which holds no memory then.
                drop((memory, each));
                let next = gather.end(index, result);
                // The store, which has it, is not dropped before its workers have their tasks.
                if let Some(backend) = backend.filter(|_| !next.is_empty()) {
                    backend.submit(next);
                }
            };
            Box::new(work) as Task
        };
        let tasks = self.chunks().enumerate().map(task).collect();
        // No task has begun: there is nothing to carry out next.
        drop(gather.then(move |results| then(self, results)));
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

    /// The chunks of the payload.
    fn chunks(&self) -> impl ExactSizeIterator<Item = Range<usize>> + Clone + use<> {
        chunks(payload_len(&self.blob), self.chunk_bytes)
    }

    fn memory(&self) -> Memory {
        Memory { buf: Arc::clone(&self.buf), user: self.user.clone() }
    }

    /// Counts the outcome, then reports it once the transfer holds neither the blob nor any memory.
    fn finish(self, outcome: Result<(), Failure>) {
        let Transfer { rules, direction, blob, buf, user, attempt, marks, busy, done, .. } = self;
        drop(busy);
        let counters = &rules.counters;
        let result = outcome.map_err(|failure| failure.into_error(direction, attempt, &blob));
        match (&result, direction) {
            (Ok(()), Direction::Write) => count(&counters.writes, &counters.bytes_written, blob.len()),
            (Ok(()), Direction::Read) => {
                count(&counters.reads, &counters.bytes_read, blob.len());
                if marks.is_some() {
                    count(&counters.reads_checked, &counters.bytes_checked, blob.len());
                }
            }
            (Err(error), _) => {
                counters.failures.fetch_add(1, Relaxed);
                counters.timed_out.fetch_add(u64::from(error.kind() == ErrorKind::TimedOut), Relaxed);
            }
        }
        drop((blob, buf, user));
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
        let failure = Failure::TimedOut { limit, piece, offset };
        contained("the end of a transfer that was given up", || transfer.finish(Err(failure)));
        self.given_up.end();
    }
}
