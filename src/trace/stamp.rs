//! Moments of a step, by the clock of where it computes.

use std::time::{Duration, Instant};

use ssdtrain_plan::Rates;
use ssdtrain_store::Direction;

use super::throughput::{Stretch, throughput};
use super::{Moment, Name, Span, Trace, TraceEvent, Track, thread_number};
use crate::device::Lane;

/// Fewer copied bytes take as long as their beginnings and ends.
const TELLING: u64 = 16 << 20;

/// A moment: the thread's time, and the point that the device's compute queue has reached.
pub(crate) struct Stamp {
    pub(crate) host: Instant,
    pub(crate) thread: u32,
    device: Option<Moment>,
}

/// When a stamp was reached: by the host's clock, and on the device or else on the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reached {
    pub(crate) host: Instant,
    pub(crate) at: Instant,
}

/// Waits for the cache and transfer rates, from one event of a trace on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Moves {
    /// Waits in the device's compute queue.
    pub(crate) device_stalls: Vec<(Instant, Instant)>,
    /// Waits of threads, by their beginnings.
    pub(crate) host_stalls: Vec<Wait>,
    pub(crate) rates: Rates,
    /// How many bytes left where the step computes, or came back.
    pub(crate) moved: u64,
}

/// A wait of the thread with this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wait {
    pub(crate) thread: u32,
    pub(crate) from: Instant,
    pub(crate) to: Instant,
}

impl Stamp {
    /// One of this thread, at which the device had come so far.
    #[cfg(test)]
    pub(crate) fn at(thread: u32, host: Instant, device: Instant) -> Stamp {
        Stamp { host, thread, device: Some(Moment::Host(device)) }
    }

    /// By how much the device is behind the thread there. Waits until it has reached it.
    pub(crate) fn lag(&self) -> Duration {
        self.reach().map(|Reached { host, at }| at.saturating_duration_since(host)).unwrap_or_default()
    }

    /// Waits until the device has reached it. `None` if the device has failed.
    pub(crate) fn reach(&self) -> Option<Reached> {
        let at = match &self.device {
            None => self.host,
            Some(Moment::Host(at)) => *at,
            Some(Moment::Device(point)) => {
                point.block();
                point.when()?
            }
        };
        Some(Reached { host: self.host, at })
    }
}

impl Trace {
    /// The number of events recorded so far.
    pub(crate) fn position(&self) -> u64 {
        let log = self.log.lock();
        log.dropped + log.events.len() as u64
    }

    /// Now, whether or not anything is being recorded.
    pub(crate) fn stamp(&self) -> Stamp {
        Stamp { host: Instant::now(), thread: thread_number(), device: self.point() }
    }

    /// The moves recorded from `position` on. Waits for the device to reach them.
    pub(crate) fn moves(&self, position: u64) -> Moves {
        self.block();
        let log = self.log.lock();
        let before = usize::try_from(position.saturating_sub(log.dropped)).unwrap_or(usize::MAX);
        let spans: Vec<&Span> = log.events.iter().skip(before).filter_map(TraceEvent::span).collect();
        let of = |track: Track| spans.iter().copied().filter(move |span| span.track == track);
        let [out, back, written, read] = [
            Track::Device(Lane::Out),
            Track::Device(Lane::In),
            Track::Disk(Direction::Write),
            Track::Disk(Direction::Read),
        ]
        .map(|track| throughput(of(track)));
        let stalls = spans.iter().filter(|span| matches!(span.name, Name::Stall(_)));
        let stalls = stalls.filter_map(|span| Some((span.track, span.stretch()?)));
        let (mut device_stalls, mut host_stalls) = (Vec::new(), Vec::new());
        for (track, Stretch { from, to }) in stalls.filter(|(_, stretch)| stretch.from < stretch.to) {
            match track {
                Track::Device(_) => device_stalls.push((from, to)),
                Track::Thread(thread) => host_stalls.push(Wait { thread, from, to }),
                Track::Disk(_) => {}
            }
        }
        host_stalls.sort_by_key(|wait| wait.from);
        Moves {
            device_stalls,
            host_stalls,
            rates: Rates { out: of_copies(out), back: of_copies(back), written: written.1, read: read.1 },
            // What has been copied to or from the host may go through the disk besides.
            moved: (out.0 + back.0).max(written.0 + read.0),
        }
    }
}

/// The rate of so many copied bytes, if these tell anything.
fn of_copies((bytes, rate): (u64, Option<f64>)) -> Option<f64> {
    rate.filter(|_| bytes >= TELLING)
}

impl TraceEvent {
    fn span(&self) -> Option<&Span> {
        match self {
            TraceEvent::Span(span) => Some(span),
            TraceEvent::Sample { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::telemetry::{ScopeId, StallCause};

    #[test]
    fn only_what_was_recorded_since_counts() {
        let (trace, start) = (Trace::default(), Instant::now());
        let span = |track, name, millis: [u64; 2]| {
            let [from, to] = millis.map(|millis| start + Duration::from_millis(millis));
            trace.record(Span::on_host(track, name, from, to, Some(1000)));
            (from, to)
        };
        let (stall, write) = (Name::Stall(StallCause::Load), Name::Moved(ScopeId::default(), false));
        span(Track::Thread(7), stall, [0, 5]);
        span(Track::Disk(Direction::Write), write, [0, 5]);
        let position = trace.position();
        let later = span(Track::Thread(7), stall, [20, 25]);
        span(Track::Disk(Direction::Write), write, [20, 30]);
        let moves = trace.moves(position);
        let (from, to) = later;
        assert_eq!((moves.host_stalls, moves.device_stalls), (vec![Wait { thread: 7, from, to }], vec![]));
        assert_eq!(moves.rates, Rates { written: Some(1e5), ..Rates::default() });
        assert_eq!(moves.moved, 1000);
    }

    #[test]
    fn few_copied_bytes_tell_nothing_of_the_rate() {
        let rate = |bytes| {
            let (trace, from) = (Trace::default(), Instant::now());
            let (track, name) = (Track::Device(Lane::Out), Name::Moved(ScopeId::default(), false));
            let span = Span::on_host(track, name, from, from + Duration::from_secs(1), Some(bytes));
            trace.record(span);
            trace.moves(0).rates.out
        };
        assert_eq!([TELLING - 1, TELLING].map(rate), [None, Some(TELLING as f64)]);
    }
}
