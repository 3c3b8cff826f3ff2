//! A record of what happens when, for people to look at: steps, scopes, stalls, copies and transfers on one time line.
//!
//! Host times are taken where things happen. Device times come from events in the device's lanes, which know only afterwards when they
//! were reached. At the end of a step the events that are reached are read; the others are waited for only when the file is written.
//! Recording changes nothing else about a step.

mod clock;
mod file;
mod range;
mod rows;
mod stamp;
mod throughput;

use std::cell::Cell;
use std::collections::VecDeque;
use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Instant;

use ssdtrain_libtorch as torch;
use ssdtrain_store::sync::Mutex;

pub(crate) use self::clock::DeviceTrace;
use self::clock::{Lanes, Point};
pub(crate) use self::file::{Process, write};
pub(crate) use self::range::Range;
pub(crate) use self::stamp::{Moves, Reached, Stamp, Wait};
use ssdtrain_store::Direction;

use crate::device::Lane;
use crate::error::Completion;
use crate::telemetry::{ScopeId, StallCause};

/// Upper limit on the events kept, which are the latest. Each takes about 100 bytes, and two or three CUDA events as long as it waits
/// for a device.
const MAX_EVENTS: usize = 1 << 20;

/// The record of one cache.
#[derive(Default)]
pub(crate) struct Trace {
    lanes: OnceLock<Arc<dyn Lanes>>,
    log: Mutex<Log>,
    paused: AtomicBool,
    resumed: AtomicU64,
    origin: torch::Origin,
}

#[derive(Default)]
struct Log {
    events: VecDeque<TraceEvent>,
    /// All events before this index have their times.
    timed: usize,
    dropped: u64,
    /// Threads by their number in the system, with their names, in the order of their first event.
    threads: Vec<(u32, String)>,
    /// The latest sample of each counter.
    levels: [u64; 2],
}

enum TraceEvent {
    Span(Span),
    Sample { counter: Counter, at: Instant, bytes: u64 },
}

/// Something that took time.
struct Span {
    track: Track,
    name: Name,
    from: Moment,
    to: Moment,
    bytes: Option<u64>,
}

/// A line of the picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Track {
    /// A thread, by its number in the system.
    Thread(u32),
    /// A queue of the device.
    Device(Lane),
    /// Transfers of the spill files.
    Disk(Direction),
}

/// The name of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Name {
    Step(u64),
    Backward,
    Scope(ScopeId),
    /// The program waits for the cache's transfers in flight.
    Wait(&'static str),
    Stall(StallCause),
    /// A copy or a transfer of what was saved in this scope, and whether it failed.
    Moved(ScopeId, bool),
}

/// A quantity that goes up and down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counter {
    /// Activation bytes that the cache holds on the device.
    Device,
    /// Bytes of the host pool in use.
    HostPool,
}

/// When something began or ended.
#[derive(Clone)]
enum Moment {
    Host(Instant),
    Device(Arc<dyn Point>),
}

impl Trace {
    /// Stops recording, and discards what was recorded.
    pub(crate) fn pause(&self) {
        self.pause_if(|_| true);
    }

    /// The same if what is asked of [`resumed`](Trace::resumed) holds.
    pub(crate) fn pause_if(&self, may: impl FnOnce(u64) -> bool) {
        let mut log = self.log.lock();
        if may(self.resumed()) {
            self.paused.store(true, Ordering::Relaxed);
            *log = Log::default();
        }
    }

