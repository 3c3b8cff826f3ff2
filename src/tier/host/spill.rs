//! What is written to the disk, and read back from it.

use std::sync::{Arc, Weak};

use ssdtrain_store::AlignedBuf;
use ssdtrain_store::{Blob, Direction, contained};

use super::super::ledger::Serial;
use super::super::places::Edge;
use super::copies::Copied;
use super::{Books, HostParcel, HostTier, Load, Memory, internal, unwanted};
use crate::device::Device;
use crate::error::{Completion, Result};
use crate::sync::MutexGuard;
use crate::telemetry::events::warn_once;
use crate::trace::{DeviceTrace, Trace};

/// A transfer with the disk in flight. The ledger learns its outcome, however it ends.
struct Moving<D: Device> {
    tier: Arc<HostTier<D>>,
    serial: Serial,
    direction: Direction,
    /// Keeps the parcel's place until then.
    parcel: Option<Arc<HostParcel<D>>>,
    /// What was read into, if it is not the pool's.
    heap: Option<Memory>,
    outcome: Result<()>,
}

impl<D: Device> Moving<D> {
    fn end(mut self, outcome: Result<()>) {
        self.outcome = outcome;
    }
}

impl<D: Device> Drop for Moving<D> {
    fn drop(&mut self) {
        let outcome = std::mem::replace(&mut self.outcome, Ok(()));
        let heap = self.heap.take();
        contained("the end of a transfer", || match (self.direction, heap) {
            (Direction::Write, _) => self.tier.written(self.serial, outcome),
            (Direction::Read, None) => self.tier.read_done(self.serial, outcome),
            (Direction::Read, Some(heap)) => self.tier.read_apart(self.serial, outcome, heap),
        });
        // It may be the last reference, and then announces room.
        contained("what follows a transfer", || drop(self.parcel.take()));
        contained("the end of a transfer", || self.tier.ended());
    }
}

/// The outcome of beginning a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Write {
    Begun,
    /// A spill file has to grow first, and is growing.
    Later,
    /// The disk has no room for the parcel. No further attempt is made.
    Refused,
}

impl<D: Device> HostTier<D> {
    /// Begins to write what should be on the disk.
    pub(super) fn drain(&self, books: &mut Books<D>) {
        while let Some(next) = books.ledger.next_to_write(self.capacity(books)) {
            if self.write(books, next) != Write::Begun {
                return;
            }
        }
    }

    /// Begins to write a parcel.
    pub(super) fn write(&self, books: &mut Books<D>, serial: Serial) -> Write {
        let Some(place) = books.ledger.get(serial) else { return Write::Refused };
        let room = self.store.as_ref().map(|store| store.try_reserve(place.bytes));
        if matches!(room, Some(Ok(None))) {
            return Write::Later;
        }
        let blob = room.and_then(Result::ok).flatten();
        let (Some(blob), Some(memory)) = (blob, place.held.memory.clone()) else {
            books.ledger.stuck(serial);
            return Write::Refused;
        };
        place.held.blob = Some(Arc::clone(&blob));
        let after = place.held.out.clone().into_iter().collect();
        books.ledger.advance(serial, Edge::WriteIssued);
        self.transfer(books, serial, Direction::Write, blob, memory, after);
        Write::Begun
    }

    /// Runs when a spill file has grown, or could not: begins the writes that waited for that.
    pub(super) fn disk_has_grown(&self) {
        self.drain(&mut self.books.lock());
        self.tell_room();
    }

    /// Begins a transfer between a parcel's memory and its extent once all of `after` are reached.
    fn transfer(
        &self,
        books: &mut Books<D>,
        serial: Serial,
        direction: Direction,
        blob: Arc<Blob>,
        memory: Memory,
        after: Vec<D::Event>,
    ) {
        let (Some(place), Some(store), Some(tier)) =
            (books.ledger.get(serial), self.store.clone(), self.this.upgrade())
        else {
            return;
        };
        let parcel = Weak::clone(&place.held.parcel);
        let (scope, bytes) = (place.held.scope, place.bytes);
        let trace = self.trace.as_ref().map(DeviceTrace::trace).cloned();
        books.in_flight += 1;
        let thread = match direction {
            Direction::Write => &self.writes,
            Direction::Read => &self.reads,
        };
        let dropped = Err(internal("a transfer was dropped before its end"));
        let heap = (direction == Direction::Read && !memory.pooled).then(|| memory.clone());
        let mut moving = Moving { tier, serial, direction, parcel: None, heap, outcome: dropped };
        thread.after(after, move |reached| {
            // Nobody may want it by now.
            moving.parcel = parcel.upgrade();
            if reached.is_err() || moving.parcel.is_none() {
                // When the end is announced, the extent and the memory must be free.
                drop((blob, memory, store));
                return moving.end(reached);
            }
            let done = Completion::new(move |outcome| match moving.heap {
                None => moving.end(outcome),
                Some(_) => Arc::clone(&moving.tier).writes.after(Vec::new(), move |_| moving.end(outcome)),
            });
            let done = Trace::transfer(trace.as_ref(), direction, scope, bytes, done);
            match direction {
                Direction::Write => store.write(blob, memory.buf, done.of_transfer()),
                Direction::Read => store.read(blob, memory.buf, done.of_transfer()),
            }
        });
    }

