//! Entries as they come and leave: what is saved, what makes room for it, and the stores that move it.

use std::collections::VecDeque;
use std::sync::Arc;

use slab::Slab;
use ssdtrain_libtorch::{Block, Storage, StorageId, Watch};

use super::super::entry::{Edge, State};
use super::super::tape::Tape;
use super::{Entry, EntryKey, GIVE_UP, Gone, HeldBack, Job, Outdated, Squeeze, Table, TapeKey};
use crate::telemetry::{Counters, ScopeId, StallCause};
use crate::tier::{Parcel, Room};

/// What is known of a storage when it is first saved.
pub(crate) struct Saved {
    pub(crate) storage: Storage,
    pub(crate) parcel: Option<Arc<dyn Parcel>>,
    pub(crate) version: u32,
    /// The view of it that is saved.
    pub(crate) part: Part,
    pub(crate) scope: ScopeId,
    pub(crate) step: u64,
    pub(crate) counters: Arc<Counters>,
}

/// A view of a storage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    /// Distinguishes it from other views; see [`ssdtrain_libtorch::layout`].
    pub(crate) layout: u64,
    pub(crate) bytes: u64,
}

/// A storage is moved once this fraction of it was saved: one part in `SMALL_PART`.
const SMALL_PART: u64 = 8;

impl Table {
    /// The entry of this storage. If the storage was written to since, by its version or by the write observer, the entry stays on the
    /// device, and every save of it has the current contents, as without a cache. What is returned besides must be abandoned.
    pub(crate) fn find(&mut self, id: StorageId, version: u32) -> Option<(EntryKey, Option<Outdated>)> {
        let key = *self.identities.get(&id)?;
        let entry = self.entry(key)?;
        // A storage that was loaded has its own identity, whose version starts at 0.
        let same = if entry.source.id() == id {
            entry.version == version && !entry.source.is_written()
        } else {
            version == 0 && entry.returned.as_ref().is_some_and(|returned| !returned.is_written())
        };
        let outdated = if same { None } else { self.written(id) };
        let state = self.entry(key)?.state;
        let usable = if same { state != State::Lost } else { state == State::Kept };
        usable.then_some((key, outdated))
    }

    /// The position in a tape of what is saved next.
    pub(crate) fn end_of(&self, tape: TapeKey) -> usize {
        self.tapes.get(&tape).map_or(0, Tape::end)
    }

    /// Whether a storage has an entry.
    pub(crate) fn has(&self, id: StorageId) -> bool {
        self.identities.contains_key(&id)
    }

    /// What can be done so that `bytes` more to be saved fit the device budget.
    pub(crate) fn squeeze(&mut self, bytes: u64, jobs: &mut Vec<Job>) -> Squeeze {
        if self.has_room(bytes) {
            return Squeeze::Fits;
        }
        if self.in_flight.iter().any(|key| self.frees(*key)) {
            return Squeeze::Wait(StallCause::DeviceBudget);
        }
        if let Some((key, parcel)) = self.oldest_leaving() {
            return Squeeze::LetGo(key, parcel);
        }
        if self.storing > 0 && self.storing >= self.limits.stores_in_flight {
            return if self.would_free(|_| true) {
                Squeeze::Wait(StallCause::DeviceBudget)
            } else {
                Squeeze::Fits
            };
        }
        // More was saved than expected: entries that were to stay have to leave after all.
        while let Some(key) = self.oldest_queued() {
            if !self.begin_store(key, jobs) {
                return Squeeze::Wait(StallCause::HostPool);
            }
            if !jobs.is_empty() {
                return Squeeze::Begun;
            }
        }
        Squeeze::Fits
    }

    pub(crate) fn device_budget(&self) -> u64 {
        self.limits.device_budget
    }

    /// Whether so many bytes more are within the device budget.
    pub(crate) fn has_room(&mut self, bytes: u64) -> bool {
        let budget = self.limits.device_budget;
        let wanted = self.on_device.now() + bytes;
        wanted + self.left_bytes <= budget || wanted + self.left_in_use() <= budget
    }

