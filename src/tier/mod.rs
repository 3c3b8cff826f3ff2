//! Where saved tensors are when they are not on the device. The cache's books know these two traits and nothing of what is
//! behind them.
//!
//! `disk` serves CPU tensors: device and host are one, so their bytes go straight to the spill files. `host` serves CUDA
//! tensors: pinned host memory first, the spill files below it. `direct` serves them where their bytes go straight between the GPU
//! and the spill files.

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
use ssdtrain_store::Store;

pub(crate) use self::direct::DirectTier;
pub(crate) use self::disk::DiskTier;
pub(crate) use self::host::{HostSettings, HostTier, PoolSize};
use crate::device::{Device, Lane};
use crate::error::{Completion, Result};
use crate::telemetry::{Counters, ScopeId, StallCause};

/// Called when a parcel that was told [`Room::Later`] should ask again. It must not wait for a transfer.
pub(crate) type RoomListener = dyn Fn() + Send + Sync;

/// What lies below a device.
pub(crate) trait Tier: Send + Sync {
    /// A place for `bytes` bytes that the calling thread has just computed in `scope`. Room is made later.
    fn parcel(self: Arc<Self>, bytes: u64, scope: ScopeId, here: &Here) -> Result<Arc<dyn Parcel>>;

    /// A new storage on the device, for what the calling thread computes.
    fn allocate(&self, bytes: u64) -> Result<Storage>;

    /// When the cache may let go of a storage that it stores. Unless that is [`Release::WhenStored`], it is at any moment after the store
    /// was begun, once the device's queue has been told to wait for it ([`Parcel::order`]). As that is done as late as the device budget
    /// allows, the peak does not depend on how far the threads are ahead of the device.
    fn release(&self) -> Release;

    /// Has `listener` called when a parcel that was told [`Room::Later`] should ask again, for as long as the caller holds it.
    fn on_room(&self, listener: &Arc<RoomListener>);

    /// A step begins: what was learned from those before may be used.
    fn begin_step(&self);

    /// Waits for what is still to be counted of this cache's steps, and counts it.
    fn settle(&self);

    /// The spill files, if there are any.
    fn store(&self) -> Option<&Store>;

    /// Host memory pinned for the device, in bytes.
    fn pinned_bytes(&self) -> u64;

    /// Which way bytes go, for people.
    fn path(&self) -> String;
}

/// Where the calling thread's computation has come to, for as long as it queues nothing: within one call of autograd's. It is
/// recorded when it is first asked for, and no more often than need be, since each event costs the thread a microsecond.
#[derive(Default)]
pub(crate) struct Here {
    /// A device's own event.
    event: RefCell<Option<Box<dyn Any>>>,
    /// The last event that the computation was told to wait for since.
    waited: RefCell<Option<Box<dyn Any>>>,
}

impl Here {
    /// What the calling thread computed before this call. Marked once.
    fn now<D: Device>(&self, device: &D) -> Result<D::Event> {
        if let Some(event) = Here::get(&self.event) {
            return Ok(event);
        }
        let event = device.record(Lane::Compute)?;
        Here::set(&self.event, &event);
        Ok(event)
    }

    /// The same, and what it was told to wait for since: memory that was let go of may be written after it.
    fn after_waits<D: Device>(&self, device: &D) -> Result<D::Event> {
        if self.waited.take().is_some() {
            self.event.take();
        }
        self.now(device)
    }

    /// The calling thread has got memory, which what other threads of its stream queued meanwhile may have used before: it is used only
    /// after that, too.
    pub(crate) fn has_allocated(&self) {
        self.event.take();
        self.waited.take();
    }

    /// Keeps the memory of `storage`, which is that stream's, from being used again before what the calling thread does with it.
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
    /// Not now, but something is on its way out.
    Later,
    /// Not, and none will appear by waiting.
    None,
}

/// The place of one entry's bytes below the device.
pub(crate) trait Parcel: Send + Sync {
    /// Makes room. To be called until it says [`Room::Reserved`], before [`store`](Parcel::store).
    fn reserve(&self) -> Room;

    /// Begins to store the bytes of `from`, which whoever asks keeps as they are until the storage may leave. `done` is called when they
    /// are stored, or the store has failed; where storages leave in stream order, only if it has failed: else it is dismissed.
    fn store(self: Arc<Self>, from: Block, done: Completion);

    /// Begins to load the bytes into `into`, which the calling thread has just allocated and keeps until it has called
    /// [`order`](Parcel::order), or [`abandon`](Parcel::abandon). After `done`, the bytes are there for whoever calls `order` first.
    fn load(self: Arc<Self>, into: Storage, here: &Here, done: Completion);

    /// Brings the bytes up to where loading them is quick, if they are further down. False: there is no room for them yet.
    fn bring_near(self: Arc<Self>) -> bool;

    /// Makes what the calling thread computes from now on come after the transfers of this parcel that were begun. Time that
    /// the device waits for that is counted for `cause`. `of` is the storage that is to leave, or that was loaded: if it is another
    /// stream's, its memory is used again only after what the calling thread's does.
    fn order(
        &self,
        of: Option<&Storage>,
        cause: StallCause,
        counters: &Arc<Counters>,
        here: &Here,
    ) -> Result<()>;

    /// Asks whether the device may let go of bytes that were loaded; false if they are nowhere below it any more.
    fn may_evict(&self) -> bool;

    /// The entry is gone: what has not begun is dropped, what is handed over later need not be moved, and what the device still
    /// reads or writes comes before what the calling thread computes from now on, and before what uses the memory of `of` again.
    fn abandon(&self, of: Option<&Storage>);
}