    /// Resumes recording. Returns how often this was done.
    pub(crate) fn resume(&self) -> u64 {
        // Nobody pauses in between for one that was before.
        let _log = self.log.lock();
        self.paused.store(false, Ordering::Relaxed);
        self.resumed.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// How often recording was resumed.
    pub(crate) fn resumed(&self) -> u64 {
        self.resumed.load(Ordering::Relaxed)
    }

    pub(crate) fn is_recording(&self) -> bool {
        !self.paused.load(Ordering::Relaxed) && !self.origin.is_parent()
    }

    /// Records that the calling thread waited.
    pub(crate) fn stall(&self, cause: StallCause, from: Instant, to: Instant) {
        self.record(Span::on_host(Track::Thread(thread_number()), Name::Stall(cause), from, to, None));
    }

    /// A completion that first records the transfer that begins now, and then calls `done`.
    pub(crate) fn transfer(
        trace: Option<&Arc<Trace>>,
        direction: Direction,
        scope: ScopeId,
        bytes: u64,
        done: Completion,
    ) -> Completion {
        let Some(trace) = trace.filter(|trace| trace.is_recording()).map(Arc::clone) else { return done };
        let from = Instant::now();
        Completion::new(move |outcome| {
            let name = Name::Moved(scope, outcome.is_err());
            let span = Span::on_host(Track::Disk(direction), name, from, Instant::now(), Some(bytes));
            trace.record(span);
            done.call(outcome);
        })
    }

    /// Records the present value of a counter.
    pub(crate) fn sample(&self, counter: Counter, bytes: u64) {
        if !self.is_recording() {
            return;
        }
        let mut log = self.log.lock();
        if std::mem::replace(&mut log.levels[counter as usize], bytes) != bytes {
            log.push(TraceEvent::Sample { counter, at: Instant::now(), bytes });
        }
    }

    /// Reads the times of the events that are reached, which frees the events. Does not wait.
    pub(crate) fn settle(&self) {
        self.log.lock().settle();
    }

    fn record(&self, span: Span) {
        if !self.is_recording() {
            return;
        }
        let mut log = self.log.lock();
        if let Track::Thread(number) = span.track
            && !log.threads.iter().any(|(known, _)| *known == number)
        {
            log.threads.push((number, thread_name()));
        }
        log.push(TraceEvent::Span(span));
    }

    /// The point that the device's compute queue has reached, if there is a device and something is being recorded.
    fn compute(&self) -> Option<Moment> {
        if self.is_recording() { self.point() } else { None }
    }

    /// The same at any time.
    fn point(&self) -> Option<Moment> {
        let lanes = self.lanes.get().filter(|_| !self.origin.is_parent())?;
        Arc::clone(lanes).point(Lane::Compute).map(Moment::Device)
    }

    /// Waits until everything recorded so far has its times. Others may record meanwhile.
    fn block(&self) {
        let waiting: Vec<_> = {
            let log = self.log.lock();
            let ends = log.events.range(log.timed..).filter_map(|event| match event {
                TraceEvent::Span(Span { to: Moment::Device(point), .. }) => Some(Arc::clone(point)),
                _ => None,
            });
            ends.collect()
        };
        waiting.iter().for_each(|point| point.block());
        self.settle();
    }
}

impl Log {
    fn push(&mut self, event: TraceEvent) {
        if self.events.len() == MAX_EVENTS {
            self.events.pop_front();
            self.timed = self.timed.saturating_sub(1);
            self.dropped += 1;
        }
        self.events.push_back(event);
    }

    fn settle(&mut self) {
        let mut all = true;
        for event in self.events.range_mut(self.timed..) {
            if let TraceEvent::Span(span) = event {
                // A span's beginning is reached before its end.
                all &= span.to.settle() && span.from.settle();
            }
            self.timed += usize::from(all);
        }
    }
}

impl Span {
    fn on_host(track: Track, name: Name, from: Instant, to: Instant, bytes: Option<u64>) -> Span {
        Span { track, name, from: Moment::Host(from), to: Moment::Host(to), bytes }
    }
}

impl Moment {
    /// Replaces an event that is reached by its time; false if it is not reached yet.
    fn settle(&mut self) -> bool {
        if let Moment::Device(point) = self {
            let Some(at) = point.when() else { return false };
            *self = Moment::Host(at);
        }
        true
    }

    fn host(&self) -> Option<Instant> {
        match self {
            Moment::Host(at) => Some(*at),
            Moment::Device(_) => None,
        }
    }
}

/// The calling thread's number in the system; 0 if the kernel does not say.
fn thread_number() -> u32 {
    thread_local!(static NUMBER: Cell<Option<u32>> = const { Cell::new(None) });
    NUMBER.get().unwrap_or_else(|| {
        let link = fs::read_link("/proc/thread-self").ok();
        let number = link.and_then(|link| link.file_name()?.to_str()?.parse().ok()).unwrap_or(0);
        NUMBER.set(Some(number));
        number
    })
}

/// The calling thread's name. Threads started by libtorch have one only in the kernel.
fn thread_name() -> String {
    let known = thread::current().name().map(str::to_owned);
    known.unwrap_or_else(|| {
        fs::read_to_string("/proc/thread-self/comm").unwrap_or_default().trim_end().to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_events_are_kept_and_the_others_counted() {
        let trace = Trace::default();
        for bytes in 1..=MAX_EVENTS as u64 + 3 {
            trace.sample(Counter::Device, bytes);
        }
        let log = trace.log.lock();
        assert_eq!((log.events.len(), log.dropped), (MAX_EVENTS, 3));
        assert!(matches!(log.events[0], TraceEvent::Sample { bytes: 4, .. }));
    }

    #[test]
    fn a_level_that_stays_is_recorded_once() {
        let trace = Trace::default();
        for (counter, bytes) in [(Counter::Device, 7), (Counter::HostPool, 7), (Counter::Device, 7)] {
            trace.sample(counter, bytes);
        }
        assert_eq!(trace.log.lock().events.len(), 2);
    }

    #[test]
    fn an_event_is_as_large_as_it_is_documented_to_be() {
        assert!(size_of::<TraceEvent>() <= 104, "{}", size_of::<TraceEvent>());
    }
}
