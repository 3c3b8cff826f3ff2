//! A plain record of what a table holds, and steps that are taken with it and with [`Table`] alike: storages are saved, moved, written to,
//! asked for and released, in whatever order. One word of each storage stands for all its bytes.

mod below;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use ssdtrain_libtorch::{Storage, StorageId};
use ssdtrain_store::sync::Mutex;

use self::below::Below;
use super::super::entry::State;
use super::super::keys::{EntryKey, TapeKey};
use super::{Answer, Entry, Job, Limits, Outdated, Part, Released, Relief, Saved, Squeeze, Table, Tried};
use crate::error::{Completion, Error, Result};
use crate::telemetry::{ScopeId, StallCause};
use crate::tier::{Here, Parcel, Tier};

/// What a table and what is below it are like. Sizes are in bytes.
#[derive(Clone, Copy, Debug)]
struct TableSettings {
    /// Whether storages leave in stream order, or when they are stored.
    in_stream_order: bool,
    /// Whether what was loaded may leave again.
    evicts: bool,
    /// Whether storages leave as late as the budget allows.
    late: bool,
    /// The room below the device.
    room: u64,
    /// The budget while tensors are saved.
    device_budget: u64,
    /// The budget while they are asked for.
    backward_budget: u64,
    /// What may be loaded ahead.
    prefetch: u64,
    /// What may be on its way out at once.
    stores_in_flight: u64,
}

/// Something that happens to a table. Where one of several things is meant, its number is counted round.
#[derive(Clone, Copy, Debug)]
enum TableStep {
    /// A micro-batch begins.
    OpenTape,
    /// A step no longer uses one of the tapes.
    CloseTape(usize),
    /// A new storage is saved in one of the open tapes.
    Save {
        /// The tape.
        tape: usize,
        /// Its size in words.
        words: u8,
        /// Whether it is to stay on the device.
        keeps: bool,
        /// Whether the program goes on holding it.
        holds: bool,
    },
    /// A storage that the program holds is saved.
    SaveHeld(usize, usize),
    /// The program writes to a storage that it holds.
    Write(usize),
    /// The program lets go of a storage.
    Drop(usize),
    /// Everything that has to leave begins to.
    Flush,
    /// A transfer that was decided on is handed over.
    HandOver(usize),
    /// A transfer ends, in success or not.
    End(usize, bool),
    /// A handle asks for its bytes; the program holds them from then on if it says so.
    Ask(usize, bool),
    /// A handle will not ask again in this backward.
    Serve(usize),
    /// The graph releases a handle.
    Release(usize),
    /// Memory of the device is short.
    Relieve,
    /// From now on there is no memory for loads, or there is; and the device refuses to wait for transfers, or does not.
    Weather(bool, bool),
    /// Stored storages are freed only when memory is sampled; or no longer.
    HoldBack(bool),
    /// Memory is sampled.
    Sample,
    /// A step begins.
    BeginStep,
}

/// Takes `steps` with a table and with a record of it; at last everything is asked for, and released. Panics where the two differ.
fn compare(settings: TableSettings, steps: impl IntoIterator<Item = TableStep>) {
    let mut record = Record::new(settings);
    for step in steps {
        record.take(step);
        record.assert_same();
    }
    record.finish();
}

/// A transfer that has ended, and how.
type Ended = (Awaited, Result<()>);

/// Its keys are those of the table, and what they stand for is known here.
struct Record {
    settings: TableSettings,
    table: Table,
    below: Arc<Below>,
    open: Vec<TapeKey>,
    handles: Vec<Handle>,
    /// The word that each entry has to be served with, and the storage that it was saved from.
    words: HashMap<EntryKey, (u64, StorageId)>,
    /// Those of which a load or the wait for one has failed.
    failed: HashSet<EntryKey>,
    /// What the program holds, and how often it wrote to that.
    held: Vec<(Storage, u32)>,
    /// Transfers that were decided on, and not handed over yet.
    jobs: Vec<Job>,
    /// Transfers that the table waits for, handed over or not.
    awaited: Vec<Awaited>,
    ended: Arc<Mutex<Vec<Ended>>>,
    memory_is_short: bool,
    last_word: u64,
}

