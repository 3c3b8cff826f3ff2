//! The cache as backward uses it: handles get their bytes, and are let go.

use std::sync::Arc;
use std::time::Instant;

use ssdtrain_libtorch::{Block, Storage};

use super::keys::{EntryKey, TapeKey};
use super::table::{Answer, Released, Squeeze, Table};
use super::{Cache, failures};
use crate::sync::MutexGuard;
use crate::telemetry::{Counters, StallCause};
use crate::tier::Here;

impl Cache {
    /// Backward has come to what was saved at this position of a tape, and is computed again.
    pub(crate) fn comes_to(&self, tape: TapeKey, position: usize) {
        self.table.lock().comes_to(tape, position);
    }

    /// Gives a handle its bytes: from the device if possible, otherwise from the tier below. If backward has come to its `position` in the
    /// tape, what lies before that is loaded ahead.
    pub(crate) fn fetch(
        self: &Arc<Self>,
        key: EntryKey,
        tape: TapeKey,
        position: Option<usize>,
    ) -> Result<Storage, String> {
        let mut table = self.table.lock();
        let here = Here::default();
        let mut waited: Option<(Instant, Arc<Counters>)> = None;
        let mut missed = false;
        let until = table.saved();
        loop {
            while waited.is_none() && !self.fits_backward(&mut table, (key, tape), until, &here) {}
            let mut jobs = Vec::new();
            let answer = table.ask(key, &mut jobs);
            missed |= !jobs.is_empty();
            if waited.is_none() {
                table.look_ahead(tape, position, missed, &mut jobs);
            }
            self.sample(&table);
            if !jobs.is_empty() {
                MutexGuard::unlocked(&mut table, || self.submit(jobs, &here));
            }
            match answer {
                Answer::Here(storage, order) => {
                    drop(table);
                    if let Some((start, counters)) = waited {
                        self.stalled(&counters, StallCause::Load, start);
                    }
                    if let Some((parcel, counters)) = order
                        && let Err(error) =
                            parcel.order(Some(&storage), Some(StallCause::CopyIn), &counters, &here)
                    {
                        let text = error.to_string();
                        failures::note(&error);
                        self.table.lock().note_failure(key, error);
                        return Err(text);
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

    /// A handle [will not ask again](Table::served). The result is to be [given back](Cache::gives_back).
    pub(super) fn served(&self, key: EntryKey, round: &mut u64) -> Option<Block> {
        let mut table = self.table.lock();
        let device = table.served(key, round);
        self.sample(&table);
        device
    }

    /// Gives back the memory of what has left the device. Must be called without holding a lock.
    pub(super) fn gives_back(&self, device: Option<Block>) {
        if let Some(device) = device {
            #[cfg(test)]
            crate::sync::assert_nothing_is_locked();
            drop(device);
            self.departs();
        }
    }

    /// The graph has released a handle.
    pub(crate) fn release(&self, key: EntryKey, tape: TapeKey, round: u64) {
        let Released { entry, device } = {
            let mut table = self.table.lock();
            let gone = table.release(key, tape, round);
            self.sample(&table);
            gone
        };
        self.gives_back(device);
        let Some(mut entry) = entry else { return };
        if let Some(parcel) = &entry.parcel {
            parcel.abandon(entry.storage());
        }
        drop(entry.device.take());
        self.departs();
        if let Some(storage) = entry.source.upgrade() {
            self.table.lock().outlived(&storage);
        }
    }

    /// What can be done so that backward, which asks for `wanted` of `tape`, keeps to its budget; true if nothing more. So many entries were
    /// saved when it began to ask.
    fn fits_backward(
        self: &Arc<Self>,
        table: &mut MutexGuard<'_, Table>,
        (wanted, tape): (EntryKey, TapeKey),
        until: u64,
        here: &Here,
    ) -> bool {
        let counters = |table: &Table, key| table.entry(key).map(|entry| Arc::clone(&entry.counters));
        let mut jobs = Vec::new();
        match table.squeeze_for_backward(wanted, tape, until, &mut jobs) {
            Squeeze::Fits => true,
            Squeeze::Begun => {
                MutexGuard::unlocked(table, || self.submit(jobs, here));
                false
            }
            Squeeze::LetGo(key, parcel) => {
                counters(table, key).is_none_or(|counters| !self.let_go(table, key, parcel, &counters, here))
            }
            Squeeze::Wait(cause) => {
                let start = Instant::now();
                self.changed.wait(table);
                counters(table, wanted).iter().for_each(|counters| self.stalled(counters, cause, start));
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ssdtrain_libtorch::Reliever;
    use ssdtrain_store::{BackendKind, Direction, Faulty, Pool, Store, StoreConfig};

    use super::super::entry::State;
    use super::super::table::Limits;
    use super::super::waits::{BYTES, Batch, LATE};
    use super::*;
    use crate::tier::DiskTier;

    /// Storages leave when they are stored, which tests hold up.
    fn on_disk() -> (Arc<Faulty>, Arc<Cache>, Batch) {
        let faulty = Arc::new(Faulty::new(Arc::new(Pool::new(1).unwrap())));
        let config = StoreConfig { backend: BackendKind::Memory, ..StoreConfig::default() };
        let store = Store::open_with(config, Arc::<Faulty>::clone(&faulty)).unwrap();
        let limits = Limits { late: false, prefetch: 8 * BYTES, ..LATE };
        let cache = Cache::new(Some(Arc::new(DiskTier::new(store, None))), limits, None);
        let batch = Batch::new(&cache);
        (faulty, cache, batch)
    }

    /// The position of another handle of what was saved at this place.
    fn attach(cache: &Cache, batch: &Batch, place: usize) -> usize {
        cache.table.lock().attach(batch.key(place), batch.tape())
    }

    fn serve(cache: &Cache, key: EntryKey, round: &mut u64) {
        cache.gives_back(cache.served(key, round));
    }

    fn state(cache: &Cache, key: EntryKey) -> State {
        cache.table.lock().entry(key).unwrap().state
    }

    #[test]
    fn what_backward_uses_while_it_is_stored_stays_for_its_other_handles() {
        let (faulty, cache, mut batch) = on_disk();
        faulty.hold(Direction::Write);
        batch.save(1);
        let (key, tape, second) = (batch.key(0), batch.tape(), attach(&cache, &batch, 0));
        faulty.wait_held(1);
        let (mut one, mut other) = (0, 0);
        let used = cache.fetch(key, tape, Some(second)).unwrap();
        serve(&cache, key, &mut one);
        faulty.release();
        cache.quiesce();
        assert_eq!(state(&cache, key), State::Loaded);
        drop(used);
        drop(cache.fetch(key, tape, Some(0)).unwrap());
        serve(&cache, key, &mut other);
        assert_eq!((state(&cache, key), batch.counters.loaded.tally().count), (State::Away, 0));
        [one, other].into_iter().for_each(|round| cache.release(key, tape, round));
    }

    #[test]
    fn handles_that_are_done_stay_so_where_the_copy_leaves_and_comes_back() {
        let (_, cache, mut batch) = on_disk();
        batch.save(1);
        let (key, tape, second) = (batch.key(0), batch.tape(), attach(&cache, &batch, 0));
        cache.quiesce();
        let (mut one, mut other) = (0, 0);
        for backward in 1..=2 {
            drop(cache.fetch(key, tape, Some(second)).unwrap());
            serve(&cache, key, &mut one);
            assert_eq!(Arc::clone(&cache).relieve(BYTES), BYTES);
            drop(cache.fetch(key, tape, Some(0)).unwrap());
            serve(&cache, key, &mut other);
            assert_eq!((state(&cache, key), cache.held().2), (State::Away, 0), "backward {backward}");
        }
        [one, other].into_iter().for_each(|round| cache.release(key, tape, round));
    }

    #[test]
    fn a_handle_that_never_asks_is_not_waited_for() {
        let (_, cache, mut batch) = on_disk();
        batch.save(1);
        let (key, tape) = (batch.key(0), batch.tape());
        attach(&cache, &batch, 0);
        cache.quiesce();
        let (mut one, mut other) = (0, 0);
        serve(&cache, key, &mut one);
        drop(cache.fetch(key, tape, Some(0)).unwrap());
        serve(&cache, key, &mut other);
        assert_eq!(state(&cache, key), State::Away);
        [one, other].into_iter().for_each(|round| cache.release(key, tape, round));
    }

    /// Its store ends when backward has passed the last place where it was saved.
    #[test]
    fn what_backward_has_passed_is_not_loaded_ahead_again() {
        let (faulty, cache, mut batch) = on_disk();
        (1..=4).for_each(|word| batch.save(word));
        cache.quiesce();
        faulty.hold(Direction::Write);
        batch.save(5);
        let (tape, last) = (batch.tape(), attach(&cache, &batch, 4));
        faulty.wait_held(1);
        cache.set_limits(Limits { late: false, ..LATE });
        let mut rounds = [0; 6];
        for (place, position) in [(4, last), (3, 3), (2, 2)] {
            drop(cache.fetch(batch.key(place), tape, Some(position)).unwrap());
            serve(&cache, batch.key(place), &mut rounds[position]);
        }
        cache.set_limits(Limits { late: false, prefetch: 8 * BYTES, ..LATE });
        // A rerun borrows two storages; the store ends between.
        cache.comes_to(tape, 2);
        drop(cache.fetch(batch.key(1), tape, None).unwrap());
        faulty.release();
        cache.quiesce();
        drop(cache.fetch(batch.key(0), tape, None).unwrap());
        cache.quiesce();
        assert_eq!([2, 3, 4].map(|place| state(&cache, batch.key(place))), [State::Away; 3]);
        for (place, position) in [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (4, last)] {
            cache.release(batch.key(place), tape, rounds[position]);
        }
    }
}
