//! The tier of CUDA tensors: pinned host memory, with the spill files below it.
//!
//! A parcel is copied out into a slot of the pool and stays there while the pool has room. What a step needs beyond that is written to
//! the disk, oldest first. Backward asks for the newest first, so what is still in the pool is what is wanted next. A slot whose bytes
//! are also on the disk is clean, and is reclaimed, oldest first, when room is needed.
//!
//! Copies are queued and never waited for here. Where a thread has to sleep until a copy is done, before a slot is written to the disk or
//! before a slot that the device still reads is read into, one of this tier's own threads does so.

mod copies;
mod growth;
mod parcel;
mod spill;
mod times;

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use bytesize::ByteSize;
use ssdtrain_libtorch::{Storage, StorageId};
use ssdtrain_plan::Release;
use ssdtrain_store::sync::Mutex as PlainMutex;
use ssdtrain_store::{Blob, HostPool, IoBuf, Store};

pub(crate) use self::growth::{BOUNCE_BYTES, PoolSize};
use self::spill::Write;
use self::times::Times;
use super::event_thread::EventThread;
use super::ledger::{Ledger, Serial};
use super::places::Edge;
use super::{Here, Mark, Parcel, Room, RoomListener, Tier};
use crate::device::{Device, Lane, is_unanswered, keep};
use crate::error::{Completion, Error, ErrorKind, Result};
use crate::mem::available_memory;
use crate::sync::{Condvar, Mutex};
use crate::telemetry::{Counters, ScopeId};
use crate::trace::{DeviceTrace, Trace};

/// How much host memory the tier takes, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostSettings {
    pub(crate) pool: PoolSize,
    /// Upper limit on the bytes read from the disk ahead of the copies to the device.
    pub(crate) read_ahead: u64,
}

/// Pinned host memory below a device.
pub(crate) struct HostTier<D: Device> {
    // Declared first, because their tasks use everything else.
    /// Begins writes. It also copies from memory that is not pinned, and lets go of what the device may still use.
    writes: EventThread<D>,
    reads: EventThread<D>,
    /// `None` if the pool does not grow.
    pins: Option<EventThread<D>>,
    books: Mutex<Books<D>>,
    /// Signalled when a store has begun, and when a transfer with the disk has ended.
    changed: Condvar,
    times: Times<D::Event>,
    room: PlainMutex<Vec<Weak<RoomListener>>>,
    /// Called when a spill file has grown.
    grown: Arc<dyn Fn() + Send + Sync>,
    read_ahead: u64,
    size: PoolSize,
    pool: HostPool,
    store: Option<Store>,
    trace: Option<DeviceTrace<D>>,
    device: Arc<D>,
    this: Weak<HostTier<D>>,
}

struct Books<D: Device> {
    ledger: Ledger<ParcelData<D>>,
    /// Memory that the device may still read or write, oldest first, each with the event after which it does not.
    cooling: VecDeque<Cooling<D>>,
    /// Such events for memory that was given back to the pool before they were reached.
    hot: Vec<D::Event>,
    /// Such memory that is not the pool's: it is freed only after its event.
    unpooled: Vec<Cooling<D>>,
    /// A thread is pinning more for the pool.
    growing: bool,
    /// The bytes that the pool is to have in this step, whether or not parcels have asked for them.
    wanted: u64,
    /// Why the pool does not grow: for the rest of the step because memory is short, or for good because the system refused.
    short: bool,
    refused: bool,
    /// Transfers with the disk, including those that have not begun yet, and copies out that are being handed over.
    in_flight: usize,
}

/// Memory, and the event after which the device does not use it any more.
type Cooling<D> = (<D as Device>::Event, Memory);
/// Memory, and all events after which the device does not use it any more.
type Taken<D> = (Vec<<D as Device>::Event>, Memory);

/// Host memory of a parcel.
#[derive(Clone)]
struct Memory {
    buf: Arc<dyn IoBuf>,
    /// Whether it is a slot of the pool, whose next user waits for what the device still does with it.
    pooled: bool,
}

/// The data kept with a parcel.
struct ParcelData<D: Device> {
    parcel: Weak<HostParcel<D>>,
    /// The scope in which it was computed.
    scope: ScopeId,
    /// Reached when the device has computed the bytes.
    ready: D::Event,
    /// The stream to which its storage's memory belongs: the one that it was saved on, or loaded for.
    stream: usize,
    memory: Option<Memory>,
    blob: Option<Arc<Blob>>,
    /// The ends of the copy out and of the last copy in.
    out: Option<D::Event>,
    back: Option<D::Event>,
    /// How many copies were begun, and how many of them had been when the compute queue was last made to wait for the latest.
    copies: u64,
    ordered: u64,
    /// What it was last loaded into; `None` if it was not.
    target: Option<StorageId>,
    /// Why the copy out failed.
    failure: Option<Error>,
    /// Loads that wait for the disk.
    loads: Vec<Load<D>>,
}

