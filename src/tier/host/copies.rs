//! Copies between the device and the parcels' memory.

use std::sync::Arc;

use ssdtrain_libtorch::{Block, Storage};
use ssdtrain_store::{IoBuf, parts};

use super::super::ledger::{Place, Serial};
use super::super::places::Edge;
use super::{Books, HostTier, Load, Memory, ParcelData, internal};
use crate::device::{Device, Lane, keep};
use crate::error::Result;
use crate::trace::Counter;

/// A copy in that was queued.
pub(super) struct Copied<D: Device> {
    /// If the trace records it.
    begin: Option<D::Event>,
    /// Its end.
    pub(super) back: D::Event,
}

impl<D: Device> HostTier<D> {
    pub(super) fn copy_out(&self, books: &mut Books<D>, serial: Serial, from: &Block) -> Result<()> {
        let Some(place) = books.ledger.get(serial) else { return Err(internal("a copy of no parcel")) };
        let bytes = whole(place.bytes)?;
        let Some(memory) = &place.held.memory else { return Err(internal("a copy without room")) };
        self.device.wait(Lane::Out, &place.held.ready)?;
        let begin = self.begin_copy(Lane::Out)?;
        let source: *const u8 = from.data().cast_const().cast();
        let mut offset = 0;
        let queued = parts(&*memory.buf, bytes).try_for_each(|(to, len)| {
            let from = source.wrapping_add(offset);
            offset += len;
            // SAFETY: the storage is kept as it is until it may leave, and the memory is this parcel's alone; both are longer than the
            // copy, and both stay until the event below is reached.
            unsafe { self.device.copy_out(from, to, len) }
        });
        // Some parts may be in flight even if one could not be queued.
        let out = self.end_of(Lane::Out, || (from.storage().clone(), memory.clone()))?;
        self.end_copy(Lane::Out, place, begin.as_ref(), &out);
        if queued.is_err() {
            self.hold(Some(out.clone()), Some(from.storage().clone()));
        }
        place.held.out = Some(out);
        place.held.copies += 1;
        queued?;
        books.ledger.advance(serial, Edge::CopiedOut);
        Ok(())
    }

    pub(super) fn copy_in(
        &self,
        books: &mut Books<D>,
        serial: Serial,
        into: &Storage,
        ready: &D::Event,
    ) -> Result<()> {
        let Some(place) = books.ledger.get(serial) else { return Err(internal("a copy of no parcel")) };
        let bytes = whole(place.bytes)?;
        let Some(memory) = &place.held.memory else { return Err(internal("a copy of nothing")) };
        self.device.wait(Lane::In, ready)?;
        if let Some(out) = &place.held.out {
            self.device.wait(Lane::In, out)?;
        }
        let begin = self.begin_copy(Lane::In)?;
        let queued = self.queue_in(memory, bytes, into);
        let back = self.end_of(Lane::In, || (into.clone(), memory.clone()))?;
        if let Err(error) = queued {
            // The caller lets go of the storage when it hears of this, but parts may still be on their way to it.
            self.hold(Some(back.clone()), Some(into.clone()));
            (place.held.back, place.held.copies) = (Some(back), place.held.copies + 1);
            return Err(error);
        }
        self.lend(books, serial, &Copied { begin, back });
        Ok(())
    }

    /// The device has the bytes too, once it has reached the end of a copy in.
    pub(super) fn lend(&self, books: &mut Books<D>, serial: Serial, copied: &Copied<D>) {
        let Some(place) = books.ledger.get(serial) else { return };
        self.end_copy(Lane::In, place, copied.begin.as_ref(), &copied.back);
        place.held.back = Some(copied.back.clone());
        place.held.copies += 1;
        books.ledger.not_near(serial);
        books.ledger.advance(serial, Edge::Lent);
    }

