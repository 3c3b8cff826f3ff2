//! The time in which nothing was computed.

use std::time::{Duration, Instant};

use crate::trace::{Moves, Reached, Stamp, Wait};

/// When the device, or else the thread, only waited: in order, and apart.
pub(super) struct Stalls(Vec<(Instant, Instant)>);

impl Stalls {
    /// Those among `moves`. While a thread waits, the device still computes what was queued before: up to the last of `points` by then.
    pub(super) fn new(mut points: Vec<Reached>, moves: &Moves) -> Stalls {
        let Moves { device_stalls, host_stalls, .. } = moves;
        points.sort_by_key(|point| point.host);
        let idle = host_stalls.iter().filter_map(|&Wait { from, to, .. }| {
            let before = points.partition_point(|point| point.host <= from);
            let busy = points[..before].last().map_or(from, |point| point.at.max(from));
            (busy < to).then_some((busy, to))
        });
        let mut stalls: Vec<_> = device_stalls.iter().copied().chain(idle).collect();
        stalls.sort_unstable();
        let mut apart: Vec<(Instant, Instant)> = Vec::new();
        for (from, to) in stalls {
            match apart.last_mut().filter(|(_, until)| from <= *until) {
                Some((_, until)) => *until = to.max(*until),
                None => apart.push((from, to)),
            }
        }
        Stalls(apart)
    }

    /// The time between two instants outside of them.
    pub(super) fn computed(&self, from: Instant, to: Instant) -> Duration {
        let Stalls(stalls) = self;
        let first = stalls.partition_point(|(_, until)| *until <= from);
        let waited = stalls[first..].iter().take_while(|(begin, _)| *begin < to);
        let waited: Duration = waited.map(|(begin, end)| (*end).min(to) - (*begin).max(from)).sum();
        to.saturating_duration_since(from).saturating_sub(waited)
    }
}

/// How long an operation took between two stamps of its thread, without what that has waited for meanwhile: an operation waits for memory
/// before it computes. `None` if the device has failed.
pub(super) fn took(begun: &Stamp, ended: &Stamp, waits: &[Wait]) -> Option<Duration> {
    let (from, to) = (begun.reach()?, ended.reach()?);
    let first = waits.partition_point(|wait| wait.from < from.host);
    let within = waits[first..].iter().take_while(|wait| wait.from < to.host);
    let own = within.filter(|wait| wait.thread == begun.thread);
    let waited: Duration = own.map(|wait| wait.to.saturating_duration_since(wait.from.max(from.at))).sum();
    Some(to.at.saturating_duration_since(from.at).saturating_sub(waited))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn only_what_was_computed_counts() {
        let start = Instant::now();
        let at = |millis: u32| start + millis * MS;
        let point = |host, device| Reached { host: at(host), at: at(device) };
        let wait = |thread, from, to| Wait { thread, from: at(from), to: at(to) };
        let moves = Moves {
            device_stalls: vec![(at(38), at(45))],
            host_stalls: vec![wait(1, 10, 20), wait(2, 12, 18), wait(1, 30, 40)],
            ..Moves::default()
        };
        // Until 34 the device computes what the thread had handed to it before it waited, whichever thread that was.
        let stalls = Stalls::new(vec![point(50, 50), point(25, 34), point(5, 6)], &moves);
        for (from, to, millis) in [(0, 10, 10), (5, 25, 10), (25, 50, 14), (15, 17, 0), (45, 50, 5)] {
            assert_eq!(stalls.computed(at(from), at(to)), millis * MS, "from {from} to {to}");
        }
    }

    /// Another thread's waits are not its own, and its device was behind until 12.
    #[test]
    fn an_operation_does_not_take_what_its_thread_waits_for_in_it() {
        let start = Instant::now();
        let at = |millis: u32| start + millis * MS;
        let stamp = |host, device| Stamp::at(1, at(host), at(device));
        let waits = [(1, 2, 4), (2, 11, 19), (1, 11, 20), (1, 31, 40)];
        let waits = waits.map(|(thread, from, to)| Wait { thread, from: at(from), to: at(to) });
        assert_eq!(took(&stamp(10, 12), &stamp(22, 25), &waits), Some(5 * MS));
        assert_eq!(took(&stamp(22, 25), &stamp(30, 31), &waits), Some(6 * MS));
    }
}
