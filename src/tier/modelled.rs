//! A device and a disk for models: they move one word of each storage when they are made to, and record what breaks their rules.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ssdtrain_libtorch::Storage;
use ssdtrain_store::sync::Mutex;
use ssdtrain_store::{
    Backend, BackendInfo, BackendKind, Direction, Medium, Op, Pin, Place, Region, RegionInfo, Store,
    StoreConfig,
};

use crate::device::{Device, Lane};
use crate::error::{Error, ErrorKind, Result};
use crate::sync::{self, Condvar, Thread};

/// The contents of memory that belongs to somebody else.
pub(crate) const FOREIGN: u64 = 0xdead;

pub(crate) fn word(storage: &Storage) -> u64 {
    // SAFETY: a model's storages have room for a word, and one of its threads runs at a time.
    unsafe { storage.data().cast::<u64>().read() }
}

pub(crate) fn set_word(storage: &Storage, word: u64) {
    // SAFETY: as above.
    unsafe { storage.data().cast::<u64>().write(word) };
}

/// When copies are performed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copies {
    /// As soon as they are queued.
    AtOnce,
    /// Only when somebody waits for them.
    AtLast,
}

pub(crate) struct ModelDevice {
    copies: Copies,
    lanes: Mutex<[Queue; 2]>,
    fault: Option<Fault>,
    copied: AtomicUsize,
    allocated: Mutex<Allocated>,
    /// Passed by threads that copy in, that allocate, that pin, and that record an event of what they compute, respectively.
    pub(crate) copies_in: Arc<Gate>,
    pub(crate) allocations: Arc<Gate>,
    pub(crate) pins: Arc<Gate>,
    pub(crate) events: Arc<Gate>,
}

/// Until it was allocated, memory may have been used by what other threads of the same stream had queued.
#[derive(Default)]
struct Allocated {
    count: usize,
    clock: usize,
    /// When each memory was allocated, by its address.
    at: HashMap<usize, usize>,
    /// When the event that the next copy in waits for was recorded.
    ready: usize,
}

impl Allocated {
    fn tick(&mut self) -> usize {
        self.clock += 1;
        self.clock
    }
}

/// A gate that blocks threads while it is closed. Open at first.
#[derive(Default)]
pub(crate) struct Gate {
    state: Mutex<(bool, usize)>,
    changed: ssdtrain_store::sync::Condvar,
}

impl Gate {
    /// From now on nobody passes.
    pub(crate) fn close(&self) {
        self.state.lock().0 = true;
    }

    /// Sleeps until the gate blocks somebody.
    pub(crate) fn holds_somebody_up(&self) {
        self.changed.wait_while(&mut self.state.lock(), |(_, held)| *held == 0);
    }

    pub(crate) fn open(&self) {
        self.state.lock().0 = false;
        self.changed.notify_all();
    }

    fn pass(&self) {
        let mut state = self.state.lock();
        state.1 += 1;
        self.changed.notify_all();
        self.changed.wait_while(&mut state, |(closed, _)| *closed);
        state.1 -= 1;
    }
}

/// The operation that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The copy with this number.
    Copy(usize),
    /// The copy with this number, which panics.
    CopyPanics(usize),
    WaitPanics,
    PinPanics,
    /// The allocation with this number, which panics.
    AllocationPanics(usize),
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Work>,
    done: usize,
}

enum Work {
    Wait(ModelEvent),
    Copy { from: usize, to: usize },
}

/// A position in a lane's queue. The compute lane is the calling thread, which has always reached its position.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModelEvent {
    lane: Lane,
    done: usize,
    /// When it was recorded, by the clock of allocations.
    at: usize,
}

impl ModelDevice {
    pub(crate) fn new(copies: Copies, fault: Option<Fault>) -> ModelDevice {
        let (copied, allocated) = (AtomicUsize::new(0), Mutex::default());
        let (lanes, copies_in, allocations, pins, events) = Default::default();
        ModelDevice { copies, lanes, fault, copied, allocated, copies_in, allocations, pins, events }
    }

    fn queue(&self, lane: Lane, work: Work) {
        let mut lanes = self.lanes.lock();
        lanes[index(lane)].waiting.push_back(work);
        if self.copies == Copies::AtOnce {
            let all = ModelEvent { lane, done: usize::MAX, at: 0 };
            run(&mut lanes, all);
        }
    }

    fn copy(&self, lane: Lane, from: *const u8, to: *mut u8) -> Result<()> {
        let copy = self.copied.fetch_add(1, Ordering::Relaxed);
        assert_ne!(self.fault, Some(Fault::CopyPanics(copy)), "on purpose, in a copy");
        if self.fault == Some(Fault::Copy(copy)) {
            return Err(Error::new(ErrorKind::Device, "the device failed"));
        }
        self.queue(lane, Work::Copy { from: from.expose_provenance(), to: to.expose_provenance() });
        Ok(())
    }
}