    /// Copies what was read into memory that is not the pool's, without the lock: such memory is not pinned, and the driver returns only
    /// when the device has come that far. [`lend`](HostTier::lend) is to follow.
    pub(super) fn copy_in_apart(&self, bytes: u64, memory: &Memory, load: &Load<D>) -> Result<Copied<D>> {
        let Load { into, ready, .. } = load;
        self.device.block_on(ready)?;
        self.device.wait(Lane::In, ready)?;
        // What other loads have had the lane wait for comes first. Those that have it wait from here on may still hold the driver up.
        self.device.block_on(&self.device.record(Lane::In)?)?;
        let begin = self.begin_copy(Lane::In)?;
        let queued = self.queue_in(memory, whole(bytes)?, into);
        let back = self.end_of(Lane::In, || (into.clone(), memory.clone()))?;
        if queued.is_err() {
            self.hold(Some(back.clone()), Some((into.clone(), memory.clone())));
        }
        queued.map(|()| Copied { begin, back })
    }

    /// Queues the copies of the parts of `memory`.
    fn queue_in(&self, memory: &Memory, bytes: usize, into: &Storage) -> Result<()> {
        let target: *mut u8 = into.data().cast();
        let mut offset = 0;
        parts(&*memory.buf, bytes).try_for_each(|(from, len)| {
            let to = target.wrapping_add(offset);
            offset += len;
            // SAFETY: the storage is as long as the parcel and nobody else's before the event that follows is reached; the memory holds the
            // parcel's bytes, and goes to no one else before that event.
            unsafe { self.device.copy_in(from, to, len) }
        })
    }

    /// An event at the end of copies that were queued. Where none can be recorded, nothing tells their end: then what they use, which
    /// `memory` gives, is held until the device has done all that it was given.
    fn end_of<M: Send + 'static>(&self, lane: Lane, memory: impl FnOnce() -> M) -> Result<D::Event> {
        self.device.record(lane).inspect_err(|_| self.hold(None, Some(memory())))
    }

    /// Holds memory that its owner may let go of until the device has reached `event`, or has done all that it was given. Nobody waits for
    /// that here: the thread may have locks, or be one that ends transfers.
    pub(super) fn hold<M: Send + 'static>(&self, event: Option<D::Event>, memory: Option<M>) {
        let (Some(memory), device) = (memory, Arc::clone(&self.device)) else { return };
        self.writes.after(Vec::new(), move |_| {
            let over = event.map_or_else(|| device.synchronize(), |event| device.block_unless_late(&event));
            keep(&over, Some(memory));
        });
    }

    /// An event at the beginning of a copy, if the trace records it.
    fn begin_copy(&self, lane: Lane) -> Result<Option<D::Event>> {
        let trace = self.trace.as_ref().filter(|trace| trace.trace().is_recording());
        trace.map(|_| self.device.record(lane)).transpose()
    }

    fn end_copy(&self, lane: Lane, place: &Place<ParcelData<D>>, begin: Option<&D::Event>, end: &D::Event) {
        if let (Some(trace), Some(begin)) = (&self.trace, begin) {
            trace.copy(lane, place.held.scope, place.bytes, begin, end);
            self.sample();
        }
    }

    pub(super) fn sample(&self) {
        if let Some(trace) = &self.trace {
            let used = self.pool.capacity().saturating_sub(self.pool.free_bytes());
            trace.trace().sample(Counter::HostPool, used);
        }
    }
}

/// How many bytes are copied at once in a trial, and how often each way.
pub(super) const PIECE: u64 = 16 << 20;
const TIMES: u32 = 4;

/// Bytes per second of copies from a storage on the device to `buf`, which nobody else uses, and back; `bytes` at a time.
pub(super) fn rates<D: Device>(buf: Arc<dyn IoBuf>, bytes: u64, device: &D) -> Result<(f64, f64)> {
    let storage = device.allocate(bytes)?;
    let rates = rates_between(&*buf, &storage, bytes, device);
    keep(&rates, Some((buf, storage)));
    rates
}