struct Handle {
    key: EntryKey,
    tape: TapeKey,
    position: usize,
    round: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Awaited {
    key: EntryKey,
    bytes: u64,
    /// The number of the store; `None` of a load.
    store: Option<u64>,
}

impl Record {
    fn new(settings: TableSettings) -> Record {
        let below = Below::new(settings);
        let TableSettings { device_budget, backward_budget, prefetch, stores_in_flight, late, .. } = settings;
        let limits = Limits { device_budget, backward_budget, prefetch, stores_in_flight, late };
        Record {
            settings,
            table: Table::new(Some(Arc::<Below>::clone(&below)), limits),
            below,
            open: Vec::new(),
            handles: Vec::new(),
            words: HashMap::new(),
            failed: HashSet::new(),
            held: Vec::new(),
            jobs: Vec::new(),
            awaited: Vec::new(),
            ended: Arc::default(),
            memory_is_short: false,
            last_word: 0,
        }
    }

    fn take(&mut self, step: TableStep) {
        match step {
            TableStep::OpenTape => self.open.push(self.table.open_tape()),
            TableStep::CloseTape(index) => {
                if let Some(index) = round(index, self.open.len()) {
                    self.table.close_tape(self.open.swap_remove(index));
                }
            }
            TableStep::Save { tape, words, keeps, holds } => {
                let Some(tape) = round(tape, self.open.len()) else { return };
                let storage = Storage::allocate(8 * u64::from(words).max(1)).expect("a few words");
                set_word(&storage, self.next_word());
                if holds {
                    self.held.push((storage.clone(), 0));
                }
                self.save(self.open[tape], storage, 0, keeps);
            }
            TableStep::SaveHeld(tape, index) => {
                let (Some(tape), Some(index)) = (round(tape, self.open.len()), round(index, self.held.len()))
                else {
                    return;
                };
                let (storage, version) = &self.held[index];
                self.save(self.open[tape], storage.clone(), *version, false);
            }
            TableStep::Write(index) => self.write(index),
            TableStep::Drop(index) => {
                round(index, self.held.len()).map(|index| self.held.swap_remove(index));
            }
            TableStep::Flush => {
                self.decide(Table::pump_all);
            }
            TableStep::HandOver(index) => {
                round(index, self.jobs.len()).into_iter().for_each(|index| self.hand_over(index));
            }
            TableStep::End(index, succeeds) => {
                self.below.ends(index, succeeds);
                self.hear();
            }
            TableStep::Ask(index, holds) => {
                let Some(index) = round(index, self.handles.len()) else { return };
                let storage = self.ask(index);
                self.held.extend(storage.filter(|_| holds).map(|storage| (storage, 0)));
            }
            TableStep::Serve(index) => {
                round(index, self.handles.len()).into_iter().for_each(|index| self.serve(index));
            }
            TableStep::Release(index) => {
                round(index, self.handles.len()).into_iter().for_each(|index| self.release(index));
            }
            TableStep::Relieve => self.relieve(),
            TableStep::Weather(memory_is_short, refuses_order) => {
                self.memory_is_short = memory_is_short;
                self.below.refuse_order(refuses_order);
            }
            TableStep::HoldBack(holds) => drop(self.table.hold_back(holds)),
            TableStep::Sample => {
                drop(self.table.stored_since());
                assert!(self.table.alive().bytes >= self.table.held().2);
            }
            TableStep::BeginStep => self.table.begin_step(),
        }
    }
}

impl Record {
    fn next_word(&mut self) -> u64 {
        self.last_word += 1;
        self.last_word
    }

