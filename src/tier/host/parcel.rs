//! One entry's place in the tier, as the cache uses it.

use std::sync::Arc;

use ssdtrain_libtorch::{Block, Storage};
use ssdtrain_store::contained;

use super::super::ledger::{Near, Up};
use super::super::places::{At, Edge};
use super::super::{Here, NO_STREAM, Parcel, Room, stream_of_load};
use super::times::Stall;
use super::{HostParcel, HostTier, Load, internal, unwanted};
use crate::device::{Device, Lane};
use crate::error::Completion;
use crate::error::Result;
use crate::telemetry::events::warn_once;
use crate::telemetry::{Counters, StallCause};

impl<D: Device> Parcel for HostParcel<D> {
    fn of_any_stream(&self) {
        if let Some(place) = self.tier.books.lock().ledger.get(self.serial) {
            place.held.stream = NO_STREAM;
        }
    }

    fn reserve(&self) -> Room {
        self.tier.reserve(self.serial, self.bytes)
    }

    fn store(self: Arc<Self>, from: Block, done: Completion) {
        let handing_over = HandingOver::begin(&self.tier);
        // However this ends, threads that wait for the copy to begin are notified.
        let outcome = contained("a copy out", || {
            let mut books = self.tier.books.lock();
            let outcome =
                books.wanted(self.serial).and_then(|()| self.tier.copy_out(&mut books, self.serial, &from));
            self.tier.drain(&mut books);
            outcome
        });
        let outcome = outcome.unwrap_or_else(|| Err(internal("a copy out panicked")));
        if let Err(error) = &outcome {
            let mut books = self.tier.books.lock();
            if let Some(place) = books.ledger.get(self.serial) {
                place.held.failure = Some(error.clone());
            }
            if books.ledger.at(self.serial) == At::Reserved {
                books.ledger.advance(self.serial, Edge::CopyFailed);
            }
        }
        self.tier.changed.notify_all();
        match outcome {
            Ok(()) => done.dismiss(),
            Err(_) => done.call(outcome),
        }
        // By now the parcel may be written and released elsewhere. Its extent is free once the tier has settled.
        drop(self);
        drop(handing_over);
    }

    fn load(self: Arc<Self>, into: Storage, here: &Here, done: Completion) {
        let tier = &self.tier;
        let (ready, stream) =
            match here.after_waits(&*tier.device).and_then(|ready| Ok((ready, tier.device.stream()?))) {
                Ok(here) => here,
                Err(error) => return done.call(Err(error)),
            };
        let mut books = tier.books.lock();
        if let Some(place) = books.ledger.get(self.serial) {
            let was_loaded = place.held.back.is_some();
            place.held.stream = stream_of_load(place.held.stream, was_loaded, stream);
            place.held.target = Some(into.id());
        }
        let way = books.ledger.way_up(self.serial);
        let outcome = match way {
            Up::Unwanted => Err(unwanted()),
            Up::Never => Err(internal("a load of what is nowhere below the device")),
            Up::Copy => tier.copy_in(&mut books, self.serial, &into, &ready),
            Up::Read | Up::AfterRead => {
                let begun = if way == Up::Read { tier.read(&mut books, self.serial, true) } else { Ok(true) };
                match (begun, books.ledger.get(self.serial)) {
                    (Ok(_), Some(place)) => {
                        place.held.loads.push(Load { into, ready, done });
                        books.ledger.not_near(self.serial);
                        return;
                    }
                    (Ok(_), None) => Err(internal("a load of no parcel")),
                    (Err(error), _) => Err(error),
                }
            }
        };
        drop(books);
        done.call(outcome);
    }

    fn bring_near(self: Arc<Self>) -> bool {
        let tier = &self.tier;
        let mut books = tier.books.lock();
        match books.ledger.way_near(self.serial, tier.read_ahead) {
            Near::Already => return true,
            Near::Later => return false,
            Near::Read => {}
        }
        let begun = tier.read(&mut books, self.serial, false);
        if matches!(begun, Ok(true)) {
            books.ledger.bring_near(self.serial);
        }
        // A failure to read is reported when the bytes are asked for.
        begun.unwrap_or(true)
    }