fn index(lane: Lane) -> usize {
    usize::from(lane == Lane::In)
}

/// Makes the lane perform what comes before `event`.
fn run(lanes: &mut [Queue; 2], event: ModelEvent) {
    while event.lane != Lane::Compute && lanes[index(event.lane)].done < event.done {
        let Some(work) = lanes[index(event.lane)].waiting.pop_front() else { return };
        match work {
            Work::Wait(other) => run(lanes, other),
            Work::Copy { from, to } => {
                let from: *const u64 = std::ptr::with_exposed_provenance(from);
                let to: *mut u64 = std::ptr::with_exposed_provenance_mut(to);
                // SAFETY: whoever queued the copy promised that both places stay valid until it is done; both consist of whole pages.
                unsafe { std::ptr::copy(from, to, 1) };
            }
        }
        lanes[index(event.lane)].done += 1;
    }
}

impl Device for ModelDevice {
    type Event = ModelEvent;

    const IS_HOST: bool = true;

    fn record(&self, lane: Lane) -> Result<ModelEvent> {
        if lane == Lane::Compute {
            self.events.pass();
        }
        let (lanes, at) = (self.lanes.lock(), self.allocated.lock().tick());
        let queue = &lanes[index(lane)];
        Ok(ModelEvent { lane, done: queue.done + queue.waiting.len(), at })
    }

    fn wait(&self, lane: Lane, event: &ModelEvent) -> Result<()> {
        match lane {
            Lane::Compute => self.block_on(event)?,
            Lane::Out | Lane::In => self.queue(lane, Work::Wait(*event)),
        }
        if (lane, event.lane) == (Lane::In, Lane::Compute) {
            self.allocated.lock().ready = event.at;
        }
        Ok(())
    }

    fn is_reached(&self, event: &ModelEvent) -> bool {
        event.lane == Lane::Compute || self.lanes.lock()[index(event.lane)].done >= event.done
    }

    fn block_on(&self, event: &ModelEvent) -> Result<()> {
        assert_ne!(self.fault, Some(Fault::WaitPanics), "on purpose, in a wait");
        run(&mut self.lanes.lock(), *event);
        Ok(())
    }

    fn between(&self, _from: &ModelEvent, _to: &ModelEvent) -> Result<Duration> {
        Ok(Duration::ZERO)
    }

    unsafe fn copy_out(&self, from: *const u8, to: *mut u8, _bytes: usize) -> Result<()> {
        self.copy(Lane::Out, from, to)
    }

    unsafe fn copy_in(&self, from: *const u8, to: *mut u8, _bytes: usize) -> Result<()> {
        let allocated = self.allocated.lock();
        let is_ready = allocated.at.get(&to.addr()).is_none_or(|at| *at < allocated.ready);
        assert!(
            is_ready,
            "a copy into memory that may still be used: it waits for what was queued before that was allocated"
        );
        drop(allocated);
        self.copies_in.pass();
        self.copy(Lane::In, from, to)
    }

    fn stream(&self) -> Result<usize> {
        Ok(0)
    }

    fn after(&self, _stream: usize) -> Result<()> {
        Ok(())
    }

    fn record_use(&self, _storage: &Storage) -> Result<()> {
        Ok(())
    }

    fn allocate(&self, bytes: u64) -> Result<Storage> {
        sync::assert_nothing_is_locked();
        self.allocations.pass();
        let storage = Storage::allocate(bytes).map_err(Error::torch)?;
        let mut allocated = self.allocated.lock();
        let (at, count) = (allocated.tick(), allocated.count);
        allocated.count += 1;
        allocated.at.insert(storage.data().addr(), at);
        drop(allocated);
        assert_ne!(self.fault, Some(Fault::AllocationPanics(count)), "on purpose, in an allocation");
        Ok(storage)
    }
}

impl Pin for ModelDevice {
    unsafe fn pin(&self, _memory: NonNull<u8>, _bytes: usize) -> Result<(), String> {
        self.pins.pass();
        assert_ne!(self.fault, Some(Fault::PinPanics), "on purpose, while pinning");
        Ok(())
    }

    unsafe fn unpin(&self, _memory: NonNull<u8>, _bytes: usize) {}
}

/// How the disk behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Disk {
    Works,
    FailsToWrite,
    FailsToRead,
}

/// A disk that performs transfers while other threads run.
pub(crate) struct ModelDisk {
    does: Disk,
    words: Mutex<HashMap<u64, u64>>,
    turns: Mutex<Arc<Turns>>,
    broken: Mutex<Vec<&'static str>>,
    transfers: AtomicUsize,
}

/// The transfers that a thread of the model performs, in the order that is explored.
#[derive(Default)]
struct Turns {
    given: sync::Mutex<Given>,
    changed: Condvar,
}

