//! Everything the cache knows, behind one lock: entries, identities, tapes, the store queue and the bytes on the device. The methods here
//! update this state and return what is to be moved. They never wait, and never make libtorch compute.

mod backward;
#[cfg(test)]
mod reference;
mod relief;
mod saving;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;

use slab::Slab;
use ssdtrain_libtorch::{Block, Storage, StorageId, Watch, WeakStorage};
use ssdtrain_plan::Release;

pub(crate) use self::relief::{Relief, Tried};
pub(crate) use self::saving::{Part, Saved};
use super::entry::{Edge, State};
use super::keys::{EntryKey, TapeKey};
use super::tape::Tape;
use crate::error::Error;
use crate::profile::Alive;
use crate::telemetry::{Counters, Level, ScopeId, StallCause};
use crate::tier::{Parcel, Tier};

/// The record of one storage, from its first pack to its last release.
pub(crate) struct Entry {
    serial: u64,
    pub(crate) state: State,
    pub(crate) bytes: u64,
    /// The bytes on the device, while the cache holds them.
    pub(crate) device: Option<Block>,
    /// The storage that was saved, and its version at that time: as long as neither has changed, the storage holds what was saved.
    pub(crate) source: Watch,
    version: u32,
    /// The storage that was last loaded from below.
    returned: Option<Watch>,
    /// The layouts of the views saved of it, and the bytes these cover, until they are enough for it to be moved.
    parts: Vec<u64>,
    covered: u64,
    /// Whether it was put into the store queue.
    queued: bool,
    /// Whether it found no room below.
    refused: bool,
    /// Whether a store is in flight that has to be waited for.
    storing: bool,
    /// How many of its stores have begun. The end of an earlier one may become known when it is kept already, or leaves anew.
    pub(crate) stores: u64,
    /// Its place below the device; `None` if it is to stay.
    pub(crate) parcel: Option<Arc<dyn Parcel>>,
    /// Whether it was to leave when it was saved, and the bytes of all such entries that existed then.
    leaves: bool,
    leaving_before: u64,
    /// Handles in the graph, and how many of them were served in this round. Once all were, the next load begins another.
    handles: usize,
    served: usize,
    round: u64,
    /// Whether any handle has asked since the device copy last arrived, served or not.
    asked: bool,
    /// Loaded ahead and not yet asked for.
    early: bool,
    pub(crate) scope: ScopeId,
    pub(crate) step: u64,
    pub(crate) counters: Arc<Counters>,
    /// Where it was saved last.
    last: (TapeKey, usize),
    failure: Option<Error>,
}

impl Entry {
    /// Its storage on the device, as long as the cache holds it.
    pub(crate) fn storage(&self) -> Option<&Storage> {
        self.device.as_ref().map(Block::storage)
    }

    /// Whether the storage is on the device, and no more than this many hold it.
    fn is_held_by(&self, most: u64) -> bool {
        self.storage().is_some_and(|storage| storage.owners() <= most)
    }
}

/// A transfer to hand to the tier once the lock is released.
pub(crate) enum Job {
    Store {
        key: EntryKey,
        /// Which of the entry's stores it is.
        store: u64,
        parcel: Arc<dyn Parcel>,
        from: Block,
    },
    /// With `early`, nobody waits for it yet.
    Load { key: EntryKey, parcel: Arc<dyn Parcel>, bytes: u64, early: bool },
}

impl Job {
    /// Whether it is a load that nobody waits for yet.
    pub(crate) fn is_early(&self) -> bool {
        matches!(self, Job::Load { early: true, .. })
    }
}

/// What a handle gets when it asks.
pub(crate) enum Answer {
    /// The bytes. If there is a parcel, call its [`Parcel::order`] before using them.
    Here(Storage, Option<(Arc<dyn Parcel>, Arc<Counters>)>),
    Wait,
    Failed(String),
}

