//! When plans are held to the memory that is free, and how much of it they may have.
//!
//! Processors have no memory beside the host's, where a program that takes more than there is ends without an error.

use super::kind::{FITTING, Kind};

/// It is looked how much is free when there is another plan, and after so many steps.
pub(super) const LOOKED: u64 = 64;
/// Once so many times as much is free, plans may have more again.
const MORE: f64 = 1.25;
/// The fewest and the most steps in which plans that were given less have that. Each time, it is twice as many: memory that is short now and
/// then is not worth a plan each time.
const PATIENCE: (u64, u64) = (8, 1024);

/// What was seen when it was looked last.
#[derive(Clone, Debug)]
pub(super) struct Fitting {
    /// How many plans there were.
    plans: u64,
    /// Before which step it is looked next, if there is no other plan before.
    next: u64,
    /// From which step on plans may have more again, and for how many steps not after they are next given less.
    patient_until: u64,
    patience: u64,
}

impl Fitting {
    pub(super) fn new() -> Fitting {
        Fitting { plans: 0, next: 0, patient_until: 0, patience: PATIENCE.0 }
    }

    /// Whether it is to be looked before step `number`, whose plan is one of so many.
    pub(super) fn is_due(&self, number: u64, plans: u64) -> bool {
        plans != self.plans || number >= self.next
    }

    /// The most that plans may have, if that is not what it was, `known`, now that `free` bytes are free.
    pub(super) fn limit(&mut self, number: u64, known: u64, free: u64, kinds: &[Kind]) -> Option<u64> {
        let most = (FITTING * free as f64) as u64;
        let is_short = kinds.iter().any(|kind| kind.largest_peak() > most && !kind.fits_in_vain(most));
        // Those that have less than what the time goal needs are to have that as soon as it is there.
        let wants_more = |kind: &Kind| !kind.planned.in_reach && !kind.fits_in_vain(most);
        let want_more = most > known && kinds.iter().any(wants_more);
        let may_have_more = known < u64::MAX && number >= self.patient_until;
        if is_short && most < known {
            self.patient_until = number + self.patience;
            self.patience = (2 * self.patience).min(PATIENCE.1);
        }
        let is_over = may_have_more && (want_more || most as f64 > MORE * known as f64);
        (is_short || is_over).then_some(most)
    }

    /// It was looked before step `number`. There are so many plans by now.
    pub(super) fn looked(&mut self, number: u64, plans: u64) {
        self.plans = plans;
        self.next = number + LOOKED;
        if self.patient_until > number {
            self.next = self.next.min(self.patient_until);
        }
    }
}