    /// Has the table decide on transfers.
    fn decide<T>(&mut self, decide: impl FnOnce(&mut Table, &mut Vec<Job>) -> T) -> T {
        let mut jobs = Vec::new();
        let outcome = decide(&mut self.table, &mut jobs);
        let awaited =
            jobs.iter().map(Awaited::of).filter(|one| one.store.is_none() || !self.settings.in_stream_order);
        self.awaited.extend(awaited);
        self.jobs.extend(jobs);
        outcome
    }

    /// Saves a storage the way the cache does.
    fn save(&mut self, tape: TapeKey, storage: Storage, version: u32, keeps: bool) {
        let (here, bytes, word) = (Here::default(), storage.bytes(), word(&storage));
        let part = Part { layout: 0, bytes };
        let below = Arc::<Below>::clone(&self.below);
        let mut parcel = (!keeps).then(|| below.parcel(bytes, ScopeId::default(), &here).expect("a place"));
        let key = loop {
            if let Some((key, written)) = self.table.find(storage.id(), version) {
                written.into_iter().for_each(Outdated::abandon);
                assert_eq!(self.words[&key].0, word, "the entry is of what the storage holds now");
                self.table.covered(key, part);
                break key;
            }
            if self.fits(bytes) {
                let held = self.table.on_device.now() + self.left_in_use() + bytes;
                self.assert_waited(held, self.settings.device_budget, None);
                let (scope, counters) = (ScopeId::default(), Arc::default());
                let (id, parcel) = (storage.id(), parcel.take());
                let saved = Saved { storage, parcel, version, part, scope, step: 1, counters };
                let key = self.table.insert(saved);
                assert!(self.words.insert(key, (word, id)).is_none(), "a key is never used again");
                break key;
            }
        };
        let position = self.table.attach(key, tape);
        self.handles.push(Handle { key, tape, position, round: 0 });
        self.decide(Table::pump);
    }

    /// Bytes that are not on the device for the table, but that the program holds.
    fn left_in_use(&self) -> u64 {
        let held_back = |serial| self.table.held_back.iter().flatten().any(|held| held.key.serial == serial);
        let entries = self.table.entries.iter().map(|(_, entry)| entry);
        let left = entries.filter(|entry| entry.state == State::Away && entry.source.upgrade().is_some());
        let left = left.filter(|entry| !held_back(entry.serial));
        let left = left.filter(|_| !self.settings.in_stream_order);
        left.map(|entry| entry.bytes).sum()
    }

    /// Nothing exceeds a budget as long as something else than what is `wanted` is on its way out, or may go, and would free memory.
    fn assert_waited(&self, held: u64, budget: u64, wanted: Option<EntryKey>) {
        let is_other = |key: &EntryKey| Some(*key) != wanted;
        let stores = self.awaited.iter().filter(|one| one.store.is_some()).map(|one| one.key);
        let leaving = stores.filter(is_other).filter(|key| self.frees(*key, State::Storing)).count();
        // Backward leaves there what is to stay as long as it may.
        let may_go = wanted.is_none() || !self.settings.late;
        let queued = self.table.queue.iter().filter(|key| may_go && is_other(key));
        let queued = queued.filter(|key| self.frees(**key, State::Device)).count();
        let frees = if self.settings.in_stream_order { leaving } else { leaving + queued };
        assert!(
            held <= budget || frees == 0,
            "{held} bytes, {budget} allowed, and {leaving} are on their way, {queued} may go"
        );
    }

    /// Whether an entry in this state frees memory once it is stored, or has gone and does so then.
    fn frees(&self, key: EntryKey, state: State) -> bool {
        let is_held = |entry: &Entry| {
            let id = entry.source.id();
            let held_back = self.table.held_back.iter().flatten().filter(|held| held.storage.id() == id);
            // What was released and saved anew is held back twice, and goes with the next sample.
            self.held.iter().any(|(held, _)| held.id() == id) || held_back.count() > 1
        };
        self.table.entry(key).map_or(state == State::Storing, |entry| entry.state == state && !is_held(entry))
    }

