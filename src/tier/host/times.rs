//! How long the device's compute queue waits, and how long reruns take it.

use std::collections::VecDeque;
use std::mem::{replace, take};
use std::sync::Arc;
use std::time::Duration;

use crate::sync::Mutex;

use super::super::Mark;
use crate::device::{Device, Lane};
use crate::error::Result;
use crate::telemetry::events::warn_once;
use crate::telemetry::{Counters, StallCause};

/// What is to be counted once the device has come so far, by its events.
pub(super) struct Times<E>(Mutex<Noted<E>>);

struct Noted<E> {
    now: Batch<E>,
    /// Of steps that were not finished before the next one began.
    earlier: VecDeque<Batch<E>>,
}

struct Batch<E> {
    /// How many stalls came before.
    before: usize,
    stalls: Vec<Stall<E>>,
    reruns: Vec<Rerun<E>>,
}

/// A wait in the device's compute queue, from the moment the queue reaches it to the end of the copy that it waits for. If the copy ends
/// first, nothing was waited for.
pub(super) struct Stall<E> {
    pub(super) cause: StallCause,
    pub(super) counters: Arc<Counters>,
    pub(super) from: E,
    /// The end of the wait before, if nothing was computed between the two.
    pub(super) waited: Option<E>,
    pub(super) to: E,
}

struct Rerun<E> {
    counters: Arc<Counters>,
    from: E,
    to: E,
    /// The first stall that was noted after it had begun, and after it had ended. Those between may be other threads'.
    stalls: [usize; 2],
}

/// The time from one event to another, both of which are reached; zero if the second came first.
type Between<'a, E> = &'a dyn Fn(&E, &E) -> Result<Duration>;

impl<E: Clone + Send + 'static> Times<E> {
    pub(super) fn new() -> Times<E> {
        Times(Mutex::new(Noted { now: Batch::after(0), earlier: VecDeque::new() }))
    }

    pub(super) fn stalled(&self, stall: Stall<E>) {
        self.0.lock().now.stalls.push(stall);
    }

    /// The point that the calling thread's computation has reached.
    pub(super) fn mark(&self, device: &impl Device<Event = E>) -> Option<Mark> {
        let event = Box::new(device.record(Lane::Compute).ok()?);
        Some(Mark { event, stalls: self.0.lock().now.noted() })
    }

    /// What the calling thread has computed since `mark` was a rerun.
    pub(super) fn reran(&self, device: &impl Device<Event = E>, since: Mark, counters: &Arc<Counters>) {
        // Without both events, its time stays unknown.
        let Some(from) = since.event.downcast_ref::<E>().cloned() else { return };
        let Ok(to) = device.record(Lane::Compute) else { return };
        let mut noted = self.0.lock();
        let stalls = [since.stalls, noted.now.noted()];
        noted.now.reruns.push(Rerun { counters: Arc::clone(counters), from, to, stalls });
    }

    /// A step begins. Where those before were not finished, what the device has come past is counted, and the rest later.
    pub(super) fn begin_step(&self, device: &impl Device<Event = E>) {
        let past: Vec<_> = {
            let Noted { now, earlier } = &mut *self.0.lock();
            if !(now.stalls.is_empty() && now.reruns.is_empty()) {
                let next = Batch::after(now.noted());
                earlier.push_back(replace(now, next));
            }
            let is_past = |batch: &&Batch<E>| batch.ends().all(|event| device.is_reached(event));
            let past = earlier.iter().take_while(is_past).count();
            earlier.drain(..past).collect()
        };
        past.into_iter().for_each(|batch| batch.count(device));
    }

    /// Waits for all of it, and counts it.
    pub(super) fn count(&self, device: &impl Device<Event = E>) {
        let (earlier, now) = {
            let Noted { now, earlier } = &mut *self.0.lock();
            let next = Batch::after(now.noted());
            (take(earlier), replace(now, next))
        };
        earlier.into_iter().chain([now]).for_each(|batch| batch.count(device));
    }
}

