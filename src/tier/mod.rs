//! Where saved tensors are when they are not on the device. The cache knows only these two traits, not what is behind them.
//!
//! `disk` serves CPU tensors: device and host are one, so their bytes go straight to the spill files. `host` serves CUDA tensors: pinned
//! host memory first, and the spill files below it. `direct` serves CUDA tensors whose bytes go straight between the GPU and the spill
//! files.

mod direct;
mod disk;
mod event_thread;
mod host;
mod ledger;
#[cfg(test)]
mod model;
#[cfg(test)]
pub(crate) mod modelled;
#[cfg(test)]
mod panics;
mod places;
#[cfg(test)]
mod streams;

use std::any::Any;
use std::cell::RefCell;
use std::sync::Arc;

use ssdtrain_libtorch::{Block, Storage};
use ssdtrain_plan::Release;
use ssdtrain_store::{HostPool, Store};

pub(crate) use self::direct::DirectTier;
pub(crate) use self::disk::DiskTier;
pub(crate) use self::host::{BOUNCE_BYTES, HostSettings, HostTier, PoolSize};
use crate::device::{Device, Lane};
use crate::error::{Completion, Result};
use crate::telemetry::{Counters, ScopeId, StallCause};

/// Called when a parcel that was answered [`Room::Later`] should ask again. It must not wait for a transfer.
pub(crate) type RoomListener = dyn Fn() + Send + Sync;

/// What lies below a device.
pub(crate) trait Tier: Send + Sync {
    /// A place for `bytes` bytes that the calling thread has just computed in `scope`. Room is made later.
    fn parcel(self: Arc<Self>, bytes: u64, scope: ScopeId, here: &Here) -> Result<Arc<dyn Parcel>>;

    /// A new storage on the device, for what the calling thread computes.
    fn allocate(&self, bytes: u64) -> Result<Storage>;

    /// When the cache may release a storage that it stores. [`Release::WhenStored`]: when the store has ended. Otherwise at any moment
    /// after the store has begun, once the device's queue has been made to wait for it ([`Parcel::order`]). That is done as late as the
    /// device budget allows, so the peak does not depend on how far the threads run ahead of the device.
    fn release(&self) -> Release;

    /// Has `listener` called whenever a parcel that was answered [`Room::Later`] should ask again, for as long as the caller holds it.
    fn on_room(&self, listener: &Arc<RoomListener>);

    /// A step begins: what was learned from earlier steps may be used.
    fn begin_step(&self);

    /// Whether this much host memory is there, or as much as there may be. Otherwise more is provided in the background.
    fn provide(&self, _bytes: u64) -> bool {
        true
    }

    /// What the calling thread queues next uses this storage. However early it leaves, its memory is reused only after that, even if
    /// it belongs to another stream.
    fn in_use(&self, _storage: &Storage) -> Result<()> {
        Ok(())
    }

    /// Which of its device's streams the calling thread computes on.
    fn stream(&self) -> Result<usize> {
        Ok(0)
    }

    /// What the calling thread computes from now on comes after all that this stream was given so far.
    fn after(&self, _stream: usize) -> Result<()> {
        Ok(())
    }

    /// Bytes per second of copies off the device, and back to it, as a trial shows; `None` where nothing is copied to host memory.
    fn try_copies(&self) -> Result<Option<(f64, f64)>> {
        Ok(None)
    }

    /// Gives host memory back that nothing is in, to be taken again by the next step. Waits for the device. Returns the bytes.
    fn shrink(&self) -> u64 {
        0
    }

    /// Waits until the device has done all that it was given so far, on all its streams.
    fn synchronize(&self) -> Result<()>;

    /// The point that the calling thread's computation has reached on a device, for [`reran`](Tier::reran). `None` where the thread computes
    /// itself.
    fn mark(&self) -> Option<Mark> {
        None
    }

    /// What the calling thread has computed since `mark` was a rerun. The time that it takes the device, without what that waits for
    /// meanwhile, is counted once it is known.
    fn reran(&self, _since: Mark, _counters: &Arc<Counters>) {}

    /// Waits for what is still to be counted for this cache's steps, and counts it.
    fn settle(&self);

    /// Waits until one of the transfers has ended that hold memory of the device whatever becomes of their entries; false if there are
    /// none.
    fn one_ends(&self) -> bool {
        false
    }

    /// The spill files, if there are any.
    fn store(&self) -> Option<&Store>;

    /// The host memory pinned for the device, if bytes go through it.
    fn host_pool(&self) -> Option<&HostPool> {
        None
    }

    /// A description of the way that bytes take, for people.
    fn path(&self) -> String;
}

/// A point that some thread's computation has reached: an event of the device's own type, and how many stalls there were before.
pub(crate) struct Mark {
    event: Box<dyn Any + Send>,
    stalls: usize,
}

