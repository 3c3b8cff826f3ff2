//! The times of a step's forward, read from its trace.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use ssdtrain_store::Direction;

use super::{Log, Name, Span, Trace, TraceEvent, Track};
use crate::device::Lane;
use crate::telemetry::ScopeId;

/// The forward pass of one step, timed where it was computed: on the device, or else on the thread.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Forward {
    /// Time in each scope, without the scopes within it and without stalls; what is in no scope counts for the root.
    pub(crate) scopes: HashMap<ScopeId, Duration>,
    /// Bytes per second on their way off the device, counting only the time while any were: to the disk if some went there, or else to
    /// the host.
    pub(crate) bandwidth: Option<f64>,
}

/// A stretch of time.
#[derive(Clone, Copy)]
pub(super) struct Stretch {
    pub(super) from: Instant,
    pub(super) to: Instant,
}

impl Trace {
    /// The number of events recorded so far.
    pub(crate) fn position(&self) -> u64 {
        self.log.lock().position()
    }

    /// The forward pass that was recorded from `position` on, up to the first backward after it; `None` if there was no backward yet.
    /// Waits for the device to reach what was recorded.
    pub(crate) fn forward(&self, position: u64) -> Option<Forward> {
        self.block();
        self.log.lock().forward(position)
    }
}

impl Log {
    fn position(&self) -> u64 {
        self.dropped + self.events.len() as u64
    }

    fn forward(&self, position: u64) -> Option<Forward> {
        let before = usize::try_from(position.saturating_sub(self.dropped)).unwrap_or(usize::MAX);
        let spans: Vec<&Span> = self.events.iter().skip(before).filter_map(TraceEvent::span).collect();
        let is_backward = |span: &&&Span| span.name == Name::Backward;
        let on_device = |span: &&Span| span.track == Track::Device(Lane::Compute);
        let backwards = || spans.iter().filter(is_backward);
        let ended = backwards().find(|span| on_device(span)).or_else(|| backwards().next())?;
        let computed = || spans.iter().filter(|span| span.track == ended.track);
        let scopes = computed().filter(|span| matches!(span.name, Name::Scope(_)));
        let end = ended.from.host()?;
        let whole = Stretch {
            from: scopes.filter_map(|span| span.from.host()).min().unwrap_or(end).min(end),
            to: end,
        };
        let (mut scopes, mut stalls) = (Vec::new(), Vec::new());
        for span in computed() {
            let Some(stretch) = span.stretch().and_then(|stretch| stretch.within(whole)) else { continue };
            match span.name {
                Name::Scope(scope) => scopes.push((scope, stretch)),
                Name::Stall(_) => stalls.push(stretch),
                _ => {}
            }
        }
        let of = |track: Track| spans.iter().copied().filter(move |span| span.track == track);
        let begun = |span: &&Span| span.stretch().is_some_and(|stretch| stretch.from < whole.to);
        let moved = |track: Track| throughput(of(track).filter(begun));
        let bandwidth = moved(Track::Disk(Direction::Write)).or_else(|| moved(Track::Device(Lane::Out)));
        Some(Forward { scopes: exclusive(whole, &scopes, &stalls), bandwidth })
    }
}

impl TraceEvent {
    pub(super) fn span(&self) -> Option<&Span> {
        match self {
            TraceEvent::Span(span) => Some(span),
            TraceEvent::Sample { .. } => None,
        }
    }
}

impl Span {
    pub(super) fn stretch(&self) -> Option<Stretch> {
        Some(Stretch { from: self.from.host()?, to: self.to.host()? })
    }
}

impl Stretch {
    /// The part of it within `other`; `None` if there is none.
    fn within(self, other: Stretch) -> Option<Stretch> {
        let (from, to) = (self.from.max(other.from), self.to.min(other.to));
        (from < to).then_some(Stretch { from, to })
    }

    fn covers(self, other: Stretch) -> bool {
        self.from <= other.from && other.to <= self.to
    }
}

/// The time of `whole` in each scope and in none within that scope, outside of `stalls`.
fn exclusive(
    whole: Stretch,
    scopes: &[(ScopeId, Stretch)],
    stalls: &[Stretch],
) -> HashMap<ScopeId, Duration> {
    let all = || scopes.iter().map(|(_, stretch)| stretch).chain(stalls);
    let mut borders: Vec<Instant> = all().flat_map(|stretch| [stretch.from, stretch.to]).collect();
    borders.extend([whole.from, whole.to]);
    borders.sort_unstable();
    borders.dedup();
    let mut times = HashMap::new();
    for pair in borders.windows(2) {
        let piece = Stretch { from: pair[0], to: pair[1] };
        if stalls.iter().any(|stall| stall.covers(piece)) {
            continue;
        }
        // Of the scopes around the piece, the innermost began last; of two that began at once, it is the shorter.
        let around = scopes.iter().filter(|(_, scope)| scope.covers(piece));
        let innermost = around.max_by_key(|(_, scope)| (scope.from, std::cmp::Reverse(scope.to)));
        let scope = innermost.map_or_else(ScopeId::default, |(scope, _)| *scope);
        *times.entry(scope).or_default() += piece.to - piece.from;
    }
    times
}