    /// Bytes of the storages that have left, but that the program still holds. Of many, it is seen little by little which it has let go of.
    fn left_in_use(&mut self) -> u64 {
        let (mut looked_at, all) = (0, self.left.len());
        while looked_at < all {
            let before = self.left.len();
            for _ in 0..LOOKED_AT.min(all - looked_at) {
                let Some((key, bytes)) = self.left.pop_front() else { break };
                let away = self.entry(key).filter(|entry| entry.state == State::Away);
                if away.is_some_and(|entry| entry.source.upgrade().is_some()) {
                    self.left.push_back((key, bytes));
                } else {
                    self.left_bytes -= bytes;
                }
            }
            if self.left.len() == before {
                break;
            }
            looked_at += LOOKED_AT;
        }
        self.left_bytes
    }

    /// The storage of an entry is only held by the program from now on, if by anybody.
    pub(super) fn has_left(&mut self, key: EntryKey, bytes: u64) {
        self.left.push_back((key, bytes));
        self.left_bytes += bytes;
        self.left_in_use();
    }

    /// Whether memory is free once the store of an entry has ended: it is to leave then, and nobody holds its storage but the cache, the
    /// store, and who holds back what is stored. Or it has been released, and only its store still holds it.
    pub(super) fn frees(&self, key: EntryKey) -> bool {
        let own = 2 + u64::from(self.held_back.is_some());
        self.entry(key).is_none_or(|entry| entry.state == State::Storing && entry.is_held_by(own))
    }

    /// Whether any of the queue's first entries that are meant would free memory. They come after stores that are on their way, and that
    /// free nothing themselves.
    pub(super) fn would_free(&mut self, is_meant: impl Fn(EntryKey) -> bool) -> bool {
        // Keys of entries that are gone, or stay, are forgotten at the front.
        self.oldest_queued();
        let queued = self.queue.iter().filter(|key| is_meant(**key)).filter_map(|key| self.entry(*key));
        let mut queued = queued.filter(|entry| entry.state == State::Device).take(LOOKED_AT);
        queued.any(|entry| entry.storage().is_some_and(|storage| storage.owners() == 1))
    }

    /// The oldest entry whose store has begun, if storages leave in stream order.
    pub(crate) fn oldest_leaving(&mut self) -> Option<(EntryKey, Arc<dyn Parcel>)> {
        while let Some(&key) = self.leaving.front() {
            let storing = self.entry(key).filter(|entry| entry.state == State::Storing);
            if let Some(parcel) = storing.and_then(|entry| entry.parcel.clone()) {
                return Some((key, parcel));
            }
            self.leaving.pop_front();
        }
        None
    }

    pub(super) fn oldest_queued(&mut self) -> Option<EntryKey> {
        while let Some(&key) = self.queue.front() {
            if self.entry(key).is_some_and(|entry| entry.state == State::Device) {
                return Some(key);
            }
            self.queue.pop_front();
        }
        None
    }

    /// Adds an entry: one to be moved or, without a parcel, one that stays on the device.
    pub(crate) fn insert(&mut self, saved: Saved) -> EntryKey {
        self.serial += 1;
        let bytes = saved.storage.bytes();
        let keep = saved.parcel.is_none();
        let id = saved.storage.id();
        let index = self.entries.insert(Entry {
            serial: self.serial,
            state: if keep { State::Kept } else { State::Device },
            bytes,
            source: Watch::new(&saved.storage),
            device: Some(Block::of(saved.storage)),
            version: saved.version,
            returned: None,
            parts: Vec::new(),
            covered: 0,
            queued: false,
            refused: false,
            storing: false,
            stores: 0,
            parcel: saved.parcel,
            leaves: !keep,
            leaving_before: self.live_leaving,
            handles: 0,
            served: 0,
            round: 0,
            asked: false,
            early: false,
            scope: saved.scope,
            step: saved.step,
            counters: saved.counters,
            last: Default::default(),
            failure: None,
        });
        let key = EntryKey { index, serial: self.serial };
        self.identities.insert(id, key);
        self.on_device.raise(bytes);
        self.live += bytes;
        self.live_leaving += if keep { 0 } else { bytes };
        self.peak_live = self.peak_live.max(self.live);
        self.covered(key, saved.part);
        key
    }

