//! A device that refuses calls, or stops, on request; for tests.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use ssdtrain_libtorch::Storage;
use ssdtrain_store::Pin;
use ssdtrain_store::sync::{Condvar, Mutex};

use super::{Device, Lane};
use crate::error::{Error, ErrorKind, Result};

/// What a device is asked to do.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceCall {
    CopyOut,
    CopyIn,
    Record,
    Wait,
    After,
    /// Whether an event is reached. As CUDA's, a device that refuses says no.
    Query,
    Block,
    BlockUnlessLate,
    Synchronize,
    Time,
    RecordUse,
    /// Refused as libtorch does where memory is short.
    Allocate,
    Pin,
}

impl DeviceCall {
    /// Every kind of call.
    pub const ALL: [DeviceCall; DeviceCall::Pin as usize + 1] = {
        use DeviceCall::*;
        [
            CopyOut,
            CopyIn,
            Record,
            Wait,
            After,
            Query,
            Block,
            BlockUnlessLate,
            Synchronize,
            Time,
            RecordUse,
            Allocate,
            Pin,
        ]
    };
}

/// Which calls of a device are refused, and when a simulated one stops. None is at first, and it does not.
#[doc(hidden)]
#[derive(Debug, Default)]
pub struct DeviceFaults {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    rules: Vec<Rule>,
    /// How much more of what is queued on the lanes of copies is done; `None` for all.
    stops_after: Option<u64>,
    /// How much was to be done.
    begun: u64,
    calls: [u64; DeviceCall::ALL.len()],
}

/// `times` calls are refused after the first `skip`; those of any kind for `None`.
#[derive(Debug)]
struct Rule {
    call: Option<DeviceCall>,
    skip: u64,
    times: u64,
}

impl DeviceFaults {
    /// What the error of a call that is refused says.
    pub const WORDS: &str = "was told to refuse it";

    /// Refuses `times` calls, after skipping the next `skip` of them; `None` stands for calls of any kind, as of a device that is lost.
    pub fn inject(&self, call: Option<DeviceCall>, skip: u64, times: u64) {
        self.state.lock().rules.push(Rule { call, skip, times });
    }

    /// Number of calls so far.
    pub fn calls(&self, call: Option<DeviceCall>) -> u64 {
        let calls = self.state.lock().calls;
        call.map_or_else(|| calls.iter().sum(), |call| calls[call as usize])
    }

    /// Stops the lanes of copies once they have done `skip` more of what is queued on them: copies, events and waits.
    pub fn stop_after(&self, skip: u64) {
        self.state.lock().stops_after = Some(skip);
    }

    /// How much of what is queued on the lanes of copies they have begun to do.
    pub fn begun(&self) -> u64 {
        self.state.lock().begun
    }

    /// Whether the lanes of copies have stopped.
    pub(super) fn is_stopped(&self) -> bool {
        self.state.lock().stops_after == Some(0)
    }

    /// A lane is to do what comes next: returns once it does.
    pub(super) fn proceed(&self) {
        let mut state = self.state.lock();
        state.begun += 1;
        self.changed.wait_while(&mut state, |state| state.stops_after == Some(0));
        state.stops_after = state.stops_after.map(|left| left - 1);
    }

    /// From now on nothing is refused, and lanes go on.
    pub fn heal(&self) {
        let mut state = self.state.lock();
        state.rules.clear();
        state.stops_after = None;
        drop(state);
        self.changed.notify_all();
    }

    /// Counts a call. Returns whether it is refused.
    fn refuses(&self, call: DeviceCall) -> bool {
        let mut state = self.state.lock();
        state.calls[call as usize] += 1;
        let mut refused = false;
        for rule in state.rules.iter_mut().filter(|rule| rule.call.is_none_or(|of| of == call)) {
            if rule.skip > 0 {
                rule.skip -= 1;
            } else if rule.times > 0 && !refused {
                rule.times -= 1;
                refused = true;
            }
        }
        refused
    }