struct Load<D: Device> {
    into: Storage,
    /// Reached when the device has stopped using `into`'s memory for anything else.
    ready: D::Event,
    done: Completion,
}

/// A parcel of this tier.
struct HostParcel<D: Device> {
    tier: Arc<HostTier<D>>,
    serial: Serial,
    bytes: u64,
}

impl<D: Device> HostTier<D> {
    pub(crate) fn new(
        device: D,
        store: Option<Store>,
        settings: HostSettings,
        trace: Option<&Arc<Trace>>,
    ) -> Result<Arc<HostTier<D>>> {
        let device = Arc::new(device);
        let trace = trace.map(|trace| DeviceTrace::start(trace, &device)).transpose()?;
        let cap = match settings.pool {
            // Whole portions of 2 MiB. What cannot be rounded up is more memory than there is, and refused as such.
            PoolSize::Fixed(bytes) => bytes.saturating_add((2 << 20) - 1) >> 21 << 21,
            PoolSize::Learned { cap } => cap,
            PoolSize::Bounce(_) => u64::MAX,
        };
        let pool = HostPool::new(cap, Arc::clone(&device) as _);
        if let PoolSize::Fixed(_) = settings.pool {
            pool.grow(cap)?;
        }
        let books = Books {
            ledger: Ledger::new(),
            cooling: VecDeque::new(),
            hot: Vec::new(),
            unpooled: Vec::new(),
            growing: false,
            wanted: 0,
            short: false,
            refused: false,
            in_flight: 0,
        };
        let writes = EventThread::start("ssdtrain-out", Arc::clone(&device))?;
        let reads = EventThread::start("ssdtrain-in", Arc::clone(&device))?;
        let grows = !matches!(settings.pool, PoolSize::Fixed(_));
        let pins = grows.then(|| EventThread::start("ssdtrain-pin", Arc::clone(&device))).transpose()?;
        let tier = Arc::new_cyclic(|this| HostTier {
            writes,
            reads,
            pins,
            books: Mutex::new(books),
            changed: Condvar::new(),
            times: Times::new(),
            room: Default::default(),
            grown: {
                let this: Weak<HostTier<D>> = Weak::clone(this);
                Arc::new(move || this.upgrade().iter().for_each(|tier| tier.disk_has_grown()))
            },
            read_ahead: settings.read_ahead,
            size: settings.pool,
            pool,
            store,
            trace,
            device,
            this: Weak::clone(this),
        });
        tier.store.iter().for_each(|store| store.on_growth(&tier.grown));
        Ok(tier)
    }

    /// Upper limit on the pool's bytes in this step.
    fn capacity(&self, books: &Books<D>) -> u64 {
        match self.size {
            PoolSize::Learned { cap } if !(books.short || books.refused) => cap,
            _ => self.pool.capacity(),
        }
    }

    // ---- host memory ----

    /// Memory for `bytes` bytes, from the pool or from parcels that are on the disk too. The device may still use it until the returned
    /// events are reached.
    fn take(&self, books: &mut Books<D>, bytes: u64) -> Option<Taken<D>> {
        while books.cooling.pop_front_if(|(event, _)| self.device.is_reached(event)).is_some() {}
        books.unpooled.retain(|(event, _)| !self.device.is_reached(event));
        loop {
            if let Some(slot) = self.pool.take(bytes) {
                books.hot.retain(|event| !self.device.is_reached(event));
                return Some((books.hot.clone(), Memory { buf: Arc::new(slot), pooled: true }));
            }
            if let Some(cooling) = books.cooling.pop_front() {
                books.give_back(cooling);
            } else {
                let next = books.ledger.next_to_reclaim()?;
                self.reclaim(books, next);
            }
        }
    }

    /// Takes a parcel's memory, whose bytes are elsewhere too.
    fn reclaim(&self, books: &mut Books<D>, serial: Serial) {
        books.ledger.reclaim(serial);
        let Some(place) = books.ledger.get(serial) else { return };
        let memory = place.held.memory.take();
        if let Some(cooling) = place.held.under_way(&*self.device).zip(memory) {
            books.give_back(cooling);
        }
    }