#[derive(Default)]
struct Given {
    /// `None` if there is no such thread: then the thread that begins a transfer performs it.
    ops: Option<VecDeque<Op>>,
    closed: bool,
}

impl ModelDisk {
    pub(crate) fn new(does: Disk) -> Arc<ModelDisk> {
        Arc::new(ModelDisk {
            does,
            words: Mutex::default(),
            turns: Mutex::default(),
            broken: Mutex::default(),
            transfers: AtomicUsize::new(0),
        })
    }

    /// Starts over for another order of a model.
    pub(crate) fn begin(&self) {
        *self.turns.lock() = Arc::default();
        self.words.lock().clear();
    }

    /// Starts a thread that performs transfers until [`ModelDisk::close`].
    pub(crate) fn start(self: &Arc<ModelDisk>) -> Thread {
        let (disk, turns) = (Arc::clone(self), Arc::clone(&self.turns.lock()));
        turns.given.lock().ops = Some(VecDeque::new());
        Thread::start("disk", move || {
            let mut given = turns.given.lock();
            loop {
                if let Some(op) = given.ops.as_mut().and_then(VecDeque::pop_front) {
                    sync::MutexGuard::unlocked(&mut given, || disk.carry_out(op));
                } else if given.closed {
                    return;
                } else {
                    turns.changed.wait(&mut given);
                }
            }
        })
        .unwrap()
    }

    pub(crate) fn close(&self) {
        let turns = Arc::clone(&self.turns.lock());
        turns.given.lock().closed = true;
        turns.changed.notify_all();
    }

    fn carry_out(&self, op: Op) {
        let mut ops = VecDeque::from([op]);
        while let Some(op) = ops.pop_front() {
            let outcome = self.moves(&op);
            ops.extend(op.complete(outcome));
        }
    }

    pub(crate) fn store(self: &Arc<ModelDisk>) -> Store {
        let config = StoreConfig { backend: BackendKind::Memory, ..StoreConfig::default() };
        Store::open_with(config, Arc::<ModelDisk>::clone(self)).unwrap()
    }

    /// Transfers of all orders so far.
    pub(crate) fn transfers(&self) -> usize {
        self.transfers.load(Ordering::Relaxed)
    }

    pub(crate) fn assert_rules_were_kept(&self) {
        assert!(self.broken.lock().is_empty(), "{:?}", self.broken.lock());
    }

    fn moves(&self, op: &Op) -> io::Result<usize> {
        self.transfers.fetch_add(1, Ordering::Relaxed);
        let memory = op.ptr().cast::<u64>();
        // SAFETY: the operation's memory is valid until it completes, and at least a page.
        let read = || unsafe { memory.read() };
        // SAFETY: as above.
        let write = |word| unsafe { memory.write(word) };
        let takes_turns = |says: &'static str| {
            let before = read();
            let turns = Arc::clone(&self.turns.lock());
            drop(turns.given.lock());
            if read() != before {
                self.broken.lock().push(says);
            }
        };
        match op.direction() {
            Direction::Write => {
                takes_turns("memory changed while it was written to the disk");
                if self.does == Disk::FailsToWrite {
                    return Err(io::Error::other("on purpose, a write"));
                }
                self.words.lock().insert(op.offset(), read());
            }
            Direction::Read => {
                write(FOREIGN);
                takes_turns("memory changed while it was read into");
                if self.does == Disk::FailsToRead {
                    return Err(io::Error::other("on purpose, a read"));
                }
                write(self.words.lock().get(&op.offset()).copied().unwrap_or(FOREIGN));
            }
        }
        Ok(op.len())
    }
}

/// A region whose words the disk itself keeps.
struct ModelRegion;

impl Region for ModelRegion {
    fn grow(&self, _from: u64, _to: u64) -> io::Result<()> {
        Ok(())
    }

    fn describe(&self) -> RegionInfo {
        RegionInfo { name: "a model's".to_owned(), medium: Medium::Memory, alignment: 1, notes: Vec::new() }
    }

    fn backing(&self) -> &dyn Any {
        self
    }
}

impl Backend for ModelDisk {
    fn submit(&self, ops: Vec<Op>) {
        let turns = Arc::clone(&self.turns.lock());
        {
            let mut given = turns.given.lock();
            if let Some(queue) = &mut given.ops {
                queue.extend(ops);
                turns.changed.notify_all();
                return;
            }
        }
        ops.into_iter().for_each(|op| self.carry_out(op));
    }

    fn open(&self, _place: Place<'_>, _cap_bytes: u64) -> ssdtrain_store::Result<Arc<dyn Region>> {
        Ok(Arc::new(ModelRegion))
    }

    fn describe(&self) -> BackendInfo {
        BackendInfo::named("a model's")
    }
}
