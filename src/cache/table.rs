//! Everything the cache knows, behind one lock: entries, identities, tapes, the store queue and the bytes on the device.
//! Methods here change the books and say what is to be moved; they never wait and never call libtorch to compute.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use slab::Slab;
use ssdtrain_libtorch::{Storage, StorageId, WeakStorage};

use super::entry::{Edge, State};
use super::tape::Tape;
use crate::telemetry::{Cause, Counters, ScopeId};
use crate::tier::{Leaving, Parcel, Room, Tier};

/// Which entry: a place in the table, and a number that is never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryKey {
    pub(crate) index: usize,
    pub(crate) serial: u64,
}

pub(crate) type TapeKey = usize;

/// No tape has this key.
pub(crate) const NO_TAPE: TapeKey = TapeKey::MAX;

/// The record of one storage, from its first pack to its last release.
pub(crate) struct Entry {
    serial: u64,
    pub(crate) state: State,
    pub(crate) bytes: u64,
    /// The bytes on the device, while the cache holds them.
    device: Option<Storage>,
    /// The storage that was saved, and its version then: together the identity of what was saved.
    source: WeakStorage,
    version: u32,
    /// The storage that came back from below last.
    returned: Option<WeakStorage>,
    /// Its place below the device; none if it is to stay.
    pub(crate) parcel: Option<Arc<dyn Parcel>>,
    /// Bytes of all entries there were when it was saved.
    live_before: u64,
    /// Handles in the graph, and how many of them have been served since the device copy last came.
    handles: usize,
    served: usize,
    round: u64,
    /// Loaded ahead and not asked for yet.
    early: bool,
    pub(crate) scope: ScopeId,
    pub(crate) step: u64,
    pub(crate) counters: Arc<Counters>,
    failure: Option<String>,
}

/// A transfer to hand to the tier once the lock is released.
pub(crate) enum Job {
    Store { key: EntryKey, parcel: Arc<dyn Parcel>, from: Storage },
    Load { key: EntryKey, parcel: Arc<dyn Parcel>, into: Storage },
}

/// What a handle gets when it asks.
pub(crate) enum Answer {
    /// The bytes; after [`Parcel::order`] of the parcel, if there is one.
    Here(Storage, Option<(Arc<dyn Parcel>, Arc<Counters>)>),
    Wait,
    Failed(String),
}

/// How the device budget can be kept when more bytes come.
pub(crate) enum Squeeze {
    /// There is room, or none can be made.
    Fits,
    /// The oldest that is leaving may go, after [`Parcel::order`].
    LetGo(EntryKey, Arc<dyn Parcel>),
    /// A store was begun to make room: submit it and look again.
    Begun,
    /// Wait for a change.
    Wait(Cause),
}

/// What is to be dropped without the lock.
pub(crate) type Gone = (Option<Storage>, Option<Arc<dyn Parcel>>);

/// Limits the table keeps, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// On the device while tensors are saved, and while they are asked for.
    pub(crate) device_budget: u64,
    pub(crate) backward_budget: u64,
    pub(crate) prefetch: u64,
    /// Stores handed to the backend at once: enough to keep the disk busy, the rest can still be cancelled.
    pub(crate) stores_in_flight: u64,
}

pub(crate) struct Table {
    /// None if everything is kept.
    tier: Option<Arc<dyn Tier>>,
    limits: Limits,
    entries: Slab<Entry>,
    tapes: Slab<Tape>,
    identities: HashMap<StorageId, EntryKey>,
    serial: u64,
    /// Entries that wait for their store, oldest first. May name entries that have moved on.
    queue: VecDeque<EntryKey>,
    /// Entries whose store was begun, oldest first, where they leave in stream order. May name entries that have moved on.
    leaving: VecDeque<EntryKey>,
    /// Bytes whose store has to be waited for.
    storing: u64,
    transfers: usize,
    on_device: u64,
    early: u64,
    /// Bytes of all entries, the most there were in this step, and in the step before.
    live: u64,
    peak_live: u64,
    expected_live: Option<u64>,
    /// Consecutive failed stores; at [`GIVE_UP`] the rest of the step keeps its tensors.
    failures: u32,
}

const GIVE_UP: u32 = 3;

impl Table {
    pub(crate) fn new(tier: Option<Arc<dyn Tier>>, limits: Limits) -> Table {
        Table {
            tier,
            limits,
            entries: Slab::new(),
            tapes: Slab::new(),
            identities: HashMap::new(),
            serial: 0,
            queue: VecDeque::new(),
            leaving: VecDeque::new(),
            storing: 0,
            transfers: 0,
            on_device: 0,
            early: 0,
            live: 0,
            peak_live: 0,
            expected_live: None,
            failures: 0,
        }
    }

