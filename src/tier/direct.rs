//! The tier of a GPU whose tensors go straight between its memory and the spill files, as in the paper (section 5.3.2): through GPUDirect
//! Storage if the machine has it.
//!
//! A storage is written once the device has computed it, and leaves as late as the device budget allows, as it does through host memory.
//! Here, however, the thread waits for the write, because the device's queue cannot. Loads begin once the device has stopped using their
//! memory for anything else, and are complete when they are served.
//!
//! Only as many writes are handed to the disk as keep it busy: those that wait for their turn can still be dropped, and their memory with
//! them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use ssdtrain_libtorch::{Block, Storage};
use ssdtrain_plan::Release;
use ssdtrain_store::{Blob, Direction, Store, contained};

use super::event_thread::EventThread;
use super::{Here, NO_STREAM, Parcel, Room, RoomListener, Tier, stream_of_load};
use crate::device::{Device, Lane, keep};
use crate::error::{Completion, Error, ErrorKind, Result};
use crate::mem::{DeviceBuf, Rest};
use crate::sync::{Condvar, Mutex};
use crate::telemetry::{Counters, ScopeId, StallCause};
use crate::trace::{DeviceTrace, Trace};

/// Spill files directly below a device.
pub(crate) struct DirectTier<D: Device> {
    // Declared first, because their tasks use everything else.
    ready: EventThread<D>,
    reads: EventThread<D>,
    writes: Mutex<Writes<D>>,
    /// Upper limit on the bytes being written at once, except that a single storage may exceed it.
    window: u64,
    store: Store,
    trace: Option<DeviceTrace<D>>,
    device: Arc<D>,
    under_way: Arc<UnderWay>,
}

/// Writes that wait for their turn, and the bytes of those in flight.
struct Writes<D: Device> {
    waiting: VecDeque<Write<D>>,
    writing: u64,
    /// Whether a thread is beginning the writes whose turn it is. It looks again after each.
    moving_on: bool,
}

/// A storage that the device has computed.
struct Write<D: Device> {
    parcel: Arc<DirectParcel<D>>,
    from: Block,
    /// Called after the parcel itself has recorded the outcome.
    done: Completion,
}

/// The numbers of transfers that have begun or wait to begin, and of those that have ended.
#[derive(Default)]
struct UnderWay {
    counts: Mutex<(usize, u64)>,
    changed: Condvar,
}

/// An extent, once there is one, and the outcome of its write.
struct DirectParcel<D: Device> {
    tier: Arc<DirectTier<D>>,
    bytes: u64,
    scope: ScopeId,
    /// Reached when the device has computed the bytes.
    ready: D::Event,
    /// The stream to which its storage's memory belongs: the one that it was saved on, or loaded for.
    stream: AtomicUsize,
    was_loaded: AtomicBool,
    blob: OnceLock<Arc<Blob>>,
    /// The entry is gone: no transfer begins any more.
    abandoned: AtomicBool,
    written: Mutex<Option<Result<()>>>,
    changed: Condvar,
}

impl<D: Device> DirectTier<D> {
    /// Writes at most `window` bytes at once.
    pub(crate) fn new(
        device: D,
        store: Store,
        window: u64,
        trace: Option<&Arc<Trace>>,
    ) -> Result<Arc<DirectTier<D>>> {
        let device = Arc::new(device);
        let trace = trace.map(|trace| DeviceTrace::start(trace, &device)).transpose()?;
        Ok(Arc::new(DirectTier {
            ready: EventThread::start("ssdtrain-out", Arc::clone(&device))?,
            reads: EventThread::start("ssdtrain-in", Arc::clone(&device))?,
            writes: Mutex::new(Writes { waiting: VecDeque::new(), writing: 0, moving_on: false }),
            window,
            store,
            trace,
            device,
            under_way: Arc::default(),
        }))
    }

