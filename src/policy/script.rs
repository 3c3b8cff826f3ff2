//! A plan as the saves of a step come to it: one line for each, in their order.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::plan::Placement;
use crate::telemetry::ScopeId;

/// What becomes of the saves of a micro-batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Script(Vec<Line>);

/// One save that could be moved, and what becomes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    pub(crate) bytes: u64,
    pub(crate) scope: ScopeId,
    pub(crate) placement: Placement,
}

/// Where a step is in its script. Steps without one have no lines.
#[derive(Debug, Default)]
pub(crate) struct Reading {
    script: Option<Arc<Script>>,
    /// Placements in turn, whatever is saved; for tests.
    forced: Option<Arc<[Placement]>>,
    next: AtomicUsize,
    lost: AtomicBool,
    /// What has a recipe is saved all the same.
    saves_all: bool,
}

impl Script {
    pub(crate) fn new(lines: Vec<Line>) -> Script {
        Script(lines)
    }
}

impl Reading {
    pub(crate) fn new(script: Option<Arc<Script>>) -> Reading {
        Reading { script, ..Reading::default() }
    }

    /// A step that is to show what it saves.
    pub(crate) fn of_all() -> Reading {
        Reading { saves_all: true, ..Reading::default() }
    }

    /// A step that is to place its saves so, again and again, whatever they are.
    pub(crate) fn forced(placements: Arc<[Placement]>) -> Reading {
        Reading { forced: Some(placements), ..Reading::default() }
    }

    /// Whether a save that has a recipe needs no bytes, where `planned` is what becomes of it.
    pub(crate) fn recomputes(&self, planned: Option<Placement>) -> bool {
        planned.map_or(!self.saves_all, |planned| planned == Placement::Recompute)
    }

    /// What becomes of the next save; none if nothing was planned for it. Once a save is not the one in the script nothing is, up
    /// to the end of the step.
    pub(crate) fn next(&self, bytes: u64, scope: ScopeId) -> Option<Placement> {
        if let Some(forced) = &self.forced {
            return forced.get(self.next.fetch_add(1, Ordering::Relaxed) % forced.len().max(1)).copied();
        }
        let script = self.script.as_ref()?;
        let line = script.0.get(self.next.fetch_add(1, Ordering::Relaxed));
        let expected = line.filter(|line| line.bytes == bytes && line.scope == scope);
        if expected.is_none() {
            self.lost.store(true, Ordering::Relaxed);
        }
        expected.filter(|_| !self.is_lost()).map(|line| line.placement)
    }

    /// Whether there is anything planned.
    pub(crate) fn is_planned(&self) -> bool {
        self.script.is_some()
    }

    /// A micro-batch begins.
    pub(crate) fn rewind(&self) {
        self.next.store(0, Ordering::Relaxed);
    }

    /// Whether the step is not the one that was planned.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script(lines: &[(u64, Placement)]) -> Reading {
        let line = |&(bytes, placement)| Line { bytes, scope: ScopeId::default(), placement };
        Reading::new(Some(Arc::new(Script::new(lines.iter().map(line).collect()))))
    }

    fn next(reading: &Reading, bytes: u64) -> Option<Placement> {
        reading.next(bytes, ScopeId::default())
    }

    #[test]
    fn each_micro_batch_reads_it_from_the_beginning() {
        let reading = script(&[(1, Placement::Keep), (2, Placement::Host)]);
        for _ in 0..2 {
            reading.rewind();
            assert_eq!(
                [1, 2].map(|bytes| next(&reading, bytes)),
                [Some(Placement::Keep), Some(Placement::Host)]
            );
        }
        assert!(!reading.is_lost());
    }

    #[test]
    fn a_save_that_was_not_planned_ends_the_plan() {
        for saves in [&[1, 3, 2][..], &[1, 2, 2, 1]] {
            let reading = script(&[(1, Placement::Keep), (2, Placement::Host), (2, Placement::Disk)]);
            let last = saves.iter().map(|&bytes| next(&reading, bytes)).last();
            assert_eq!((last, reading.is_lost()), (Some(None), true), "{saves:?}");
            reading.rewind();
            assert_eq!(next(&reading, 1), None, "to the end of the step");
        }
    }

    #[test]
    fn what_has_a_recipe_is_recomputed_unless_something_else_is_planned() {
        let keep = Some(Placement::Keep);
        assert_eq!([None, keep].map(|planned| Reading::default().recomputes(planned)), [true, false]);
        assert_eq!([None, keep].map(|planned| Reading::of_all().recomputes(planned)), [false, false]);
    }

    #[test]
    fn without_a_script_nothing_is_planned_or_lost() {
        let reading = Reading::default();
        assert_eq!((next(&reading, 1), reading.is_lost()), (None, false));
    }
}
