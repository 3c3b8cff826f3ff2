//! How much of a device's memory is free, as far as the steps of plans need to know.

use std::cell::OnceCell;
use std::time::Duration;

/// Looking takes a part of a millisecond, so what was seen counts for steps that take this long together, and for so many of them.
const LASTS: Duration = Duration::from_millis(500);
const STEPS: u32 = 16;

/// What was seen of the free memory.
#[derive(Clone, Debug, Default)]
pub(super) struct FreeMemory {
    /// Counts for the next step.
    known: Option<Seen>,
    /// Counts again once the step that has begun has ended, and was not short of memory: it may have ended by that.
    lent: Option<Seen>,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    bytes: u64,
    since: Duration,
    steps: u32,
}

/// The free memory when a step begins.
pub(super) struct Look<'a> {
    free: &'a dyn Fn() -> u64,
    now: OnceCell<u64>,
    known: Option<Seen>,
}

impl FreeMemory {
    /// A step begins.
    pub(super) fn look<'a>(&mut self, free: &'a dyn Fn() -> u64) -> Look<'a> {
        let known = self.known.take().filter(|seen| seen.since < LASTS && seen.steps < STEPS);
        Look { free, now: OnceCell::new(), known }
    }

    /// That is all that the step needs to know.
    pub(super) fn looked(&mut self, look: &Look<'_>) {
        let seen = look.now.get().map(|bytes| Seen { bytes: *bytes, since: Duration::ZERO, steps: 0 });
        self.lent = seen.or(look.known);
    }

    /// A step has ended that took `wall`.
    pub(super) fn ended(&mut self, wall: Duration, was_short: bool) {
        let seen = self.lent.take().filter(|_| !was_short);
        let older = |seen: Seen| Seen { since: seen.since + wall, steps: seen.steps + 1, ..seen };
        self.known = seen.map(older);
    }
}

impl Look<'_> {
    /// Bytes that are free now.
    pub(super) fn now(&self) -> u64 {
        *self.now.get_or_init(self.free)
    }

    /// Bytes that were free not long ago.
    pub(super) fn lately(&self) -> u64 {
        self.known.map_or_else(|| self.now(), |seen| seen.bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn what_was_seen_counts_for_some_steps_unless_one_did_not_end_well() {
        let mut memory = FreeMemory::default();
        let looks = Cell::new(0);
        let free = || {
            looks.set(looks.get() + 1);
            looks.get()
        };
        let mut step = |ends: Option<(Duration, bool)>| {
            let look = memory.look(&free);
            let lately = look.lately();
            assert_eq!(lately, look.lately());
            memory.looked(&look);
            if let Some((wall, was_short)) = ends {
                memory.ended(wall, was_short);
            }
            lately
        };
        let mut seen = |count: usize, ends| (0..count).map(|_| step(ends)).collect::<Vec<u64>>();
        assert_eq!(seen(17, Some((MS, false))), [[1; 16].as_slice(), &[2]].concat());
        assert_eq!(seen(3, Some((250 * MS, false))), [2, 2, 3], "they took long");
        assert_eq!(seen(2, Some((MS, true))), [3, 4], "memory was short");
        assert_eq!(seen(2, None), [5, 6], "a step that was dropped");
    }

    #[test]
    fn all_that_asks_in_one_step_looks_once() {
        let looks = Cell::new(0);
        let free = || {
            looks.set(looks.get() + 1);
            100
        };
        let mut memory = FreeMemory::default();
        let look = memory.look(&free);
        assert_eq!((look.now(), look.now(), look.lately(), looks.get()), (100, 100, 100, 1));
    }
}
