//! The cache itself: what happens when autograd saves a tensor, asks for it back, and releases it.
//!
//! `entry` is the life of one entry, `tape` the order within a micro-batch, and `table` all the cache's state, behind one lock. This
//! module is the mechanism around them: it takes the lock and waits, and `serving` does so for backward. `transfers` hands transfers to the
//! tier without holding the lock.

mod entry;
mod failures;
mod handle;
mod keys;
mod late_reads;
#[cfg(test)]
mod model;
#[cfg(test)]
mod orders;
mod relief;
mod serving;
#[cfg(test)]
mod slow;
#[cfg(test)]
mod streams;
mod table;
mod tape;
mod transfers;
#[cfg(test)]
mod unlocked;
#[cfg(test)]
mod waits;

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use ssdtrain_libtorch::{Storage, StorageId, WriteObserver};
use ssdtrain_plan::Release;

pub(crate) use self::failures::note as note_failure;
pub(crate) use self::handle::{EntryHandle, Subject};
pub(crate) use self::keys::{EntryKey, NO_TAPE, TapeKey};
use self::late_reads::LateReads;
pub(crate) use self::table::Limits;
use self::table::{Gone, Outdated, Saved, Squeeze, Table};
use crate::error::Error;
use crate::profile::{Alive, Pressure};
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::telemetry::events::warn_once;
use crate::telemetry::{Counters, Level, ScopeId, ScopeRecord, Scopes, StallCause};
use crate::tier::{Here, Mark, Parcel, RoomListener, Tier};
use crate::trace::{Counter, Trace};

pub(crate) struct Cache {
    /// `None` if the policy is to keep everything.
    tier: Option<Arc<dyn Tier>>,
    table: Mutex<Table>,
    /// Signalled when a transfer ends or room appears below.
    changed: Condvar,
    room: Arc<RoomListener>,
    /// Held by the thread that frees memory of the device for an allocation.
    relieving: Mutex<()>,
    late_reads: Mutex<LateReads>,
    /// How often memory of the device was freed.
    departed: AtomicU64,
    /// Takes note of what is freed because there is no memory for something else, if anybody wants to know.
    pressure: Mutex<Weak<Pressure>>,
    /// Bytes on the device that the cache holds.
    pub(crate) on_device: Level,
    pub(crate) scopes: Arc<Scopes>,
    pub(crate) trace: Option<Arc<Trace>>,
}

/// Who saves: the step with its counters, and the place within it.
#[derive(Clone, Copy)]
pub(crate) struct By<'a> {
    pub(crate) step: u64,
    pub(crate) scope: ScopeId,
    pub(crate) tape: TapeKey,
    pub(crate) counters: &'a Arc<Counters>,
    pub(crate) record: &'a ScopeRecord,
}

impl Cache {
    pub(crate) fn new(tier: Option<Arc<dyn Tier>>, limits: Limits, trace: Option<Arc<Trace>>) -> Arc<Cache> {
        let cache = Arc::new_cyclic(|this: &Weak<Cache>| {
            let this = Weak::clone(this);
            let table = Table::new(tier.clone(), limits);
            Cache {
                tier,
                on_device: table.level(),
                table: Mutex::new(table),
                changed: Condvar::new(),
                room: Arc::new(move || this.upgrade().iter().for_each(Cache::has_room)),
                relieving: Mutex::default(),
                late_reads: Mutex::default(),
                departed: AtomicU64::new(0),
                pressure: Mutex::new(Weak::new()),
                scopes: Arc::default(),
                trace,
            }
        });
        cache.tier.iter().for_each(|tier| tier.on_room(&cache.room));
        cache
    }

    /// Continues with stores that found no room below.
    fn has_room(self: &Arc<Self>) {
        let mut jobs = Vec::new();
        // Taking the lock loses no wake-up: a thread that found no room holds it until it waits.
        self.table.lock().pump(&mut jobs);
        self.changed.notify_all();
        self.submit(jobs, &Here::default());
    }

    pub(crate) fn tier(&self) -> Option<&dyn Tier> {
        self.tier.as_deref()
    }

    /// The point that the calling thread's computation has reached on the device, and how long threads have waited by then, if reruns are
    /// measured for these counters.
    pub(crate) fn mark(&self, counters: &Counters) -> Option<(Mark, Duration)> {
        counters.device_reruns.as_ref()?;
        let mark = self.tier()?.mark()?;
        Some((mark, counters.waited()))
    }