    /// Begins the writes whose turn it is. Those that nobody wants any more fail.
    fn write_on(&self) {
        if std::mem::replace(&mut self.writes.lock().moving_on, true) {
            return;
        }
        loop {
            let next = {
                let mut writes = self.writes.lock();
                let next = writes.next(self.window);
                writes.moving_on = next.is_some();
                next
            };
            match next {
                // A write that panics as it begins has failed; the following ones continue.
                Some(write) => drop(contained("the beginning of a write", || write.begin())),
                None => return,
            }
        }
    }

    /// Copies the part of `buf` that cannot go straight, and waits for that.
    fn copy(&self, direction: Direction, buf: &Arc<DeviceBuf>) -> Result<()> {
        let Some(Rest { device, host, bytes }) = buf.rest() else { return Ok(()) };
        let lane = match direction {
            Direction::Write => Lane::Out,
            Direction::Read => Lane::In,
        };
        match direction {
            // SAFETY: both places belong to the buffer of a transfer that has not begun, which is alive until the event below is reached;
            // the storage's bytes are there, since its event is reached.
            Direction::Write => unsafe { self.device.copy_out(device, host, bytes) },
            // SAFETY: as above, for a transfer that has ended but has not been reported yet.
            Direction::Read => unsafe { self.device.copy_in(host, device, bytes) },
        }?;
        let over = self.device.record_end(lane).and_then(|end| self.device.block_on(&end));
        keep(&over, Some(Arc::clone(buf)));
        over
    }

    fn traced(&self, direction: Direction, scope: ScopeId, bytes: u64, done: Completion) -> Completion {
        Trace::transfer(self.trace.as_ref().map(DeviceTrace::trace), direction, scope, bytes, done)
    }
}

impl<D: Device> Tier for DirectTier<D> {
    fn parcel(self: Arc<Self>, bytes: u64, scope: ScopeId, here: &Here) -> Result<Arc<dyn Parcel>> {
        let ready = here.now(&*self.device)?;
        let stream = AtomicUsize::new(self.device.stream()?);
        Ok(Arc::new(DirectParcel {
            tier: self,
            bytes,
            scope,
            ready,
            stream,
            was_loaded: AtomicBool::default(),
            blob: OnceLock::new(),
            abandoned: AtomicBool::new(false),
            written: Mutex::default(),
            changed: Condvar::new(),
        }))
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
        Release::OnceWritten
    }

    fn on_room(&self, listener: &Arc<RoomListener>) {
        self.store.on_growth(listener);
    }

    fn begin_step(&self) {}

    fn after(&self, stream: usize) -> Result<()> {
        self.device.after(stream)
    }

    fn synchronize(&self) -> Result<()> {
        self.device.synchronize()
    }

    fn settle(&self) {
        self.under_way.settle();
    }

    fn one_ends(&self) -> bool {
        self.under_way.one_ends()
    }

    fn store(&self) -> Option<&Store> {
        Some(&self.store)
    }

    fn path(&self) -> String {
        self.store.path().to_string()
    }
}

impl<D: Device> Parcel for DirectParcel<D> {
    fn of_any_stream(&self) {
        self.stream.store(NO_STREAM, Ordering::Relaxed);
    }

    fn reserve(&self) -> Room {
        match self.tier.store.try_reserve(self.bytes) {
            Ok(Some(blob)) => {
                self.blob.get_or_init(|| blob);
                Room::Reserved
            }
            Ok(None) => Room::Later,
            Err(_) => Room::None,
        }
    }

    fn store(self: Arc<Self>, from: Block, done: Completion) {
        let tier = Arc::clone(&self.tier);
        let (task, transfer) = (UnderWay::task(&tier.under_way), UnderWay::task(&tier.under_way));
        let parcel = Arc::clone(&self);
        let done = Completion::new(move |outcome| parcel.written(outcome, done, transfer));
        let write = Write { parcel: self, from, done };
        tier.ready.after(vec![write.parcel.ready.clone()], move |reached| {
            let _task = task;
            let tier = Arc::clone(&write.parcel.tier);
            match reached {
                Ok(()) => {
                    tier.writes.lock().waiting.push_back(write);
                    tier.write_on();
                }
                Err(error) => write.fail(error),
            }
        });
    }

