//! Copies between the device and the parcels' memory.

use std::sync::Arc;

use ssdtrain_libtorch::{Block, Storage};
use ssdtrain_store::{IoBuf, parts};

use super::super::ledger::{Place, Serial};
use super::super::places::Edge;
use super::{Books, HostTier, ParcelData, internal};
use crate::device::{Device, Lane, keep};
use crate::error::Result;
use crate::trace::Counter;

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
        let out = self.device.record_end(Lane::Out);
        keep(&out, Some((from.storage().clone(), memory.clone())));
        let out = out?;
        self.end_copy(Lane::Out, place, begin, &out);
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
        let target: *mut u8 = into.data().cast();
        let mut offset = 0;
        let queued = parts(&*memory.buf, bytes).try_for_each(|(from, len)| {
            let to = target.wrapping_add(offset);
            offset += len;
            // SAFETY: the storage is as long as the parcel and nobody else's before the event below is reached; the memory holds
            // the parcel's bytes, and goes to no one else before that event.
            unsafe { self.device.copy_in(from, to, len) }
        });
        let back = self.device.record_end(Lane::In);
        keep(&back, Some((into.clone(), memory.clone())));
        let back = back?;
        self.end_copy(Lane::In, place, begin, &back);
        place.held.back = Some(back.clone());
        place.held.copies += 1;
        if queued.is_err() {
            // The caller releases the storage when it hears of this, but parts may still be on their way to it.
            let over = self.device.block_on(&back);
            keep(&over, Some(into.clone()));
            over?;
        }
        queued?;
        books.ledger.not_near(serial);
        books.ledger.advance(serial, Edge::Lent);
        Ok(())
    }

    /// An event at the beginning of a copy, if the trace records it.
    fn begin_copy(&self, lane: Lane) -> Result<Option<D::Event>> {
        let trace = self.trace.as_ref().filter(|trace| trace.trace().is_recording());
        trace.map(|_| self.device.record(lane)).transpose()
    }

    fn end_copy(&self, lane: Lane, place: &Place<ParcelData<D>>, begin: Option<D::Event>, end: &D::Event) {
        if let (Some(trace), Some(begin)) = (&self.trace, begin) {
            trace.copy(lane, place.held.scope, place.bytes, &begin, end);
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
    use std::time::Duration;

    use ssdtrain_store::{BackendKind, Store, StoreConfig};

    use super::super::super::modelled::{Copies, FOREIGN, Fault, ModelDevice, set_word, word};
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

    /// A slot in two parts, the second of which cannot be queued. The first is in flight all the same.
    #[test]
    fn a_copy_in_that_fails_halfway_writes_to_nothing_that_was_let_go_of() {
        // Three copies out of one part each and one of two parts; the next fault is the second part of the copy in.
        let device = ModelDevice::new(Copies::AtLast, Some(Fault::Copy(6)));
        let settings = HostSettings { pool: PoolSize::Fixed(2 * MIB), read_ahead: 0 };
        let tier = HostTier::new(device, None, settings, None).unwrap();
        let half = Storage::allocate(MIB / 2).unwrap();
        let mut small = [(); 3].map(|()| Some(saved(&tier, &half)));
        drop(small[1].take());
        let whole = Storage::allocate(MIB).unwrap();
        let parcel = saved(&tier, &whole);
        let into = Storage::allocate(MIB).unwrap();
        set_word(&into, FOREIGN);
        let (tell, told) = channel();
        let done = Completion::new(move |outcome| tell.send(outcome).unwrap());
        Arc::clone(&parcel).load(into.clone(), &Here::default(), done);
        assert!(told.recv().unwrap().is_err());
        // From here on the storage belongs to somebody else.
        set_word(&into, FOREIGN);
        parcel.order(None, StallCause::CopyIn, &Arc::default(), &Here::default()).unwrap();
        assert_eq!(word(&into), FOREIGN);
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
    fn a_copy_in_whose_end_is_not_recorded_writes_to_nothing_that_was_let_go_of() {
        let (tier, faults) = refusing();
        let from = Storage::allocate(MIB).unwrap();
        set_word(&from, 1);
        let parcel = saved(&tier, &from);
        // The first event is of what was computed before the copy.
        faults.inject(Some(DeviceCall::Record), 1, 1);
        let (into, outcome) = loaded(&parcel);
        assert!(outcome.unwrap_err().to_string().contains(DeviceFaults::WORDS));
        set_word(&into, FOREIGN);
        tier.synchronize().unwrap();
        assert_eq!(word(&into), FOREIGN);
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
        set_word(&into, FOREIGN);
        tier.synchronize().unwrap();
        assert_eq!(word(&into), FOREIGN);
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
    fn a_tier_that_goes_waits_once_for_a_device_that_does_not_answer() {
        let (tier, faults) = stopping(None);
        faults.stop_after(0);
        let from = Storage::allocate(MIB / 2).unwrap();
        drop([(); 4].map(|()| saved(&tier, &from)));
        let (device, waits) = (Arc::downgrade(&tier.device), || faults.calls(Some(DeviceCall::Block)));
        let before = waits();
        drop(tier);
        assert_eq!(waits(), before + 1);
        faults.heal();
        // The pool, which stays, keeps the device.
        device.upgrade().unwrap().synchronize().unwrap();
    }

    type Stopping = FaultyDevice<Simulated>;

    /// A tier of one huge page above a device that can be stopped.
    fn stopping(store: Option<Store>) -> (Arc<HostTier<Stopping>>, Arc<DeviceFaults>) {
        let faults = Arc::<DeviceFaults>::default();
        let device = Simulation { delay: Duration::ZERO, faults: Arc::clone(&faults), staging: None };
        let settings = HostSettings { pool: PoolSize::Fixed(2 * MIB), read_ahead: 0 };
        (HostTier::new(device.start().unwrap(), store, settings, None).unwrap(), faults)
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
                    let ordered = failed.order(None, StallCause::CopyIn, &Arc::default(), &Here::default());
                    assert_eq!(ordered.unwrap_err().kind(), ErrorKind::TimedOut);
                }
                Some(parcel) => {
                    let (tell, told) = channel();
                    let done = Completion::new(move |outcome| tell.send(outcome).unwrap());
                    Arc::clone(&parcel).load(into.clone(), &Here::default(), done);
                    assert_eq!(told.recv().unwrap().unwrap_err().kind(), ErrorKind::TimedOut);
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
        let half = Storage::allocate(MIB / 2).unwrap();
        let mut small = [(); 3].map(|()| Some(saved(&tier, &half)));
        drop(small[1].take());
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
        let (tier, faults) = refusing();
        let device = Arc::clone(&tier.device);
        let from = [(); 2].map(|()| Storage::allocate(MIB).unwrap());
        drop(from.each_ref().map(|from| saved(&tier, from)));
        let last = device.record(Lane::Out).unwrap();
        faults.inject(Some(DeviceCall::Block), 0, 1);
        drop(tier);
        assert!(device.is_reached(&last));
    }
}