/// Bytes per second of the transfers, while any was in flight; `None` if there was none.
pub(super) fn throughput<'a>(transfers: impl Iterator<Item = &'a Span>) -> Option<f64> {
    let mut moved = 0;
    let mut stretches: Vec<Stretch> = Vec::new();
    for span in transfers.filter(|span| matches!(span.name, Name::Moved(_, false))) {
        let Some(stretch) = span.stretch() else { continue };
        moved += span.bytes.unwrap_or(0);
        stretches.push(stretch);
    }
    stretches.sort_unstable_by_key(|stretch| stretch.from);
    let (mut busy, mut until) = (Duration::ZERO, stretches.first()?.from);
    for Stretch { from, to } in stretches {
        busy += to.saturating_duration_since(from.max(until));
        until = until.max(to);
    }
    (moved > 0 && !busy.is_zero()).then(|| moved as f64 / busy.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::{Scopes, StallCause};

    const MS: Duration = Duration::from_millis(1);

    struct Story {
        trace: Trace,
        start: Instant,
    }

    impl Story {
        fn begin() -> Story {
            Story { trace: Trace::default(), start: Instant::now() }
        }

        fn span(&self, track: Track, name: Name, from: u32, to: u32, bytes: Option<u64>) {
            let at = |millis| self.start + millis * MS;
            self.trace.record(Span::on_host(track, name, at(from), at(to), bytes));
        }

        fn forward(&self) -> Forward {
            self.trace.forward(0).unwrap()
        }
    }

    fn ids<const N: usize>() -> [ScopeId; N] {
        let scopes = Scopes::default();
        std::array::from_fn(|index| scopes.child(ScopeId::default(), &index.to_string()))
    }

    const THREAD: Track = Track::Thread(7);
    const COMPUTE: Track = Track::Device(Lane::Compute);
    const WRITES: Track = Track::Disk(Direction::Write);

    #[test]
    fn time_is_the_innermost_scopes_and_stalls_are_no_ones() {
        let ([outer, inner], story) = (ids(), Story::begin());
        story.span(THREAD, Name::Stall(StallCause::HostPool), 30, 35, None);
        story.span(THREAD, Name::Scope(inner), 20, 40, None);
        story.span(THREAD, Name::Scope(outer), 10, 60, None);
        story.span(THREAD, Name::Backward, 100, 200, None);
        let expected = [(outer, 30), (inner, 15), (ScopeId::default(), 40)];
        assert_eq!(story.forward().scopes, expected.map(|(scope, millis)| (scope, millis * MS)).into());
    }

    #[test]
    fn only_what_happened_before_backward_counts() {
        let ([scope, later], story) = (ids(), Story::begin());
        story.span(THREAD, Name::Scope(scope), 0, 10, None);
        story.span(THREAD, Name::Scope(later), 60, 70, None);
        story.span(THREAD, Name::Backward, 10, 50, None);
        story.span(WRITES, Name::Moved(scope, false), 2, 12, Some(1000));
        story.span(WRITES, Name::Moved(scope, false), 20, 30, Some(5000));
        assert_eq!(story.forward(), Forward { scopes: [(scope, 10 * MS)].into(), bandwidth: Some(1e5) });
    }

    #[test]
    fn the_device_tells_where_there_is_one() {
        let ([scope], story) = (ids(), Story::begin());
        story.span(THREAD, Name::Scope(scope), 0, 1, None);
        story.span(THREAD, Name::Backward, 1, 2, None);
        story.span(COMPUTE, Name::Scope(scope), 0, 40, None);
        story.span(COMPUTE, Name::Backward, 40, 100, None);
        story.span(Track::Device(Lane::Out), Name::Moved(scope, false), 10, 20, Some(2000));
        assert_eq!(story.forward(), Forward { scopes: [(scope, 40 * MS)].into(), bandwidth: Some(2e5) });
    }

    #[test]
    fn transfers_at_once_are_busy_once_and_failed_ones_carry_nothing() {
        let ([scope], story) = (ids(), Story::begin());
        story.span(THREAD, Name::Scope(scope), 0, 100, None);
        story.span(THREAD, Name::Backward, 100, 200, None);
        for (from, to, failed) in [(0, 10, false), (5, 20, false), (30, 40, true)] {
            story.span(WRITES, Name::Moved(scope, failed), from, to, Some(1000));
        }
        assert_eq!(story.forward().bandwidth, Some(1e5));
    }

    #[test]
    fn a_step_is_told_from_the_one_before_it() {
        let ([scope], story) = (ids(), Story::begin());
        story.span(THREAD, Name::Scope(scope), 0, 10, None);
        story.span(THREAD, Name::Backward, 10, 20, None);
        let position = story.trace.position();
        story.span(THREAD, Name::Scope(scope), 30, 60, None);
        story.span(THREAD, Name::Backward, 60, 80, None);
        assert_eq!(story.trace.forward(position).unwrap().scopes, [(scope, 30 * MS)].into());
    }

    #[test]
    fn there_is_no_forward_before_a_backward() {
        let story = Story::begin();
        story.span(THREAD, Name::Scope(ScopeId::default()), 0, 10, None);
        assert_eq!(story.trace.forward(0), None);
    }
}