    fn load(self: Arc<Self>, into: Storage, here: &Here, done: Completion) {
        let tier = Arc::clone(&self.tier);
        match here.after_waits(&*tier.device).and_then(|ready| Ok((ready, tier.device.stream()?))) {
            Ok((ready, stream)) => {
                let was_loaded = self.was_loaded.swap(true, Ordering::Relaxed);
                let before = self.stream.load(Ordering::Relaxed);
                self.stream.store(stream_of_load(before, was_loaded, stream), Ordering::Relaxed);
                let (task, transfer) = (UnderWay::task(&tier.under_way), UnderWay::task(&tier.under_way));
                let parcel = Arc::clone(&self);
                let done = Completion::new(move |outcome| {
                    drop(parcel);
                    done.call(outcome);
                    drop(transfer);
                });
                tier.reads.after(vec![ready], move |reached| {
                    let _task = task;
                    self.read(into, reached, done);
                });
            }
            Err(error) => done.call(Err(error)),
        }
    }

    /// There is nothing between disk and device.
    fn bring_near(self: Arc<Self>) -> bool {
        true
    }

    fn order(
        &self,
        of: Option<&Storage>,
        cause: Option<StallCause>,
        counters: &Arc<Counters>,
        _here: &Here,
    ) -> Result<()> {
        Here::record_use(&*self.tier.device, self.stream.load(Ordering::Relaxed), of)?;
        let mut written = self.written.lock();
        if written.is_none() {
            let start = Instant::now();
            while written.is_none() {
                self.changed.wait(&mut written);
            }
            let now = Instant::now();
            if let Some(cause) = cause {
                counters.stalled(cause, now - start);
                if let Some(trace) = &self.tier.trace {
                    trace.trace().stall(cause, start, now);
                }
            }
        }
        match &*written {
            Some(outcome) => outcome.clone(),
            None => Ok(()),
        }
    }

    fn may_evict(&self) -> bool {
        true
    }

    /// A transfer in flight holds the memory until it ends; a write that waits for its turn is dropped.
    fn abandon(&self, _of: Option<&Storage>) {
        self.abandoned.store(true, Ordering::Release);
        let waits = {
            let mut writes = self.tier.writes.lock();
            let place =
                writes.waiting.iter().position(|write| std::ptr::eq(Arc::as_ptr(&write.parcel), self));
            place.and_then(|place| writes.waiting.remove(place))
        };
        waits.into_iter().for_each(|write| write.fail(unwanted()));
    }
}

impl<D: Device> Writes<D> {
    /// The next write whose turn it is, which from now on counts as in flight.
    fn next(&mut self, window: u64) -> Option<Write<D>> {
        let bytes = self.waiting.front()?.parcel.bytes;
        if self.writing > 0 && self.writing + bytes > window {
            return None;
        }
        self.writing += bytes;
        self.waiting.pop_front()
    }
}

impl<D: Device> Write<D> {
    fn begin(self) {
        let Write { parcel, from, done } = self;
        let (tier, scope, bytes) = (Arc::clone(&parcel.tier), parcel.scope, parcel.bytes);
        let writes = Arc::clone(&tier);
        let over = Completion::new(move |outcome| {
            writes.writes.lock().writing -= bytes;
            // The disk gets its next write before anyone hears of this one.
            writes.write_on();
            drop(writes);
            done.call(outcome);
        });
        let lent = parcel
            .wanted()
            .and_then(|()| parcel.extent())
            .and_then(|blob| Ok((parcel.lend(from, &blob)?, blob)))
            .and_then(|(buf, blob)| tier.copy(Direction::Write, &buf).map(|()| (buf, blob)));
        drop(parcel);
        match lent {
            Ok((buf, blob)) => {
                let done = tier.traced(Direction::Write, scope, bytes, over);
                tier.store.write(blob, buf, done.of_transfer());
            }
            Err(error) => over.call(Err(error)),
        }
    }