impl<E: Clone + Send + 'static> Batch<E> {
    fn after(before: usize) -> Batch<E> {
        Batch { before, stalls: Vec::new(), reruns: Vec::new() }
    }

    /// How many stalls there were so far.
    fn noted(&self) -> usize {
        self.before + self.stalls.len()
    }

    fn ends(&self) -> impl Iterator<Item = &E> {
        self.stalls.iter().map(|stall| &stall.to).chain(self.reruns.iter().map(|rerun| &rerun.to))
    }

    fn count(self, device: &impl Device<Event = E>) {
        let Batch { before, stalls, reruns } = self;
        let between = |from: &E, to: &E| device.between(from, to);
        for stall in &stalls {
            let time =
                device.block_unless_late(&stall.to).and_then(|()| match device.is_reached(&stall.from) {
                    true => stall.until(&stall.to, &between),
                    // The copy has ended before the queue came to wait for it.
                    false => Ok(Duration::ZERO),
                });
            match time {
                Ok(time) => stall.counters.stalled(stall.cause, time),
                Err(error) => warn_once!(%error, "a stall could not be measured"),
            }
        }
        for rerun in &reruns {
            let time =
                device.block_unless_late(&rerun.to).and_then(|()| rerun.time(before, &stalls, &between));
            match time {
                Ok(time) => rerun.counters.reran(time),
                Err(error) => {
                    warn_once!(%error, "how long a device took to compute something again could not be measured")
                }
            }
        }
    }
}

impl<E> Stall<E> {
    /// From its beginning to `event`; zero if that came first.
    fn until(&self, event: &E, between: Between<'_, E>) -> Result<Duration> {
        let after_wait = self.waited.as_ref().map(|waited| between(waited, event)).transpose()?;
        Ok(between(&self.from, event)?.min(after_wait.unwrap_or(Duration::MAX)))
    }
}

impl<E> Rerun<E> {
    /// How long it took, without those of these stalls that it met with. So many came before them.
    fn time(&self, before: usize, stalls: &[Stall<E>], between: Between<'_, E>) -> Result<Duration> {
        let whole = between(&self.from, &self.to)?;
        let [first, last] = self.stalls.map(|stall| stall.saturating_sub(before));
        let mut left = whole;
        for stall in stalls.get(first..last).unwrap_or_default() {
            // Both at once: from the later beginning to the earlier end.
            let common = [
                whole,
                between(&self.from, &stall.to)?,
                stall.until(&self.to, between)?,
                stall.until(&stall.to, between)?,
            ];
            left = left.saturating_sub(common.into_iter().min().unwrap_or_default());
        }
        Ok(left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Events are the milliseconds at which they are reached.
    fn stall(waited: Option<u32>, [from, to]: [u32; 2]) -> Stall<u32> {
        Stall { cause: StallCause::CopyIn, counters: Arc::default(), from, waited, to }
    }

    /// How many milliseconds a rerun of this time takes beside these stalls, the first `before` of which came before it.
    fn time([from, to]: [u32; 2], before: usize, stalls: &[Stall<u32>]) -> u32 {
        let rerun = Rerun { counters: Arc::default(), from, to, stalls: [before, stalls.len()] };
        let between = |from: &u32, to: &u32| Ok(to.saturating_sub(*from) * MS);
        let time = rerun.time(0, stalls, &between).unwrap();
        u32::try_from(time.as_millis()).unwrap()
    }

    #[test]
    fn what_a_rerun_waits_for_is_no_part_of_it() {
        assert_eq!(time([10, 30], 0, &[]), 20);
        assert_eq!(time([10, 30], 0, &[stall(None, [12, 15]), stall(None, [20, 26])]), 11);
        // Only the second began when the copy before had ended.
        assert_eq!(time([10, 30], 0, &[stall(None, [12, 15]), stall(Some(15), [12, 20])]), 12);
        // Its copy had ended before the queue came to it.
        assert_eq!(time([10, 30], 0, &[stall(None, [12, 7])]), 20);
    }

    #[test]
    fn what_other_threads_wait_for_counts_as_far_as_it_is_at_the_same_time() {
        assert_eq!(
            time([10, 30], 0, &[stall(None, [2, 8]), stall(None, [5, 12]), stall(None, [29, 40])]),
            17
        );
        assert_eq!(time([10, 30], 0, &[stall(None, [5, 40])]), 0);
        assert_eq!(time([10, 30], 1, &[stall(None, [12, 20]), stall(None, [20, 21])]), 19);
    }
}
