//! Copies between the device and the parcels' memory.

use ssdtrain_libtorch::{Block, Storage};
use ssdtrain_store::parts;

use super::super::places::Edge;
use super::super::shelf::{Place, Serial};
use super::{Books, Held, HostTier, internal};
use crate::device::{Device, Lane};
use crate::error::Result;
use crate::trace::Counter;

impl<D: Device> HostTier<D> {
    pub(super) fn copy_out(&self, books: &mut Books<D>, serial: Serial, from: &Block) -> Result<()> {
        let Some(place) = books.shelf.get(serial) else { return Err(internal("a copy of no parcel")) };
        let bytes = whole(place.bytes)?;
        let Some(memory) = &place.held.memory else { return Err(internal("a copy without room")) };
        self.device.wait(Lane::Out, &place.held.ready)?;
        let begin = self.begin_copy(Lane::Out)?;
        let source: *const u8 = from.data().cast_const().cast();
        let mut offset = 0;
        for (to, len) in parts(&*memory.buf, bytes) {
            // SAFETY: the storage is kept as it is until it may leave, and the memory is this parcel's alone; both are longer
            // than the copy, and both stay until the mark below is reached.
            unsafe { self.device.copy_out(source.wrapping_add(offset), to, len) }?;
            offset += len;
        }
        let out = self.device.mark(Lane::Out)?;
        self.end_copy(Lane::Out, place, begin, &out);
        place.held.out = Some(out);
        place.held.copies += 1;
        books.shelf.advance(serial, Edge::CopiedOut);
        Ok(())
    }

    pub(super) fn copy_in(
        &self,
        books: &mut Books<D>,
        serial: Serial,
        into: &Storage,
        ready: &D::Mark,
    ) -> Result<()> {
        let Some(place) = books.shelf.get(serial) else { return Err(internal("a copy of no parcel")) };
        let bytes = whole(place.bytes)?;
        let Some(memory) = &place.held.memory else { return Err(internal("a copy of nothing")) };
        self.device.wait(Lane::In, ready)?;
        if let Some(out) = &place.held.out {
            self.device.wait(Lane::In, out)?;
        }
        let begin = self.begin_copy(Lane::In)?;
        let target: *mut u8 = into.data().cast();
        let mut offset = 0;
        for (from, len) in parts(&*memory.buf, bytes) {
            // SAFETY: the storage is as long as the parcel and nobody else's before the mark below is reached; the memory holds
            // the parcel's bytes, and goes to no one else before that mark.
            unsafe { self.device.copy_in(from, target.wrapping_add(offset), len) }?;
            offset += len;
        }
        let back = self.device.mark(Lane::In)?;
        self.end_copy(Lane::In, place, begin, &back);
        place.held.back = Some(back);
        place.held.copies += 1;
        books.shelf.not_near(serial);
        books.shelf.advance(serial, Edge::Lent);
        Ok(())
    }

    /// Where a copy begins, if anyone wants to know.
    fn begin_copy(&self, lane: Lane) -> Result<Option<D::Mark>> {
        let trace = self.trace.as_ref().filter(|trace| trace.trace().is_recording());
        trace.map(|_| self.device.mark(lane)).transpose()
    }

    fn end_copy(&self, lane: Lane, place: &Place<Held<D>>, begin: Option<D::Mark>, end: &D::Mark) {
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

/// A length as the address space counts it.
fn whole(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| internal("a parcel larger than the address space"))
}
