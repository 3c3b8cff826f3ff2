//! Entries as backward asks for them: serving, loading, and prefetching.

use std::sync::Arc;

use ssdtrain_libtorch::{Block, Storage, Watch};

use super::super::entry::{Edge, State};
use super::super::tape::Tape;
use super::{Answer, EntryKey, Job, Squeeze, Table, TapeKey};
use crate::error::{Error, Result};
use crate::telemetry::StallCause;
use crate::tier::Parcel;

impl Table {
    /// What can be done so that everything on the device and the load of `wanted` fit backward's budget. Where storages leave when they are
    /// stored, backward waits as it begins to ask for what `tape` has, and for room for what it loads: for the stores of what was
    /// saved up to number `until`, whatever others save meanwhile.
    pub(crate) fn squeeze_for_backward(
        &mut self,
        wanted: EntryKey,
        tape: TapeKey,
        until: u64,
        jobs: &mut Vec<Job>,
    ) -> Squeeze {
        let away = self.entry(wanted).filter(|entry| entry.state == State::Away);
        let loaded = away.filter(|entry| entry.source.upgrade().is_none()).map(|entry| entry.bytes);
        let over = self.device_bytes() + loaded.unwrap_or(0) > self.limits.backward_budget;
        let begins = self.tapes.get(&tape).is_some_and(|tape| !tape.has_begun());
        if !over {
            return Squeeze::Fits;
        }
        if self.in_stream_order() {
            return match self.oldest_leaving() {
                Some((key, parcel)) if key != wanted => Squeeze::LetGo(key, parcel),
                _ => Squeeze::Fits,
            };
        }
        if loaded.is_none() && !begins {
            return Squeeze::Fits;
        }
        // It is about to be used.
        if self.entry(wanted).is_some_and(|entry| entry.state == State::Device) {
            self.stays(wanted);
        }
        let is_other = |key: EntryKey| key != wanted && key.serial <= until;
        if self.in_flight.iter().any(|key| is_other(*key) && self.frees(*key)) {
            return Squeeze::Wait(StallCause::DeviceBudget);
        }
        // What is wanted may be on its way out, but if that were waited for, it would have to come back.
        let own = self.in_flight.iter().filter(|key| **key == wanted).filter_map(|key| self.entry(*key));
        let others = self.storing - own.map(|entry| entry.bytes).sum::<u64>();
        if others > 0 && others >= self.limits.stores_in_flight {
            return match self.would_free(is_other) {
                true if !self.limits.late => Squeeze::Wait(StallCause::DeviceBudget),
                _ => Squeeze::Fits,
            };
        }
        match self.oldest_queued().filter(|key| is_other(*key) && !self.limits.late) {
            // There was no room below for it.
            Some(key) if !self.begin_store(key, jobs) => Squeeze::Wait(StallCause::HostPool),
            Some(_) => Squeeze::Begun,
            None => Squeeze::Fits,
        }
    }

    /// Answers a handle that asks for its bytes.
    pub(crate) fn ask(&mut self, key: EntryKey, jobs: &mut Vec<Job>) -> Answer {
        let Some(entry) = self.entry(key) else {
            return Answer::Failed("internal error: a handle outlived its entry".to_owned());
        };
        match entry.state {
            State::Device => self.stays(key),
            State::Storing if !entry.asked => entry.counters.forwarded.add(entry.bytes),
            State::Away => {
                if let Some(alive) = entry.source.upgrade().filter(|alive| alive.bytes() >= entry.bytes) {
                    entry.counters.forwarded.add(entry.bytes);
                    return Answer::Here(alive, None);
                }
                entry.counters.load_misses.add(entry.bytes);
                self.load(key, false, jobs);
                return Answer::Wait;
            }
            State::Loading => {
                // From now on somebody waits for it.
                self.not_early(key);
                return Answer::Wait;
            }
            State::Lost => {
                let failure = entry.failure.as_ref();
                return Answer::Failed(
                    failure.map_or_else(|| "unknown failure".to_owned(), Error::to_string),
                );
            }
            State::Storing | State::Loaded | State::Kept => {}
        }
        self.serve(key)
    }

    /// A handle will not ask for its bytes again in this backward. `round` is the handle's own record of the last round that it was done
    /// in. Once all handles are, the device copy goes, if anybody has asked for it: otherwise it may still be on its way. The result must
    /// be dropped without holding the lock.
    pub(crate) fn served(&mut self, key: EntryKey, round: &mut u64) -> Option<Block> {
        let entry = self.entry_mut(key)?;
        if *round != entry.round + 1 {
            *round = entry.round + 1;
            entry.served += 1;
        }
        if entry.asked { self.evict_if_served(key) } else { None }
    }

    /// Backward asks for what is only on the device, where it stays.
    fn stays(&mut self, key: EntryKey) {
        let entry = self.advance(key, Edge::Cancelled);
        let counters = &entry.counters;
        let counter = if entry.queued { &counters.cancelled } else { &counters.kept_parts };
        counter.add(entry.bytes);
        counters.forwarded.add(entry.bytes);
    }

    /// If storages leave when they are stored: an entry that has left is considered for loading, though it was passed while it was stored.
    pub(super) fn looks_again(&mut self, key: EntryKey) {
        if self.in_stream_order() {
            return;
        }
        let Some((tape, position)) = self.entry(key).map(|entry| entry.last) else { return };
        self.tapes.entry(tape).and_modify(|tape| tape.left(position));
    }