    /// Makes room, or waits for some; true if there is nothing more to do for it.
    fn fits(&mut self, bytes: u64) -> bool {
        match self.decide(|table, jobs| table.squeeze(bytes, jobs)) {
            Squeeze::Fits => true,
            Squeeze::Begun => false,
            Squeeze::LetGo(key, parcel) => !self.let_go(key, &parcel),
            Squeeze::Wait(_) => {
                self.wait();
                false
            }
        }
    }

    /// Waits until something changes: others hand over what was decided on, or the oldest transfer ends. If neither can be, somebody
    /// would wait for ever.
    fn wait(&mut self) {
        if self.jobs.is_empty() {
            assert!(self.below.ends(0, true), "nobody is left to wake who waits");
            self.hear();
        }
        while !self.jobs.is_empty() {
            self.hand_over(0);
        }
    }

    /// Has a storage leave in stream order; false if the device refuses to wait for its store.
    fn let_go(&mut self, key: EntryKey, parcel: &Arc<dyn Parcel>) -> bool {
        // Who orders waits for the hand-over.
        let is_own = |job: &Job| matches!(job, Job::Store { key: own, .. } if *own == key);
        if let Some(index) = self.jobs.iter().position(is_own) {
            self.hand_over(index);
        }
        let store = self.table.entry(key).map(|entry| entry.stores);
        let ordered = parcel.order(None, Some(StallCause::DeviceBudget), &Arc::default(), &Here::default());
        let bytes = self.table.entry(key).map(|entry| entry.bytes);
        let Some((bytes, store)) = bytes.zip(store) else { return true };
        let left = ordered.is_ok();
        self.stored(key, store, bytes, ordered);
        left
    }

    fn hand_over(&mut self, index: usize) {
        let job = self.jobs.remove(index);
        let awaited = Awaited::of(&job);
        let ended = Arc::clone(&self.ended);
        let done = Completion::new(move |outcome| ended.lock().push((awaited, outcome)));
        match job {
            Job::Store { parcel, from, .. } => parcel.store(from, done),
            Job::Load { key, bytes, early: true, .. } if self.memory_is_short => {
                done.dismiss();
                self.awaited.remove(self.place_of(awaited));
                self.table.postponed(key, bytes);
            }
            Job::Load { .. } if self.memory_is_short => done.call(Err(Error::torch("no memory"))),
            Job::Load { key, parcel, bytes, .. } => {
                let into = Storage::allocate(bytes).expect("a few words");
                set_word(&into, u64::MAX);
                if self.table.loads_into(key, &into) {
                    parcel.load(into, &Here::default(), done);
                } else {
                    done.dismiss();
                    self.awaited.remove(self.place_of(awaited));
                    self.table.postponed(key, bytes);
                }
            }
        }
        self.hear();
    }

    fn place_of(&self, awaited: Awaited) -> usize {
        self.awaited.iter().position(|one| *one == awaited).expect("it is waited for")
    }

    /// Tells the table which transfers have ended.
    fn hear(&mut self) {
        let ended = std::mem::take(&mut *self.ended.lock());
        for (awaited @ Awaited { key, bytes, store }, outcome) in ended {
            if store.is_none() || !self.settings.in_stream_order {
                self.awaited.remove(self.place_of(awaited));
            }
            if let Some(store) = store {
                self.stored(key, store, bytes, outcome);
                self.decide(Table::pump);
            } else {
                if outcome.is_err() {
                    self.failed.insert(key);
                }
                drop(self.table.loaded(key, bytes, outcome));
            }
        }
    }

    /// Tells the table that a store has ended. What backward uses by then stays for the handles that have not been served.
    fn stored(&mut self, key: EntryKey, store: u64, bytes: u64, outcome: Result<()>) {
        let is_used = self.table.entry(key).is_some_and(|entry| {
            let ends = outcome.is_ok() && entry.state == State::Storing && entry.stores == store;
            let is_held = self.held.iter().any(|(held, _)| held.id() == entry.source.id());
            ends && is_held && entry.asked && entry.served < entry.handles
        });
        drop(self.table.stored(key, store, bytes, outcome.map_err(|error| error.to_string())));
        assert!(!is_used || self.table.entries[key.index].state == State::Loaded, "it is used");
    }

