//! A backend that fails on request, for tests.

use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::sync::{Condvar, Mutex};

use super::{Backend, BackendInfo, Direction, Op};
use crate::completion::is_completing;
use crate::error::Result;
use crate::mem::BLOCK;
use crate::region::{Disk, Place, Region, RegionInfo};

/// The way in which an operation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// It fails with this error number; a read leaves garbage in memory.
    Errno(i32),
    /// It moves only about half of its bytes, in whole blocks.
    Short,
    /// It succeeds, but the first bit that was read is wrong. Has no effect on a write.
    FlippedBit,
    /// It completes so much later, after others that follow it.
    Delayed(Duration),
    /// It never completes, unless everything is [released](Faulty::release). If it was given up by then, it ends as the
    /// kernel may end it: a read leaves garbage in memory.
    Never,
}

/// Passes operations on to another backend, and can make some of them fail or hold their completions back.
///
/// For testing code that is built on a store; pass it to [`Store::open_with`](crate::Store::open_with).
pub struct Faulty {
    inner: Arc<dyn Backend>,
    shared: Arc<Shared>,
}

struct Shared {
    /// What delayed operations continue on.
    inner: Weak<dyn Backend>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    rules: Vec<Rule>,
    submitted: [u64; 2],
    /// The regions in the order in which they were opened, and how many operations each has had.
    regions: Vec<(Weak<FaultyRegion>, u64)>,
    holding: [bool; 2],
    holding_growth: bool,
    /// Number of regions that are waiting to grow.
    growing: usize,
    /// How often regions were asked to grow, and the attempts that fail: the error number, how many come before, and how many there are.
    grown: u64,
    refusals: Vec<(i32, u64, u64)>,
    held: VecDeque<(Op, io::Result<usize>)>,
    /// Operations that never complete, and the time limit that they have instead of the store's.
    never: Vec<Op>,
    never_within: Option<Duration>,
    /// The threads of delayed operations.
    delays: Vec<JoinHandle<()>>,
}

struct Rule {
    fails: Fails,
    fault: Fault,
    skip: u64,
    times: u64,
}

/// What a rule is for.
#[derive(Clone, Copy)]
enum Fails {
    Operations(Direction),
    /// All that is done with one region, or with all of them.
    Disk(Option<usize>),
}

impl Fails {
    fn includes(self, direction: Direction, region: Option<usize>) -> bool {
        match self {
            Fails::Operations(of) => of == direction,
            Fails::Disk(of) => of.is_none() || of == region,
        }
    }
}

impl Faulty {
    /// Passes everything on to `inner`, until one of the other methods is called.
    pub fn new(inner: Arc<dyn Backend>) -> Faulty {
        let (weak, state) = (Arc::downgrade(&inner), Mutex::default());
        Faulty { inner, shared: Arc::new(Shared { inner: weak, state, changed: Condvar::new() }) }
    }

    /// Makes `times` operations of this direction fail, after skipping the next `skip` of them.
    ///
    /// Operations are counted when they are submitted; one that continues after a short transfer counts again.
    pub fn inject(&self, direction: Direction, fault: Fault, skip: u64, times: u64) {
        self.shared.add(Rule { fails: Fails::Operations(direction), fault, skip, times });
    }

    /// Makes a disk vanish after the next `skip` operations on it, reads and writes counted together: all later ones fail with the
    /// error number `errno`, and its region neither grows nor shrinks. `disk` is the place of its region in the order in which they
    /// were opened; `None` for all disks at once.
    pub fn vanish(&self, disk: Option<usize>, errno: i32, skip: u64) {
        let (fails, fault, times) = (Fails::Disk(disk), Fault::Errno(errno), u64::MAX);
        self.shared.add(Rule { fails, fault, skip, times });
    }

    /// Makes `times` attempts of regions to grow fail with the error number `errno`, after skipping the next `skip` of them.
    pub fn refuse_growth(&self, errno: i32, skip: u64, times: u64) {
        self.shared.state.lock().refusals.push((errno, skip, times));
    }

