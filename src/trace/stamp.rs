//! Moments of a step, by the clock of where it computes.

use std::time::Instant;

use ssdtrain_store::Direction;

use super::forward::throughput;
use super::{Moment, Name, Span, Trace, TraceEvent, Track};
use crate::device::Lane;

/// A moment: the thread's time, and the point that the device's compute queue has reached.
pub(crate) struct Stamp {
    pub(crate) host: Instant,
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
    /// Waits of threads.
    pub(crate) host_stalls: Vec<(Instant, Instant)>,
    /// Bytes per second while any were in transit, if any were: copies off the device and back, writes to and reads from the disk.
    pub(crate) out: Option<f64>,
    pub(crate) back: Option<f64>,
    pub(crate) written: Option<f64>,
    pub(crate) read: Option<f64>,
}

impl Stamp {
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
    pub(crate) fn stamp(&self) -> Stamp {
        Stamp { host: Instant::now(), device: self.compute() }
    }

    /// The moves recorded from `position` on. Waits for the device to reach them.
    pub(crate) fn moves(&self, position: u64) -> Moves {
        self.block();
        let log = self.log.lock();
        let before = usize::try_from(position.saturating_sub(log.dropped)).unwrap_or(usize::MAX);
        let spans: Vec<&Span> = log.events.iter().skip(before).filter_map(TraceEvent::span).collect();
        let of = |track: Track| spans.iter().copied().filter(move |span| span.track == track);
        let rate = |track: Track| throughput(of(track));
        let stalls = |on_device: bool| {
            let stalls = spans.iter().filter(|span| {
                matches!(span.name, Name::Stall(_)) && matches!(span.track, Track::Device(_)) == on_device
            });
            let stretches = stalls.filter_map(|span| span.stretch());
            stretches
                .filter(|stretch| stretch.from < stretch.to)
                .map(|stretch| (stretch.from, stretch.to))
                .collect()
        };
        Moves {
            device_stalls: stalls(true),
            host_stalls: stalls(false),
            out: rate(Track::Device(Lane::Out)),
            back: rate(Track::Device(Lane::In)),
            written: rate(Track::Disk(Direction::Write)),
            read: rate(Track::Disk(Direction::Read)),
        }
    }
}
