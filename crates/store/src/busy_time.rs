//! Measures how long transfers were in flight.

use std::time::{Duration, Instant};

use super::backend::Direction;

/// Adds up the time during which something was in flight. Callers must pass instants that never go back.
#[derive(Debug, Default)]
pub(super) struct BusyClock {
    in_flight: [u64; 2],
    time: BusyTime,
    /// The instant up to which `time` is correct.
    since: Option<Instant>,
}

/// How long at least one read, at least one write, or at least one of either was in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct BusyTime {
    pub(super) reads: Duration,
    pub(super) writes: Duration,
    pub(super) either: Duration,
}

impl BusyClock {
    /// Something is in flight from now on.
    pub(super) fn begin(&mut self, direction: Direction, now: Instant) {
        self.time(now);
        self.in_flight[direction as usize] += 1;
    }

    /// One of the things in flight has ended.
    pub(super) fn end(&mut self, direction: Direction, now: Instant) {
        self.time(now);
        self.in_flight[direction as usize] -= 1;
    }

    /// The time up to now, including that of everything still in flight.
    pub(super) fn time(&mut self, now: Instant) -> BusyTime {
        let passed = self.since.replace(now).map_or(Duration::ZERO, |since| now - since);
        let [reads, writes] = [Direction::Read, Direction::Write].map(|way| self.in_flight[way as usize] > 0);
        for (busy, time) in [
            (reads, &mut self.time.reads),
            (writes, &mut self.time.writes),
            (reads || writes, &mut self.time.either),
        ] {
            if busy {
                *time += passed;
            }
        }
        self.time
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn seconds(reads: u64, writes: u64, either: u64) -> BusyTime {
        let [reads, writes, either] = [reads, writes, either].map(Duration::from_secs);
        BusyTime { reads, writes, either }
    }

    #[test]
    fn time_counts_once_however_much_is_in_flight() {
        let (mut busy, start) = (BusyClock::default(), Instant::now());
        let at = |second| start + Duration::from_secs(second);
        assert_eq!(busy.time(at(5)), seconds(0, 0, 0), "nothing was in flight");
        busy.begin(Direction::Read, at(10));
        busy.begin(Direction::Read, at(11));
        busy.begin(Direction::Write, at(13));
        assert_eq!(busy.time(at(14)), seconds(4, 1, 4), "what is in flight counts up to now");
        busy.end(Direction::Read, at(15));
        busy.end(Direction::Read, at(16));
        busy.end(Direction::Write, at(19));
        assert_eq!(busy.time(at(100)), seconds(6, 6, 9), "and no longer than it is in flight");
    }

    proptest! {
        #[test]
        fn each_time_only_grows_and_the_union_lies_between_the_longer_and_the_sum(
            steps in proptest::collection::vec((any::<bool>(), any::<bool>(), 0_u64..1_000), 1..100),
        ) {
            let (mut busy, mut now, mut last) = (BusyClock::default(), Instant::now(), BusyTime::default());
            for (reads, begin, nanos) in steps {
                now += Duration::from_nanos(nanos);
                let direction = if reads { Direction::Read } else { Direction::Write };
                if begin {
                    busy.begin(direction, now);
                } else if busy.in_flight[direction as usize] > 0 {
                    busy.end(direction, now);
                }
                let time = busy.time(now);
                prop_assert!(time.reads >= last.reads && time.writes >= last.writes && time.either >= last.either);
                prop_assert!(time.either >= time.reads.max(time.writes));
                prop_assert!(time.either <= time.reads + time.writes);
                last = time;
            }
        }
    }
}
