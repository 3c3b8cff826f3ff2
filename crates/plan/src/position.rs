//! Points in what the threads of a step do.

use serde::{Deserialize, Serialize};

/// A point in what one thread of a step does, told by the operations that were recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Position {
    /// The thread's number among those that recorded, in the order in which they began.
    pub strand: u32,
    /// How many operations it had recorded before.
    pub index: u64,
}