    fn pass(&self, call: DeviceCall) -> Result<()> {
        if self.refuses(call) { Err(Error::new(ErrorKind::Device, refusal(call))) } else { Ok(()) }
    }
}

fn refusal(call: DeviceCall) -> String {
    format!("{call:?}: the device {}", DeviceFaults::WORDS)
}

/// Passes calls on to another device, but for those that are to fail.
#[derive(Debug)]
pub(crate) struct FaultyDevice<D> {
    inner: D,
    faults: Arc<DeviceFaults>,
}

impl<D: Device> FaultyDevice<D> {
    pub(crate) fn new(inner: D, faults: &Arc<DeviceFaults>) -> FaultyDevice<D> {
        FaultyDevice { inner, faults: Arc::clone(faults) }
    }
}

impl<D: Device> Device for FaultyDevice<D> {
    type Event = D::Event;

    const IS_HOST: bool = D::IS_HOST;

    fn record(&self, lane: Lane) -> Result<D::Event> {
        self.faults.pass(DeviceCall::Record)?;
        self.inner.record(lane)
    }

    fn after(&self, stream: usize) -> Result<()> {
        self.faults.pass(DeviceCall::After)?;
        self.inner.after(stream)
    }

    fn wait(&self, lane: Lane, event: &D::Event) -> Result<()> {
        self.faults.pass(DeviceCall::Wait)?;
        self.inner.wait(lane, event)
    }

    fn is_reached(&self, event: &D::Event) -> bool {
        !self.faults.refuses(DeviceCall::Query) && self.inner.is_reached(event)
    }

    /// What a device that has failed was doing is over, and so it is here.
    fn block_on(&self, event: &D::Event) -> Result<()> {
        let outcome = self.faults.pass(DeviceCall::Block);
        self.inner.block_on(event)?;
        outcome
    }

    fn block_unless_late(&self, event: &D::Event) -> Result<()> {
        let outcome = self.faults.pass(DeviceCall::BlockUnlessLate);
        self.inner.block_unless_late(event)?;
        outcome
    }

    fn synchronize(&self) -> Result<()> {
        self.inner.synchronize()?;
        self.faults.pass(DeviceCall::Synchronize)
    }

    fn between(&self, from: &D::Event, to: &D::Event) -> Result<Duration> {
        self.faults.pass(DeviceCall::Time)?;
        self.inner.between(from, to)
    }

    unsafe fn copy_out(&self, from: *const u8, to: *mut u8, bytes: usize) -> Result<()> {
        self.faults.pass(DeviceCall::CopyOut)?;
        // SAFETY: the caller's promise.
        unsafe { self.inner.copy_out(from, to, bytes) }
    }

    unsafe fn copy_in(&self, from: *const u8, to: *mut u8, bytes: usize) -> Result<()> {
        self.faults.pass(DeviceCall::CopyIn)?;
        // SAFETY: the caller's promise.
        unsafe { self.inner.copy_in(from, to, bytes) }
    }

    fn stream(&self) -> Result<usize> {
        self.inner.stream()
    }

    fn record_use(&self, storage: &Storage) -> Result<()> {
        self.faults.pass(DeviceCall::RecordUse)?;
        self.inner.record_use(storage)
    }

    fn allocate(&self, bytes: u64) -> Result<Storage> {
        if self.faults.refuses(DeviceCall::Allocate) {
            return Err(Error::torch(refusal(DeviceCall::Allocate)));
        }
        self.inner.allocate(bytes)
    }
}

impl<D: Device> Pin for FaultyDevice<D> {
    unsafe fn pin(&self, memory: NonNull<u8>, bytes: usize) -> Result<(), String> {
        if self.faults.refuses(DeviceCall::Pin) {
            return Err(refusal(DeviceCall::Pin));
        }
        // SAFETY: the caller's promise.
        unsafe { self.inner.pin(memory, bytes) }
    }

    unsafe fn unpin(&self, memory: NonNull<u8>, bytes: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.inner.unpin(memory, bytes) };
    }

    fn node(&self) -> Option<u32> {
        self.inner.node()
    }
}