    fn write(&mut self, index: usize) {
        let Some(index) = round(index, self.held.len()) else { return };
        let word = self.next_word();
        let (storage, version) = &mut self.held[index];
        *version += 1;
        set_word(storage, word);
        let id = storage.id();
        self.table.written(id).into_iter().for_each(Outdated::abandon);
        for (key, (expected, source)) in &mut self.words {
            // What was served and is there still is the saved tensor as well.
            let device = self.table.entry(*key).and_then(|entry| entry.storage()).map(Storage::id);
            if *source == id || device == Some(id) {
                *expected = word;
            }
        }
    }

    /// Asks once. Returns what the handle was served with.
    fn ask(&mut self, index: usize) -> Option<Storage> {
        let Handle { key, tape, position, .. } = self.handles[index];
        let until = self.table.saved();
        let begins = self.table.tapes.get(&tape).is_some_and(|tape| !tape.has_begun());
        loop {
            match self.decide(|table, jobs| table.squeeze_for_backward(key, tape, until, jobs)) {
                Squeeze::Begun => {}
                Squeeze::Wait(_) => self.wait(),
                Squeeze::LetGo(leaving, parcel) if self.let_go(leaving, &parcel) => {}
                _ => break,
            }
        }
        if begins {
            self.assert_waited(self.table.on_device.now(), self.settings.backward_budget, Some(key));
        }
        let answer = self.decide(|table, jobs| {
            let answer = table.ask(key, jobs);
            table.look_ahead(tape, Some(position), !jobs.is_empty(), jobs);
            answer
        });
        match answer {
            Answer::Here(storage, order) => {
                let ordered = order.map_or(Ok(()), |(parcel, counters)| {
                    parcel.order(Some(&storage), Some(StallCause::CopyIn), &counters, &Here::default())
                });
                if let Err(error) = ordered {
                    self.table.note_failure(key, error);
                    return None;
                }
                assert_eq!(word(&storage), self.words[&key].0, "what was saved comes back");
                Some(storage)
            }
            Answer::Failed(failure) => {
                assert!(self.failed.contains(&key), "{failure}");
                None
            }
            Answer::Wait => {
                assert!(self.table.is_reading(key), "who waits is waited for");
                None
            }
        }
    }

    /// What was asked for goes once all its handles are done with it.
    fn serve(&mut self, index: usize) {
        let key = self.handles[index].key;
        let entry = &self.table.entries[key.index];
        let may_go = self.settings.evicts && entry.state == State::Loaded && entry.asked;
        let round = entry.round + 1;
        let gone = self.table.served(key, &mut self.handles[index].round);
        let are_done = self.handles.iter().filter(|handle| handle.key == key).all(|one| one.round == round);
        assert_eq!(gone.is_some(), may_go && are_done);
    }

    fn release(&mut self, index: usize) {
        let Handle { key, tape, round, .. } = self.handles.swap_remove(index);
        let Released { entry, device } = self.table.release(key, tape, round);
        assert!(entry.is_none() || device.is_none());
        assert_eq!(
            entry.is_some(),
            self.handles.iter().all(|handle| handle.key != key),
            "the last one ends it"
        );
        let Some(mut entry) = entry else { return };
        self.words.remove(&key);
        entry.parcel.iter().for_each(|parcel| parcel.abandon(entry.storage()));
        drop(entry.device.take());
        if let Some(storage) = entry.source.upgrade() {
            self.table.outlived(&storage);
        }
    }

