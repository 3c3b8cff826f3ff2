//! When plans are held to the memory that is free, and how much of it they may have.
//!
//! Processors have no memory beside the host's, where a program that takes more than there is ends without an error.

use super::kind::{FITTING, Kind};

/// It is looked how much is free when there is another plan, and after so many steps; after up to so many where no other plan than the last
/// one would be made.
pub(super) const LOOKED: u64 = 64;
const MOST_LOOKED: u64 = 1024;
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
    /// After how many steps it is looked again.
    rest: u64,
    /// From which step on plans may have more again, and for how many steps not after they are next given less.
    patient_until: u64,
    patience: u64,
}

impl Fitting {
    pub(super) fn new() -> Fitting {
        Fitting { plans: 0, next: 0, rest: LOOKED, patient_until: 0, patience: PATIENCE.0 }
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
        let want_more = most > known && kinds.iter().any(|kind| !kind.planned.in_reach);
        let may_have_more = known < u64::MAX && number >= self.patient_until;
        if is_short && most < known {
            self.patient_until = number + self.patience;
            self.patience = (2 * self.patience).min(PATIENCE.1);
        }
        let is_over = may_have_more && (want_more || most as f64 > MORE * known as f64);
        (is_short || is_over).then_some(most)
    }

    /// It was looked before step `number`. There are so many plans by now; `in_vain` if others were to be made, are like those before, and
    /// none fits: not even the lowest peaks do.
    pub(super) fn looked(&mut self, number: u64, plans: u64, in_vain: bool) {
        self.plans = plans;
        self.rest = if in_vain { (2 * self.rest).min(MOST_LOOKED) } else { LOOKED };
        self.next = match self.patient_until > number {
            true if !in_vain => self.patient_until.min(number + self.rest),
            _ => number + self.rest,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_nothing_fits_it_is_looked_ever_more_rarely() {
        let (mut fitting, mut number, mut looks) = (Fitting::new(), 0, Vec::new());
        while looks.len() < 7 {
            if fitting.is_due(number, 1) {
                looks.push(number);
                fitting.limit(number, u64::MAX, 0, &[]);
                fitting.looked(number, 1, looks.len() > 1);
            }
            number += 1;
        }
        let rests: Vec<u64> = looks.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(rests, [64, 128, 256, 512, 1024, 1024]);
        fitting.looked(number, 2, false);
        assert!(fitting.is_due(number + LOOKED, 2));
    }
}