    // ---- tapes ----

    pub(crate) fn open_tape(&mut self) -> TapeKey {
        self.tapes.insert(Tape::default())
    }

    pub(crate) fn close_tape(&mut self, key: TapeKey) {
        if let Some(tape) = self.tapes.get_mut(key) {
            tape.closed = true;
        }
        self.drop_tape_if_done(key);
    }

    /// Whether the step of the tape still goes on.
    pub(crate) fn is_open(&self, key: TapeKey) -> bool {
        self.tapes.get(key).is_some_and(|tape| !tape.closed)
    }

    fn drop_tape_if_done(&mut self, key: TapeKey) {
        if self.tapes.get(key).is_some_and(|tape| tape.closed && tape.handles == 0) {
            self.tapes.remove(key);
        }
    }

    /// A new step gives stores another chance, and is expected to save as much as the one before.
    pub(crate) fn begin_step(&mut self) {
        self.failures = 0;
        if self.peak_live > 0 {
            self.expected_live = Some(self.peak_live);
        }
        self.peak_live = self.live;
    }

    // ---- saving ----

    /// The entry that already holds this version of this storage.
    pub(crate) fn find(&self, id: StorageId, version: u32) -> Option<EntryKey> {
        let key = *self.identities.get(&id)?;
        let entry = self.entry(key)?;
        // The identity of a storage that came back is its own: it starts at version 0.
        let same = if entry.source.id() == id { entry.version == version } else { version == 0 };
        (same && entry.state != State::Lost).then_some(key)
    }

    /// Whether storages leave once the device's queue was told to wait for their stores.
    fn in_stream_order(&self) -> bool {
        self.tier.as_ref().is_some_and(|tier| tier.leaving() == Leaving::InStreamOrder)
    }

    /// What can be done so that `bytes` more that are being saved fit the device budget.
    pub(crate) fn squeeze(&mut self, bytes: u64, jobs: &mut Vec<Job>) -> Squeeze {
        if self.on_device + bytes <= self.limits.device_budget {
            return Squeeze::Fits;
        }
        if self.storing > 0 {
            return Squeeze::Wait(Cause::DeviceBudget);
        }
        if let Some((key, parcel)) = self.oldest_leaving() {
            return Squeeze::LetGo(key, parcel);
        }
        // More was saved than expected: what was to stay has to leave after all.
        while let Some(key) = self.oldest_queued() {
            if !self.begin_store(key, jobs) {
                return Squeeze::Wait(Cause::HostPool);
            }
            if !jobs.is_empty() {
                return Squeeze::Begun;
            }
        }
        Squeeze::Fits
    }

    /// What may leave so that all there is, and what backward loads of `wanted`, fit its budget: backward itself never waits.
    pub(crate) fn squeeze_for_backward(&mut self, wanted: EntryKey) -> Option<(EntryKey, Arc<dyn Parcel>)> {
        let away =
            self.entry(wanted).filter(|entry| entry.state == State::Away && entry.source.upgrade().is_none());
        let bytes = away.map_or(0, |entry| entry.bytes);
        let over = self.on_device + bytes > self.limits.backward_budget;
        if over { self.oldest_leaving().filter(|(key, _)| *key != wanted) } else { None }
    }

    /// The oldest entry whose store was begun, where storages leave in stream order.
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

    fn oldest_queued(&mut self) -> Option<EntryKey> {
        while let Some(&key) = self.queue.front() {
            if self.entry(key).is_some_and(|entry| entry.state == State::Device) {
                return Some(key);
            }
            self.queue.pop_front();
        }
        None
    }

    /// A new entry, on its way down or, without a parcel, to stay on the device.
    pub(crate) fn insert(&mut self, saved: Saved) -> EntryKey {
        self.serial += 1;
        let bytes = saved.storage.bytes();
        let keep = saved.parcel.is_none();
        let id = saved.storage.id();
        let index = self.entries.insert(Entry {
            serial: self.serial,
            state: if keep { State::Kept } else { State::Device },
            bytes,
            source: saved.storage.downgrade(),
            device: Some(saved.storage),
            version: saved.version,
            returned: None,
            parcel: saved.parcel,
            live_before: self.live,
            handles: 0,
            served: 0,
            round: 0,
            early: false,
            scope: saved.scope,
            step: saved.step,
            counters: saved.counters,
            failure: None,
        });
        let key = EntryKey { index, serial: self.serial };
        self.identities.insert(id, key);
        self.on_device += bytes;
        self.live += bytes;
        self.peak_live = self.peak_live.max(self.live);
        if !keep {
            self.queue.push_back(key);
        }
        key
    }