/// The number of no stream.
const NO_STREAM: usize = usize::MAX;

/// To which stream the storages of a parcel belong that is loaded for `stream`. One that was loaded for another before may still be in use.
fn stream_of_load(before: usize, was_loaded: bool, stream: usize) -> usize {
    if was_loaded && before != stream { NO_STREAM } else { stream }
}

/// The point that the calling thread's computation has reached, valid as long as the thread queues nothing: within one call from
/// autograd. Its event is recorded when first asked for, and no more often than necessary, because each event costs the thread a
/// microsecond.
#[derive(Default)]
pub(crate) struct Here {
    /// An event of the device's own type.
    event: RefCell<Option<Box<dyn Any>>>,
    /// The last event that the computation was made to wait for since.
    waited: RefCell<Option<Box<dyn Any>>>,
}

impl Here {
    /// An event after what the calling thread computed before this call. Recorded once.
    fn now<D: Device>(&self, device: &D) -> Result<D::Event> {
        if let Some(event) = Here::get(&self.event) {
            return Ok(event);
        }
        let event = device.record(Lane::Compute)?;
        Here::set(&self.event, &event);
        Ok(event)
    }

    /// As [`Here::now`], but also after what the computation was made to wait for since: memory released then may be written after this
    /// event.
    fn after_waits<D: Device>(&self, device: &D) -> Result<D::Event> {
        if self.waited.take().is_some() {
            self.event.take();
        }
        self.now(device)
    }

    /// The calling thread has allocated memory, which may still be in use by what other threads queued on its stream meanwhile. The next
    /// event is recorded anew, so that it comes after those uses.
    pub(crate) fn has_allocated(&self) {
        self.event.take();
        self.waited.take();
    }

    /// Keeps the memory of `storage`, which belongs to `stream`, from being reused before what the calling thread does with it.
    fn record_use<D: Device>(device: &D, stream: usize, storage: Option<&Storage>) -> Result<()> {
        match storage {
            Some(storage) if device.stream()? != stream => device.record_use(storage),
            _ => Ok(()),
        }
    }

    fn is_marked(&self) -> bool {
        self.event.borrow().is_some()
    }

    fn get<M: Clone + 'static>(place: &RefCell<Option<Box<dyn Any>>>) -> Option<M> {
        place.borrow().as_ref().and_then(|event| event.downcast_ref()).cloned()
    }

    fn set<M: Clone + 'static>(place: &RefCell<Option<Box<dyn Any>>>, event: &M) {
        place.replace(Some(Box::new(event.clone())));
    }
}

/// Whether there is room for a parcel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    Reserved,
    /// Not at present, but something is on its way out.
    Later,
    /// No, and waiting will not change that.
    None,
}

/// The place of one entry's bytes below the device.
pub(crate) trait Parcel: Send + Sync {
    /// The storage may have been computed on any stream, not on that of the thread which made the parcel. It has been computed.
    fn of_any_stream(&self);

    /// Makes room. Must be called until it returns [`Room::Reserved`], before [`store`](Parcel::store).
    fn reserve(&self) -> Room;

    /// Begins to store the bytes of `from`, which the caller leaves unchanged until the storage may leave. `done` is called when the
    /// bytes are stored or the store has failed. If storages leave in stream order, it is called only for a failure and dismissed
    /// otherwise.
    fn store(self: Arc<Self>, from: Block, done: Completion);

    /// Begins to load the bytes into `into`, which the calling thread has just allocated and keeps until it has called
    /// [`order`](Parcel::order) or [`abandon`](Parcel::abandon). After `done`, a thread may use the bytes once it has called `order`.
    fn load(self: Arc<Self>, into: Storage, here: &Here, done: Completion);

    /// Reads the bytes into a tier from which loading is quick, if they are further down. False if there is no room for them yet.
    fn bring_near(self: Arc<Self>) -> bool;

    /// Makes what the calling thread computes from now on come after the transfers of this parcel that have begun. The time that the
    /// device waits for them is counted for `cause`; `None` if the calling thread's own wait is. `of` is the storage that is to leave, or that was loaded. If it belongs to another
    /// stream, its memory is reused only after what the calling thread does with it.
    fn order(
        &self,
        of: Option<&Storage>,
        cause: Option<StallCause>,
        counters: &Arc<Counters>,
        here: &Here,
    ) -> Result<()>;

    /// Whether the device may release bytes that were loaded; false if they are no longer anywhere below it.
    fn may_evict(&self) -> bool;

    /// The entry is gone. Transfers that have not begun are dropped, and those handed over later need not be made. What the device still
    /// reads or writes comes before what the calling thread computes from now on, and before `of`'s memory is reused.
    fn abandon(&self, of: Option<&Storage>);
}