    fn relieve(&mut self) {
        let mut tried = Tried::default();
        tried.computed = self.table.newest();
        loop {
            match self.decide(|table, jobs| table.relief(&mut tried, &Here::default(), jobs)) {
                Relief::LetGo(key, parcel) => drop(self.let_go(key, &parcel)),
                Relief::Left(block, parcel, counters) => {
                    // A device that refuses has failed, and does not use it either.
                    parcel
                        .order(Some(block.storage()), Some(StallCause::CopyIn), &counters, &Here::default())
                        .ok();
                }
                Relief::Stores(_) | Relief::Loads(_) | Relief::Wait | Relief::Ends => self.wait(),
                Relief::Begun(_) => {}
                Relief::Nothing => return,
            }
            self.assert_same();
        }
    }

    /// Asks for everything that is left, the newest first, on a machine without faults.
    fn finish(mut self) {
        self.take(TableStep::Weather(false, false));
        while let Some(last) = self.handles.len().checked_sub(1) {
            let key = self.handles[last].key;
            while self.ask(last).is_none() && !self.failed.contains(&key) {
                self.wait();
                self.assert_same();
            }
            self.release(last);
            self.assert_same();
        }
        while !self.jobs.is_empty() || !self.below.is_idle() {
            self.wait();
            self.assert_same();
        }
        (0..self.open.len()).for_each(|index| self.table.close_tape(self.open[index]));
        drop(self.table.hold_back(false));
        assert_eq!((self.table.held(), self.table.transfers()), ((0, 0, 0), 0));
        assert!(self.table.identities.is_empty());
        assert!(self.below.is_empty(), "all room below comes back");
    }

    /// Compares the table's sums with those of its entries, and its counts with those that are known here.
    fn assert_same(&self) {
        let table = &self.table;
        assert_eq!(table.entries.len(), self.words.len());
        let sum = |counts: &dyn Fn(&Entry) -> bool| {
            table.entries.iter().filter(|(_, entry)| counts(entry)).map(|(_, entry)| entry.bytes).sum::<u64>()
        };
        let is_here = |entry: &Entry| !matches!(entry.state, State::Away | State::Lost);
        let gone = self.awaited.iter().filter(|one| table.entry(one.key).is_none()).map(|one| one.bytes);
        assert_eq!(table.on_device.now(), sum(&is_here) + gone.sum::<u64>(), "bytes on the device");
        assert_eq!(table.live, sum(&|_| true));
        assert_eq!(table.live_leaving, sum(&|entry| entry.leaves));
        assert_eq!(table.early, sum(&|entry| entry.early));
        let stores = self.awaited.iter().filter(|one| one.store.is_some()).map(|one| one.bytes);
        assert_eq!((table.storing, table.transfers), (stores.sum(), self.awaited.len()));
        for (index, entry) in &table.entries {
            let key = EntryKey { index, serial: entry.serial };
            let handles = self.handles.iter().filter(|handle| handle.key == key);
            let served = handles.clone().filter(|handle| handle.round == entry.round + 1).count();
            assert_eq!((entry.handles, entry.served), (handles.count(), served), "{:?}", entry.state);
        }
        for (key, tape) in &table.tapes {
            assert_eq!(tape.handles, self.handles.iter().filter(|handle| handle.tape == *key).count());
            assert!(!tape.closed || tape.handles > 0, "a tape goes with its last handle");
        }
        assert!(table.identities.values().all(|key| table.entry(*key).is_some()), "names of what is gone");
    }
}

impl Awaited {
    fn of(job: &Job) -> Awaited {
        match job {
            Job::Store { key, store, from, .. } => {
                Awaited { key: *key, bytes: from.bytes(), store: Some(*store) }
            }
            Job::Load { key, bytes, .. } => Awaited { key: *key, bytes: *bytes, store: None },
        }
    }
}

fn round(index: usize, count: usize) -> Option<usize> {
    index.checked_rem(count)
}

fn word(storage: &Storage) -> u64 {
    // SAFETY: each storage of a record has room for a word, and one thread uses them.
    unsafe { storage.data().cast::<u64>().read() }
}

fn set_word(storage: &Storage, word: u64) {
    // SAFETY: as above.
    unsafe { storage.data().cast::<u64>().write(word) };
}

#[cfg(test)]
mod tests;
