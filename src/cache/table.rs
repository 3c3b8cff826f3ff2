//! Everything the cache knows, behind one lock: entries, identities, tapes, the store queue and the bytes on the device.
//! Methods here change the books and say what is to be moved; they never wait and never call libtorch to compute.

mod backward;
mod saving;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;

use slab::Slab;
use ssdtrain_libtorch::{Block, Storage, StorageId, Watch, WeakStorage};
use ssdtrain_plan::Release;

pub(crate) use self::saving::{Part, Saved};
use super::entry::{Edge, State};
use super::keys::{EntryKey, TapeKey};
use super::tape::Tape;
use crate::error::Error;
use crate::profile::Alive;
use crate::telemetry::{Counters, ScopeId, StallCause};
use crate::tier::{Parcel, Tier};

/// The record of one storage, from its first pack to its last release.
pub(crate) struct Entry {
    serial: u64,
    pub(crate) state: State,
    pub(crate) bytes: u64,
    /// The bytes on the device, while the cache holds them.
    pub(crate) device: Option<Block>,
    /// The storage that was saved, and its version then: as long as neither has moved on, this is what it holds.
    pub(crate) source: Watch,
    version: u32,
    /// The storage that came back from below last.
    returned: Option<Watch>,
    /// The views of it that were saved, by their layouts, and their bytes, until they are enough of it to be moved.
    parts: Vec<u64>,
    covered: u64,
    /// Whether it was put into the store queue.
    queued: bool,
    /// Whether a store is under way that has to be waited for.
    storing: bool,
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
    failure: Option<Error>,
}

impl Entry {
    /// Its storage on the device, while the cache holds that.
    pub(crate) fn storage(&self) -> Option<&Storage> {
        self.device.as_ref().map(Block::storage)
    }
}

/// A transfer to hand to the tier once the lock is released.
pub(crate) enum Job {
    Store {
        key: EntryKey,
        parcel: Arc<dyn Parcel>,
        from: Block,
    },
    /// `early`: nobody waits for it yet.
    Load {
        key: EntryKey,
        parcel: Arc<dyn Parcel>,
        bytes: u64,
        early: bool,
    },
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
    Wait(StallCause),
}

/// A storage whose store has begun, and whether it has ended.
struct HeldBack {
    key: EntryKey,
    storage: Storage,
    stored: bool,
}

/// What is to be dropped without the lock.
pub(crate) type Gone = (Option<Block>, Option<Arc<dyn Parcel>>);

/// Limits the table keeps, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// On the device while tensors are saved, and while they are asked for.
    pub(crate) device_budget: u64,
    pub(crate) backward_budget: u64,
    pub(crate) prefetch: u64,
    /// Stores handed to the backend at once: enough to keep the disk busy, the rest can still be cancelled.
    pub(crate) stores_in_flight: u64,
    /// Storages leave as late as the device budget allows, as those of a GPU do anyway.
    pub(crate) late: bool,
}

