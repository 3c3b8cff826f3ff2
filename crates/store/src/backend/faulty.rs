//! A backend that fails on request, for tests.

use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::{Backend, BackendInfo, Direction, Op};
use crate::error::Result;
use crate::mem::BLOCK;
use crate::region::{Place, Region, RegionInfo};

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
}

/// Passes operations on to another backend, and can make some of them fail or hold their completions back.
///
/// For testing code that is built on a store; pass it to [`Store::open_with`](crate::Store::open_with).
pub struct Faulty {
    inner: Arc<dyn Backend>,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    rules: Vec<Rule>,
    submitted: [u64; 2],
    holding: [bool; 2],
    holding_growth: bool,
    /// Number of regions that are waiting to grow.
    growing: usize,
    held: VecDeque<(Op, io::Result<usize>)>,
}

struct Rule {
    direction: Direction,
    fault: Fault,
    skip: u64,
    times: u64,
}

impl Faulty {
    /// Passes everything on to `inner`, until one of the other methods is called.
    pub fn new(inner: Arc<dyn Backend>) -> Faulty {
        Faulty { inner, shared: Arc::default() }
    }

    /// Makes `times` operations of this direction fail, after skipping the next `skip` of them.
    ///
    /// Operations are counted when they are submitted; one that continues after a short transfer counts again.
    pub fn inject(&self, direction: Direction, fault: Fault, skip: u64, times: u64) {
        self.shared.state.lock().rules.push(Rule { direction, fault, skip, times });
    }

    /// Number of operations of this direction so far, counted as [`inject`](Faulty::inject) does.
    pub fn submitted(&self, direction: Direction) -> u64 {
        self.shared.state.lock().submitted[direction as usize]
    }

    /// From now on nothing fails.
    pub fn heal(&self) {
        self.shared.state.lock().rules.clear();
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

    /// Completes the oldest operation that is held back, on the calling thread. Returns false if there is none.
    pub fn release_one(&self) -> bool {
        let Some((op, result)) = self.shared.state.lock().held.pop_front() else { return false };
        let next = op.complete(result);
        self.submit(next);
        true
    }

    /// Stops holding back completions and growth, and completes what was held, on the calling thread.
    pub fn release(&self) {
        {
            let mut state = self.shared.state.lock();
            (state.holding, state.holding_growth) = ([false; 2], false);
        }
        self.shared.changed.notify_all();
        while self.release_one() {}
    }
}

impl Backend for Faulty {
    fn open(&self, place: Place<'_>, cap_bytes: u64) -> Result<Arc<dyn Region>> {
        let inner = self.inner.open(place, cap_bytes)?;
        Ok(Arc::new(FaultyRegion { inner, shared: Arc::clone(&self.shared) }))
    }

    fn submit(&self, ops: Vec<Op>) {
        let ops: Vec<Op> = ops.into_iter().map(|op| self.shared.wrap(op)).collect();
        if !ops.is_empty() {
            self.inner.submit(ops);
        }
    }

    fn describe(&self) -> BackendInfo {
        self.inner.describe()
    }
}

/// A region whose growth can be held back.
struct FaultyRegion {
    inner: Arc<dyn Region>,
    shared: Arc<Shared>,
}

impl Region for FaultyRegion {
    fn grow(&self, from: u64, to: u64) -> io::Result<()> {
        let mut state = self.shared.state.lock();
        state.growing += 1;
        self.shared.changed.notify_all();
        self.shared.changed.wait_while(&mut state, |state| state.holding_growth);
        state.growing -= 1;
        drop(state);
        self.inner.grow(from, to)
    }

    fn describe(&self) -> RegionInfo {
        self.inner.describe()
    }

    fn backing(&self) -> &dyn Any {
        self.inner.backing()
    }
}

impl Drop for Faulty {
    fn drop(&mut self) {
        self.release();
    }
}

impl Shared {
    /// Wraps an operation for the inner backend.
    fn wrap(self: &Arc<Shared>, op: Op) -> Op {
        let fault = self.state.lock().next_fault(op.direction);
        let mut len = op.len();
        if fault == Some(Fault::Short) {
            len = (len / 2).next_multiple_of(BLOCK).min(len);
        }
        let place = (Arc::clone(&op.region), op.offset());
        let memory = (Arc::clone(&op.buf), op.start + op.moved, len);
        let shared = Arc::clone(self);
        Op::new(op.direction, place, memory, Box::new(move |outcome| shared.finish(op, fault, outcome, len)))
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
                if op.direction == Direction::Read {
                    // SAFETY: `op` owns the `len` bytes at its address, and nothing else touches them.
                    unsafe { op.ptr().write_bytes(0xa5, len) };
                }
                result = Err(io::Error::from_raw_os_error(code));
            }
            Some(Fault::FlippedBit) if op.direction == Direction::Read => {
                // SAFETY: as above; it is at least one byte long.
                let first = unsafe { op.ptr().read() };
                // SAFETY: as above.
                unsafe { op.ptr().write(first ^ 1) };
            }
            Some(Fault::Short | Fault::FlippedBit) | None => {}
        }
        let mut state = self.state.lock();
        if state.holding[op.direction as usize] {
            state.held.push_back((op, result));
            self.changed.notify_all();
            return Vec::new();
        }
        drop(state);
        op.complete(result).into_iter().map(|op| self.wrap(op)).collect()
    }
}

impl State {
    /// Counts the next operation of this direction. Returns its fault, if any.
    fn next_fault(&mut self, direction: Direction) -> Option<Fault> {
        self.submitted[direction as usize] += 1;
        let mut fault = None;
        for rule in self.rules.iter_mut().filter(|rule| rule.direction == direction) {
            if rule.skip > 0 {
                rule.skip -= 1;
            } else if rule.times > 0 && fault.is_none() {
                rule.times -= 1;
                fault = Some(rule.fault);
            }
        }
        fault
    }
}