    /// One more handle of `key` on `tape`; returns its position there.
    pub(crate) fn attach(&mut self, key: EntryKey, tape: TapeKey) -> usize {
        if let Some(entry) = self.entry_mut(key) {
            entry.handles += 1;
        }
        let tape = &mut self.tapes[tape];
        tape.handles += 1;
        tape.push(key)
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

    /// Begins every store there is room for; false if there is not room for all of them yet.
    pub(crate) fn pump_all(&mut self, jobs: &mut Vec<Job>) -> bool {
        while let Some(key) = self.oldest_queued() {
            if !self.begin_store(key, jobs) {
                return false;
            }
        }
        true
    }

    /// Whether an entry has to leave the device. Where storages leave as late as the budget allows, those that a step like the
    /// one before saves last will still be there when backward asks for them.
    fn must_leave(&self, key: EntryKey) -> bool {
        match (self.in_stream_order(), self.expected_live, self.entry(key)) {
            (true, Some(expected), Some(entry)) => {
                let budget = self.limits.device_budget.min(self.limits.backward_budget);
                expected.saturating_sub(entry.live_before) > budget
            }
            _ => true,
        }
    }

    /// Begins the store of the entry at the head of the queue, or gives it up. False if it has to wait for room below.
    fn begin_store(&mut self, key: EntryKey, jobs: &mut Vec<Job>) -> bool {
        let in_stream_order = self.in_stream_order();
        let stores_work = self.failures < GIVE_UP;
        let Some(entry) = self.entry(key) else { return true };
        let (parcel, from, bytes) = (entry.parcel.clone(), entry.device.clone(), entry.bytes);
        let room = parcel.as_ref().filter(|_| stores_work).map_or(Room::None, |parcel| parcel.reserve());
        if room == Room::Later {
            return false;
        }
        self.queue.pop_front();
        match (room, parcel, from) {
            (Room::Reserved, Some(parcel), Some(from)) => {
                self.advance(key, Edge::StoreIssued);
                if in_stream_order {
                    self.leaving.push_back(key);
                } else {
                    self.storing += bytes;
                    self.transfers += 1;
                }
                jobs.push(Job::Store { key, parcel, from });
            }
            _ => self.advance(key, Edge::StoreRefused).counters.kept_no_room.add(bytes),
        }
        true
    }

    /// The store of `key` is over, or need not be waited for.
    pub(crate) fn stored(&mut self, key: EntryKey, bytes: u64, outcome: Result<(), String>) -> Gone {
        let in_stream_order = self.in_stream_order();
        if !in_stream_order {
            self.storing -= bytes;
            self.transfers -= 1;
        }
        self.failures = if outcome.is_ok() { 0 } else { self.failures + 1 };
        let Some(entry) = self.entry(key) else {
            // Released while it was written: the transfer held the last reference.
            self.on_device -= if in_stream_order { 0 } else { bytes };
            return (None, None);
        };
        if entry.state != State::Storing {
            return (None, None);
        }
        if outcome.is_err() {
            entry.counters.store_failures.add(bytes);
            let entry = self.advance(key, Edge::StoreFailed);
            return (None, entry.parcel.take());
        }
        entry.counters.offloaded.add(bytes);
        if entry.served > 0 && entry.served < entry.handles {
            self.advance(key, Edge::StoredInUse);
            return (None, None);
        }
        let entry = self.advance(key, Edge::Stored);
        let device = entry.device.take();
        self.on_device -= bytes;
        (device, None)
    }

    // ---- backward ----

    /// Answers a handle that asks for its bytes; `round` is the handle's own mark of the last copy it was served from.
    pub(crate) fn ask(&mut self, key: EntryKey, round: &mut u64, jobs: &mut Vec<Job>) -> Answer {
        let Some(entry) = self.entry(key) else {
            return Answer::Failed("internal error: a handle outlived its entry".to_owned());
        };
        match entry.state {
            State::Device => {
                entry.counters.cancelled.add(entry.bytes);
                entry.counters.forwarded.add(entry.bytes);
                self.advance(key, Edge::Cancelled);
            }
            State::Storing if entry.served == 0 => entry.counters.forwarded.add(entry.bytes),
            State::Away => {
                if let Some(alive) = entry.source.upgrade() {
                    entry.counters.forwarded.add(entry.bytes);
                    return Answer::Here(alive, None);
                }
                entry.counters.load_misses.add(entry.bytes);
                self.load(key, false, jobs);
                return Answer::Wait;
            }
            State::Loading => return Answer::Wait,
            State::Lost => {
                return Answer::Failed(entry.failure.clone().unwrap_or_else(|| "unknown failure".to_owned()));
            }
            State::Storing | State::Loaded | State::Kept => {}
        }
        self.serve(key, round)
    }

    fn serve(&mut self, key: EntryKey, round: &mut u64) -> Answer {
        self.not_early(key);
        let Some(entry) = self.entry_mut(key) else {
            return Answer::Failed("internal error: a handle outlived its entry".to_owned());
        };
        let Some(storage) = entry.device.clone() else {
            return Answer::Failed(format!("internal error: {:?} without bytes", entry.state));
        };
        if *round != entry.round + 1 {
            *round = entry.round + 1;
            entry.served += 1;
        }
        let loaded = entry.state == State::Loaded;
        let order =
            entry.parcel.clone().filter(|_| loaded).map(|parcel| (parcel, Arc::clone(&entry.counters)));
        self.evict_if_served(key);
        Answer::Here(storage, order)
    }

    /// Issues the load of an entry that is away; false if it must wait for memory, which only an early one may.
    fn load(&mut self, key: EntryKey, early: bool, jobs: &mut Vec<Job>) -> bool {
        let Some(entry) = self.entry(key) else { return false };
        let bytes = entry.bytes;
        let (Some(parcel), Some(tier)) = (entry.parcel.clone(), &self.tier) else {
            return self.lose(key, "internal error: away without a place".to_owned());
        };
        let into = match tier.allocate(bytes) {
            Ok(into) => into,
            Err(_) if early => return false,
            Err(refused) => return self.lose(key, refused.to_string()),
        };
        jobs.push(Job::Load { key, parcel, into: into.clone() });
        let id = into.id();
        let entry = self.advance(key, Edge::LoadIssued);
        let before = entry.returned.replace(into.downgrade());
        entry.device = Some(into);
        entry.early = early;
        entry.round += 1;
        entry.served = 0;
        if let Some(before) = before {
            self.forget(before.id(), key);
        }
        self.identities.insert(id, key);
        self.on_device += bytes;
        self.early += if early { bytes } else { 0 };
        self.transfers += 1;
        true
    }

    /// The load of `key` is over. What it returns is to be dropped without the lock.
    pub(crate) fn loaded(
        &mut self,
        key: EntryKey,
        bytes: u64,
        outcome: Result<(), String>,
    ) -> Option<Storage> {
        self.transfers -= 1;
        let Some(entry) = self.entry(key) else {
            self.on_device -= bytes;
            return None;
        };
        match outcome {
            Ok(()) => {
                entry.counters.loaded.add(bytes);
                self.advance(key, Edge::Loaded);
                None
            }
            Err(failure) => {
                self.not_early(key);
                let entry = self.advance(key, Edge::LoadFailed);
                entry.failure = Some(failure);
                let device = entry.device.take();
                self.on_device -= bytes;
                device
            }
        }
    }

    /// Backward has asked for `position` of `tape`, and `missed` if it has to wait for it: looks ahead by as many bytes
    /// as the limits allow.
    pub(crate) fn look_ahead(&mut self, tape: TapeKey, position: usize, missed: bool, jobs: &mut Vec<Job>) {
        if let Some(tape) = self.tapes.get_mut(tape) {
            tape.asked(position, missed);
        }
        while let Some(key) = self.tapes.get(tape).and_then(Tape::ahead) {
            if let Some(entry) = self.entry(key).filter(|entry| entry.state == State::Away) {
                let alive = entry.source.upgrade().is_some();
                let bytes = entry.bytes;
                // One that is larger than the limit goes alone, so that it does not stand in the way of all below it.
                let alone = self.early == 0 && self.limits.prefetch > 0;
                let fits = (alone || self.early + bytes <= self.limits.prefetch)
                    && self.on_device + bytes <= self.limits.backward_budget;
                let done = alive || (fits && self.load(key, true, jobs));
                if !done {
                    break;
                }
            }
            self.tapes[tape].advance();
        }
        // Below what fits the device, bytes are brought up to where the next look ahead finds them quickly.
        while let Some(key) = self.tapes.get(tape).and_then(Tape::far) {
            let away = self.entry(key).filter(|entry| entry.state == State::Away);
            if !away.and_then(|entry| entry.parcel.clone()).is_none_or(Parcel::bring_near) {
                return;
            }
            self.tapes[tape].advance_near();
        }
    }

    // ---- release ----

    /// The graph has let go of a handle. What it returns is to be dropped without the lock.
    pub(crate) fn release(&mut self, key: EntryKey, tape: TapeKey, round: u64) -> Option<Entry> {
        if let Some(tape) = self.tapes.get_mut(tape) {
            tape.handles -= 1;
        }
        self.drop_tape_if_done(tape);
        let entry = self.entry_mut(key)?;
        entry.handles -= 1;
        if round == entry.round + 1 {
            entry.served -= 1;
        }
        if entry.handles > 0 {
            self.evict_if_served(key);
            return None;
        }
        self.remove(key)
    }

    fn remove(&mut self, key: EntryKey) -> Option<Entry> {
        self.not_early(key);
        let entry = self.entries.try_remove(key.index)?;
        if entry.state == State::Device {
            entry.counters.cancelled.add(entry.bytes);
        }
        // A transfer that is waited for still holds the bytes; it gives them back to the books when it ends.
        let here = match entry.state {
            State::Device | State::Loaded | State::Kept => true,
            State::Storing => self.in_stream_order(),
            State::Away | State::Loading | State::Lost => false,
        };
        self.on_device -= if here { entry.bytes } else { 0 };
        self.live -= entry.bytes;
        self.forget(entry.source.id(), key);
        if let Some(returned) = &entry.returned {
            self.forget(returned.id(), key);
        }
        Some(entry)
    }

    // ---- reading the books ----

    /// Transfers under way.
    pub(crate) fn transfers(&self) -> usize {
        self.transfers
    }

    /// Entries, tapes and bytes on the device; all zero when nothing is saved.
    pub(crate) fn held(&self) -> (usize, usize, u64) {
        (self.entries.len(), self.tapes.len(), self.on_device)
    }

    /// Whether a load of `key` is under way.
    pub(crate) fn is_reading(&self, key: EntryKey) -> bool {
        self.entry(key).is_some_and(|entry| entry.state == State::Loading)
    }

    pub(crate) fn entry(&self, key: EntryKey) -> Option<&Entry> {
        self.entries.get(key.index).filter(|entry| entry.serial == key.serial)
    }

    // ---- helpers ----

    fn entry_mut(&mut self, key: EntryKey) -> Option<&mut Entry> {
        self.entries.get_mut(key.index).filter(|entry| entry.serial == key.serial)
    }

    /// Takes an edge of the state table. An edge that is not in it is a bug of ours: the entry is lost then, so that asking
    /// for it is an error and never a wrong tensor.
    fn advance(&mut self, key: EntryKey, edge: Edge) -> &mut Entry {
        let entry = &mut self.entries[key.index];
        debug_assert!(entry.state.after(edge).is_some(), "{edge:?} in {:?}", entry.state);
        entry.state = entry.state.after(edge).unwrap_or_else(|| {
            entry.failure = Some(format!("internal error: {edge:?} in {:?}", entry.state));
            State::Lost
        });
        entry
    }

    fn lose(&mut self, key: EntryKey, failure: String) -> bool {
        self.advance(key, Edge::LoadFailed).failure = Some(failure);
        true
    }

    fn not_early(&mut self, key: EntryKey) {
        let Some(entry) = self.entry_mut(key) else { return };
        let bytes = if std::mem::take(&mut entry.early) { entry.bytes } else { 0 };
        self.early -= bytes;
    }

    /// Lets the device copy go once every handle has been served and a copy is on the disk.
    fn evict_if_served(&mut self, key: EntryKey) {
        let Some(entry) = self.entry(key) else { return };
        let served = entry.state == State::Loaded && entry.served >= entry.handles;
        if served && entry.parcel.as_ref().is_some_and(|parcel| parcel.may_evict()) {
            let entry = self.advance(key, Edge::Evicted);
            entry.device = None;
            let bytes = entry.bytes;
            self.on_device -= bytes;
        }
    }

    fn forget(&mut self, id: StorageId, key: EntryKey) {
        if self.identities.get(&id) == Some(&key) {
            self.identities.remove(&id);
        }
    }
}

/// What is known of a storage when it is first saved.
pub(crate) struct Saved {
    pub(crate) storage: Storage,
    pub(crate) parcel: Option<Arc<dyn Parcel>>,
    pub(crate) version: u32,
    pub(crate) scope: ScopeId,
    pub(crate) step: u64,
    pub(crate) counters: Arc<Counters>,
}
