//! The cache itself: what happens when autograd saves a tensor, asks for it back, and lets go of it.
//!
//! `entry` is the life of one entry, `tape` the order within a micro-batch, `table` the books behind one lock. This module
//! is the mechanism around them: it takes the lock, hands transfers to the store after releasing it, and waits.

mod buffer;
mod entry;
mod hooks;
#[cfg(test)]
mod model;
mod table;
mod tape;

use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use ssdtrain_libtorch::{SavedTensor, Storage};

use self::buffer::StorageBuf;
pub(crate) use self::hooks::{Recorder, StepContext};
use self::table::{Answer, EntryKey, Job, Saved, Table};
pub(crate) use self::table::{Limits, NO_TAPE, TapeKey};
use crate::store::Store;
use crate::telemetry::{Counters, ScopeId, Scopes};

pub(crate) struct Cache {
    /// None when the policy is to keep everything.
    store: Option<Store>,
    table: Mutex<Table>,
    /// Signalled when a transfer ends.
    changed: Condvar,
    pub(crate) scopes: Arc<Scopes>,
}

impl Cache {
    pub(crate) fn new(store: Option<Store>, limits: Limits) -> Cache {
        Cache {
            store,
            table: Mutex::new(Table::new(limits)),
            changed: Condvar::new(),
            scopes: Arc::default(),
        }
    }

    pub(crate) fn store(&self) -> Option<&Store> {
        self.store.as_ref()
    }

    pub(crate) fn begin_step(&self) -> TapeKey {
        let mut table = self.table.lock();
        table.begin_step();
        table.open_tape()
    }

    pub(crate) fn open_tape(&self) -> TapeKey {
        self.table.lock().open_tape()
    }

    pub(crate) fn close_tape(&self, tape: TapeKey) {
        self.table.lock().close_tape(tape);
    }

    /// Waits until no transfer is under way.
    pub(crate) fn quiesce(&self) {
        let mut table = self.table.lock();
        while table.transfers() > 0 {
            self.changed.wait(&mut table);
        }
    }

    /// Entries, tapes and bytes on the device that the cache holds.
    pub(crate) fn held(&self) -> (usize, usize, u64) {
        self.table.lock().held()
    }

    /// Takes one saved tensor in and returns its entry and its position on the tape. `keep`: it stays on the device.
    fn save(
        self: &Arc<Self>,
        saved: &SavedTensor<'_>,
        keep: bool,
        step: &StepContext,
        scope: ScopeId,
        tape: TapeKey,
    ) -> Option<(EntryKey, usize)> {
        let id = saved.storage_id()?;
        let (bytes, version) = (saved.storage_bytes(), saved.version());
        let counters = &step.counters;
        let mut jobs = Vec::new();
        let place = {
            let mut table = self.table.lock();
            // Waiting lets go of the lock, so all is looked at anew after it.
            let key = loop {
                if !table.is_open(tape) {
                    return None;
                }
                if let Some(key) = table.find(id, version) {
                    counters.deduplicated.add(bytes);
                    break key;
                }
                if !table.must_wait(bytes) {
                    let (storage, counters) = (saved.storage()?, Arc::clone(counters));
                    let saved = Saved { storage, version, scope, step: step.number, counters };
                    break table.insert(saved, keep);
                }
                let start = Instant::now();
                self.changed.wait(&mut table);
                counters.stall_budget.add_since(start);
            };
            let position = table.attach(key, tape);
            if let Some(store) = &self.store {
                table.pump(store, &mut jobs);
            }
            (key, position)
        };
        self.submit(jobs);
        Some(place)
    }

    /// Serves one handle: from the device where it can, from the disk where it must.
    fn fetch(
        self: &Arc<Self>,
        key: EntryKey,
        tape: TapeKey,
        position: usize,
        round: &mut u64,
    ) -> Result<Storage, String> {
        let mut table = self.table.lock();
        let mut waited: Option<(Instant, Arc<Counters>)> = None;
        let mut missed = false;
        loop {
            let mut jobs = Vec::new();
            let answer = table.ask(key, round, &mut jobs);
            missed |= !jobs.is_empty();
            if waited.is_none() {
                table.look_ahead(tape, position, missed, &mut jobs);
            }
            if !jobs.is_empty() {
                parking_lot::MutexGuard::unlocked(&mut table, || self.submit(jobs));
            }
            match answer {
                Answer::Here(storage) => {
                    if let Some((start, counters)) = waited {
                        counters.stall_load.add_since(start);
                    }
                    return Ok(storage);
                }
                Answer::Failed(failure) => return Err(failure),
                Answer::Wait => {
                    if waited.is_none() {
                        let counters = table.entry(key).map(|entry| Arc::clone(&entry.counters));
                        waited = counters.map(|counters| (Instant::now(), counters));
                    }
                    if table.is_reading(key) {
                        self.changed.wait(&mut table);
                    }
                }
            }
        }
    }

    /// The graph has let go of a handle.
    fn release(&self, key: EntryKey, tape: TapeKey, round: u64) {
        let gone = self.table.lock().release(key, tape, round);
        drop(gone);
    }

    /// Hands transfers to the store. Called without the lock.
    fn submit(self: &Arc<Self>, jobs: Vec<Job>) {
        let Some(store) = &self.store else { return };
        for job in jobs {
            let cache = Arc::clone(self);
            match job {
                Job::Store { key, blob, from } => {
                    let bytes = blob.len();
                    let done = move |outcome: crate::Result<()>| cache.stored(key, bytes, outcome);
                    store.write(blob, Arc::new(StorageBuf::new(from)), Box::new(done));
                }
                Job::Load { key, blob, into } => {
                    let bytes = blob.len();
                    let done = move |outcome: crate::Result<()>| cache.loaded(key, bytes, outcome);
                    store.read(blob, Arc::new(StorageBuf::new(into)), Box::new(done));
                }
            }
        }
    }

    /// Runs on the I/O thread when a store is over.
    fn stored(self: Arc<Self>, key: EntryKey, bytes: u64, outcome: crate::Result<()>) {
        if let Err(error) = &outcome {
            tracing::debug!(%error, bytes, "a store failed; its tensor stays on the device");
        }
        let mut jobs = Vec::new();
        let gone = {
            let mut table = self.table.lock();
            let gone = table.stored(key, bytes, outcome.map_err(|error| error.to_string()));
            if let Some(store) = &self.store {
                table.pump(store, &mut jobs);
            }
            gone
        };
        drop(gone);
        self.changed.notify_all();
        self.submit(jobs);
    }

    /// Runs on the I/O thread when a load is over.
    fn loaded(self: Arc<Self>, key: EntryKey, bytes: u64, outcome: crate::Result<()>) {
        let gone = {
            let mut table = self.table.lock();
            let failure = outcome.map_err(|error| match table.entry(key) {
                Some(entry) => format!(
                    "ssdtrain cannot load saved tensor {} ({} bytes, scope \"{}\", step {}): {error}",
                    key.serial,
                    entry.bytes,
                    self.scopes.name(entry.scope),
                    entry.step
                ),
                None => error.to_string(),
            });
            table.loaded(key, bytes, failure)
        };
        drop(gone);
        self.changed.notify_all();
    }
}
