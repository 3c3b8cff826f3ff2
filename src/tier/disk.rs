//! The tier of CPU tensors: device and host are one, so bytes go straight between tensors and the spill files.

use std::sync::{Arc, OnceLock};

use ssdtrain_libtorch::{Block, Storage};
use ssdtrain_plan::Release;
use ssdtrain_store::{Blob, Direction, Store};

use super::{Here, Parcel, Room, RoomListener, Tier};
use crate::error::{Completion, Error, ErrorKind, Result};
use crate::mem::StorageBuf;
use crate::telemetry::{Counters, ScopeId, StallCause};
use crate::trace::Trace;

/// Spill files below CPU memory.
pub(crate) struct DiskTier {
    store: Store,
    trace: Option<Arc<Trace>>,
}

/// An extent, once there is one.
struct DiskParcel {
    store: Store,
    trace: Option<Arc<Trace>>,
    bytes: u64,
    scope: ScopeId,
    blob: OnceLock<Arc<Blob>>,
}

impl DiskTier {
    pub(crate) fn new(store: Store, trace: Option<Arc<Trace>>) -> DiskTier {
        DiskTier { store, trace }
    }
}

impl DiskParcel {
    fn traced(&self, direction: Direction, done: Completion) -> Completion {
        Trace::transfer(self.trace.as_ref(), direction, self.scope, self.bytes, done)
    }
}

impl Tier for DiskTier {
    fn parcel(self: Arc<Self>, bytes: u64, scope: ScopeId, _here: &Here) -> Result<Arc<dyn Parcel>> {
        let (store, trace) = (self.store.clone(), self.trace.clone());
        Ok(Arc::new(DiskParcel { store, trace, bytes, scope, blob: OnceLock::new() }))
    }

    fn allocate(&self, bytes: u64) -> Result<Storage> {
        Storage::allocate(bytes).map_err(Error::torch)
    }

    fn release(&self) -> Release {
        Release::WhenStored
    }

    fn on_room(&self, listener: &Arc<RoomListener>) {
        self.store.on_growth(listener);
    }

    fn begin_step(&self) {}

    /// CPU tensors have no queue.
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    fn settle(&self) {}

    fn store(&self) -> Option<&Store> {
        Some(&self.store)
    }

    fn path(&self) -> String {
        self.store.path().to_string()
    }
}

impl Parcel for DiskParcel {
    fn of_any_stream(&self) {}

    fn reserve(&self) -> Room {
        match self.store.try_reserve(self.bytes) {
            Ok(Some(blob)) => {
                self.blob.get_or_init(|| blob);
                Room::Reserved
            }
            Ok(None) => Room::Later,
            Err(_) => Room::None,
        }
    }

    fn store(self: Arc<Self>, from: Block, done: Completion) {
        match self.blob.get() {
            Some(blob) => {
                let done = self.traced(Direction::Write, done);
                self.store.write(Arc::clone(blob), Arc::new(StorageBuf::new(from)), done.of_transfer());
            }
            None => done.call(Err(unreserved())),
        }
    }

    fn load(self: Arc<Self>, into: Storage, _here: &Here, done: Completion) {
        match self.blob.get() {
            Some(blob) => {
                let done = self.traced(Direction::Read, done);
                self.store.read(
                    Arc::clone(blob),
                    Arc::new(StorageBuf::new(Block::of(into))),
                    done.of_transfer(),
                );
            }
            None => done.call(Err(unreserved())),
        }
    }

    /// There is nothing between disk and device.
    fn bring_near(self: Arc<Self>) -> bool {
        true
    }

    /// CPU tensors have no queue: what was called has been computed.
    fn order(
        &self,
        _of: Option<&Storage>,
        _cause: Option<StallCause>,
        _counters: &Arc<Counters>,
        _here: &Here,
    ) -> Result<()> {
        Ok(())
    }

    fn may_evict(&self) -> bool {
        true
    }

    fn abandon(&self, _of: Option<&Storage>) {}
}

fn unreserved() -> Error {
    Error::new(ErrorKind::Io, "internal error: a transfer without an extent")
}
