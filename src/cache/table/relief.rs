//! What can go when the device has no memory left, one thing after another.

use std::collections::HashSet;
use std::sync::Arc;

use ssdtrain_libtorch::{Block, Storage};

use super::super::entry::{Edge, State};
use super::{Entry, EntryKey, Job, Table};
use crate::telemetry::Counters;
use crate::tier::{Here, Parcel};

/// How to free memory of the device.
pub(crate) enum Relief {
    /// The oldest entry that is leaving may be released, after [`Parcel::order`].
    LetGo(EntryKey, Arc<dyn Parcel>),
    /// The store of this entry is in flight, and releases it when it ends.
    Stores(EntryKey),
    /// An entry that was loaded, and that nobody uses now, is away again. Drop its copy without holding the lock, after [`Parcel::order`].
    Left(Block, Arc<dyn Parcel>, Arc<Counters>),
    /// This entry is being loaded ahead, and can go once that has ended.
    Loads(EntryKey),
    /// The store of this entry was begun: submit it, and wait for what releases it if that is not the calling thread.
    Begun(EntryKey),
    /// There will be room below: wait for a change.
    Wait,
    /// Nothing else can go, but there are stores in flight of entries that are gone, which release memory when they end.
    Ends,
    /// Nothing can go.
    Nothing,
}

/// What was tried to free memory for one allocation.
#[derive(Default)]
pub(crate) struct Tried {
    entries: HashSet<EntryKey>,
    /// Bytes of the smallest storage that found no room below the device.
    refused: Option<u64>,
    /// Entries up to this number were computed before the calling thread's event, on whichever stream.
    pub(crate) computed: u64,
}

impl Tried {
    fn has(&self, index: usize, entry: &Entry) -> bool {
        self.entries.contains(&EntryKey { index, serial: entry.serial })
    }

    /// Whether storing this entry may be of use.
    fn allows(&self, index: usize, entry: &Entry) -> bool {
        !self.has(index, entry)
            && self.refused.is_none_or(|refused| entry.bytes < refused)
            // A parcel knows when its storage is computed.
            && (entry.parcel.is_some() || entry.serial <= self.computed)
    }
}

impl Table {
    /// What can be done next to free memory. What needs no store comes first, and of each kind the oldest, because backward asks for it
    /// last.
    pub(crate) fn relief(&mut self, tried: &mut Tried, here: &Here, jobs: &mut Vec<Job>) -> Relief {
        if let Some((key, parcel)) = self.oldest_leaving() {
            return Relief::LetGo(key, parcel);
        }
        if let Some(key) = self.oldest(|_, entry| entry.storing && entry.state == State::Storing) {
            return Relief::Stores(key);
        }
        while let Some(key) = self.oldest(|index, entry| entry.is_unused() && !tried.has(index, entry)) {
            tried.entries.insert(key);
            if let Some((block, parcel, counters)) = self.unload(key) {
                return Relief::Left(block, parcel, counters);
            }
        }
        if let Some(key) = self.oldest(|_, entry| entry.early && entry.state == State::Loading) {
            return Relief::Loads(key);
        }
        while let Some(key) = self.oldest(|index, entry| tried.allows(index, entry) && entry.is_idle()) {
            if self.is_to_leave(key, here) && !self.begin_store(key, jobs) {
                return Relief::Wait;
            }
            tried.entries.insert(key);
            if !jobs.is_empty() {
                return Relief::Begun(key);
            }
            tried.refused = self.entry(key).map(|entry| entry.bytes);
        }
        if self.storing > 0 { Relief::Ends } else { Relief::Nothing }
    }

    /// The number of the newest entry.
    pub(crate) fn newest(&self) -> u64 {
        self.serial
    }

    /// Whether the store of `key` is in flight, or has ended and what it releases is not free yet.
    pub(crate) fn is_storing(&self, key: EntryKey) -> bool {
        self.releasing > 0 || self.entry(key).is_some_and(|entry| entry.storing)
    }

    /// Whether the cache has the entry's bytes only below the device.
    pub(crate) fn is_away(&self, key: EntryKey) -> bool {
        self.entry(key).is_some_and(|entry| entry.state == State::Away)
    }

    fn oldest(&self, is_meant: impl Fn(usize, &Entry) -> bool) -> Option<EntryKey> {
        let meant = self.entries.iter().filter(|(index, entry)| is_meant(*index, entry));
        let keys = meant.map(|(index, entry)| EntryKey { index, serial: entry.serial });
        keys.min_by_key(|key| key.serial)
    }

    /// Takes an entry that was loaded off the device, unless its bytes are nowhere else any more.
    fn unload(&mut self, key: EntryKey) -> Option<(Block, Arc<dyn Parcel>, Arc<Counters>)> {
        let parcel = self.entry(key)?.parcel.clone()?;
        if !parcel.may_evict() {
            return None;
        }
        self.not_early(key);
        let entry = self.advance(key, Edge::Pressed);
        let (device, bytes, counters) = (entry.device.take()?, entry.bytes, Arc::clone(&entry.counters));
        self.on_device.lower(bytes);
        Some((device, parcel, counters))
    }

    /// Puts an idle entry at the head of the store queue; false if there is no place for it below the device.
    fn is_to_leave(&mut self, key: EntryKey, here: &Here) -> bool {
        let Some(entry) = self.entry(key) else { return false };
        if entry.parcel.is_none() {
            let tier = self.tier.clone();
            let parcel = tier.and_then(|tier| tier.parcel(entry.bytes, entry.scope, here).ok());
            let Some(parcel) = parcel else { return false };
            parcel.of_any_stream();
            if let Some(entry) = self.entry_mut(key) {
                entry.parcel = Some(parcel);
            }
        }
        let entry = match self.entry(key).map(|entry| entry.state) {
            Some(State::Kept) => self.advance(key, Edge::Pressed),
            _ => &mut self.entries[key.index],
        };
        (entry.queued, entry.parts) = (true, Vec::new());
        self.queue.retain(|queued| *queued != key);
        self.queue.push_front(key);
        true
    }
}

impl Entry {
    /// Whether it was loaded, and nobody has asked for it yet, or who has is done with it for now.
    fn is_unused(&self) -> bool {
        let belongs_to_us = || self.storage().is_some_and(|storage| storage.owners() == 1);
        self.state == State::Loaded && (self.early || (self.asked && belongs_to_us()))
    }

    /// Whether its bytes are on the device alone, hold what was saved, and belong to the cache alone, so that a store frees them, and no
    /// earlier store is in flight.
    fn is_idle(&self) -> bool {
        let belongs_to_us = |device: &Block| {
            let storage: &Storage = device.storage();
            device.is_current() && storage.id() == self.source.id() && storage.owners() == 1
        };
        matches!(self.state, State::Device | State::Kept)
            && !self.storing
            && !self.source.is_written()
            && self.device.as_ref().is_some_and(belongs_to_us)
    }
}
