//! How fast bytes moved, read from a trace.

use std::time::{Duration, Instant};

use super::{Name, Span};

/// A stretch of time.
#[derive(Clone, Copy)]
pub(super) struct Stretch {
    pub(super) from: Instant,
    pub(super) to: Instant,
}

impl Span {
    pub(super) fn stretch(&self) -> Option<Stretch> {
        Some(Stretch { from: self.from.host()?, to: self.to.host()? })
    }
}

/// The bytes of the transfers, and how many of them per second while any was in flight; `None` if there was none.
pub(super) fn throughput<'a>(transfers: impl Iterator<Item = &'a Span>) -> (u64, Option<f64>) {
    let mut moved = 0;
    let mut stretches: Vec<Stretch> = Vec::new();
    for span in transfers.filter(|span| matches!(span.name, Name::Moved(_, false))) {
        let Some(stretch) = span.stretch() else { continue };
        moved += span.bytes.unwrap_or(0);
        stretches.push(stretch);
    }
    stretches.sort_unstable_by_key(|stretch| stretch.from);
    let Some(first) = stretches.first() else { return (0, None) };
    let (mut busy, mut until) = (Duration::ZERO, first.from);
    for Stretch { from, to } in stretches {
        busy += to.saturating_duration_since(from.max(until));
        until = until.max(to);
    }
    let rate = (moved > 0 && !busy.is_zero()).then(|| moved as f64 / busy.as_secs_f64());
    (moved, rate)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::ScopeId;
    use crate::trace::Track;

    #[test]
    fn transfers_at_once_are_busy_once_and_failed_ones_carry_nothing() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let transfer = |(from, to, failed)| {
            let name = Name::Moved(ScopeId::default(), failed);
            Span::on_host(Track::Thread(7), name, at(from), at(to), Some(1000))
        };
        let spans = [(0, 10, false), (5, 20, false), (30, 40, true)].map(transfer);
        assert_eq!(throughput(spans.iter()), (2000, Some(1e5)));
        assert_eq!(throughput(spans[2..].iter()), (0, None));
    }
}
