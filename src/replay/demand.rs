//! How much is still to be computed from something.

use std::sync::atomic::{AtomicIsize, Ordering};

/// How many need something: results that wait for their first backward, and operations that read it and are needed themselves.
///
/// Several threads may count at once. What one of them passes on to what it reads may arrive after what another does, so that the count
/// may be negative for a moment.
#[derive(Default)]
pub(super) struct Demand(AtomicIsize);

impl Demand {
    pub(super) fn is_some(&self) -> bool {
        self.0.load(Ordering::Acquire) > 0
    }

    /// Returns whether it is the first.
    pub(super) fn begins(&self) -> bool {
        self.0.fetch_add(1, Ordering::AcqRel) == 0
    }

    /// Returns whether it was the last.
    pub(super) fn ends(&self) -> bool {
        self.0.fetch_sub(1, Ordering::AcqRel) == 1
    }
}
