//! How many, and how many bytes.

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
