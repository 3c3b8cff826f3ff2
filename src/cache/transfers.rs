//! Transfers: how they are handed to the tier without holding the lock, and what follows when they end.

use std::collections::VecDeque;
use std::sync::Arc;

use ssdtrain_libtorch::{Storage, without_relief};
use ssdtrain_store::contained;

use super::table::Job;
use super::{Cache, EntryKey, failures};
use crate::error::{Completion, Error, Result};
use crate::telemetry::events::TRANSFER;
use crate::tier::Here;

impl Cache {
    /// Hands transfers to the tier. Must be called without holding the lock.
    pub(super) fn submit(self: &Arc<Self>, jobs: Vec<Job>, here: &Here) {
        let (mut memory_is_short, mut loads) = (false, Vec::new());
        let mut jobs = VecDeque::from(jobs);
        while let Some(job) = jobs.pop_front() {
            let cache = Arc::clone(self);
            match job {
                Job::Store { key, store, parcel, from } => {
                    let bytes = from.bytes();
                    tracing::trace!(target: TRANSFER, entry = key.serial, bytes, "a store begins");
                    let done = Completion::new(move |outcome| cache.stored(key, store, bytes, outcome));
                    // A panic fails only this job; the others are still handed to the tier.
                    contained("the hand-over of a store", || parcel.store(from, done));
                }
                Job::Load { key, bytes, early: true, .. } if memory_is_short => cache.postponed(key, bytes),
                Job::Load { key, parcel, bytes, early } => match without_relief(|| self.allocate(bytes)) {
                    Ok(into) => loads.push((key, parcel, bytes, into)),
                    Err(_) if early => {
                        memory_is_short = true;
                        cache.postponed(key, bytes);
                    }
                    Err(_) => {
                        // Whoever frees memory for it may wait for loads ahead of time, so none may be left for this thread to begin.
                        memory_is_short = true;
                        let (early, others) = jobs.drain(..).partition(Job::is_early);
                        jobs = others;
                        self.postpone(early);
                        match self.allocate(bytes) {
                            Ok(into) => loads.push((key, parcel, bytes, into)),
                            Err(refused) => cache.loaded(key, bytes, Err(refused)),
                        }
                    }
                },
            }
        }
        if !loads.is_empty() {
            here.has_allocated();
        }
        for (key, parcel, bytes, into) in loads {
            let cache = Arc::clone(self);
            tracing::trace!(target: TRANSFER, entry = key.serial, bytes, "a load begins");
            // Whoever has released the entry may not have told its parcel yet.
            if !self.table.lock().loads_into(key, &into) {
                self.postponed(key, bytes);
                continue;
            }
            let done = Completion::new(move |outcome| cache.loaded(key, bytes, outcome));
            contained("the hand-over of a load", || parcel.load(into, here, done));
        }
    }

    /// A new storage on the device, for use by what the calling thread computes. May take long.
    fn allocate(&self, bytes: u64) -> Result<Storage> {
        let tier =
            self.tier.as_ref().ok_or_else(|| Error::torch("internal error: nothing is below the device"))?;
        contained("an allocation", || tier.allocate(bytes))
            .unwrap_or_else(|| Err(Error::torch("internal error: an allocation panicked")))
    }

    /// Takes back loads that nobody waits for.
    fn postpone(&self, early: VecDeque<Job>) {
        for job in early {
            if let Job::Load { key, bytes, .. } = job {
                self.postponed(key, bytes);
            }
        }
    }

    /// Takes back a load that nobody waits for.
    fn postponed(&self, key: EntryKey, bytes: u64) {
        self.table.lock().postponed(key, bytes);
        // A thread may be waiting for it by now.
        self.changed.notify_all();
    }

    /// Runs when a store ends, usually on the I/O thread.
    fn stored(self: Arc<Self>, key: EntryKey, store: u64, bytes: u64, outcome: Result<()>) {
        match &outcome {
            Ok(()) => tracing::trace!(target: TRANSFER, entry = key.serial, bytes, "a store has ended"),
            Err(error) => tracing::debug!(
                target: TRANSFER, entry = key.serial, bytes, %error, "a store failed; its tensor stays on the device"
            ),
        }
        let mut jobs = Vec::new();
        let (has_departed, gone) = {
            let mut table = self.table.lock();
            // If it was released meanwhile, the transfer was the last to hold it.
            let was_released = table.entry(key).is_none();
            let gone = table.stored(key, store, bytes, outcome.map_err(|error| error.to_string()));
            table.releasing += 1;
            table.pump(&mut jobs);
            self.sample(&table);
            (was_released || gone.0.is_some(), gone)
        };
        drop(gone);
        if has_departed {
            self.departs();
        }
        self.table.lock().releasing -= 1;
        self.changed.notify_all();
        // A finished store leads to further stores only, never to loads.
        self.submit(jobs, &Here::default());
    }

    /// Runs when a load ends: on the I/O thread, or at once if only a copy had to be queued.
    fn loaded(self: Arc<Self>, key: EntryKey, bytes: u64, outcome: Result<()>) {
        match &outcome {
            Ok(()) => tracing::trace!(target: TRANSFER, entry = key.serial, bytes, "a load has ended"),
            Err(error) => {
                tracing::debug!(target: TRANSFER, entry = key.serial, bytes, %error, "a load failed")
            }
        }
        let gone = {
            let mut table = self.table.lock();
            let outcome = outcome.map_err(|error| match table.entry(key) {
                Some(entry) => error.within(format_args!(
                    "ssdtrain cannot load saved tensor {} ({} bytes, scope \"{}\", step {})",
                    key.serial,
                    entry.bytes,
                    self.scopes.name(entry.scope),
                    entry.step
                )),
                None => error,
            });
            if let Err(failure) = &outcome {
                failures::note(failure);
            }
            table.loaded(key, bytes, outcome)
        };
        drop(gone);
        self.changed.notify_all();
    }
}