    /// Makes room for a parcel that is to be copied out.
    fn reserve(&self, serial: Serial, bytes: u64) -> Room {
        let mut books = self.books.lock();
        let books = &mut *books;
        let Some((after, memory)) = self.take(books, bytes) else {
            return self.room_to_come(books, bytes);
        };
        // Copies out come after what the device still does with the memory.
        if after.iter().try_for_each(|event| self.device.wait(Lane::Out, event)).is_err() {
            return Room::None;
        }
        if let Some(place) = books.ledger.get(serial) {
            place.held.memory = Some(memory);
        }
        books.ledger.advance(serial, Edge::RoomTaken);
        Room::Reserved
    }

    /// What a parcel that finds no room can wait for, if anything.
    fn room_to_come(&self, books: &mut Books<D>, bytes: u64) -> Room {
        if self.grows(books, bytes) {
            return Room::Later;
        }
        if bytes > self.pool.capacity() {
            return Room::None;
        }
        // Writes in flight will make room, though perhaps not enough: then this is called again.
        if self.store.is_some() && !books.ledger.is_writing() {
            while let Some(next) = books.ledger.next_to_write_at_once() {
                match self.write(books, next) {
                    Write::Begun => break,
                    Write::Later => return Room::Later,
                    Write::Refused => {}
                }
            }
        }
        if books.ledger.is_writing() { Room::Later } else { Room::None }
    }

    fn tell_room(&self) {
        let listeners: Vec<_> = self.room.lock().iter().filter_map(Weak::upgrade).collect();
        listeners.iter().for_each(|listener| listener());
    }
}

impl<D: Device> Tier for HostTier<D> {
    fn parcel(self: Arc<Self>, bytes: u64, scope: ScopeId, here: &Here) -> Result<Arc<dyn Parcel>> {
        let (ready, stream) = (here.now(&*self.device)?, self.device.stream()?);
        let parcel: Arc<HostParcel<D>> = Arc::new_cyclic(|this| {
            let held = ParcelData {
                parcel: Weak::clone(this),
                scope,
                ready,
                stream,
                memory: None,
                blob: None,
                out: None,
                back: None,
                copies: 0,
                ordered: 0,
                target: None,
                failure: None,
                loads: Vec::new(),
            };
            let serial = self.books.lock().ledger.insert(bytes, held);
            HostParcel { serial, bytes, tier: Arc::clone(&self) }
        });
        Ok(parcel)
    }

    fn in_use(&self, storage: &Storage) -> Result<()> {
        self.device.record_use(storage)
    }

    fn stream(&self) -> Result<usize> {
        self.device.stream()
    }

    fn allocate(&self, bytes: u64) -> Result<Storage> {
        self.device.allocate(bytes)
    }

    fn release(&self) -> Release {
        Release::InStreamOrder
    }

    fn on_room(&self, listener: &Arc<RoomListener>) {
        let mut listeners = self.room.lock();
        listeners.retain(|listener| listener.strong_count() > 0);
        listeners.push(Arc::downgrade(listener));
    }

    fn begin_step(&self) {
        self.times.begin_step(&*self.device);
        let mut books = self.books.lock();
        books.ledger.begin_step();
        (books.short, books.wanted) = (false, 0);
        drop(books);
        // What was given back.
        if let PoolSize::Fixed(bytes) = self.size
            && let lacking @ 1.. = self.pool.cap().min(bytes).saturating_sub(self.pool.capacity())
            && let Err(error) = self.pool.grow(lacking)
        {
            tracing::warn!(%error, "the host pool is smaller than it was");
        }
    }

    fn provide(&self, bytes: u64) -> bool {
        let capacity = self.pool.capacity();
        if bytes <= capacity {
            return true;
        }
        // No more than half of what is available is taken at a time, and nothing where memory is short.
        let spare = available_memory() / 2;
        let wanted = bytes.min(capacity.saturating_add(spare));
        let mut books = self.books.lock();
        books.wanted = books.wanted.max(wanted);
        spare < growth::AHEAD || !self.grows_ahead(&mut books)
    }

    fn try_copies(&self) -> Result<Option<(f64, f64)>> {
        let bytes = copies::PIECE.min(self.pool.cap());
        let take = || self.take(&mut self.books.lock(), bytes);
        let taken = match take() {
            None => {
                self.pool.grow(bytes)?;
                take()
            }
            taken => taken,
        };
        let (after, memory) = taken.ok_or_else(|| internal("a pool that has grown has no room"))?;
        for (lane, event) in
            [Lane::Out, Lane::In].iter().flat_map(|lane| after.iter().map(move |event| (*lane, event)))
        {
            self.device.wait(lane, event)?;
        }
        copies::rates(memory.buf, bytes, &*self.device).map(Some)
    }