    /// Fails the write before it began.
    fn fail(self, error: Error) {
        let Write { parcel, from, done } = self;
        drop((parcel, from));
        done.call(Err(error));
    }
}

impl<D: Device> DirectParcel<D> {
    /// Reports the outcome of the write. When `settle` returns, the extent is free and this reference to the tier is gone.
    fn written(self: Arc<Self>, outcome: Result<()>, done: Completion, transfer: Task) {
        *self.written.lock() = Some(outcome.clone());
        self.changed.notify_all();
        drop(self);
        if outcome.is_err() {
            done.call(outcome);
        } else {
            done.dismiss();
        }
        drop(transfer);
    }

    /// Runs once the device no longer uses `into` for anything else.
    fn read(self: Arc<Self>, into: Storage, reached: Result<()>, done: Completion) {
        let tier = Arc::clone(&self.tier);
        let lent = reached
            .and_then(|()| self.wanted())
            .and_then(|()| self.extent())
            .and_then(|blob| Ok((self.lend(Block::of(into), &blob)?, blob)));
        let (scope, bytes) = (self.scope, self.bytes);
        drop(self);
        let (buf, blob) = match lent {
            Ok(lent) => lent,
            Err(error) => {
                drop(tier);
                return done.call(Err(error));
            }
        };
        let (filled, copies) = (Arc::clone(&buf), Arc::clone(&tier));
        let done = Completion::new(move |outcome: Result<()>| {
            let outcome = outcome.and_then(|()| copies.copy(Direction::Read, &filled));
            drop((filled, copies));
            done.call(outcome);
        });
        let done = tier.traced(Direction::Read, scope, bytes, done);
        tier.store.read(blob, buf, done.of_transfer());
    }

    fn wanted(&self) -> Result<()> {
        if self.abandoned.load(Ordering::Acquire) { Err(unwanted()) } else { Ok(()) }
    }

    fn extent(&self) -> Result<Arc<Blob>> {
        self.blob.get().cloned().ok_or_else(|| internal("a transfer without an extent"))
    }

    fn lend(&self, block: Block, blob: &Blob) -> Result<Arc<DeviceBuf>> {
        let bytes =
            usize::try_from(self.bytes).map_err(|_| internal("a parcel larger than the address space"))?;
        // Only host memory has to meet the alignment that files need.
        let alignment = if D::IS_HOST { blob.memory_alignment() } else { 1 };
        let buf = DeviceBuf::new(block, bytes, alignment);
        buf.map(Arc::new).ok_or_else(|| internal("no host memory for the end of a storage"))
    }
}

/// A transfer in flight, from its submission to its end. The task of the thread that begins it counts as well, so that the task's
/// reference to the tier is gone when everything has ended.
struct Task(Arc<UnderWay>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.ends();
    }
}

impl UnderWay {
    fn task(this: &Arc<UnderWay>) -> Task {
        this.begins();
        Task(Arc::clone(this))
    }

    fn begins(&self) {
        self.counts.lock().0 += 1;
    }

    fn ends(&self) {
        let mut counts = self.counts.lock();
        counts.0 -= 1;
        counts.1 += 1;
        drop(counts);
        self.changed.notify_all();
    }

    fn settle(&self) {
        let mut counts = self.counts.lock();
        while counts.0 > 0 {
            self.changed.wait(&mut counts);
        }
    }

    /// Waits until one has ended; false if there are none.
    fn one_ends(&self) -> bool {
        let mut counts = self.counts.lock();
        let ended = counts.1;
        while counts.0 > 0 && counts.1 == ended {
            self.changed.wait(&mut counts);
        }
        counts.1 > ended
    }
}

fn unwanted() -> Error {
    internal("nobody wants it any more")
}

fn internal(what: &str) -> Error {
    Error::new(ErrorKind::Device, format!("internal error: {what}"))
}