/// How to make room in the device budget for more bytes.
pub(crate) enum Squeeze {
    /// There is room, or none can be made.
    Fits,
    /// The oldest entry that is leaving may be released, after [`Parcel::order`].
    LetGo(EntryKey, Arc<dyn Parcel>),
    /// A store was begun to make room: submit it and look again.
    Begun,
    /// Wait for a change.
    Wait(StallCause),
}

/// A storage whose store has begun, and whether that has ended.
struct HeldBack {
    key: EntryKey,
    storage: Storage,
    stored: bool,
}

/// What goes with a handle, to be dropped without holding the lock.
#[derive(Default)]
pub(crate) struct Released {
    pub(crate) entry: Option<Entry>,
    pub(crate) device: Option<Block>,
}

/// To be dropped without holding the lock.
pub(crate) type Gone = (Option<Block>, Option<Arc<dyn Parcel>>);

/// What lies below the device of an entry that has other contents now.
pub(crate) struct Outdated {
    parcel: Arc<dyn Parcel>,
    /// The storage that may still be copied to it.
    of: Option<Storage>,
}

impl Outdated {
    /// Must be called without holding the lock.
    pub(crate) fn abandon(self) {
        self.parcel.abandon(self.of.as_ref());
    }
}

/// Limits the table keeps, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Upper limits for the device: while tensors are saved, and while backward asks for them.
    pub(crate) device_budget: u64,
    pub(crate) backward_budget: u64,
    pub(crate) prefetch: u64,
    /// Upper limit for stores handed to the backend at once. Enough to keep the disk busy; the others can still be cancelled.
    pub(crate) stores_in_flight: u64,
    /// Whether storages leave as late as the device budget allows, as a GPU's do anyway.
    pub(crate) late: bool,
}

impl Limits {
    /// No limits but that on the bytes of stores in flight.
    pub(crate) fn none(stores_in_flight: u64) -> Limits {
        let any = u64::MAX;
        Limits { device_budget: any, backward_budget: any, prefetch: any, stores_in_flight, late: false }
    }
}