    /// How often regions were asked to grow so far.
    pub fn growths(&self) -> u64 {
        self.shared.state.lock().grown
    }

    /// Makes operations that [never](Fault::Never) complete be given up after so long, whatever the store's time limit is.
    /// So a test need not wait for long, and other operations have all the time that they need.
    pub fn never_within(&self, limit: Duration) {
        self.shared.state.lock().never_within = Some(limit);
    }

    /// Number of operations of this direction so far, counted as [`inject`](Faulty::inject) does.
    pub fn submitted(&self, direction: Direction) -> u64 {
        self.shared.state.lock().submitted[direction as usize]
    }

    /// Number of operations on a disk so far, or on all of them, counted as [`vanish`](Faulty::vanish) does.
    pub fn submitted_to(&self, disk: Option<usize>) -> u64 {
        let state = self.shared.state.lock();
        match disk {
            Some(disk) => state.regions.get(disk).map_or(0, |(_, operations)| *operations),
            None => state.submitted.iter().sum(),
        }
    }

    /// From now on nothing fails.
    pub fn heal(&self) {
        let mut state = self.shared.state.lock();
        state.rules.clear();
        state.refusals.clear();
    }

    /// From now on completions of this direction are held back.
    pub fn hold(&self, direction: Direction) {
        self.shared.state.lock().holding[direction as usize] = true;
    }

    /// From now on regions that are asked to grow wait until everything is [released](Faulty::release).
    pub fn hold_growth(&self) {
        self.shared.state.lock().holding_growth = true;
    }

    /// Sleeps until the growth of a region is held back.
    pub fn wait_growing(&self) {
        let mut state = self.shared.state.lock();
        self.shared.changed.wait_while(&mut state, |state| state.growing == 0);
    }

    /// Sleeps until `count` completions are held back.
    pub fn wait_held(&self, count: usize) {
        let mut state = self.shared.state.lock();
        self.shared.changed.wait_while(&mut state, |state| state.held.len() < count);
    }

    /// Sleeps until `count` operations were begun that never complete.
    pub fn wait_never(&self, count: usize) {
        let mut state = self.shared.state.lock();
        self.shared.changed.wait_while(&mut state, |state| state.never.len() < count);
    }

    /// Completes the oldest operation that is held back, on the calling thread. Returns false if there is none.
    pub fn release_one(&self) -> bool {
        let oldest = self.shared.state.lock().held.pop_front();
        self.complete(oldest)
    }

    /// As [`release_one`](Faulty::release_one), but the newest.
    pub fn release_newest(&self) -> bool {
        let newest = self.shared.state.lock().held.pop_back();
        self.complete(newest)
    }

    fn complete(&self, held: Option<(Op, io::Result<usize>)>) -> bool {
        let Some((op, result)) = held else { return false };
        let next = op.complete(result);
        self.submit(next);
        true
    }

    /// Stops holding back completions and growth, and completes what was held and what would never complete, on the
    /// calling thread.
    pub fn release(&self) {
        let never = {
            let mut state = self.shared.state.lock();
            (state.holding, state.holding_growth) = ([false; 2], false);
            std::mem::take(&mut state.never)
        };
        self.shared.changed.notify_all();
        while self.release_one() {}
        let (lost, wanted): (Vec<_>, Vec<_>) = never.into_iter().partition(Op::is_given_up);
        for op in lost {
            let len = op.len();
            scribble(&op, len);
            let next = op.complete(Ok(len));
            self.submit(next);
        }
        if !wanted.is_empty() {
            let wanted = wanted.into_iter().map(|op| self.shared.pass_on(op, None)).collect();
            self.inner.submit(wanted);
        }
    }
}

impl Backend for Faulty {
    fn open(&self, place: Place<'_>, cap_bytes: u64) -> Result<Arc<dyn Region>> {
        let inner = self.inner.open(place, cap_bytes)?;
        let mut state = self.shared.state.lock();
        let region = FaultyRegion { inner, number: state.regions.len(), shared: Arc::clone(&self.shared) };
        let region = Arc::new(region);
        state.regions.push((Arc::downgrade(&region), 0));
        Ok(region)
    }

