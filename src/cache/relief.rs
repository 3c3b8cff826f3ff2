//! Memory of the device that runs out: what the cache lets go of so that an allocation need not fail.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ssdtrain_libtorch::{Block, Reliever, Storage};

use super::table::{Gone, Relief, Table, Tried};
use super::{Cache, EntryKey};
use crate::device::is_unanswered;
use crate::error::Result;
use crate::sync::MutexGuard;
use crate::telemetry::events::warn_once;
use crate::telemetry::{Counters, StallCause};
use crate::tier::{Here, Parcel};

/// Nobody has the lock for so long, unless it is the calling thread itself, which is then an error of ours.
const PATIENCE: Duration = Duration::from_secs(10);

impl Reliever for Cache {
    /// Runs on the thread whose allocation failed, or would exceed a ceiling: one of the program's, or one that allocates memory to load
    /// into. Neither has a lock of the cache or of a tier, nor has it begun anything that another thread waits for. One thread at a time does
    /// this, because what one is about to free is not there for another to find.
    ///
    /// The device may still use what is released, on whichever stream. So it is waited for: once before anything is copied, since each
    /// storage must have been computed, and before each storage is freed.
    fn relieve(self: Arc<Self>, bytes: u64) -> u64 {
        let (since, mut whose) = (Instant::now(), None);
        let freed = self.lets_go(bytes, &mut whose);
        if let Some(counters) = whose {
            self.stalled(&counters, StallCause::Memory, since);
        }
        freed
    }
}

impl Cache {
    /// Lets go of `bytes`, as far as there is anything to let go of. Returns how many it has freed. Tells `whose` storage left first.
    fn lets_go(self: &Arc<Self>, bytes: u64, whose: &mut Option<Arc<Counters>>) -> u64 {
        let Some(tier) = &self.tier else { return 0 };
        let before = self.departed.load(Ordering::Acquire);
        let by_others = || u64::from(self.departed.load(Ordering::Acquire) > before);
        let _alone = self.relieving.lock();
        if by_others() > 0 {
            return by_others();
        }
        let Some(mut table) = self.table.try_lock_for(PATIENCE) else {
            tracing::error!("internal error: a thread allocates while it has the cache's lock");
            return 0;
        };
        let pressure = self.pressure.lock().upgrade();
        if let Some(pressure) = &pressure {
            pressure.begins();
        }
        let (here, mut tried, mut freed) = (Here::default(), Tried::default(), 0);
        while freed < bytes {
            let may_free = table.has_entries() && tried.computed < table.newest();
            if may_free && !self.computes(&mut table, &mut tried) {
                break;
            }
            freed += self.free_held_back(&mut table);
            let mut jobs = Vec::new();
            let relief = table.relief(&mut tried, &here, &mut jobs);
            let counters = match &relief {
                Relief::LetGo(key, _) | Relief::Stores(key) | Relief::Begun(key) | Relief::Loads(key) => {
                    table.entry(*key).map(|entry| &entry.counters)
                }
                Relief::Left(_, _, counters) => Some(counters),
                Relief::Wait | Relief::Ends | Relief::Nothing => None,
            };
            if whose.is_none() {
                *whose = counters.map(Arc::clone);
            }
            freed += match relief {
                Relief::LetGo(key, parcel) => match self.presses_out(&mut table, key, parcel, &here) {
                    Ok(bytes) => bytes,
                    Err(_) => break,
                },
                Relief::Stores(key) => self.awaits(&mut table, key),
                Relief::Left(block, parcel, counters) => {
                    self.sample(&table);
                    let unloaded = || self.unloaded(block, parcel, &counters, &here);
                    match MutexGuard::unlocked(&mut table, unloaded) {
                        Ok(bytes) => bytes,
                        Err(_) => break,
                    }
                }
                Relief::Begun(key) => {
                    MutexGuard::unlocked(&mut table, || self.submit(jobs, &here));
                    // It may be over before the lock is taken again.
                    self.awaits(&mut table, key)
                }
                Relief::Loads(key) => {
                    while table.is_reading(key) {
                        self.changed.wait(&mut table);
                    }
                    0
                }
                Relief::Wait => {
                    self.changed.wait(&mut table);
                    0
                }
                // Whatever has gone by now, whoever has let it go, may be enough.
                Relief::Ends | Relief::Nothing if by_others() > 0 => break,
                Relief::Ends => {
                    self.changed.wait(&mut table);
                    0
                }
                Relief::Nothing => {
                    if !MutexGuard::unlocked(&mut table, || tier.one_ends()) {
                        break;
                    }
                    self.departs();
                    0
                }
            };
        }
        if let Some(pressure) = &pressure {
            pressure.ends();
        }
        freed.max(by_others())
    }