    fn order(
        &self,
        of: Option<&Storage>,
        cause: Option<StallCause>,
        counters: &Arc<Counters>,
        here: &Here,
    ) -> Result<()> {
        let tier = &self.tier;
        let mut books = tier.books.lock();
        // The thread that saved it may not have begun the store yet.
        while books.ledger.begins_soon(self.serial) {
            tier.changed.wait(&mut books);
        }
        let Some(place) = books.ledger.get(self.serial) else { return Ok(()) };
        if let Some(failure) = &place.held.failure {
            return Err(failure.clone());
        }
        let Some(event) = place.held.back.clone().or_else(|| place.held.out.clone()) else { return Ok(()) };
        let (copies, ordered, stream) = (place.held.copies, place.held.is_ordered(), place.held.stream);
        // Others may have let go of what the calling thread was given, and loaded it anew: that is in no order yet.
        let is_last = of.map(Storage::id) == place.held.target || place.held.target.is_none();
        drop(books);
        let put_in_order = || -> Result<()> {
            Here::record_use(&*tier.device, stream, of)?;
            // A wait costs less than asking whether it is needed. The event recorded before it does not, so without one, ask.
            if !here.is_marked() && tier.device.is_reached(&event) {
                return Ok(());
            }
            let wait = || tier.device.wait(Lane::Compute, &event).map(|()| Here::set(&here.waited, &event));
            if ordered {
                return wait();
            }
            let from = cause.map(|_| here.now(&*tier.device)).transpose()?;
            let waited = Here::get(&here.waited);
            // No event is recorded after the wait: CUDA lets a thread run only some 60 recorded events of a stream ahead of the device.
            wait()?;
            // Only now: releasing the storage relies on the wait being queued.
            if let Some(place) = tier.books.lock().ledger.get(self.serial).filter(|_| is_last) {
                place.held.ordered = copies;
            }
            let Some((cause, from)) = cause.zip(from) else { return Ok(()) };
            if let Some(trace) = &tier.trace {
                trace.stall(cause, [&from, waited.as_ref().unwrap_or(&from)], &event);
            }
            let (counters, to) = (Arc::clone(counters), event.clone());
            tier.times.stalled(Stall { cause, counters, from, waited, to });
            Ok(())
        };
        put_in_order().inspect_err(|_| tier.hold(Some(event.clone()), of.cloned()))
    }

    fn may_evict(&self) -> bool {
        self.tier.books.lock().ledger.take_back(self.serial)
    }

    fn abandon(&self, of: Option<&Storage>) {
        let (event, stream, loads) = {
            let mut books = self.tier.books.lock();
            books.ledger.abandon(self.serial);
            let Some(place) = books.ledger.get(self.serial) else { return };
            let event = if place.held.is_ordered() { None } else { place.held.under_way(&*self.tier.device) };
            (event, place.held.stream, std::mem::take(&mut place.held.loads))
        };
        // Threads that wait for the store to begin need not wait any more.
        self.tier.changed.notify_all();
        let device = &*self.tier.device;
        if let Some(event) = event {
            let ordered = device.wait(Lane::Compute, &event);
            if let Err(error) = ordered.and_then(|()| Here::record_use(device, stream, of)) {
                warn_once!(%error, "the device cannot be made to wait for a copy");
                self.tier.hold(Some(event), of.cloned());
            }
        }
        for Load { into, done, .. } in loads {
            drop(into);
            done.call(Err(unwanted()));
        }
    }
}

/// A copy out that a thread hands over. It counts as in flight until that thread has no parcel any more.
struct HandingOver<D: Device>(Arc<HostTier<D>>);

impl<D: Device> HandingOver<D> {
    fn begin(tier: &Arc<HostTier<D>>) -> HandingOver<D> {
        tier.books.lock().in_flight += 1;
        HandingOver(Arc::clone(tier))
    }
}

impl<D: Device> Drop for HandingOver<D> {
    fn drop(&mut self) {
        self.0.books.lock().in_flight -= 1;
        self.0.changed.notify_all();
    }
}

impl<D: Device> Drop for HostParcel<D> {
    fn drop(&mut self) {
        let place = {
            let mut books = self.tier.books.lock();
            let Some(mut place) = books.ledger.remove(self.serial) else { return };
            // Whether the event is reached is asked later, when the memory is needed. By then it often is.
            let event = place.held.back.take().or_else(|| place.held.out.take());
            if let Some(cooling) = event.zip(place.held.memory.take()) {
                books.cooling.push_back(cooling);
            }
            place
        };
        // Without the lock, because this answers loads that still wait.
        drop(place);
        self.tier.sample();
        self.tier.tell_room();
    }
}