fn rates_between<D: Device>(
    buf: &dyn IoBuf,
    storage: &Storage,
    bytes: u64,
    device: &D,
) -> Result<(f64, f64)> {
    let data: *mut u8 = storage.data().cast();
    let length = whole(bytes)?;
    let rate = |lane: Lane| -> Result<f64> {
        device.wait(lane, &device.record(Lane::Compute)?)?;
        let mut begun = device.record(lane)?;
        let mut queued = Ok(());
        // The first one does not count.
        for number in 0..=TIMES {
            let mut offset = 0;
            queued = queued.and_then(|()| {
                parts(buf, length).try_for_each(|(host, len)| {
                    let there = data.wrapping_add(offset);
                    offset += len;
                    match lane {
                        // SAFETY: buffer and storage are nobody else's, as long as the copy, and stay until the last event below is
                        // reached.
                        Lane::Out => unsafe { device.copy_out(there, host, len) },
                        // SAFETY: as above.
                        Lane::In | Lane::Compute => unsafe { device.copy_in(host, there, len) },
                    }
                })
            });
            if number == 0 {
                queued = queued.and_then(|()| device.record_end(lane).map(|event| begun = event));
            }
        }
        let ended = device.record_end(lane)?;
        device.block_on(&ended)?;
        queued?;
        let took = device.between(&begun, &ended)?.as_secs_f64();
        Ok(f64::from(TIMES) * bytes as f64 / took.max(f64::MIN_POSITIVE))
    };
    Ok((rate(Lane::Out)?, rate(Lane::In)?))
}