    fn submit(&self, ops: Vec<Op>) {
        let ops: Vec<Op> = ops.into_iter().filter_map(|op| self.shared.wrap(op)).collect();
        if !ops.is_empty() {
            self.inner.submit(ops);
        }
    }

    fn describe(&self) -> BackendInfo {
        self.inner.describe()
    }
}

/// A region whose growth can be held back or refused.
struct FaultyRegion {
    inner: Arc<dyn Region>,
    number: usize,
    shared: Arc<Shared>,
}

impl Region for FaultyRegion {
    fn grow(&self, from: u64, to: u64) -> io::Result<()> {
        let mut state = self.shared.state.lock();
        state.growing += 1;
        self.shared.changed.notify_all();
        self.shared.changed.wait_while(&mut state, |state| state.holding_growth);
        state.growing -= 1;
        let refused = state.next_refusal().or_else(|| state.gone(self.number));
        drop(state);
        match refused {
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
            None => self.inner.grow(from, to),
        }
    }

    fn shrink(&self, to: u64) -> io::Result<()> {
        let gone = self.shared.state.lock().gone(self.number);
        match gone {
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
            None => self.inner.shrink(to),
        }
    }

    fn describe(&self) -> RegionInfo {
        self.inner.describe()
    }

    fn disk(&self) -> Option<Disk> {
        self.inner.disk()
    }

    fn backing(&self) -> &dyn Any {
        self.inner.backing()
    }
}

impl Drop for Faulty {
    /// As every backend, it waits for the operations that were not given up.
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        while !is_completing() && state.never.iter().any(|op| !op.is_given_up()) {
            self.shared.changed.wait(&mut state);
        }
        let delays = std::mem::take(&mut state.delays);
        drop(state);
        self.release();
        // A delayed completion may drop the backend.
        let here = thread::current().id();
        for thread in delays.into_iter().filter(|thread| thread.thread().id() != here) {
            if thread.join().is_err() {
                tracing::error!("a thread that delays an operation panicked");
            }
        }
    }
}

impl Shared {
    fn add(&self, rule: Rule) {
        self.state.lock().rules.push(rule);
    }

    /// Wraps an operation for the inner backend; `None` if that never hears of it.
    fn wrap(self: &Arc<Shared>, op: Op) -> Option<Op> {
        let fault = self.state.lock().next_fault(&op);
        if fault == Some(Fault::Never) {
            self.keep(op);
            return None;
        }
        Some(self.pass_on(op, fault))
    }

    fn pass_on(self: &Arc<Shared>, op: Op, fault: Option<Fault>) -> Op {
        let mut len = op.len();
        if fault == Some(Fault::Short) {
            len = (len / 2).next_multiple_of(BLOCK).min(len);
        }
        let place = (Arc::clone(&op.region), op.offset());
        let memory = (Arc::clone(&op.buf), op.start + op.moved, len);
        let (shared, clock, direction) = (Arc::clone(self), op.clock.clone(), op.direction);
        let follow = move |outcome| shared.finish(op, fault, outcome, len);
        let inner = Op::new(direction, place, memory, Box::new(follow));
        match clock {
            Some(clock) => inner.timed(clock),
            None => inner,
        }
    }

    /// Takes an operation that never completes.
    fn keep(self: &Arc<Shared>, op: Op) {
        let mut state = self.state.lock();
        op.begin_within(state.never_within, &self.on_lost());
        state.never.push(op);
        drop(state);
        self.changed.notify_all();
    }

    /// There is nothing to go on with instead, but the drop may wait for it.
    fn on_lost(self: &Arc<Shared>) -> Arc<dyn Fn() + Send + Sync> {
        let shared = Arc::downgrade(self);
        Arc::new(move || {
            let Some(shared) = shared.upgrade() else { return };
            // Whoever has looked at the operations sleeps by now.
            drop(shared.state.lock());
            shared.changed.notify_all();
        })
    }

