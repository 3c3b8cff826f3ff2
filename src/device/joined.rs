//! What runs the operations of a chain together.

use std::num::NonZeroU32;
use std::time::Duration;

use ssdtrain_libtorch::{Recorded, Storage};

use crate::error::Result;
use crate::fusion::Pointwise;

/// Runs the operations of a chain together, with the bits that they have one after another.
pub(crate) trait Joined: Send + Sync {
    /// Whether it can compute as much.
    fn takes(&self, size: Size) -> bool;

    /// A storage for an output, for what the calling thread computes.
    fn allocate(&self, bytes: u64) -> Result<Storage>;

    /// Computes the outputs, as the calling thread's next operation.
    fn run(&self, arguments: &Arguments<'_>) -> Result<()>;

    /// Whether the outputs hold something else than [`run`](Joined::run) would write. Waits for the device, up to `limit`.
    fn differs(&self, arguments: &Arguments<'_>, limit: Duration) -> Result<bool>;
}

/// What the bits of an operation may depend on besides its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Size {
    /// How many elements each result has.
    pub(crate) count: u64,
    /// How many threads the CPU may have.
    pub(crate) threads: Option<NonZeroU32>,
}

/// What a chain is run with.
pub(crate) struct Arguments<'a> {
    pub(crate) size: Size,
    /// The storage of each input, and where in it the first element is, in bytes.
    pub(crate) inputs: &'a [(Storage, u64)],
    pub(crate) numbers: &'a [f32],
    pub(crate) outputs: &'a [Storage],
    /// The operation of each step.
    pub(crate) operations: &'a [(&'a Recorded, &'a Pointwise)],
}