    /// A transfer with the disk has ended.
    fn ended(&self) {
        self.books.lock().in_flight -= 1;
        self.changed.notify_all();
        self.tell_room();
    }

    /// Runs on the I/O thread when a write has ended.
    fn written(&self, serial: Serial, outcome: Result<()>) {
        {
            let mut books = self.books.lock();
            let edge = match outcome {
                Ok(()) => Edge::Written,
                Err(error) => {
                    warn_once!(%error, "a write failed; its tensor stays in host memory");
                    if let Some(place) = books.ledger.get(serial) {
                        place.held.blob = None;
                    }
                    books.ledger.stuck(serial);
                    Edge::WriteFailed
                }
            };
            books.ledger.advance(serial, edge);
            self.drain(&mut books);
        }
    }

    /// Begins to read a parcel that is on the disk. False if there is no room for it, which cannot happen if it is `wanted` immediately.
    pub(super) fn read(&self, books: &mut Books<D>, serial: Serial, wanted: bool) -> Result<bool> {
        let bytes = books.ledger.get(serial).map_or(0, |place| place.bytes);
        let (after, memory) = match self.take(books, bytes) {
            Some(taken) => taken,
            None if wanted => {
                // The pool is full of what is needed sooner. Memory that is not pinned is slow, but correct.
                let heap = usize::try_from(bytes).ok().and_then(AlignedBuf::new);
                let heap = heap.ok_or_else(|| internal("no host memory to read into"))?;
                (Vec::new(), Memory { buf: Arc::new(heap), pooled: false })
            }
            None => return Ok(false),
        };
        let Some(place) = books.ledger.get(serial) else { return Err(internal("a read of no parcel")) };
        let Some(blob) = place.held.blob.clone() else { return Err(internal("a read without an extent")) };
        place.held.memory = Some(memory.clone());
        place.held.out = None;
        books.ledger.advance(serial, Edge::ReadIssued);
        self.transfer(books, serial, Direction::Read, blob, memory, after);
        Ok(true)
    }

    /// Runs on the I/O thread when a read has ended: queues the copies in that waited for it.
    fn read_done(&self, serial: Serial, outcome: Result<()>) {
        // These outlive the lock: even a completion that a panic drops then answers, and none is called while the lock is held.
        let (mut loads, mut copied) = (Vec::new(), Vec::new());
        {
            let mut books = self.books.lock();
            books.ledger.advance(serial, if outcome.is_ok() { Edge::Read } else { Edge::ReadFailed });
            if let Some(place) = books.ledger.get(serial) {
                loads = std::mem::take(&mut place.held.loads);
            }
            for Load { into, ready, .. } in &loads {
                copied.push(match &outcome {
                    Ok(()) => self.copy_in(&mut books, serial, into, ready),
                    Err(error) => Err(error.clone()),
                });
            }
            if outcome.is_err() {
                books.ledger.not_near(serial);
                if let Some(place) = books.ledger.get(serial) {
                    drop(place.held.memory.take());
                }
            }
        }
        for (Load { into, done, .. }, outcome) in loads.into_iter().zip(copied) {
            drop(into);
            done.call(outcome);
        }
    }

    /// As [`read_done`](HostTier::read_done) for what was read into memory that is not the pool's, on `ssdtrain-out`. The parcel is
    /// being read until it is copied: until then nobody else copies it, or reclaims the memory, which nothing needs afterwards.
    fn read_apart(&self, serial: Serial, outcome: Result<()>, heap: Memory) {
        if outcome.is_err() {
            return self.read_done(serial, outcome);
        }
        let mut copied: Vec<(Load<D>, Result<Copied<D>>)> = Vec::new();
        let mut books = self.books.lock();
        while let Some(place) = books.ledger.get(serial) {
            let (bytes, loads) = (place.bytes, std::mem::take(&mut place.held.loads));
            if loads.is_empty() {
                break;
            }
            MutexGuard::unlocked(&mut books, || {
                for load in loads {
                    let outcome = contained("a copy in", || self.copy_in_apart(bytes, &heap, &load));
                    copied.push((load, outcome.unwrap_or_else(|| Err(internal("a copy in panicked")))));
                }
            });
        }
        books.ledger.advance(serial, Edge::Read);
        let is_wanted = books.ledger.is_wanted(serial);
        for copied in copied.iter().filter(|_| is_wanted).filter_map(|(_, outcome)| outcome.as_ref().ok()) {
            self.lend(&mut books, serial, copied);
        }
        self.reclaim(&mut books, serial);
        drop(books);
        for (Load { into, done, .. }, outcome) in copied {
            let outcome = outcome.and_then(|copied| {
                if is_wanted {
                    return Ok(());
                }
                // Whoever abandoned the parcel knew of no copy to wait for.
                self.hold(Some(copied.back), Some((into.clone(), heap.clone())));
                Err(unwanted())
            });
            drop(into);
            done.call(outcome);
        }
    }
}
