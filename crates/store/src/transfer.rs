//! A complete write or read of a blob: split into operations, joined, verified, retried, and given up when it takes too
//! long.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use parking_lot::Mutex;

use super::backend::{Direction, Op};
use super::blob::Blob;
use super::stats::Counters;
use super::{Completion, contained};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::{AlignedBuf, BLOCK, IoBuf, parts};
use crate::watch::{Clock, GivenUp, Watcher};

/// How many times a read is attempted before it fails.
const READ_ATTEMPTS: u32 = 3;

/// What all transfers of a store share.
#[derive(Clone)]
pub(super) struct Rules {
    pub(super) verify: bool,
    /// Largest operation, in bytes.
    pub(super) io_bytes: u64,
    pub(super) counters: Arc<Counters>,
    pub(super) watcher: Arc<Watcher>,
}

/// A transfer between a blob and memory.
pub(super) struct Transfer {
    rules: Rules,
    direction: Direction,
    blob: Arc<Blob>,
    /// The memory that the operations point at.
    buf: Arc<dyn IoBuf>,
    /// Where a read is copied to when `buf` is a bounce buffer.
    copy_to: Option<Arc<dyn IoBuf>>,
    attempt: u32,
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

/// Why an attempt failed.
enum Failure {
    /// An operation failed `offset` bytes into its file.
    Io { error: io::Error, piece: usize, offset: u64 },
    /// The payload's checksum differs from the one taken when it was written.
    Corrupt { written: u32, read: u32 },
    /// The disk has not answered an operation `offset` bytes into its file.
    TimedOut { limit: Duration, piece: usize, offset: u64 },
}

impl Transfer {
    /// A transfer of all of `blob`, which is not empty, from or to `user`.
    pub(super) fn new(
        rules: Rules,
        direction: Direction,
        blob: Arc<Blob>,
        user: Arc<dyn IoBuf>,
        done: Completion,
    ) -> Result<Transfer, (Error, Completion)> {
        if (user.len() as u64) < blob.len() {
            let message = format!("memory of {} bytes cannot hold a blob of {blob}", user.len());
            return Err((Error::new(ErrorKind::Io, message), done));
        }
        let suits = suits(&*user, &blob);
        if !user.is_on_host(0) && (rules.verify || !suits) {
            let why =
                if rules.verify { "checksums are taken of host memory only" } else { "it does not suit" };
            let message = format!("a blob of {blob} cannot be moved from or to a device's memory: {why}");
            return Err((Error::new(ErrorKind::Io, message), done));
        }
        if suits {
            let (buf, copy_to) = (user, None);
            return Ok(Transfer { rules, direction, blob, buf, copy_to, attempt: 1, done });
        }
        let len = payload_len(&blob);
        let Some(bounce) = AlignedBuf::new(len) else {
            let message = format!("out of memory for a bounce buffer of {len} bytes");
            return Err((Error::new(ErrorKind::Io, message), done));
        };
        rules.counters.bounced.fetch_add(1, Relaxed);
        let buf: Arc<dyn IoBuf> = Arc::new(bounce);
        let copy_to = match direction {
            Direction::Read => Some(user),
            Direction::Write => {
                copy(&*user, &*buf, len);
                None
            }
        };
        Ok(Transfer { rules, direction, blob, buf, copy_to, attempt: 1, done })
    }

