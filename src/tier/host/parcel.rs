//! One entry's place in the tier, as the cache's books use it.

use std::sync::Arc;

use parking_lot::MutexGuard;
use ssdtrain_libtorch::Storage;

use super::super::shelf::{At, Serial};
use super::super::{Here, Parcel, Room};
use super::{Books, HostParcel, Load, Stall, internal};
use crate::device::{Device, Lane};
use crate::error::{Error, ErrorKind, Result};
use crate::store::Completion;
use crate::telemetry::{Cause, Counters};

impl<D: Device> Parcel for HostParcel<D> {
    fn reserve(&self) -> Room {
        self.tier.reserve(self.serial, self.bytes)
    }

    fn store(self: Arc<Self>, from: Storage, done: Completion) {
        let outcome = {
            let mut books = self.tier.books.lock();
            let outcome = self.tier.copy_out(&mut books, self.serial, &from);
            if let (Err(error), Some(place)) = (&outcome, books.shelf.get(self.serial)) {
                place.held.failure = Some(error.to_string());
            }
            self.tier.drain(&mut books);
            outcome
        };
        self.tier.changed.notify_all();
        if outcome.is_err() {
            done(outcome);
        }
    }

    fn load(self: Arc<Self>, into: Storage, here: &Here, done: Completion) {
        let tier = &self.tier;
        let ready = match here.after_waits(&*tier.device) {
            Ok(ready) => ready,
            Err(error) => return done(Err(error)),
        };
        let mut books = tier.books.lock();
        let outcome = match books.shelf.at(self.serial) {
            At::Host | At::Writing | At::Both => tier.copy_in(&mut books, self.serial, &into, &ready),
            At::Nowhere | At::Device => Err(internal("a load of what is nowhere below the device")),
            at @ (At::Disk | At::Reading) => {
                let begun = if at == At::Disk { tier.read(&mut books, self.serial, true) } else { Ok(true) };
                match (begun, books.shelf.get(self.serial)) {
                    (Ok(_), Some(place)) => {
                        place.held.loads.push(Load { into, ready, done });
                        books.shelf.not_near(self.serial);
                        return;
                    }
                    (Ok(_), None) => Err(internal("a load of no parcel")),
                    (Err(error), _) => Err(error),
                }
            }
        };
        drop(books);
        done(outcome);
    }

    fn bring_near(self: Arc<Self>) -> bool {
        let tier = &self.tier;
        let mut books = tier.books.lock();
        if books.shelf.at(self.serial) != At::Disk {
            return true;
        }
        let near = books.shelf.near();
        if near > 0 && near + self.bytes > tier.read_ahead {
            return false;
        }
        let begun = tier.read(&mut books, self.serial, false);
        if matches!(begun, Ok(true)) {
            books.shelf.bring_near(self.serial);
        }
        // What cannot be read is told when it is asked for.
        begun.unwrap_or(true)
    }

    fn order(&self, cause: Cause, counters: &Arc<Counters>, here: &Here) -> Result<()> {
        let tier = &self.tier;
        let mut books = tier.books.lock();
        // The thread that saved it may not have begun the store yet.
        while begins_soon(&mut books, self.serial) {
            tier.changed.wait(&mut books);
        }
        let Some(place) = books.shelf.get(self.serial) else { return Ok(()) };
        if let Some(failure) = &place.held.failure {
            return Err(Error::new(ErrorKind::Device, failure.clone()));
        }
        let Some(mark) = place.held.back.clone().or_else(|| place.held.out.clone()) else { return Ok(()) };
        let ordered = std::mem::replace(&mut place.held.ordered, true);
        drop(books);
        // A wait costs less than the question whether it is needed, but the mark before it does not.
        if !here.is_marked() && tier.device.is_reached(&mark) {
            return Ok(());
        }
        if ordered {
            return tier.device.wait(Lane::Compute, &mark);
        }
        let from = here.now(&*tier.device)?;
        let waited = Here::get(&here.waited);
        // No mark after the wait: CUDA lets a thread run only some 60 recorded events of a stream ahead of the device.
        tier.device.wait(Lane::Compute, &mark)?;
        Here::set(&here.waited, &mark);
        if let Some(trace) = &tier.trace {
            trace.stall(cause, waited.as_ref().unwrap_or(&from), &mark);
        }
        tier.stalls.lock().push(Stall { cause, counters: Arc::clone(counters), from, waited, to: mark });
        Ok(())
    }

    fn may_evict(&self) -> bool {
        self.tier.books.lock().shelf.take_back(self.serial)
    }

    fn abandon(&self) {
        let (mark, loads) = {
            let mut books = self.tier.books.lock();
            let Some(place) = books.shelf.get(self.serial) else { return };
            let mark = if place.held.ordered { None } else { place.held.under_way(&*self.tier.device) };
            (mark, std::mem::take(&mut place.held.loads))
        };
        if let Some(Err(error)) = mark.map(|mark| self.tier.device.wait(Lane::Compute, &mark)) {
            tracing::warn!(%error, "the device cannot be made to wait for a copy");
        }
        for Load { into, done, .. } in loads {
            drop(into);
            done(Err(internal("nobody waits for it any more")));
        }
    }
}

impl<D: Device> Drop for HostParcel<D> {
    fn drop(&mut self) {
        {
            let mut books = self.tier.books.lock();
            let Some(mut place) = books.shelf.remove(self.serial) else { return };
            // Whether the mark is reached is asked when the memory is needed, which is later: often nothing is left to ask then.
            let mark = place.held.back.take().or_else(|| place.held.out.take());
            if let Some(cooling) = mark.zip(place.held.memory.take()) {
                books.cooling.push_back(cooling);
            }
        }
        self.tier.sample();
        self.tier.tell_room();
    }
}

fn begins_soon<D: Device>(books: &mut MutexGuard<'_, Books<D>>, serial: Serial) -> bool {
    books.shelf.at(serial) == At::Nowhere
        && books
            .shelf
            .get(serial)
            .is_some_and(|place| place.held.failure.is_none() && place.held.memory.is_some())
}