pub(crate) struct Table {
    /// None if everything is kept.
    tier: Option<Arc<dyn Tier>>,
    limits: Limits,
    entries: Slab<Entry>,
    tapes: BTreeMap<TapeKey, Tape>,
    next_tape: TapeKey,
    identities: HashMap<StorageId, EntryKey>,
    /// Storages that outlived their entries.
    elsewhere: HashMap<StorageId, WeakStorage>,
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
    /// Storages that were served to the last handle and let go of, but that backward still uses: of which entries.
    in_use: Vec<(EntryKey, WeakStorage)>,
    /// While notes are taken of memory: what is being stored, which must not come free between two notes.
    held_back: Option<Vec<HeldBack>>,
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
            tapes: BTreeMap::new(),
            next_tape: 0,
            identities: HashMap::new(),
            elsewhere: HashMap::new(),
            serial: 0,
            queue: VecDeque::new(),
            leaving: VecDeque::new(),
            storing: 0,
            transfers: 0,
            on_device: 0,
            early: 0,
            in_use: Vec::new(),
            held_back: None,
            live: 0,
            peak_live: 0,
            expected_live: None,
            failures: 0,
        }
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

    /// Whether the step of the tape still goes on.
    pub(crate) fn is_open(&self, key: TapeKey) -> bool {
        self.tapes.get(&key).is_some_and(|tape| !tape.closed)
    }

    fn drop_tape_if_done(&mut self, key: TapeKey) {
        if self.tapes.get(&key).is_some_and(|tape| tape.closed && tape.handles == 0) {
            self.tapes.remove(&key);
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

    /// Holds storages back from now on, or no longer. What it returns is to be dropped without the lock.
    pub(crate) fn hold_back(&mut self, holds: bool) -> Vec<Storage> {
        let held = std::mem::replace(&mut self.held_back, holds.then(Vec::new));
        held.into_iter().flatten().map(|held| held.storage).collect()
    }

    /// What was held back and has been stored. It is to be dropped without the lock.
    pub(crate) fn stored_since(&mut self) -> Vec<Storage> {
        let held = self.held_back.iter_mut();
        held.flat_map(|held| held.extract_if(.., |held| held.stored)).map(|held| held.storage).collect()
    }

    // ---- writes ----

    /// An operation writes to the storage `id`. What was saved of it is what it holds from now on, as without a cache: it stays on the
    /// device. The parcel that is returned is to be abandoned without the lock.
    pub(crate) fn written(&mut self, id: StorageId) -> Option<Arc<dyn Parcel>> {
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
            self.on_device += bytes;
        }
        parcel
    }

    /// Storages whose tensors the program holds beside the graph, as far as it is known from what it let go of. Those that are gone are
    /// forgotten.
    pub(crate) fn held_elsewhere(&mut self) -> HashSet<StorageId> {
        self.elsewhere.retain(|_, storage| storage.upgrade().is_some());
        self.elsewhere.keys().copied().collect()
    }

    /// The graph has let go of this storage, and it is still there.
    pub(crate) fn outlived(&mut self, storage: &Storage) {
        self.elsewhere.insert(storage.id(), storage.downgrade());
    }

    // ---- release ----

    /// The graph has let go of a handle. What it returns is to be dropped without the lock.
    pub(crate) fn release(&mut self, key: EntryKey, tape: TapeKey, round: u64) -> Option<Entry> {
        if let Some(tape) = self.tapes.get_mut(&tape) {
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
        match entry.state {
            State::Device if entry.queued => entry.counters.cancelled.add(entry.bytes),
            State::Device => entry.counters.kept_parts.add(entry.bytes),
            State::Storing => entry.counters.discarded.add(entry.bytes),
            _ => {}
        }
        // A transfer that is waited for still holds the bytes; it gives them back to the books when it ends.
        let here = match entry.state {
            State::Device | State::Loaded => true,
            State::Kept | State::Storing => !entry.storing,
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

    /// Bytes on the device, those included that backward still uses.
    fn device_bytes(&mut self) -> u64 {
        self.in_use.retain(|(_, storage)| storage.upgrade().is_some());
        let in_use = self.in_use.iter().filter_map(|(key, _)| self.entry(*key));
        self.on_device + in_use.map(|entry| entry.bytes).sum::<u64>()
    }

    /// Bytes of the storages that are on the device, and the entries among them that only the program still holds.
    pub(crate) fn alive(&self) -> Alive {
        let mut alive = Alive { bytes: self.on_device, in_use: Vec::new() };
        for (_, entry) in self.entries.iter().filter(|(_, entry)| entry.device.is_none()) {
            let returned = || entry.returned.as_ref().is_some_and(|returned| returned.upgrade().is_some());
            if entry.source.upgrade().is_some() || returned() {
                alive.in_use.push(entry.serial);
                alive.bytes += entry.bytes;
            }
        }
        alive
    }

    /// Whether a load of `key` is under way.
    pub(crate) fn is_reading(&self, key: EntryKey) -> bool {
        self.entry(key).is_some_and(|entry| entry.state == State::Loading)
    }

    /// The failed load that `text` speaks of, if there is one.
    pub(crate) fn failure_in(&self, text: &str) -> Option<Error> {
        let mut failures = self.entries.iter().filter_map(|(_, entry)| entry.failure.as_ref());
        failures.find(|failure| text.contains(&failure.to_string())).cloned()
    }

    /// What [`Table::failure_in`] is to know of an entry that is on the device, and cannot be used.
    pub(crate) fn note_failure(&mut self, key: EntryKey, failure: Error) {
        if let Some(entry) = self.entry_mut(key) {
            entry.failure = Some(failure);
        }
    }

    pub(crate) fn entry(&self, key: EntryKey) -> Option<&Entry> {
        self.entries.get(key.index).filter(|entry| entry.serial == key.serial)
    }

    // ---- helpers ----

    /// Whether storages leave once the device's queue was told to wait for their stores.
    fn in_stream_order(&self) -> bool {
        self.tier.as_ref().is_some_and(|tier| tier.release() != Release::WhenStored)
    }

    fn entry_mut(&mut self, key: EntryKey) -> Option<&mut Entry> {
        self.entries.get_mut(key.index).filter(|entry| entry.serial == key.serial)
    }

    /// Takes an edge of the state table. An edge that is not in it is a bug of ours: the entry is lost then, so that asking
    /// for it is an error and never a wrong tensor.
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

    /// Lets the device copy go once every handle has been served and a copy is on the disk.
    fn evict_if_served(&mut self, key: EntryKey) {
        let Some(entry) = self.entry(key) else { return };
        let served = entry.state == State::Loaded && entry.served >= entry.handles;
        if served && entry.parcel.as_ref().is_some_and(|parcel| parcel.may_evict()) {
            let entry = self.advance(key, Edge::Evicted);
            let (device, bytes) = (entry.device.take(), entry.bytes);
            self.on_device -= bytes;
            self.in_use.extend(device.map(|block| (key, block.storage().downgrade())));
        }
    }

    fn forget(&mut self, id: StorageId, key: EntryKey) {
        if self.identities.get(&id) == Some(&key) {
            self.identities.remove(&id);
        }
    }
}