    fn shrink(&self) -> u64 {
        let used: Vec<D::Event> = {
            let books = self.books.lock();
            let cooling = books.cooling.iter().chain(&books.unpooled);
            cooling.map(|(event, _)| event).chain(&books.hot).cloned().collect()
        };
        for event in &used {
            if let Err(error) = self.device.block_on(event) {
                tracing::warn!(%error, "host memory is not given back");
                return 0;
            }
        }
        let mut books = self.books.lock();
        books.cooling.retain(|(event, _)| !self.device.is_reached(event));
        books.unpooled.retain(|(event, _)| !self.device.is_reached(event));
        books.hot.retain(|event| !self.device.is_reached(event));
        // Nothing is pinned ahead until a step asks for it again.
        books.wanted = 0;
        // Other threads may have given memory back since. None does between this and taking what is free.
        let gone = books.hot.is_empty().then(|| self.pool.shrink());
        drop(books);
        gone.map_or(0, |gone| gone.bytes())
    }

    fn after(&self, stream: usize) -> Result<()> {
        self.device.after(stream)
    }

    fn synchronize(&self) -> Result<()> {
        self.device.synchronize()
    }

    fn mark(&self) -> Option<Mark> {
        self.times.mark(&*self.device)
    }

    fn reran(&self, since: Mark, counters: &Arc<Counters>) {
        self.times.reran(&*self.device, since, counters);
    }

    fn settle(&self) {
        let mut books = self.books.lock();
        while books.in_flight > 0 {
            self.changed.wait(&mut books);
        }
        drop(books);
        self.times.count(&*self.device);
    }

    fn store(&self) -> Option<&Store> {
        self.store.as_ref()
    }

    fn host_pool(&self) -> Option<&HostPool> {
        Some(&self.pool)
    }

    fn path(&self) -> String {
        let pool = match self.pool.capacity() {
            // It grows with what steps need.
            0 => "pinned host memory".to_owned(),
            bytes => format!("{} of pinned host memory", ByteSize(bytes)),
        };
        match &self.store {
            Some(store) => format!("{pool}, then {}", store.path()),
            None => pool,
        }
    }
}

impl<D: Device> Drop for HostTier<D> {
    fn drop(&mut self) {
        // Before the pool's memory is freed, the device must have finished with it. One that is late is not waited for again.
        let books = self.books.get_mut();
        for (event, memory) in books.cooling.drain(..).chain(books.unpooled.drain(..)) {
            keep(&self.device.block_unless_late(&event), Some(memory));
        }
        let mut errors = books.hot.iter().filter_map(|event| self.device.block_unless_late(event).err());
        let over = errors.find(is_unanswered).map_or(Ok(()), Err);
        keep(&over, Some(self.pool.clone()));
    }
}

impl<D: Device> Books<D> {
    /// Fails once the parcel was abandoned, because the storages of its copies may belong to somebody else by then.
    fn wanted(&self, serial: Serial) -> Result<()> {
        if self.ledger.is_wanted(serial) { Ok(()) } else { Err(unwanted()) }
    }

    /// Gives memory back before its event is reached.
    fn give_back(&mut self, (event, memory): Cooling<D>) {
        if memory.pooled {
            self.hot.push(event);
        } else {
            self.unpooled.push((event, memory));
        }
    }
}

impl<D: Device> ParcelData<D> {
    /// Whether the compute queue was already made to wait for the latest copy.
    fn is_ordered(&self) -> bool {
        self.ordered == self.copies
    }

    /// The event after which the device uses neither the parcel's memory nor the storages of its copies; `None` if it is reached. A copy
    /// in comes after the copy out.
    fn under_way(&self, device: &D) -> Option<D::Event> {
        self.back.as_ref().or(self.out.as_ref()).filter(|event| !device.is_reached(event)).cloned()
    }
}

#[cfg(test)]
impl<D: Device> HostTier<D> {
    pub(super) fn audit(&self) {
        self.books.lock().ledger.audit();
    }

    /// Checks that no parcel is left, and that no memory of the pool is in use.
    pub(super) fn assert_nothing_is_held(&self) {
        let mut books = self.books.lock();
        books.ledger.audit();
        assert_eq!((books.ledger.len(), books.in_flight), (0, 0));
        books.cooling.clear();
        assert_eq!(self.pool.free_bytes(), self.pool.capacity());
        drop(books);
        assert_eq!(self.store.as_ref().map_or(0, |store| store.stats().reserved_bytes), 0);
    }
}

fn internal(what: &str) -> Error {
    Error::new(ErrorKind::Device, format!("internal error: {what}"))
}

fn unwanted() -> Error {
    internal("nobody wants it any more")
}
