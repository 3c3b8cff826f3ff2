//! The device's time on the host's time line.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ssdtrain_store::sync::Mutex;

use super::{Moment, Name, Span, Trace, Track};
use crate::device::{Device, Lane};
use crate::error::Result;
use crate::telemetry::{ScopeId, StallCause};

/// How often host and device are matched; the quickest exchange is used.
const MEETINGS: usize = 8;
/// Devices report times as floating-point milliseconds, which get coarser with length, so the base moves on after this long.
const REACH: Duration = Duration::from_secs(4);

/// A device's queues, whatever its type.
pub(super) trait Lanes: Send + Sync {
    /// An event in a lane's queue; `None` if the device has failed.
    fn point(self: Arc<Self>, lane: Lane) -> Option<Arc<dyn Point>>;
}

/// An event, whatever its device's type.
pub(super) trait Point: Send + Sync {
    /// When it was reached; `None` if it has not been, or the device has failed.
    fn when(&self) -> Option<Instant>;

    /// Sleeps until it is reached.
    fn block(&self);
}

/// A trace for code that works with a device's own events.
pub(crate) struct DeviceTrace<D: Device> {
    trace: Arc<Trace>,
    clock: Arc<Clock<D>>,
}

/// A device, and an event in its queues whose host time is known.
struct Clock<D: Device> {
    device: Arc<D>,
    base: Mutex<(D::Event, Instant)>,
}

struct DevicePoint<D: Device> {
    clock: Arc<Clock<D>>,
    event: D::Event,
}

/// When both were reached.
struct Later<D: Device>([DevicePoint<D>; 2]);

impl<D: Device> DeviceTrace<D> {
    /// Adds the device's lanes to the trace. Waits for the compute queue of the calling thread.
    pub(crate) fn start(trace: &Arc<Trace>, device: &Arc<D>) -> Result<DeviceTrace<D>> {
        device.block_on(&device.record(Lane::Compute)?)?;
        let meet = || -> Result<(Duration, D::Event, Instant)> {
            let before = Instant::now();
            let event = device.record(Lane::Compute)?;
            device.block_on(&event)?;
            let window = before.elapsed();
            Ok((window, event, before + window / 2))
        };
        let mut nearest = meet()?;
        for _ in 1..MEETINGS {
            let next = meet()?;
            if next.0 < nearest.0 {
                nearest = next;
            }
        }
        let (_, event, at) = nearest;
        let clock = Arc::new(Clock { device: Arc::clone(device), base: Mutex::new((event, at)) });
        // A trace belongs to one cache, and so to one device.
        drop(trace.lanes.set(Arc::clone(&clock) as _));
        Ok(DeviceTrace { trace: Arc::clone(trace), clock })
    }

    pub(crate) fn trace(&self) -> &Arc<Trace> {
        &self.trace
    }

    /// Records that the device's compute queue waited, from the later of the two points on.
    pub(crate) fn stall(&self, cause: StallCause, from: [&D::Event; 2], to: &D::Event) {
        let from = Moment::Device(Arc::new(Later(from.map(|event| self.point(event)))));
        self.record(Lane::Compute, Name::Stall(cause), None, from, to);
    }

    /// Records a copy of what was saved in `scope`.
    pub(crate) fn copy(&self, lane: Lane, scope: ScopeId, bytes: u64, from: &D::Event, to: &D::Event) {
        let from = Moment::Device(Arc::new(self.point(from)));
        self.record(lane, Name::Moved(scope, false), Some(bytes), from, to);
    }

    fn record(&self, lane: Lane, name: Name, bytes: Option<u64>, from: Moment, to: &D::Event) {
        let (track, to) = (Track::Device(lane), Moment::Device(Arc::new(self.point(to))));
        self.trace.record(Span { track, name, from, to, bytes });
    }

    fn point(&self, event: &D::Event) -> DevicePoint<D> {
        DevicePoint { clock: Arc::clone(&self.clock), event: event.clone() }
    }
}

impl<D: Device> Lanes for Clock<D> {
    fn point(self: Arc<Self>, lane: Lane) -> Option<Arc<dyn Point>> {
        let event = self.device.record(lane).ok()?;
        Some(Arc::new(DevicePoint { clock: self, event }))
    }
}