    fn serve(&mut self, key: EntryKey) -> Answer {
        self.not_early(key);
        let Some(entry) = self.entry_mut(key) else {
            return Answer::Failed("internal error: a handle outlived its entry".to_owned());
        };
        let Some(storage) = entry.device.as_ref().map(|block| block.storage().clone()) else {
            return Answer::Failed(format!("internal error: {:?} without bytes", entry.state));
        };
        if storage.bytes() < entry.bytes {
            let (now, then) = (storage.bytes(), entry.bytes);
            return Answer::Failed(format!(
                "a saved tensor's storage of {then} bytes was resized to {now} bytes"
            ));
        }
        entry.asked = true;
        let loaded = entry.state == State::Loaded;
        let order =
            entry.parcel.clone().filter(|_| loaded).map(|parcel| (parcel, Arc::clone(&entry.counters)));
        Answer::Here(storage, order)
    }

    /// Issues the load of an entry that is away. It begins when there is [memory](Table::loads_into) for it.
    fn load(&mut self, key: EntryKey, early: bool, jobs: &mut Vec<Job>) {
        let Some(entry) = self.entry(key) else { return };
        let bytes = entry.bytes;
        let Some(parcel) = entry.parcel.clone() else {
            self.advance(key, Edge::LoadFailed).failure =
                Some(Error::torch("internal error: away without a place"));
            return;
        };
        jobs.push(Job::Load { key, parcel, bytes, early });
        let entry = self.advance(key, Edge::LoadIssued);
        entry.early = early;
        entry.asked = false;
        // Handles that are done with the copy before are still done if it left before all were.
        if entry.served == 0 || entry.served >= entry.handles {
            (entry.round, entry.served) = (entry.round + 1, 0);
        }
        self.on_device.raise(bytes);
        self.early += if early { bytes } else { 0 };
        self.transfers += 1;
    }

    /// Records the memory for a load that was issued. False if the entry is gone: then nobody keeps it, and nothing may be loaded into it.
    #[must_use]
    pub(crate) fn loads_into(&mut self, key: EntryKey, into: &Storage) -> bool {
        let Some(entry) = self.entry_mut(key) else { return false };
        let before = entry.returned.replace(Watch::new(into));
        entry.device = Some(Block::of(into.clone()));
        if let Some(before) = before {
            self.forget(before.id(), key);
        }
        self.identities.insert(into.id(), key);
        true
    }

    /// Undoes a load that nobody waits for: an early one for which there is no memory, so that backward will ask for the entry again, or
    /// that of an entry that is gone.
    pub(crate) fn postponed(&mut self, key: EntryKey, bytes: u64) {
        self.transfers -= 1;
        self.on_device.lower(bytes);
        self.not_early(key);
        if self.entry(key).is_some() {
            self.advance(key, Edge::LoadPostponed);
        }
    }

    /// The load of `key` has ended. The result must be dropped without holding the lock.
    pub(crate) fn loaded(&mut self, key: EntryKey, bytes: u64, outcome: Result<()>) -> Option<Block> {
        self.transfers -= 1;
        let Some(entry) = self.entry(key) else {
            self.on_device.lower(bytes);
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
                self.on_device.lower(bytes);
                device
            }
        }
    }

    /// Backward has come to what was saved at `position` of `tape`, where there is no entry.
    pub(crate) fn comes_to(&mut self, tape: TapeKey, position: usize) {
        self.tapes.entry(tape).and_modify(|tape| tape.comes_to(position));
    }

    /// Backward has asked for something of `tape`, and has come to `position` if that is given, or else is where it was; `missed` if it has to
    /// wait for it.
    /// Prefetches as many bytes as the limits allow.
    pub(crate) fn look_ahead(
        &mut self,
        tape: TapeKey,
        position: Option<usize>,
        missed: bool,
        jobs: &mut Vec<Job>,
    ) {
        if let Some(tape) = self.tapes.get_mut(&tape) {
            tape.begins();
            match position {
                Some(position) => tape.asked(position, missed),
                None if missed => tape.missed(),
                None => {}
            }
        }
        while let Some(key) = self.tapes.get(&tape).and_then(Tape::ahead) {
            if let Some(entry) = self.entry(key).filter(|entry| entry.state == State::Away) {
                let alive = entry.source.upgrade().is_some();
                let bytes = entry.bytes;
                // An entry larger than the limit is loaded alone, so that it does not block everything below it.
                let alone = self.early == 0 && self.limits.prefetch > 0;
                let fits = (alone || self.early + bytes <= self.limits.prefetch)
                    && self.device_bytes() + bytes <= self.limits.backward_budget;
                if !(alive || fits) {
                    break;
                }
                if !alive {
                    self.load(key, true, jobs);
                }
            }
            self.tapes.entry(tape).and_modify(Tape::advance);
        }
        // Bytes beyond what fits the device are read into a nearer tier, where the next prefetch finds them quickly.
        while let Some(key) = self.tapes.get(&tape).and_then(Tape::far) {
            let away = self.entry(key).filter(|entry| entry.state == State::Away);
            if !away.and_then(|entry| entry.parcel.clone()).is_none_or(Parcel::bring_near) {
                return;
            }
            self.tapes.entry(tape).and_modify(Tape::advance_near);
        }
    }
}