    /// What the calling thread has computed since then was a rerun. While a thread waits, the device may have nothing to do, so how long the
    /// rerun took it stays unknown then.
    pub(crate) fn reran(&self, since: Option<(Mark, Duration)>, counters: &Arc<Counters>) {
        let since = since.filter(|(_, waited)| *waited == counters.waited());
        if let Some((tier, (mark, _))) = self.tier().zip(since) {
            tier.reran(mark, counters);
        }
    }

    /// The tier, for as long as somebody else holds it.
    pub(crate) fn weak_tier(&self) -> Option<Weak<dyn Tier>> {
        self.tier.as_ref().map(Arc::downgrade)
    }

    /// Replaces the limits.
    pub(crate) fn set_limits(&self, limits: Limits) {
        self.table.lock().set_limits(limits);
        self.changed.notify_all();
    }

    pub(crate) fn begin_step(&self) -> TapeKey {
        if let Some(tier) = &self.tier {
            tier.begin_step();
        }
        let mut table = self.table.lock();
        table.begin_step();
        table.open_tape()
    }

    /// Storages that outlived the entries made of them earlier: the program holds them anyway.
    pub(crate) fn held_elsewhere(&self) -> HashSet<StorageId> {
        self.table.lock().held_elsewhere()
    }

    pub(crate) fn open_tape(&self) -> TapeKey {
        self.table.lock().open_tape()
    }

    /// The position in a tape of what is saved next.
    pub(crate) fn place_in(&self, tape: TapeKey) -> usize {
        self.table.lock().end_of(tape)
    }

    pub(crate) fn close_tape(&self, tape: TapeKey) {
        self.table.lock().close_tape(tape);
    }

    /// Waits until no transfer that a thread has to wait for is in flight.
    pub(crate) fn quiesce(&self) {
        let mut table = self.table.lock();
        while table.transfers() > 0 {
            self.changed.wait(&mut table);
        }
    }

    /// Stores everything that is to leave and releases it. What finds no room below stays.
    pub(crate) fn flush(self: &Arc<Self>, counters: &Arc<Counters>) {
        let here = Here::default();
        let mut table = self.table.lock();
        loop {
            let mut jobs = Vec::new();
            let all = table.pump_all(&mut jobs);
            let begun = !jobs.is_empty();
            // While the lock is open, a notification of room would reach nobody, so the loop looks again.
            if begun {
                MutexGuard::unlocked(&mut table, || self.submit(jobs, &here));
            }
            if let Some((key, parcel)) = table.oldest_leaving() {
                self.let_go(&mut table, key, parcel, counters, &here);
            } else if table.transfers() > 0 || !(all || begun) {
                self.changed.wait(&mut table);
            } else if all {
                return;
            }
        }
    }

    /// Entries, tapes and bytes on the device that the cache holds.
    pub(crate) fn held(&self) -> (usize, usize, u64) {
        self.table.lock().held()
    }

    /// Bytes of the entries that were to stay on the device.
    pub(crate) fn kept(&self) -> u64 {
        self.table.lock().kept()
    }

    /// With `holds`, the memory of stored storages is freed only when memory is sampled ([`Cache::alive`]); otherwise as soon as
    /// possible.
    pub(crate) fn hold_back(&self, holds: bool) {
        let gone = self.table.lock().hold_back(holds);
        drop(gone);
    }

    /// The saved storages on the device, whoever holds them. Storages that were held back and have been stored are released first.
    pub(crate) fn alive(&self) -> Alive {
        let mut table = self.table.lock();
        loop {
            let gone = table.stored_since();
            if gone.is_empty() {
                return table.alive();
            }
            MutexGuard::unlocked(&mut table, || drop(gone));
        }
    }

    /// How much may be on the device.
    pub(crate) fn device_budget(&self) -> u64 {
        self.table.lock().device_budget()
    }

    /// Whether so many bytes more are within the device budget.
    pub(crate) fn has_room_for(&self, bytes: u64) -> bool {
        self.table.lock().has_room(bytes)
    }

    /// From now on, `pressure` takes note of what is freed because there is no memory for something else.
    pub(crate) fn show_pressure(&self, pressure: &Arc<Pressure>) {
        *self.pressure.lock() = Arc::downgrade(pressure);
    }

    /// From now on it does not, if it did.
    pub(crate) fn hide_pressure(&self, pressure: &Arc<Pressure>) {
        let mut shown = self.pressure.lock();
        if std::ptr::eq(shown.as_ptr(), Arc::as_ptr(pressure)) {
            *shown = Weak::new();
        }
    }

    /// Whether the cache has an entry for what the storage holds.
    pub(crate) fn has(&self, storage: StorageId) -> bool {
        self.table.lock().has(storage)
    }