impl<D: Device> Point for DevicePoint<D> {
    fn when(&self) -> Option<Instant> {
        let Clock { device, base } = &*self.clock;
        if !device.is_reached(&self.event) {
            return None;
        }
        let mut base = base.lock();
        let after = device.between(&base.0, &self.event).ok()?;
        if after.is_zero() {
            return base.1.checked_sub(device.between(&self.event, &base.0).ok()?);
        }
        let at = base.1 + after;
        if after > REACH {
            *base = (self.event.clone(), at);
        }
        Some(at)
    }

    fn block(&self) {
        // A device that fails reports it where it computes; its events then have no time.
        drop(self.clock.device.block_unless_late(&self.event));
    }
}

impl<D: Device> Point for Later<D> {
    fn when(&self) -> Option<Instant> {
        let Later([one, other]) = self;
        Some(one.when()?.max(other.when()?))
    }

    fn block(&self) {
        self.0.iter().for_each(Point::block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Simulated;

    #[test]
    fn what_the_device_reaches_is_timed_as_the_host_would() {
        let device = Arc::new(Simulated::start(Duration::ZERO).unwrap());
        let trace = Arc::new(Trace::default());
        let start = Instant::now();
        let DeviceTrace { clock, .. } = DeviceTrace::start(&trace, &device).unwrap();
        // Host and device are matched somewhere within one exchange, which is long if the thread is preempted.
        let slack = start.elapsed();
        let before = Instant::now();
        let late = Arc::clone(&clock).point(Lane::Out).unwrap();
        late.block();
        let (at, after) = (late.when().unwrap(), Instant::now());
        assert!(before <= at + slack && at <= after + slack, "{before:?} {at:?} {after:?}");
    }

    #[test]
    fn marks_on_both_sides_of_the_base_have_their_times() {
        let device = Arc::new(Simulated::start(Duration::ZERO).unwrap());
        let events = [(); 3].map(|()| device.record(Lane::Compute).unwrap());
        let between = |from: usize, to: usize| device.between(&events[from], &events[to]).unwrap();
        let at = Instant::now();
        let base = Mutex::new((events[1].clone(), at));
        let clock = Arc::new(Clock { device: Arc::clone(&device), base });
        let when =
            |event: usize| DevicePoint { clock: Arc::clone(&clock), event: events[event].clone() }.when();
        assert_eq!(
            [when(0), when(1), when(2)],
            [at.checked_sub(between(0, 1)), Some(at), Some(at + between(1, 2))]
        );
    }

    /// The copy that it waited for last may have ended long before.
    #[test]
    fn a_wait_begins_when_the_queue_comes_to_it_and_the_wait_before_is_over() {
        let device = Arc::new(Simulated::start(Duration::ZERO).unwrap());
        let trace = DeviceTrace::start(&Arc::default(), &device).unwrap();
        let points = [(); 3].map(|()| {
            std::thread::sleep(Duration::from_millis(1));
            device.record(Lane::Compute).unwrap()
        });
        let [sooner, later, end] = &points;
        for from in [[sooner, later], [later, sooner]] {
            let position = trace.trace.position();
            trace.stall(StallCause::DeviceBudget, from, end);
            let when = |event| trace.point(event).when().unwrap();
            assert_eq!(trace.trace.moves(position).device_stalls, [(when(later), when(end))]);
        }
    }

    #[test]
    fn a_mark_that_is_not_reached_has_no_time() {
        let device = Arc::new(Simulated::start(Duration::from_millis(20)).unwrap());
        let trace = DeviceTrace::start(&Arc::default(), &device).unwrap();
        // The lane has a slow copy to make.
        let (from, mut to) = ([7_u8; 8], [0_u8; 8]);
        // SAFETY: both arrays outlive the copy, which is waited for below, and nobody else uses them meanwhile.
        unsafe { device.copy_out(from.as_ptr(), to.as_mut_ptr(), 8) }.unwrap();
        let point = Arc::clone(&trace.clock).point(Lane::Out).unwrap();
        assert_eq!(point.when(), None);
        point.block();
        assert!(point.when().is_some() && to == from);
    }
}