    /// Records that a view of `key` was saved. The entry is queued for its store once enough of it was.
    pub(crate) fn covered(&mut self, key: EntryKey, part: Part) {
        let waits = |entry: &&mut Entry| entry.state == State::Device && !entry.queued;
        let Some(entry) = self.entry_mut(key).filter(waits) else { return };
        if !entry.parts.contains(&part.layout) {
            entry.parts.push(part.layout);
            entry.covered += part.bytes;
        }
        if entry.covered.saturating_mul(SMALL_PART) >= entry.bytes {
            entry.queued = true;
            entry.parts = Vec::new();
            self.queue.push_back(key);
            forget_others(&mut self.queue, &self.entries, State::Device);
        }
    }

    /// Adds a handle of `key` to `tape` and returns its position there.
    pub(crate) fn attach(&mut self, key: EntryKey, open: TapeKey) -> usize {
        if let Some(entry) = self.entry_mut(key) {
            entry.handles += 1;
        }
        // The caller has found the tape open, so it exists.
        let tape = self.tapes.entry(open).or_default();
        let entries = &self.entries;
        tape.forget_gone(|key| entries.get(key.index).is_none_or(|entry| entry.serial != key.serial));
        tape.handles += 1;
        let position = tape.push(key);
        if let Some(entry) = self.entry_mut(key) {
            entry.last = (open, position);
        }
        position
    }

    /// Begins the stores of what is to leave, as far as the window allows.
    pub(crate) fn pump(&mut self, jobs: &mut Vec<Job>) {
        while self.storing < self.limits.stores_in_flight {
            let Some(key) = self.oldest_queued() else { return };
            if !self.must_leave(key) || !self.begin_store(key, jobs) {
                return;
            }
        }
    }

    /// Begins every store that there is room for; false if there is not yet room for all of them.
    pub(crate) fn pump_all(&mut self, jobs: &mut Vec<Job>) -> bool {
        while let Some(key) = self.oldest_queued() {
            if !self.begin_store(key, jobs) {
                return false;
            }
        }
        true
    }

    /// Whether an entry has to leave the device. If storages leave as late as the budget allows, the last ones that a step like the
    /// previous one saves will still be there when backward asks for them.
    fn must_leave(&self, key: EntryKey) -> bool {
        match self.entry(key).filter(|_| self.in_stream_order() || self.limits.late) {
            Some(entry) => {
                // Until a step has shown the total, and in a step that exceeds it, the current bytes are the best estimate.
                let expected = self.expected_live.unwrap_or(0).max(self.peak_live);
                let budget = self.limits.device_budget.min(self.limits.backward_budget);
                // What was saved before it and is to leave has left then.
                expected.saturating_sub(entry.leaving_before) > budget
            }
            None => true,
        }
    }