    /// Waits until what was saved so far has been computed; false if the device has failed.
    fn computes(&self, table: &mut MutexGuard<'_, Table>, tried: &mut Tried) -> bool {
        let newest = table.newest();
        let is_done = MutexGuard::unlocked(table, || self.waits_for_device()).is_ok();
        tried.computed = newest;
        is_done
    }

    /// Waits until the device has done what it was given.
    fn waits_for_device(&self) -> Result<()> {
        let outcome = self.tier.as_ref().map_or(Ok(()), |tier| tier.synchronize());
        outcome.inspect_err(
            |error| warn_once!(%error, "no memory is freed: the device does not do what it was given"),
        )
    }

    /// Releases an entry that is leaving. Returns the bytes.
    fn presses_out(
        &self,
        table: &mut MutexGuard<'_, Table>,
        key: EntryKey,
        parcel: Arc<dyn Parcel>,
        here: &Here,
    ) -> Result<u64> {
        let Some(counters) = table.entry(key).map(|entry| Arc::clone(&entry.counters)) else { return Ok(0) };
        let (_, gone) = self.leaves(table, key, parcel, None, &counters, here);
        let bytes = MutexGuard::unlocked(table, || self.free(gone))?;
        counters.pressed.add_some(bytes);
        Ok(bytes)
    }

    /// Waits until the store in flight of an entry has released it. Returns the bytes.
    fn awaits(&self, table: &mut MutexGuard<'_, Table>, key: EntryKey) -> u64 {
        let Some((bytes, counters)) =
            table.entry(key).map(|entry| (entry.bytes, Arc::clone(&entry.counters)))
        else {
            return 0;
        };
        let mut freed = 0;
        while table.is_storing(key) {
            self.changed.wait(table);
            freed += self.free_held_back(table);
        }
        let stored = if table.is_away(key) { bytes } else { 0 };
        counters.pressed.add_some(stored);
        // If what is stored is held back, it is among what was.
        if freed > 0 { freed } else { stored }
    }

    /// Frees what was loaded ahead. Returns the bytes.
    fn unloaded(
        &self,
        block: Block,
        parcel: Arc<dyn Parcel>,
        counters: &Arc<Counters>,
        here: &Here,
    ) -> Result<u64> {
        let ordered = parcel.order(Some(block.storage()), None, counters, here);
        if let Err(error) = &ordered {
            tracing::debug!(%error, "a storage that was loaded ahead is dropped");
        }
        let bytes = self.free((Some(block), Some(parcel)))?;
        // Otherwise the tier may still hold it.
        let bytes = if ordered.is_ok() { bytes } else { 0 };
        counters.pressed.add_some(bytes);
        Ok(bytes)
    }

    /// Frees what an entry has released, once the device is done with it, or what it does is in order. Returns the bytes. Fails if the
    /// device does not answer. Must be called without the lock.
    fn free(&self, (block, parcel): Gone) -> Result<u64> {
        let waited = self.waits_for_device();
        let bytes = block.as_ref().map_or(0, Block::bytes);
        drop((block, parcel));
        self.departs();
        // One that has failed does not use it either.
        match waited {
            Err(error) if is_unanswered(&error) => Err(error),
            _ => Ok(bytes),
        }
    }