/// A length as a `usize`.
fn whole(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| internal("a parcel larger than the address space"))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    use ssdtrain_store::{BackendKind, Store, StoreConfig};

    use super::super::super::modelled::{Copies, Fault, ModelDevice, set_word};
    use super::super::super::{Here, Parcel, Room, Tier};
    use super::super::{HostSettings, PoolSize};
    use super::*;
    use crate::device::{DeviceCall, DeviceFaults, FaultyDevice, Simulated, Simulation};
    use crate::error::{Completion, ErrorKind};
    use crate::telemetry::{ScopeId, StallCause};
    use crate::units::MIB;

    type Refusing = FaultyDevice<ModelDevice>;

    /// A tier whose copies are performed when somebody waits for them, and what makes its device refuse calls.
    fn refusing() -> (Arc<HostTier<Refusing>>, Arc<DeviceFaults>) {
        let faults = Arc::default();
        let device = FaultyDevice::new(ModelDevice::new(Copies::AtLast, None), &faults);
        let settings = HostSettings { pool: PoolSize::Fixed(4 * MIB), read_ahead: 0 };
        (HostTier::new(device, None, settings, None).unwrap(), faults)
    }

    fn saved<D: Device>(tier: &Arc<HostTier<D>>, from: &Storage) -> Arc<dyn Parcel> {
        let parcel = Arc::clone(tier).parcel(from.bytes(), ScopeId::default(), &Here::default()).unwrap();
        assert_eq!(parcel.reserve(), Room::Reserved);
        Arc::clone(&parcel).store(Block::of(from.clone()), Completion::new(|_| {}));
        parcel
    }

    /// Leaves a pool of 2 MiB only room in two parts for 1 MiB, while what is returned lives. A copy whose second part cannot be queued is
    /// in flight all the same.
    fn divided<D: Device>(tier: &Arc<HostTier<D>>) -> ([Option<Arc<dyn Parcel>>; 3], Storage) {
        let half = Storage::allocate(MIB / 2).unwrap();
        let mut small = [(); 3].map(|()| Some(saved(tier, &half)));
        drop(small[1].take());
        (small, half)
    }

    #[test]
    fn a_copy_in_that_fails_halfway_writes_to_nothing_that_was_let_go_of() {
        // Three copies out of one part each and one of two parts; the next fault is the second part of the copy in.
        let device = ModelDevice::new(Copies::AtLast, Some(Fault::Copy(6)));
        let settings = HostSettings { pool: PoolSize::Fixed(2 * MIB), read_ahead: 0 };
        let tier = HostTier::new(device, None, settings, None).unwrap();
        let _divided = divided(&tier);
        let whole = Storage::allocate(MIB).unwrap();
        let parcel = saved(&tier, &whole);
        let (into, outcome) = loaded(&parcel);
        assert!(outcome.is_err());
        assert_goes_after_its_copies(&tier, Lane::In, into);
    }

    /// Lets go of a storage for which copies were queued.
    fn assert_goes_after_its_copies<D: Device>(tier: &HostTier<D>, lane: Lane, storage: Storage) {
        let (last, held) = (tier.device.record(lane).unwrap(), storage.downgrade());
        drop(storage);
        while held.upgrade().is_some() {
            thread::yield_now();
        }
        assert!(tier.device.is_reached(&last), "its memory was free before it was copied");
    }

    /// Begins to load what is in a parcel; returns the storage and how that ended.
    fn loaded(parcel: &Arc<dyn Parcel>) -> (Storage, Result<()>) {
        let into = Storage::allocate(MIB).unwrap();
        let (tell, told) = channel();
        let done = Completion::new(move |outcome| tell.send(outcome).unwrap());
        Arc::clone(parcel).load(into.clone(), &Here::default(), done);
        (into, told.recv().unwrap())
    }

    #[test]
    fn a_copy_out_that_fails_halfway_reads_nothing_that_was_let_go_of() {
        let faults = Arc::default();
        let device = FaultyDevice::new(ModelDevice::new(Copies::AtLast, None), &faults);
        let settings = HostSettings { pool: PoolSize::Fixed(2 * MIB), read_ahead: 0 };
        let tier = HostTier::new(device, None, settings, None).unwrap();
        let _divided = divided(&tier);
        let from = Storage::allocate(MIB).unwrap();
        faults.inject(Some(DeviceCall::CopyOut), 1, 1);
        drop(saved(&tier, &from));
        assert_goes_after_its_copies(&tier, Lane::Out, from);
    }

    #[test]
    fn a_copy_in_whose_end_is_not_recorded_writes_to_nothing_that_was_let_go_of() {
        let (tier, faults) = refusing();
        let from = Storage::allocate(MIB).unwrap();
        set_word(&from, 1);
        let parcel = saved(&tier, &from);
        // The first event is of what was computed before the copy.
        faults.inject(Some(DeviceCall::Record), 1, 1);
        let (into, outcome) = loaded(&parcel);
        assert!(outcome.unwrap_err().to_string().contains(DeviceFaults::WORDS));
        assert_goes_after_its_copies(&tier, Lane::In, into);
    }

    #[test]
    fn what_cannot_be_put_in_order_goes_after_its_copy() {
        for call in [DeviceCall::Record, DeviceCall::Wait] {
            let (tier, faults) = refusing();
            let from = Storage::allocate(MIB).unwrap();
            let parcel = saved(&tier, &from);
            let (into, outcome) = loaded(&parcel);
            outcome.unwrap();
            faults.inject(Some(call), 0, 1);
            let ordered =
                parcel.order(Some(&into), Some(StallCause::CopyIn), &Arc::default(), &Here::default());
            assert!(ordered.is_err(), "{call:?}");
            assert_goes_after_its_copies(&tier, Lane::In, into);
        }
    }

    #[test]
    fn who_puts_an_earlier_copy_in_order_puts_no_later_one_in_order() {
        for of_last in [true, false] {
            let (tier, _) = refusing();
            let from = Storage::allocate(MIB).unwrap();
            let parcel = saved(&tier, &from);
            let (first, _) = loaded(&parcel);
            assert!(parcel.may_evict());
            let (last, _) = loaded(&parcel);
            let of = if of_last { &last } else { &first };
            parcel.order(Some(of), Some(StallCause::CopyIn), &Arc::default(), &Here::default()).unwrap();
            let is_ordered = tier.books.lock().ledger.get(1).unwrap().held.is_ordered();
            assert_eq!(is_ordered, of_last);
        }
    }

    #[test]
    fn what_no_other_stream_may_use_goes_after_its_copy() {
        for is_abandoned in [true, false] {
            let (tier, faults) = refusing();
            let from = Storage::allocate(MIB).unwrap();
            let parcel = saved(&tier, &from);
            let (into, outcome) = loaded(&parcel);
            outcome.unwrap();
            parcel.of_any_stream();
            faults.inject(Some(DeviceCall::RecordUse), 0, 1);
            if is_abandoned {
                // The device does what it is made to wait for.
                faults.inject(Some(DeviceCall::Wait), 0, 1);
                parcel.abandon(Some(&into));
            } else {
                let here = Here::default();
                parcel.order(Some(&into), Some(StallCause::CopyIn), &Arc::default(), &here).unwrap_err();
            }
            assert_goes_after_its_copies(&tier, Lane::In, into);
        }
    }

    #[test]
    fn a_copy_in_that_nobody_wants_any_more_is_waited_for_if_the_device_refuses_to_wait() {
        let (tier, faults) = refusing();
        let from = Storage::allocate(MIB).unwrap();
        let parcel = saved(&tier, &from);
        let (into, outcome) = loaded(&parcel);
        outcome.unwrap();
        faults.inject(Some(DeviceCall::Wait), 0, 1);
        parcel.abandon(Some(&into));
        assert_goes_after_its_copies(&tier, Lane::In, into);
    }

    #[test]
    fn a_pool_that_the_device_may_still_use_stays_when_its_tier_goes() {
        for is_given_back in [false, true] {
            let (tier, faults) = stopping(None);
            faults.stop_after(0);
            let from = Storage::allocate(2 * MIB).unwrap();
            drop(saved(&tier, &from));
            if is_given_back {
                tier.take(&mut tier.books.lock(), MIB).unwrap();
            }
            let last = tier.device.record(Lane::Out).unwrap();
            let device = Arc::downgrade(&tier.device);
            drop(tier);
            let device = device.upgrade().expect("what pinned the pool has not gone");
            faults.heal();
            device.block_on(&last).unwrap();
        }
    }

    #[test]
    fn a_tier_that_goes_does_not_wait_again_for_a_device_that_does_not_answer() {
        let (tier, faults) = stopping(None);
        faults.stop_after(0);
        let from = Storage::allocate(MIB / 2).unwrap();
        drop([(); 4].map(|()| saved(&tier, &from)));
        let device = Arc::downgrade(&tier.device);
        let waits = || [DeviceCall::Block, DeviceCall::BlockUnlessLate].map(|call| faults.calls(Some(call)));
        let [before, _] = waits();
        drop(tier);
        assert_eq!(waits()[0], before, "each of its waits may take as long as the device has");
        assert!(waits()[1] > 1);
        faults.heal();
        // The pool, which stays, keeps the device.
        device.upgrade().unwrap().synchronize().unwrap();
    }

    #[test]
    fn measuring_stalls_does_not_wait_again_for_a_device_that_is_late() {
        let (tier, faults) = refusing();
        let from = Storage::allocate(MIB).unwrap();
        let parcel = saved(&tier, &from);
        parcel.order(None, Some(StallCause::DeviceBudget), &Arc::default(), &Here::default()).unwrap();
        let waits = || [DeviceCall::Block, DeviceCall::BlockUnlessLate].map(|call| faults.calls(Some(call)));
        let [before, _] = waits();
        tier.settle();
        assert_eq!(waits(), [before, 1]);
    }

    type Stopping = FaultyDevice<Simulated>;

    /// A tier of one huge page above a device that can be stopped.
    fn stopping(store: Option<Store>) -> (Arc<HostTier<Stopping>>, Arc<DeviceFaults>) {
        let faults = Arc::<DeviceFaults>::default();
        let device = Simulation { delay: Duration::ZERO, staging: None };
        let settings = HostSettings { pool: PoolSize::Fixed(2 * MIB), read_ahead: 0 };
        (HostTier::new(device.start(&faults).unwrap(), store, settings, None).unwrap(), faults)
    }

    fn is_free(tier: &HostTier<Stopping>) -> bool {
        tier.books.lock().cooling.clear();
        tier.pool.free_bytes() == tier.pool.capacity()
    }

    #[test]
    fn copies_whose_end_is_not_recorded_keep_their_memory_if_the_device_does_not_answer() {
        for is_out in [true, false] {
            let (tier, faults) = stopping(None);
            let [from, into] = [(); 2].map(|()| Storage::allocate(MIB).unwrap());
            let kept = if is_out { from.downgrade() } else { into.downgrade() };
            let parcel = (!is_out).then(|| saved(&tier, &from));
            faults.stop_after(0);
            // The first event is of what was computed before the copy.
            faults.inject(Some(DeviceCall::Record), 1, 1);
            match parcel {
                None => {
                    let failed = saved(&tier, &from);
                    let ordered =
                        failed.order(None, Some(StallCause::CopyIn), &Arc::default(), &Here::default());
                    assert!(ordered.unwrap_err().to_string().contains(DeviceFaults::WORDS));
                }
                Some(parcel) => {
                    let (tell, told) = channel();
                    let done = Completion::new(move |outcome| tell.send(outcome).unwrap());
                    Arc::clone(&parcel).load(into.clone(), &Here::default(), done);
                    assert!(told.recv().unwrap().unwrap_err().to_string().contains(DeviceFaults::WORDS));
                }
            }
            drop((from, into));
            assert!(kept.upgrade().is_some() && !is_free(&tier), "{is_out}");
            faults.heal();
            tier.synchronize().unwrap();
        }
    }

    #[test]
    fn a_copy_in_that_fails_halfway_keeps_its_storage_if_the_device_does_not_answer() {
        let (tier, faults) = stopping(None);
        let _divided = divided(&tier);
        tier.synchronize().unwrap();
        let (whole, into) = (Storage::allocate(MIB).unwrap(), Storage::allocate(MIB).unwrap());
        // Its slot has two parts.
        let parcel = saved(&tier, &whole);
        tier.synchronize().unwrap();
        faults.stop_after(0);
        faults.inject(Some(DeviceCall::CopyIn), 1, 1);
        let kept = into.downgrade();
        Arc::clone(&parcel).load(into, &Here::default(), Completion::new(drop));
        assert!(kept.upgrade().is_some());
        faults.heal();
        tier.synchronize().unwrap();
    }

    #[test]
    fn a_trial_of_copies_keeps_its_memory_if_the_device_does_not_answer() {
        let (tier, faults) = stopping(None);
        faults.stop_after(0);
        assert_eq!(tier.try_copies().unwrap_err().kind(), ErrorKind::TimedOut);
        assert!(!is_free(&tier));
        faults.heal();
        tier.synchronize().unwrap();
    }

    #[test]
    fn what_the_device_has_not_copied_in_time_is_not_written_to_the_disk() {
        let config = StoreConfig { backend: BackendKind::Memory, ..StoreConfig::default() };
        let (tier, faults) = stopping(Some(Store::open(config).unwrap()));
        faults.stop_after(0);
        let from = Storage::allocate(MIB).unwrap();
        let _pool_is_full = [(); 2].map(|()| saved(&tier, &from));
        let more = Arc::clone(&tier).parcel(MIB, ScopeId::default(), &Here::default()).unwrap();
        while more.reserve() == Room::Later {
            tier.settle();
        }
        assert_eq!(tier.store.as_ref().unwrap().stats().bytes_written, 0);
        faults.heal();
        tier.synchronize().unwrap();
    }

    #[test]
    fn every_copy_into_the_pool_is_over_when_that_goes_even_if_waiting_for_one_fails() {
        for are_given_back in [false, true] {
            let (tier, faults) = refusing();
            let device = Arc::clone(&tier.device);
            let from = [(); 2].map(|()| Storage::allocate(2 * MIB).unwrap());
            drop(from.each_ref().map(|from| saved(&tier, from)));
            let last = device.record(Lane::Out).unwrap();
            if are_given_back {
                tier.take(&mut tier.books.lock(), 4 * MIB).unwrap();
            }
            faults.inject(Some(DeviceCall::BlockUnlessLate), 0, 1);
            drop(tier);
            assert!(device.is_reached(&last), "{are_given_back}");
        }
    }
}