    /// Begins the store of the entry at the head of the queue, or gives it up. False if it has to wait for room below.
    pub(super) fn begin_store(&mut self, key: EntryKey, jobs: &mut Vec<Job>) -> bool {
        let in_stream_order = self.in_stream_order();
        let stores_work = self.failures < GIVE_UP;
        let Some(entry) = self.entry(key) else { return true };
        let (parcel, from, bytes) = (entry.parcel.clone(), entry.device.clone(), entry.bytes);
        // Resized since it was saved: only its current contents count, and no place below fits them.
        if from.as_ref().is_some_and(|from| !from.is_current()) {
            entry.counters.cancelled.add(bytes);
            self.queue.pop_front();
            self.advance(key, Edge::StoreRefused);
            return true;
        }
        let room = parcel.as_ref().filter(|_| stores_work).map_or(Room::None, |parcel| parcel.reserve());
        if room == Room::Later {
            return false;
        }
        self.queue.pop_front();
        match (room, parcel, from) {
            (Room::Reserved, Some(parcel), Some(from)) => {
                let entry = self.advance(key, Edge::StoreIssued);
                entry.stores += 1;
                let store = entry.stores;
                if in_stream_order {
                    self.leaving.push_back(key);
                    forget_others(&mut self.leaving, &self.entries, State::Storing);
                } else {
                    self.entries[key.index].storing = true;
                    self.in_flight.push_back(key);
                    self.storing += bytes;
                    self.transfers += 1;
                    if let Some(held_back) = &mut self.held_back {
                        held_back.push(HeldBack { key, storage: from.storage().clone(), stored: false });
                    }
                }
                jobs.push(Job::Store { key, store, parcel, from });
            }
            _ => {
                let entry = self.advance(key, Edge::StoreRefused);
                if entry.leaves && !std::mem::replace(&mut entry.refused, true) {
                    entry.counters.kept_no_room.add(bytes);
                }
            }
        }
        true
    }

    /// The store number `store` of `key` has ended, or need not be waited for.
    pub(crate) fn stored(
        &mut self,
        key: EntryKey,
        store: u64,
        bytes: u64,
        outcome: Result<(), String>,
    ) -> Gone {
        let in_stream_order = self.in_stream_order();
        if !in_stream_order {
            self.storing -= bytes;
            self.transfers -= 1;
            let ended = self.in_flight.iter().position(|other| *other == key);
            ended.and_then(|place| self.in_flight.remove(place));
            let held_back = self.held_back.iter_mut().flatten();
            held_back.filter(|held| held.key == key).for_each(|held| held.stored = true);
        }
        let Some(entry) = self.entry(key) else {
            // Released while it was being written: the transfer held the last reference.
            self.on_device.lower(if in_stream_order { 0 } else { bytes });
            return (None, None);
        };
        let (state, is_last) = (entry.state, entry.stores == store);
        if let Some(entry) = self.entry_mut(key).filter(|_| is_last) {
            entry.storing = false;
        }
        if !is_last || state != State::Storing {
            return (None, None);
        }
        self.failures = if outcome.is_ok() { 0 } else { self.failures + 1 };
        let Some(entry) = self.entry(key) else { return (None, None) };
        if outcome.is_ok() && entry.device.as_ref().is_some_and(|device| !device.is_current()) {
            entry.counters.discarded.add(bytes);
            let entry = self.advance(key, Edge::StoreFailed);
            return (None, entry.parcel.take());
        }
        if outcome.is_err() {
            entry.counters.store_failures.add(bytes);
            let entry = self.advance(key, Edge::StoreFailed);
            return (None, entry.parcel.take());
        }
        entry.counters.offloaded.add(bytes);
        // Others will ask for what backward uses: the transfer holds it no more.
        let own = 1 + u64::from(self.is_held_back(key));
        if entry.asked && entry.served < entry.handles && !entry.is_held_by(own) {
            self.advance(key, Edge::StoredInUse);
            return (None, None);
        }
        let is_wanted = entry.served < entry.handles;
        let entry = self.advance(key, Edge::Stored);
        let device = entry.device.take();
        self.on_device.lower(bytes);
        if !in_stream_order && !self.is_held_back(key) {
            self.has_left(key, bytes);
        }
        if is_wanted {
            self.looks_again(key);
        }
        (device, None)
    }
}

/// As many of the entries that have left are looked at each time.
const LOOKED_AT: usize = 64;
/// So many more keys than entries may be in a queue, and twice as many.
const FEW: usize = 64;

/// Keeps the keys of entries in this state, if there are far more than entries. Otherwise those of entries that have gone would pile up
/// behind one that stays at the front.
fn forget_others(queue: &mut VecDeque<EntryKey>, entries: &Slab<Entry>, state: State) {
    if queue.len() > 2 * entries.len() + FEW {
        queue.retain(|key| {
            entries.get(key.index).is_some_and(|entry| entry.serial == key.serial && entry.state == state)
        });
    }
}
