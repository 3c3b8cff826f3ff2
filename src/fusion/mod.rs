//! Runs of pointwise operations as one: which of them may be, the source of their kernel on a GPU, and their tiles on the CPU. Nothing
//! here calls a device.
//!
//! A kernel has the bits of the single operations: each step computes what libtorch's CUDA kernel of that operation computes, in 32 bits,
//! and its result is rounded to the operation's type before the next step reads it. `operation` says which operations are known that
//! well, `groups` which of those that are to run may run as one, `chain` what they read, compute and write together, and
//! `source` writes that down in CUDA C++. `tiles` says which elements libtorch's CPU kernels may compute at once.

mod chain;
mod function;
mod groups;
#[cfg(test)]
mod host;
mod layout;
mod norm;
mod operation;
mod source;
mod tiles;

pub(crate) use self::chain::{ALIGNMENT, Bound, Chain, Member, Value, alone, bind, is_table};
pub(crate) use self::groups::{Vertex, groups};
pub(crate) use self::norm::is_norm;
pub(crate) use self::operation::{Pointwise, Read};
pub(crate) use self::source::{ENTRY, Shape, TABLE_BYTES, source};
pub(crate) use self::tiles::Tiling;