pub(crate) struct Table {
    /// `None` if everything is kept.
    tier: Option<Arc<dyn Tier>>,
    limits: Limits,
    entries: Slab<Entry>,
    tapes: BTreeMap<TapeKey, Tape>,
    next_tape: TapeKey,
    identities: HashMap<StorageId, EntryKey>,
    /// Storages that outlived their entries.
    elsewhere: HashMap<StorageId, WeakStorage>,
    serial: u64,
    /// Entries that wait for their store, oldest first. May contain keys of entries whose state has changed since.
    queue: VecDeque<EntryKey>,
    /// Entries whose store has begun, oldest first, if storages leave in stream order. May contain keys of entries whose state has
    /// changed since.
    leaving: VecDeque<EntryKey>,
    /// Entries whose store is in flight, if storages leave when they are stored. Some may be gone.
    in_flight: VecDeque<EntryKey>,
    /// Entries that have left while their storages may still be held by the program, if storages leave when they are stored, with their
    /// bytes, and the sum of these. May contain entries whose state has changed since.
    left: VecDeque<(EntryKey, u64)>,
    left_bytes: u64,
    /// Bytes of the stores in flight that have to be waited for.
    storing: u64,
    transfers: usize,
    /// Threads that are about to free what a store has released.
    pub(crate) releasing: usize,
    /// Bytes on the device.
    on_device: Level,
    early: u64,
    /// Storages that the cache released after serving every handle, but that backward still uses, each with the key of its entry.
    in_use: Vec<(EntryKey, WeakStorage)>,
    /// Storages being stored while memory is sampled. They must not be freed between two samples.
    held_back: Option<Vec<HeldBack>>,
    /// Bytes of all entries at present, their maximum in this step, and that in the step before.
    live: u64,
    /// Those of the entries that were to leave when they were saved.
    live_leaving: u64,
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
            tapes: BTreeMap::new(),
            next_tape: 0,
            identities: HashMap::new(),
            elsewhere: HashMap::new(),
            serial: 0,
            queue: VecDeque::new(),
            leaving: VecDeque::new(),
            in_flight: VecDeque::new(),
            left: VecDeque::new(),
            left_bytes: 0,
            storing: 0,
            transfers: 0,
            releasing: 0,
            on_device: Level::default(),
            early: 0,
            in_use: Vec::new(),
            held_back: None,
            live: 0,
            live_leaving: 0,
            peak_live: 0,
            expected_live: None,
            failures: 0,
        }
    }

    /// How many keys its queues have, those of what has gone among them.
    #[cfg(test)]
    pub(crate) fn queued(&self) -> usize {
        self.queue.len() + self.leaving.len() + self.left.len()
    }

    /// How many entries there were so far.
    pub(crate) fn saved(&self) -> u64 {
        self.serial
    }

    pub(crate) fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    // ---- tapes ----

    pub(crate) fn open_tape(&mut self) -> TapeKey {
        let key = self.next_tape;
        self.next_tape += 1;
        self.tapes.insert(key, Tape::default());
        key
    }

    pub(crate) fn close_tape(&mut self, key: TapeKey) {
        if let Some(tape) = self.tapes.get_mut(&key) {
            tape.closed = true;
        }
        self.drop_tape_if_done(key);
    }

    /// Whether the tape's step is still open.
    pub(crate) fn is_open(&self, key: TapeKey) -> bool {
        self.tapes.get(&key).is_some_and(|tape| !tape.closed)
    }

    fn drop_tape_if_done(&mut self, key: TapeKey) {
        if self.tapes.get(&key).is_some_and(|tape| tape.closed && tape.handles == 0) {
            self.tapes.remove(&key);
        }
    }

    /// A new step allows stores again, and is expected to save as much as the one before.
    pub(crate) fn begin_step(&mut self) {
        self.failures = 0;
        if self.peak_live > 0 {
            self.expected_live = Some(self.peak_live);
        }
        self.peak_live = self.live;
    }

    /// Begins or ends holding storages back. The result must be dropped without holding the lock.
    pub(crate) fn hold_back(&mut self, holds: bool) -> Vec<Storage> {
        let held = std::mem::replace(&mut self.held_back, holds.then(Vec::new));
        held.into_iter().flatten().map(|held| self.no_longer_held_back(held)).collect()
    }

    /// The storages that were held back and have been stored. They must be dropped without holding the lock.
    pub(crate) fn stored_since(&mut self) -> Vec<Storage> {
        let held = self.held_back.iter_mut();
        let stored: Vec<HeldBack> = held.flat_map(|held| held.extract_if(.., |held| held.stored)).collect();
        stored.into_iter().map(|held| self.no_longer_held_back(held)).collect()
    }

    fn no_longer_held_back(&mut self, held: HeldBack) -> Storage {
        if held.stored && self.entry(held.key).is_some_and(|entry| entry.state == State::Away) {
            self.has_left(held.key, held.storage.bytes());
        }
        held.storage
    }

    /// Whether the storage of an entry is held back, to leave with the next sample.
    fn is_held_back(&self, key: EntryKey) -> bool {
        self.held_back.iter().flatten().any(|held| held.key == key)
    }

    // ---- writes ----

    /// An operation writes to the storage `id`. From now on the saved tensor has the storage's new contents, as without a cache, so the
    /// entry stays on the device. What is returned must be abandoned.
    pub(crate) fn written(&mut self, id: StorageId) -> Option<Outdated> {
        let key = *self.identities.get(&id)?;
        let entry = self.entry(key)?;
        let alive = match entry.state {
            State::Device | State::Storing | State::Loaded => None,
            State::Away if entry.source.id() == id => Some(entry.source.upgrade()?),
            State::Away => Some(entry.returned.as_ref()?.upgrade()?),
            State::Loading | State::Kept | State::Lost => return None,
        };
        let stores = entry.state == State::Storing;
        self.not_early(key);
        let entry = self.advance(key, Edge::Written);
        let bytes = entry.bytes;
        entry.counters.kept_written.add(bytes);
        if stores {
            entry.counters.discarded.add(bytes);
        }
        let parcel = entry.parcel.take();
        if let Some(alive) = alive {
            entry.device = Some(Block::of(alive));
            self.on_device.raise(bytes);
        }
        let of = self.entry(key)?.storage().cloned();
        parcel.map(|parcel| Outdated { parcel, of })
    }

    /// Storages whose tensors the program holds besides the graph, as far as is known from those that outlived their entries. Storages
    /// that no longer exist are forgotten.
    pub(crate) fn held_elsewhere(&mut self) -> HashSet<StorageId> {
        self.elsewhere.retain(|_, storage| storage.upgrade().is_some());
        self.elsewhere.keys().copied().collect()
    }

    /// The graph has released this storage, but it still exists.
    pub(crate) fn outlived(&mut self, storage: &Storage) {
        self.elsewhere.insert(storage.id(), storage.downgrade());
    }

    // ---- release ----

    /// The graph has released a handle. Returns the entry if that was the last one, or the device copy if all others were served. The
    /// result must be dropped without holding the lock.
    pub(crate) fn release(&mut self, key: EntryKey, tape: TapeKey, round: u64) -> Released {
        if let Some(tape) = self.tapes.get_mut(&tape) {
            tape.handles -= 1;
        }
        self.drop_tape_if_done(tape);
        let Some(entry) = self.entry_mut(key) else { return Released::default() };
        entry.handles -= 1;
        if round == entry.round + 1 {
            entry.served -= 1;
        }
        match entry.handles {
            0 => Released { entry: self.remove(key), device: None },
            _ => Released { entry: None, device: self.evict_if_served(key) },
        }
    }

    fn remove(&mut self, key: EntryKey) -> Option<Entry> {
        self.not_early(key);
        let entry = self.entries.try_remove(key.index)?;
        match entry.state {
            State::Device if entry.queued => entry.counters.cancelled.add(entry.bytes),
            State::Device => entry.counters.kept_parts.add(entry.bytes),
            State::Storing => entry.counters.discarded.add(entry.bytes),
            _ => {}
        }
        // A transfer in flight that is waited for still holds the bytes, and subtracts them when it ends.
        let here = match entry.state {
            State::Device | State::Loaded => true,
            State::Kept | State::Storing => !entry.storing,
            State::Away | State::Loading | State::Lost => false,
        };
        self.on_device.lower(if here { entry.bytes } else { 0 });
        self.live -= entry.bytes;
        self.live_leaving -= if entry.leaves { entry.bytes } else { 0 };
        self.forget(entry.source.id(), key);
        if let Some(returned) = &entry.returned {
            self.forget(returned.id(), key);
        }
        Some(entry)
    }

    // ---- queries ----

    /// Transfers in flight.
    pub(crate) fn transfers(&self) -> usize {
        self.transfers
    }

    /// Entries, tapes and bytes on the device; all zero when nothing is saved.
    pub(crate) fn held(&self) -> (usize, usize, u64) {
        (self.entries.len(), self.tapes.len(), self.on_device.now())
    }

    /// Whether anything is saved.
    pub(crate) fn has_entries(&self) -> bool {
        !self.entries.is_empty()
    }

    /// Bytes of the entries that were to stay when they were saved.
    pub(crate) fn kept(&self) -> u64 {
        self.live - self.live_leaving
    }

    /// The bytes on the device, for reading without the lock.
    pub(crate) fn level(&self) -> Level {
        self.on_device.clone()
    }

    /// Bytes on the device, including those that the cache has released but backward still uses.
    fn device_bytes(&mut self) -> u64 {
        self.in_use.retain(|(_, storage)| storage.upgrade().is_some());
        let in_use = self.in_use.iter().filter_map(|(key, _)| self.entry(*key));
        self.on_device.now() + in_use.map(|entry| entry.bytes).sum::<u64>()
    }

    /// Bytes of the storages that are on the device, and the entries among them that the program holds, or would if the cache did not.
    pub(crate) fn alive(&self) -> Alive {
        let mut alive = Alive { bytes: self.on_device.now(), in_use: Vec::new() };
        for (_, entry) in &self.entries {
            let returned = || entry.returned.as_ref().is_some_and(|returned| returned.upgrade().is_some());
            let in_use = match (entry.storage(), entry.state) {
                (Some(storage), State::Device | State::Kept) => storage.owners() > 1,
                // What is moved is also held by its transfer.
                (Some(_), _) => false,
                (None, _) => entry.source.upgrade().is_some() || returned(),
            };
            if in_use {
                alive.in_use.push(entry.serial);
                alive.bytes += if entry.device.is_none() { entry.bytes } else { 0 };
            }
        }
        alive
    }

    /// Whether a load of `key` is in flight.
    pub(crate) fn is_reading(&self, key: EntryKey) -> bool {
        self.entry(key).is_some_and(|entry| entry.state == State::Loading)
    }

    /// The failed load whose message is part of `text`, if there is one.
    pub(crate) fn failure_in(&self, text: &str) -> Option<Error> {
        let mut failures = self.entries.iter().filter_map(|(_, entry)| entry.failure.as_ref());
        failures.find(|failure| text.contains(&failure.to_string())).cloned()
    }

    /// Records for [`Table::failure_in`] why an entry that is on the device cannot be used.
    pub(crate) fn note_failure(&mut self, key: EntryKey, failure: Error) {
        if let Some(entry) = self.entry_mut(key) {
            entry.failure = Some(failure);
        }
    }

    pub(crate) fn entry(&self, key: EntryKey) -> Option<&Entry> {
        self.entries.get(key.index).filter(|entry| entry.serial == key.serial)
    }

    // ---- helpers ----

    /// Whether storages are released once the device's queue has been made to wait for their stores, not when these have ended.
    fn in_stream_order(&self) -> bool {
        self.tier.as_ref().is_some_and(|tier| tier.release() != Release::WhenStored)
    }

    fn entry_mut(&mut self, key: EntryKey) -> Option<&mut Entry> {
        self.entries.get_mut(key.index).filter(|entry| entry.serial == key.serial)
    }

    /// Takes an edge of the state table. An edge that is not in the table is a bug of ours: the entry is then lost, so that asking for it
    /// is an error and never returns a wrong tensor.
    fn advance(&mut self, key: EntryKey, edge: Edge) -> &mut Entry {
        let entry = &mut self.entries[key.index];
        debug_assert!(entry.state.after(edge).is_some(), "{edge:?} in {:?}", entry.state);
        entry.state = entry.state.after(edge).unwrap_or_else(|| {
            entry.failure = Some(Error::torch(format!("internal error: {edge:?} in {:?}", entry.state)));
            State::Lost
        });
        entry
    }

    fn not_early(&mut self, key: EntryKey) {
        let Some(entry) = self.entry_mut(key) else { return };
        let bytes = if std::mem::take(&mut entry.early) { entry.bytes } else { 0 };
        self.early -= bytes;
    }

    /// Releases the device copy once every handle has been served and there is a copy below. The result must be dropped without holding
    /// the lock.
    fn evict_if_served(&mut self, key: EntryKey) -> Option<Block> {
        let entry = self.entry(key)?;
        let served = entry.state == State::Loaded && entry.served >= entry.handles;
        if !served || !entry.parcel.as_ref().is_some_and(|parcel| parcel.may_evict()) {
            return None;
        }
        // It may have been loaded ahead for a handle that is gone.
        self.not_early(key);
        let entry = self.advance(key, Edge::Evicted);
        let (device, bytes, source) = (entry.device.take(), entry.bytes, entry.source.id());
        self.on_device.lower(bytes);
        self.in_use.extend(device.iter().map(|block| (key, block.storage().downgrade())));
        // Its own storage, which was asked for while it was stored, may be the program's as well.
        let is_own = device.as_ref().is_some_and(|block| block.storage().id() == source);
        if is_own && !self.in_stream_order() && !self.is_held_back(key) {
            self.has_left(key, bytes);
        }
        device
    }

    fn forget(&mut self, id: StorageId, key: EntryKey) {
        if self.identities.get(&id) == Some(&key) {
            self.identities.remove(&id);
        }
    }
}
