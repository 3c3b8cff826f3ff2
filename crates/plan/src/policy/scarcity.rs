//! Memory that steps found too little of, for a time.

/// After the first shortage plans have to do with less for so many steps.
const FIRST_WAIT: u64 = 64;

/// Since when plans have to do with less memory than they once had, and until when. Another program may have needed it for a while, so it
/// is tried whether there is enough again; each time that goes wrong, the next attempt is twice as many steps away.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scarcity {
    until: Option<u64>,
    wait: u64,
}

impl Scarcity {
    pub(super) fn new() -> Scarcity {
        Scarcity { until: None, wait: FIRST_WAIT }
    }

    /// Step `number` found too little.
    pub(super) fn shown(&mut self, number: u64) {
        self.until = Some(number.saturating_add(self.wait));
    }

    /// Whether plans may have more again from step `number` on. It is said once.
    pub(super) fn is_over(&mut self, number: u64) -> bool {
        let is_over = self.until.is_some_and(|until| number >= until);
        if is_over {
            self.until = None;
            self.wait = self.wait.saturating_mul(2);
        }
        is_over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_attempt_is_twice_as_far_away_as_the_one_before() {
        let mut scarcity = Scarcity::new();
        assert!(!scarcity.is_over(1000), "nothing was scarce");
        scarcity.shown(10);
        scarcity.shown(11);
        let over: Vec<u64> = (12..1000).filter(|number| scarcity.is_over(*number)).collect();
        assert_eq!(over, [11 + FIRST_WAIT]);
        scarcity.shown(1000);
        let over: Vec<u64> = (1001..2000).filter(|number| scarcity.is_over(*number)).collect();
        assert_eq!(over, [1000 + 2 * FIRST_WAIT]);
    }
}