    /// The operations of the next attempt. When the last of them ends, the transfer continues by itself.
    pub(super) fn start(self) -> Vec<Op> {
        if self.direction == Direction::Write {
            self.blob.set_checksum(None);
        }
        let (blob, buf) = (Arc::clone(&self.blob), Arc::clone(&self.buf));
        let (direction, counters) = (self.direction, Arc::clone(&self.rules.counters));
        let io_bytes = self.rules.io_bytes;
        let longest = |start: u64| io_bytes.min(buf.part(start as usize).1 as u64);
        let spans: Vec<_> = blob.spans(longest).collect();
        counters.operations.fetch_add(spans.len() as u64, Relaxed);
        counters.begin(direction);
        let given_up = self.rules.watcher.transfer();
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

    /// Continues after all operations of an attempt have ended: retries, or finishes the transfer.
    fn settle(mut self, failure: Option<Failure>) -> Vec<Op> {
        self.rules.counters.end(self.direction);
        let outcome = failure.map_or_else(|| self.check(), Err);
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

    /// Takes or compares the checksum, and copies the bytes out of a bounce buffer.
    fn check(&self) -> Result<(), Failure> {
        let len = payload_len(&self.blob);
        match self.direction {
            Direction::Write if self.rules.verify => {
                self.blob.set_checksum(Some(checksum(&*self.buf, len)));
            }
            Direction::Write => {}
            Direction::Read => {
                if let Some(written) = self.blob.checksum() {
                    let read = checksum(&*self.buf, len);
                    if read != written {
                        return Err(Failure::Corrupt { written, read });
                    }
                }
                if let Some(user) = &self.copy_to {
                    copy(&*self.buf, &**user, len);
                }
            }
        }
        Ok(())
    }

    /// Counts the outcome, then reports it once the transfer holds neither the blob nor any memory.
    fn finish(self, outcome: Result<(), Failure>) {
        let Transfer { rules: Rules { counters, .. }, direction, blob, buf, copy_to, attempt, done } = self;
        let result = outcome.map_err(|failure| failure.into_error(direction, attempt, &blob));
        match (&result, direction) {
            (Ok(()), Direction::Write) => count(&counters.writes, &counters.bytes_written, blob.len()),
            (Ok(()), Direction::Read) => count(&counters.reads, &counters.bytes_read, blob.len()),
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

impl Failure {
    fn into_error(self, direction: Direction, attempts: u32, blob: &Blob) -> Error {
        match self {
            Failure::Io { error, piece, offset } => {
                let place = &blob.pieces()[piece].volume().info().name;
                let full = direction == Direction::Write
                    && matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT));
                let kind = match error.kind() {
                    _ if full => ErrorKind::NoSpace,
                    io::ErrorKind::TimedOut => ErrorKind::TimedOut,
                    _ => ErrorKind::Io,
                };
                let what = match direction {
                    Direction::Write => "could not be written".to_owned(),
                    Direction::Read => format!("could not be read (attempt {attempts} of {READ_ATTEMPTS})"),
                };
                let advice = if full { "free some space or lower the cap" } else { "check the disk" };
                let message = format!("{blob} {what}: failed at offset {offset} of the {place}; {advice}");
                Error::io(kind, message, error)
            }
            Failure::Corrupt { written, read } => {
                let message = format!(
                    "{blob} came back changed (attempt {attempts} of {READ_ATTEMPTS}): written with CRC-32C \
                     {written:08x}, read with {read:08x}; check the disk and the memory"
                );
                Error::new(ErrorKind::Corrupt, message)
            }
            Failure::TimedOut { limit, piece, offset } => {
                let place = &blob.pieces()[piece].volume().info().name;
                let what = match direction {
                    Direction::Write => "written",
                    Direction::Read => "read",
                };
                let message = format!(
                    "{blob} could not be {what}: the disk has not answered within {limit:?} at offset {offset} of the \
                     {place}; its memory and its room in the file are kept until it does; check the disk (dmesg), or \
                     raise the time limit (disk_timeout)"
                );
                Error::new(ErrorKind::TimedOut, message)
            }
        }
    }
}

fn count(transfers: &AtomicU64, bytes: &AtomicU64, len: u64) {
    transfers.fetch_add(1, Relaxed);
    bytes.fetch_add(len, Relaxed);
}

/// The payload's length. It fits in a `usize`, since memory of at least that length exists.
fn payload_len(blob: &Blob) -> usize {
    usize::try_from(blob.len()).unwrap_or(usize::MAX)
}

/// Whether the blob's padded bytes can move directly from or to `buf`: there is room for them, each part is aligned,
/// and parts meet only at block boundaries.
fn suits(buf: &dyn IoBuf, blob: &Blob) -> bool {
    let alignment = blob.memory_alignment();
    let padded = usize::try_from(blob.padded_len()).ok().filter(|&padded| padded <= buf.len());
    padded.is_some_and(|padded| {
        let mut start = 0;
        parts(buf, padded).all(|(memory, bytes)| {
            // Only host memory has to satisfy the file's alignment.
            let aligned = !buf.is_on_host(start) || memory.addr().is_multiple_of(alignment);
            start += bytes;
            aligned && bytes.is_multiple_of(BLOCK)
        })
    })
}

fn checksum(buf: &dyn IoBuf, len: usize) -> u32 {
    parts(buf, len).fold(0, |checksum, (memory, bytes)| {
        // SAFETY: the buffer is at least `len` bytes long, which was compared when the transfer began, this part of
        // it is contiguous, and nobody writes it while the transfer runs.
        crc32c::crc32c_append(checksum, unsafe { std::slice::from_raw_parts(memory, bytes) })
    })
}

fn copy(from: &dyn IoBuf, to: &dyn IoBuf, len: usize) {
    let mut start = 0;
    while start < len {
        let ((source, readable), (target, writable)) = (from.part(start), to.part(start));
        let bytes = readable.min(writable).min(len - start);
        // SAFETY: both buffers are at least `len` bytes long and contiguous for `bytes` from here on, one of them is a
        // bounce buffer that nobody else has, and nobody touches the other while the transfer runs.
        unsafe { std::ptr::copy_nonoverlapping(source, target, bytes) };
        start += bytes;
    }
}
