//! The tier of a GPU whose tensors go straight between its memory and the spill files, as in the paper (section 5.3.2): by
//! GPUDirect Storage where the machine has it.
//!
//! A storage is written once the device has computed it, and leaves as late as the device budget allows, as on the way through
//! host memory. Here it is the thread that waits for the write then: the device's queue cannot. Loads begin once the device has
//! stopped using their memory for anything else, and are complete when they are served.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use ssdtrain_libtorch::Storage;

use super::waiter::Waiter;
use super::{Here, Leaving, Parcel, Room, Tier};
use crate::device::{Device, Lane};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::{BLOCK, DeviceBuf, Rest};
use crate::store::{Blob, Completion, Direction, Store};
use crate::telemetry::{Cause, Counters, ScopeId};
use crate::trace::{DeviceTrace, Trace};

/// Spill files right below a device.
pub(crate) struct DirectTier<D: Device> {
    // Declared first: their tasks use all the rest.
    writes: Waiter<D>,
    reads: Waiter<D>,
    store: Store,
    trace: Option<DeviceTrace<D>>,
    device: Arc<D>,
    /// Transfers begun or waiting to begin.
    in_flight: Mutex<usize>,
    ended: Condvar,
}

/// An extent, once there is one, and how its write went.
struct DirectParcel<D: Device> {
    tier: Arc<DirectTier<D>>,
    bytes: u64,
    scope: ScopeId,
    /// When the device has computed the bytes.
    ready: D::Mark,
    blob: OnceLock<Arc<Blob>>,
    written: Mutex<Option<Result<(), String>>>,
    changed: Condvar,
}

impl<D: Device> DirectTier<D> {
    pub(crate) fn new(device: D, store: Store, trace: Option<&Arc<Trace>>) -> Result<Arc<DirectTier<D>>> {
        let device = Arc::new(device);
        let trace = trace.map(|trace| DeviceTrace::start(trace, &device)).transpose()?;
        Ok(Arc::new(DirectTier {
            writes: Waiter::start("ssdtrain-out", Arc::clone(&device))?,
            reads: Waiter::start("ssdtrain-in", Arc::clone(&device))?,
            store,
            trace,
            device,
            in_flight: Mutex::default(),
            ended: Condvar::new(),
        }))
    }

    fn traced(&self, direction: Direction, scope: ScopeId, bytes: u64, done: Completion) -> Completion {
        Trace::transfer(self.trace.as_ref().map(DeviceTrace::trace), direction, scope, bytes, done)
    }

    /// Copies what does not go straight, and waits for that.
    fn copy(&self, lane: Lane, rest: Option<Rest>) -> Result<()> {
        let Some(Rest { device, host, bytes }) = rest else { return Ok(()) };
        match lane {
            // SAFETY: both places belong to the buffer of a transfer that has not begun, which is alive until the mark below is reached;
            // the storage's bytes are there, since its mark is reached.
            Lane::Out => unsafe { self.device.copy_out(device, host, bytes) },
            // SAFETY: as above, of a transfer that has ended and was not told of yet.
            Lane::In | Lane::Compute => unsafe { self.device.copy_in(host, device, bytes) },
        }?;
        self.device.block_on(&self.device.mark(lane)?)
    }

    fn begins(&self) {
        *self.in_flight.lock() += 1;
    }

    fn ends(&self) {
        *self.in_flight.lock() -= 1;
        self.ended.notify_all();
    }
}

impl<D: Device> Tier for DirectTier<D> {
    fn parcel(self: Arc<Self>, bytes: u64, scope: ScopeId, here: &Here) -> Result<Arc<dyn Parcel>> {
        let ready = here.now(&*self.device)?;
        let (blob, written, changed) = (OnceLock::new(), Mutex::default(), Condvar::new());
        Ok(Arc::new(DirectParcel { tier: self, bytes, scope, ready, blob, written, changed }))
    }

    fn allocate(&self, bytes: u64) -> Result<Storage> {
        self.device.allocate(bytes)
    }

    fn leaving(&self) -> Leaving {
        Leaving::InStreamOrder
    }

    /// An extent is there at once or not at all.
    fn when_room(&self, _room: Box<dyn Fn() + Send + Sync>) {}

    fn begin_step(&self) {}

    fn settle(&self) {
        let mut in_flight = self.in_flight.lock();
        while *in_flight > 0 {
            self.ended.wait(&mut in_flight);
        }
    }

    fn store(&self) -> Option<&Store> {
        Some(&self.store)
    }

    fn pinned_bytes(&self) -> u64 {
        0
    }

    fn path(&self) -> String {
        self.store.path().to_string()
    }
}