    /// An operation that the calling thread is about to queue uses this storage: its memory is not reused before that has ended. False if
    /// the device refuses to see to it; then the storage has to stay where it is, as without a cache.
    pub(crate) fn in_use(&self, storage: &Storage) -> bool {
        let noted = self.note_use(storage);
        noted.inspect_err(|error| warn_once!(%error, "a saved tensor stays on the device")).is_ok()
    }

    /// The same for what a rerun reads if it may, and else computes too.
    pub(crate) fn may_use(&self, storage: &Storage) -> bool {
        let noted = self.note_use(storage);
        noted.inspect_err(|error| warn_once!(%error, "a rerun computes what it might have read")).is_ok()
    }

    /// The same for what backward runs again: it cannot go on without.
    pub(crate) fn in_use_again(&self, storage: &Storage) -> Result<(), String> {
        self.note_use(storage).map_err(|error| {
            failures::note(&error);
            error.to_string()
        })
    }

    fn note_use(&self, storage: &Storage) -> Result<(), Error> {
        match self.tier() {
            Some(tier) => tier.in_use(storage),
            None => storage.record_use().map_err(Error::torch),
        }
    }

    /// A rerun is about to read `storage`, which the program may write to.
    pub(crate) fn reads_late(&self, storage: &Storage) {
        // A thread that computes itself has read when it goes on.
        let queues = self.tier().is_some_and(|tier| tier.release() != Release::WhenStored);
        if let Some(stream) = self.stream(storage).filter(|_| queues) {
            let held = self.late_reads.lock().add(storage, stream);
            drop(held);
        }
    }

    /// The program is about to write to this storage: what reruns read of it is read first.
    fn await_late_reads(&self, storage: StorageId) {
        if let Some(tier) = self.tier() {
            self.late_reads.lock().written(storage, || tier.stream(), |stream| tier.after(stream));
        }
    }

    /// An error if the program has overwritten what a rerun may still have had to read, and could not be made to wait. It is returned once.
    pub(crate) fn check_late_reads(&self) -> Result<(), Error> {
        self.late_reads.lock().take_failure().map_or(Ok(()), Err)
    }

    /// Which stream of its device the calling thread computes on; `None` if the device does not say.
    pub(crate) fn stream(&self, storage: &Storage) -> Option<usize> {
        match self.tier() {
            Some(tier) => tier.stream().ok(),
            None => storage.stream().ok().and_then(|stream| usize::try_from(stream).ok()),
        }
    }

    /// Takes in one saved tensor and returns a handle to its entry; `None` if it has to stay in the graph, as it has once the step has
    /// ended. With `keep`, it stays on the device.
    pub(crate) fn save(self: &Arc<Self>, subject: Subject, keep: bool, by: By<'_>) -> Option<EntryHandle> {
        let By { step, scope, tape, counters, .. } = by;
        let Subject { storage, bytes, version, part } = subject;
        if !self.in_use(&storage) {
            counters.store_failures.add(bytes);
            return None;
        }
        let id = storage.id();
        let here = Here::default();
        // Parcels are dropped without the lock, because their drop may take it.
        let (mut parcel, mut written) = (None, Vec::new());
        let mut jobs = Vec::new();
        let saved = {
            let mut table = self.table.lock();
            // Making room releases the lock, so everything is looked up again after it.
            let key = loop {
                if !table.is_open(tape) {
                    break None;
                }
                let (known, stays) = table.find(id, version).unzip();
                written.extend(stays.flatten());
                // A storage that was resized since counts as another one.
                let known = known.filter(|key| table.entry(*key).is_some_and(|entry| entry.bytes == bytes));
                if let Some(key) = known {
                    counters.deduplicated.add(bytes);
                    table.covered(key, part);
                    break Some(key);
                }
                // Made before any wait, so that the parcel marks the point in the device's queue where the storage was computed. A device
                // that cannot even do that has failed, and reports the error where it computes.
                if parcel.is_none() && !keep {
                    let tier = self.tier.clone();
                    parcel = tier.and_then(|tier| tier.parcel(bytes, scope, &here).ok());
                }
                if self.fits(&mut table, bytes, counters, &here) {
                    let counters = Arc::clone(counters);
                    break Some(table.insert(Saved {
                        storage,
                        parcel: parcel.take(),
                        version,
                        part,
                        scope,
                        step,
                        counters,
                    }));
                }
            };
            let attached = key.map(|key| (key, table.attach(key, tape)));
            if attached.is_some() {
                table.pump(&mut jobs);
                self.sample(&table);
            }
            attached
        };
        self.submit(jobs, &here);
        written.into_iter().for_each(Outdated::abandon);
        // One that was not needed.
        parcel.into_iter().for_each(|parcel: Arc<dyn Parcel>| parcel.abandon(None));
        saved.map(|(key, position)| EntryHandle::new(self, key, tape, position))
    }

