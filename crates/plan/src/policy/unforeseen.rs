//! By how much peaks exceed the planned ones.

use serde::{Deserialize, Serialize};

/// A smaller excess replaces a larger one once this many steps in a row had none larger; each time the number doubles.
const WINDOW: u32 = 16;
const MOST_WINDOW: u32 = 1024;
/// No step has more bytes.
const MOST_BYTES: u64 = 1 << 60;

/// The room that a plan has to leave for what it does not foresee.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Unforeseen {
    bytes: u64,
    /// The largest excess of the latest steps.
    #[serde(skip)]
    lately: u64,
    #[serde(skip)]
    steps: u32,
    #[serde(skip)]
    window: u32,
}

impl Default for Unforeseen {
    fn default() -> Unforeseen {
        Unforeseen { bytes: 0, lately: 0, steps: 0, window: WINDOW }
    }
}

impl Unforeseen {
    /// The same, with no more bytes than a step may have.
    pub(super) fn within_reason(self) -> Unforeseen {
        Unforeseen { bytes: self.bytes.min(MOST_BYTES), ..self }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A step's peak was `peak` instead of `planned`; `over` says whether it exceeded the goal. Returns whether the room that plans have
    /// to leave has changed.
    pub(super) fn saw(&mut self, planned: u64, peak: u64, over: bool) -> bool {
        let beyond = peak.saturating_sub(planned);
        self.lately = self.lately.max(beyond);
        self.steps += 1;
        if over && beyond > self.bytes {
            (self.bytes, self.lately, self.steps) = (beyond, 0, 0);
            return true;
        }
        if self.steps < self.window {
            return false;
        }
        let lately = std::mem::take(&mut self.lately);
        self.steps = 0;
        if lately >= self.bytes {
            return false;
        }
        self.bytes = lately;
        self.window = (2 * self.window).min(MOST_WINDOW);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_excess_within_the_goal_needs_no_room() {
        let mut unforeseen = Unforeseen::default();
        assert!(!unforeseen.saw(10, 12, false) && unforeseen.bytes() == 0);
        assert!(unforeseen.saw(10, 12, true) && unforeseen.bytes() == 2);
        assert!(!unforeseen.saw(10, 11, true) && unforeseen.bytes() == 2, "there is room for it");
    }

    #[test]
    fn what_does_not_come_again_is_forgotten_and_later_each_time() {
        let mut unforeseen = Unforeseen::default();
        let mut forgotten_after = || {
            assert!(unforeseen.saw(10, 30, true));
            (1..).find(|_| unforeseen.saw(10, 11, false)).unwrap()
        };
        assert_eq!([forgotten_after(), forgotten_after(), forgotten_after()], [16, 32, 64]);
        assert_eq!(unforeseen.bytes(), 1);
    }

    #[test]
    fn what_stays_is_not_forgotten() {
        let mut unforeseen = Unforeseen::default();
        assert!(unforeseen.saw(10, 30, true));
        assert!((0..100).all(|_| !unforeseen.saw(10, 30, false)));
        assert_eq!(unforeseen.bytes(), 20);
    }
}