impl<D: Device> Parcel for DirectParcel<D> {
    fn reserve(&self) -> Room {
        match self.tier.store.reserve(self.bytes) {
            Ok(blob) => {
                self.blob.get_or_init(|| blob);
                Room::Reserved
            }
            Err(_) => Room::None,
        }
    }

    fn store(self: Arc<Self>, from: Storage, done: Completion) {
        let tier = Arc::clone(&self.tier);
        tier.begins();
        tier.writes.after(vec![self.ready.clone()], move |reached| self.write(from, reached, done));
    }

    fn load(self: Arc<Self>, into: Storage, here: &Here, done: Completion) {
        let tier = Arc::clone(&self.tier);
        match here.after_waits(&*tier.device) {
            Ok(ready) => {
                tier.begins();
                tier.reads.after(vec![ready], move |reached| self.read(into, reached, done));
            }
            Err(error) => done(Err(error)),
        }
    }

    /// There is nothing between disk and device.
    fn bring_near(self: Arc<Self>) -> bool {
        true
    }

    fn order(&self, cause: Cause, counters: &Arc<Counters>, _here: &Here) -> Result<()> {
        let mut written = self.written.lock();
        if written.is_none() {
            let start = Instant::now();
            while written.is_none() {
                self.changed.wait(&mut written);
            }
            let now = Instant::now();
            counters.stalled(cause, now - start);
            if let Some(trace) = &self.tier.trace {
                trace.trace().stall(cause, start, now);
            }
        }
        match &*written {
            Some(Err(failure)) => Err(Error::new(ErrorKind::Io, failure.clone())),
            Some(Ok(())) | None => Ok(()),
        }
    }

    fn may_evict(&self) -> bool {
        true
    }

    /// A transfer under way holds the memory until it is over.
    fn abandon(&self) {}
}

impl<D: Device> DirectParcel<D> {
    /// Runs once the device has computed the bytes.
    fn write(self: Arc<Self>, from: Storage, reached: Result<()>, done: Completion) {
        // Nobody may want it any more.
        let wanted = Arc::strong_count(&self) > 1;
        let tier = Arc::clone(&self.tier);
        let lent = reached
            .and_then(|()| if wanted { self.lend(from) } else { Err(internal("nobody wants it")) })
            .and_then(|buf| tier.copy(Lane::Out, buf.rest()).map(|()| buf))
            .and_then(|buf| Ok((buf, self.extent()?)));
        let (scope, bytes) = (self.scope, self.bytes);
        let over = move |outcome: Result<()>| {
            let tier = Arc::clone(&self.tier);
            *self.written.lock() = Some(outcome.as_ref().map_err(ToString::to_string).copied());
            self.changed.notify_all();
            // Its extent is free before anyone hears that all is over.
            drop(self);
            if outcome.is_err() {
                done(outcome);
            }
            tier.ends();
        };
        match lent {
            Ok((buf, blob)) => {
                let done = tier.traced(Direction::Write, scope, bytes, Box::new(over));
                tier.store.write(blob, buf, done);
            }
            Err(error) => over(Err(error)),
        }
    }

    /// Runs once `into` is nobody else's.
    fn read(self: Arc<Self>, into: Storage, reached: Result<()>, done: Completion) {
        let tier = Arc::clone(&self.tier);
        let lent = reached.and_then(|()| self.lend(into)).and_then(|buf| Ok((buf, self.extent()?)));
        let (scope, bytes) = (self.scope, self.bytes);
        let over = move |outcome| {
            let tier = Arc::clone(&self.tier);
            drop(self);
            tier.ends();
            done(outcome);
        };
        let (buf, blob) = match lent {
            Ok(lent) => lent,
            Err(error) => return over(Err(error)),
        };
        let filled = Arc::clone(&buf);
        let copies = Arc::clone(&tier);
        let done = move |outcome: Result<()>| {
            let outcome = outcome.and_then(|()| copies.copy(Lane::In, filled.rest()));
            drop(filled);
            over(outcome);
        };
        let done = tier.traced(Direction::Read, scope, bytes, Box::new(done));
        tier.store.read(blob, buf, done);
    }

    fn extent(&self) -> Result<Arc<Blob>> {
        self.blob.get().cloned().ok_or_else(|| internal("a transfer without an extent"))
    }

    fn lend(&self, storage: Storage) -> Result<Arc<DeviceBuf>> {
        let bytes =
            usize::try_from(self.bytes).map_err(|_| internal("a parcel larger than the address space"))?;
        let alignment = self.blob.get().map_or(BLOCK, |blob| blob.memory_alignment());
        let buf = DeviceBuf::new(storage, bytes, alignment);
        buf.map(Arc::new).ok_or_else(|| internal("no host memory for the end of a storage"))
    }
}

fn internal(what: &str) -> Error {
    Error::new(ErrorKind::Device, format!("internal error: {what}"))
}