    /// Whether to go on: `bytes` more fit the device budget, or no room can be made for them. If this returns false, it has made some
    /// room or waited for it.
    fn fits(
        self: &Arc<Self>,
        table: &mut MutexGuard<'_, Table>,
        bytes: u64,
        counters: &Arc<Counters>,
        here: &Here,
    ) -> bool {
        let mut jobs = Vec::new();
        match table.squeeze(bytes, &mut jobs) {
            Squeeze::Fits => true,
            Squeeze::Begun => {
                MutexGuard::unlocked(table, || self.submit(jobs, here));
                false
            }
            Squeeze::LetGo(key, parcel) => !self.let_go(table, key, parcel, counters, here),
            Squeeze::Wait(cause) => {
                let start = Instant::now();
                self.changed.wait(table);
                self.stalled(counters, cause, start);
                false
            }
        }
    }

    /// Makes the device wait for a store and releases its storage; false if the device refuses to.
    fn let_go(
        &self,
        table: &mut MutexGuard<'_, Table>,
        key: EntryKey,
        parcel: Arc<dyn Parcel>,
        counters: &Arc<Counters>,
        here: &Here,
    ) -> bool {
        let (left, gone) = self.leaves(table, key, parcel, Some(StallCause::DeviceBudget), counters, here);
        MutexGuard::unlocked(table, || drop(gone));
        if left {
            self.departs();
        }
        left
    }

    /// As [`Cache::let_go`], with what is to be dropped without the lock.
    fn leaves(
        &self,
        table: &mut MutexGuard<'_, Table>,
        key: EntryKey,
        parcel: Arc<dyn Parcel>,
        cause: Option<StallCause>,
        counters: &Arc<Counters>,
        here: &Here,
    ) -> (bool, Gone) {
        // The parcel is dropped without the lock too: it may be the last reference of an entry released meanwhile, and then announces
        // room.
        let entry = table.entry(key);
        let (storage, store) =
            (entry.and_then(|entry| entry.storage().cloned()), entry.map(|entry| entry.stores));
        let ordered =
            MutexGuard::unlocked(table, move || parcel.order(storage.as_ref(), cause, counters, here));
        // An entry that was released meanwhile has left.
        let bytes = table.entry(key).map(|entry| entry.bytes);
        let Some((bytes, store)) = bytes.zip(store) else { return (true, (None, None)) };
        if let Err(error) = &ordered {
            warn_once!(%error, "a storage cannot leave the device");
        }
        let outcome = ordered.map_err(|error| error.to_string());
        let left = outcome.is_ok();
        let gone = table.stored(key, store, bytes, outcome);
        self.sample(table);
        (left, gone)
    }

    /// Memory of the device was freed. Whoever is short of it tries to allocate once more.
    fn departs(&self) {
        self.departed.fetch_add(1, Ordering::Release);
    }

    /// Records that a computing thread has waited since `start`.
    fn stalled(&self, counters: &Counters, cause: StallCause, start: Instant) {
        let now = Instant::now();
        counters.stalled(cause, now - start);
        if let Some(trace) = &self.trace {
            trace.stall(cause, start, now);
        }
    }

    /// Records in the trace how many bytes the cache holds on the device.
    fn sample(&self, table: &Table) {
        if let Some(trace) = &self.trace {
            let (.., bytes) = table.held();
            trace.sample(Counter::Device, bytes);
        }
    }

    /// The failed load, of this or another cache, whose message is part of `text`, if there is one.
    pub(crate) fn failure_in(&self, text: &str) -> Option<Error> {
        let own = self.table.lock().failure_in(text);
        own.or_else(|| failures::find(text))
    }
}

impl Drop for Cache {
    /// Who writes from now on is not seen, so what reruns read is read before.
    fn drop(&mut self) {
        let Some(tier) = &self.tier else { return };
        let late_reads = self.late_reads.get_mut();
        if let Some(error) = late_reads.take_failure() {
            tracing::warn!(%error, "no step is left that could return this");
        }
        if !late_reads.alive().is_empty()
            && let Err(error) = tier.synchronize()
        {
            tracing::warn!(%error, "a cache is gone whose reruns may still have to read tensors of the program");
        }
    }
}

impl WriteObserver for Cache {
    fn written(&self, storage: StorageId) {
        self.await_late_reads(storage);
        let outdated = self.table.lock().written(storage);
        let Some(outdated) = outdated else { return };
        outdated.abandon();
        // Threads that wait for the entry's store need not wait any more.
        self.changed.notify_all();
    }
}