    /// Completes the operation, with the outcome as its fault changes it, or holds it back.
    fn finish(
        self: &Arc<Shared>,
        op: Op,
        fault: Option<Fault>,
        outcome: io::Result<()>,
        len: usize,
    ) -> Vec<Op> {
        let mut result = outcome.map(|()| len);
        match fault {
            Some(Fault::Errno(code)) => {
                scribble(&op, len);
                result = Err(io::Error::from_raw_os_error(code));
            }
            Some(Fault::FlippedBit) if op.direction == Direction::Read => {
                // SAFETY: `op` owns the bytes at its address, at least one, and nothing else touches them.
                let first = unsafe { op.ptr().read() };
                // SAFETY: as above.
                unsafe { op.ptr().write(first ^ 1) };
            }
            Some(Fault::Delayed(delay)) => {
                op.begin(&self.on_lost());
                self.delay(op, result, delay);
                return Vec::new();
            }
            Some(Fault::Short | Fault::FlippedBit | Fault::Never) | None => {}
        }
        let mut state = self.state.lock();
        if state.holding[op.direction as usize] {
            op.begin(&self.on_lost());
            state.held.push_back((op, result));
            self.changed.notify_all();
            return Vec::new();
        }
        drop(state);
        op.complete(result).into_iter().filter_map(|op| self.wrap(op)).collect()
    }

    /// Completes the operation on a thread of its own, later.
    fn delay(self: &Arc<Shared>, op: Op, result: io::Result<usize>, delay: Duration) {
        let shared = Arc::clone(self);
        let late = move || {
            thread::sleep(delay);
            let next: Vec<Op> = op.complete(result).into_iter().filter_map(|op| shared.wrap(op)).collect();
            // Without the backend, what is left to do fails.
            if let Some(inner) = shared.inner.upgrade().filter(|_| !next.is_empty()) {
                inner.submit(next);
            }
        };
        // If there is no thread, the operation fails as it is dropped.
        let thread = thread::Builder::new().name("ssdtrain-late".to_owned()).spawn(late);
        let mut state = self.state.lock();
        state.delays.retain(|thread| !thread.is_finished());
        state.delays.extend(thread);
    }
}

/// Leaves garbage in the memory of a read.
fn scribble(op: &Op, len: usize) {
    if op.direction == Direction::Read {
        // SAFETY: `op` owns the `len` bytes at its address, and nothing else touches them.
        unsafe { op.ptr().write_bytes(0xa5, len) };
    }
}

impl State {
    /// Counts an attempt to grow. Returns its error, if it is to fail.
    fn next_refusal(&mut self) -> Option<i32> {
        self.grown += 1;
        let mut refused = None;
        for (errno, skip, times) in &mut self.refusals {
            if *skip > 0 {
                *skip -= 1;
            } else if *times > 0 && refused.is_none() {
                *times -= 1;
                refused = Some(*errno);
            }
        }
        refused
    }

    /// Counts the operation. Returns its fault, if any.
    fn next_fault(&mut self, op: &Op) -> Option<Fault> {
        self.submitted[op.direction as usize] += 1;
        let at = Arc::as_ptr(&op.region).cast::<()>();
        let region = self.regions.iter().position(|(region, _)| region.as_ptr().cast() == at);
        if let Some(number) = region {
            self.regions[number].1 += 1;
        }
        let mut fault = None;
        for rule in self.rules.iter_mut().filter(|rule| rule.fails.includes(op.direction, region)) {
            if rule.skip > 0 {
                rule.skip -= 1;
            } else if rule.times > 0 && fault.is_none() {
                rule.times -= 1;
                fault = Some(rule.fault);
            }
        }
        fault
    }

    /// The error number of a region whose disk has vanished.
    fn gone(&self, region: usize) -> Option<i32> {
        self.rules.iter().find_map(|rule| match (rule.fails, rule.fault) {
            (Fails::Disk(disk), Fault::Errno(errno))
                if rule.skip == 0 && disk.is_none_or(|disk| disk == region) =>
            {
                Some(errno)
            }
            _ => None,
        })
    }
}