    /// Frees what was to stay until memory is sampled next. Returns the bytes.
    fn free_held_back(&self, table: &mut MutexGuard<'_, Table>) -> u64 {
        let gone = table.stored_since();
        if gone.is_empty() {
            return 0;
        }
        let bytes = gone.iter().map(Storage::bytes).sum();
        MutexGuard::unlocked(table, || drop(gone));
        self.departs();
        bytes
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use ssdtrain_store::{BackendKind, Direction, Faulty, Pool, Store, StoreConfig};

    use super::super::table::{Answer, Limits};
    use super::super::waits::{BYTES, Batch, LATE};
    use super::*;
    use crate::device::Simulated;
    use crate::tier::modelled::{Copies, Fault, ModelDevice, set_word};
    use crate::tier::{DirectTier, DiskTier, HostSettings, HostTier, PoolSize, Tier};

    fn store() -> Store {
        Store::open(StoreConfig { backend: BackendKind::Memory, ..StoreConfig::default() }).unwrap()
    }

    fn host(pool: u64, fault: Option<Fault>) -> Arc<dyn Tier> {
        let settings = HostSettings { pool: PoolSize::Fixed(pool), read_ahead: 0 };
        HostTier::new(ModelDevice::new(Copies::AtLast, fault), None, settings, None).unwrap()
    }

    fn tiers() -> [Arc<dyn Tier>; 3] {
        let device = ModelDevice::new(Copies::AtLast, None);
        let direct = DirectTier::new(device, store(), BYTES, None).unwrap();
        [host(8 * BYTES, None), direct, Arc::new(DiskTier::new(store(), None))]
    }

    fn over(tier: Arc<dyn Tier>) -> (Arc<Cache>, Batch) {
        let cache = Cache::new(Some(tier), Limits { prefetch: 4 * BYTES, ..LATE }, None);
        let batch = Batch::new(&cache);
        (cache, batch)
    }

    fn on_device(cache: &Cache) -> u64 {
        cache.held().2 / BYTES
    }

    fn relieve(cache: &Arc<Cache>, storages: u64) -> u64 {
        Arc::clone(cache).relieve(storages * BYTES) / BYTES
    }

    #[test]
    fn what_would_have_stayed_goes_as_far_as_is_needed_and_comes_back() {
        for tier in tiers() {
            let (cache, mut batch) = over(tier);
            batch.keep(1);
            (2..=3).for_each(|word| batch.save(word));
            batch.keep(4);
            assert_eq!((relieve(&cache, 2), on_device(&cache)), (2, 2));
            assert_eq!((relieve(&cache, 9), on_device(&cache)), (2, 0), "all there is");
            assert_eq!(relieve(&cache, 1), 0);
            assert_eq!(batch.counters.pressed.tally().bytes, 4 * BYTES);
            batch.backward(false);
            assert_eq!(cache.held(), (0, 0, 0));
        }
    }

    /// The copies, which the device waits for as well.
    #[test]
    fn what_a_thread_waits_for_counts_once() {
        let settings = HostSettings { pool: PoolSize::Fixed(8 * BYTES), read_ahead: 0 };
        let device = Simulated::start(Duration::from_millis(20)).unwrap();
        let tier: Arc<dyn Tier> = HostTier::new(device, None, settings, None).unwrap();
        let (cache, mut batch) = over(tier);
        (1..=3).for_each(|word| batch.keep(word));
        let start = Instant::now();
        assert_eq!(relieve(&cache, 3), 3);
        let (took, waited) = (start.elapsed(), batch.counters.waited());
        cache.tier.as_ref().unwrap().settle();
        assert!(waited >= Duration::from_millis(3 * 20) && waited <= took, "{waited:?} of {took:?}");
        assert_eq!(batch.counters.waited(), waited, "the device's own queue has nothing to add");
        batch.backward(false);
    }

    /// It was saved on another stream than the one that the thread that stores it computes on.
    #[test]
    fn what_may_not_have_been_computed_yet_is_not_stored() {
        let (cache, mut batch) = over(host(8 * BYTES, None));
        batch.keep(1);
        let mut computed = cache.table.lock().newest();
        batch.keep(2);
        for begins in [true, false, true] {
            let (mut tried, mut jobs) = (Tried::default(), Vec::new());
            tried.computed = computed;
            let mut table = cache.table.lock();
            let relief = table.relief(&mut tried, &Here::default(), &mut jobs);
            assert_eq!(matches!(relief, Relief::Begun(_)), begins);
            computed = if begins { computed } else { table.newest() };
            drop(table);
            cache.submit(jobs, &Here::default());
            cache.flush(&batch.counters);
        }
        batch.backward(false);
    }

    #[test]
    fn the_oldest_goes_first() {
        for tier in tiers() {
            let (cache, mut batch) = over(tier);
            (1..=3).for_each(|word| batch.keep(word));
            assert_eq!(relieve(&cache, 2), 2);
            batch.fetch();
            assert_eq!(batch.counters.load_misses.tally().count, 0, "the newest is there");
            batch.backward(false);
            assert_eq!(batch.counters.loaded.tally().count, 2);
        }
    }

    #[test]
    fn what_was_loaded_ahead_goes_back_before_anything_is_stored() {
        for tier in tiers() {
            let (cache, mut batch) = over(tier);
            (1..=3).for_each(|word| batch.save(word));
            batch.flush();
            batch.keep(4);
            batch.keep(5);
            // The fourth and the fifth are there, and the three below them are loaded ahead.
            batch.fetch();
            cache.quiesce();
            assert_eq!((relieve(&cache, 2), on_device(&cache)), (2, 3));
            assert_eq!(batch.counters.offloaded.tally().count, 3, "nothing was stored");
            batch.backward(false);
            assert_eq!(cache.held(), (0, 0, 0));
        }
    }

    #[test]
    fn what_the_program_holds_is_not_stored_for_nothing() {
        for tier in tiers() {
            let (cache, mut batch) = over(tier);
            let storage = Storage::allocate(BYTES).unwrap();
            set_word(&storage, 1);
            batch.save_one(storage.clone(), true);
            assert_eq!(relieve(&cache, 1), 0);
            drop(storage);
            assert_eq!(relieve(&cache, 1), 1);
            batch.backward(false);
        }
    }

    #[test]
    fn what_finds_no_room_below_stays() {
        let (cache, mut batch) = over(host(BYTES, None));
        (1..=3).for_each(|word| batch.keep(word));
        assert_eq!((relieve(&cache, 3), on_device(&cache)), (1, 2));
        assert_eq!(relieve(&cache, 3), 0);
        batch.backward(false);
        assert_eq!(cache.held(), (0, 0, 0));
    }

    #[test]
    fn what_cannot_be_copied_stays_and_the_next_one_goes() {
        let (cache, mut batch) = over(host(8 * BYTES, Some(Fault::Copy(0))));
        (1..=2).for_each(|word| batch.keep(word));
        assert_eq!((relieve(&cache, 1), on_device(&cache)), (1, 1));
        batch.backward(false);
        assert_eq!(cache.held(), (0, 0, 0));
    }

    /// Runs `meanwhile` on another thread once this one is looking for memory, or has found none.
    fn relieve_while(cache: &Arc<Cache>, meanwhile: impl FnOnce() + Send) -> u64 {
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Acquire)
                    && cache.relieving.try_lock_for(Duration::ZERO).is_some()
                {
                    thread::yield_now();
                }
                meanwhile();
            });
            let freed = Arc::clone(cache).relieve(BYTES);
            is_over.store(true, Ordering::Release);
            freed
        })
    }

    #[test]
    fn what_a_store_holds_whose_entry_is_gone_is_waited_for() {
        for direct in [false, true] {
            let faulty = Arc::new(Faulty::new(Arc::new(Pool::new(1).unwrap())));
            let config = StoreConfig { backend: BackendKind::Memory, ..StoreConfig::default() };
            let store = Store::open_with(config, Arc::<Faulty>::clone(&faulty)).unwrap();
            let tier: Arc<dyn Tier> = if direct {
                DirectTier::new(ModelDevice::new(Copies::AtLast, None), store, BYTES, None).unwrap()
            } else {
                Arc::new(DiskTier::new(store, None))
            };
            let cache = Cache::new(Some(tier), Limits { device_budget: 0, late: false, ..LATE }, None);
            let mut batch = Batch::new(&cache);
            faulty.hold(Direction::Write);
            batch.save(1);
            faulty.wait_held(1);
            batch.backward(false);
            assert_eq!(cache.held().0, 0);
            assert!(relieve_while(&cache, || faulty.release()) > 0, "direct: {direct}");
            assert_eq!(relieve(&cache, 1), 0, "there is nothing left to wait for");
        }
    }

    #[test]
    fn what_others_free_meanwhile_is_worth_another_try() {
        // There is no room below, so nothing can go.
        let (cache, mut batch) = over(host(0, None));
        batch.keep(1);
        assert_eq!(relieve(&cache, 1), 0);
        let before = cache.departed.load(Ordering::Acquire);
        batch.backward(false);
        assert!(cache.departed.load(Ordering::Acquire) > before, "what is released has departed");
        let table = cache.table.lock();
        let freed = thread::scope(|scope| {
            let short = scope.spawn(|| Arc::clone(&cache).relieve(BYTES));
            while cache.relieving.try_lock_for(Duration::ZERO).is_some() {
                thread::yield_now();
            }
            // It waits for the table. Something is released meanwhile.
            cache.departs();
            drop(table);
            short.join().unwrap()
        });
        assert_eq!(freed, 1);
    }

    /// It was saved on one stream, and a thread that computes on another is short of memory.
    #[test]
    fn what_belongs_to_another_stream_is_not_reused_too_soon() {
        let device = Simulated::start(Duration::ZERO).unwrap();
        let used = device.used();
        let settings = HostSettings { pool: PoolSize::Fixed(8 * BYTES), read_ahead: 0 };
        let (cache, mut batch) = over(HostTier::new(device, None, settings, None).unwrap());
        Simulated::enter(1);
        let storage = Storage::allocate(BYTES).unwrap();
        set_word(&storage, 1);
        let id = storage.id();
        batch.save_one(storage, true);
        Simulated::enter(2);
        let (mut tried, mut jobs, here) = (Tried::default(), Vec::new(), Here::default());
        let mut table = cache.table.lock();
        tried.computed = table.newest();
        assert!(matches!(table.relief(&mut tried, &here, &mut jobs), Relief::Begun(_)));
        drop(table);
        cache.submit(jobs, &here);
        // Another part of the program lets it go.
        batch.flush();
        assert_eq!(*used.lock(), [(id, 2)]);
        batch.backward(false);
        Simulated::enter(0);
    }

    #[test]
    fn what_somebody_waits_for_is_not_taken_from_them() {
        let (cache, mut batch) = over(host(8 * BYTES, None));
        batch.save(1);
        batch.save(2);
        batch.flush();
        let (older, tape) = (batch.key(0), batch.tape());
        let here = Here::default();
        let mut jobs = Vec::new();
        // Backward asks for the newest, and the older one is loaded ahead.
        cache.table.lock().look_ahead(tape, Some(1), true, &mut jobs);
        assert!(cache.table.lock().is_reading(older));
        assert!(matches!(cache.table.lock().ask(older, &mut Vec::new()), Answer::Wait));
        cache.submit(jobs, &here);
        cache.quiesce();
        let relief = cache.table.lock().relief(&mut Tried::default(), &here, &mut Vec::new());
        assert!(!matches!(relief, Relief::Left(..)));
        batch.backward(false);
    }

    #[test]
    fn what_waits_on_the_device_for_its_next_use_goes_as_well() {
        let (cache, mut batch) = over(host(8 * BYTES, None));
        batch.save(1);
        batch.flush();
        let (key, tape) = (batch.key(0), batch.tape());
        let used = cache.fetch(key, tape, None).unwrap();
        assert_eq!(Arc::clone(&cache).relieve(BYTES), 0, "it is used");
        drop(used);
        assert_eq!(Arc::clone(&cache).relieve(BYTES), BYTES);
        batch.backward(false);
    }

    #[test]
    fn what_is_held_back_between_two_samples_goes_as_well() {
        let (cache, mut batch) = over(Arc::new(DiskTier::new(store(), None)));
        cache.hold_back(true);
        let storage = Storage::allocate(BYTES).unwrap();
        let alive = storage.downgrade();
        set_word(&storage, 1);
        batch.save_one(storage, false);
        batch.flush();
        assert!(alive.upgrade().is_some());
        assert_eq!(relieve(&cache, 1), 1);
        assert!(alive.upgrade().is_none());
        cache.hold_back(false);
        batch.backward(false);
    }

    /// One graph that stays, and batches that keep within the budget, or leave.
    #[test]
    fn keys_of_what_has_gone_do_not_pile_up_behind_what_stays() {
        for leaves in [false, true] {
            let (cache, mut stays) = over(host(8 * BYTES, None));
            stays.save(1);
            if leaves {
                cache.set_limits(Limits { late: false, prefetch: 4 * BYTES, ..LATE });
            }
            for _ in 0..500 {
                let mut batch = Batch::new(&cache);
                batch.save(2);
                batch.backward(false);
            }
            assert!(cache.table.lock().queued() < 100, "{} entries", cache.held().0);
            stays.backward(false);
        }
    }

    #[test]
    fn what_is_to_be_counted_for_steps_that_are_not_finished_does_not_pile_up() {
        let (cache, mut batch) = over(host(8 * BYTES, None));
        let counters = Arc::downgrade(&batch.counters);
        batch.save(1);
        batch.flush();
        batch.backward(false);
        drop(batch);
        cache.begin_step();
        assert_eq!(counters.strong_count(), 0);
    }
}
