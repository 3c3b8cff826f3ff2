//! How many, and how many bytes.

use std::ops::AddAssign;

use serde::Serialize;

/// How many tensors or storages, and how many bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tally {
    /// How many.
    pub count: u64,
    /// Bytes of their storages.
    pub bytes: u64,
}

impl Tally {
    /// Both together.
    pub(crate) fn plus(self, other: Tally) -> Tally {
        Tally { count: self.count + other.count, bytes: self.bytes + other.bytes }
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        *self = self.plus(other);
    }
}
