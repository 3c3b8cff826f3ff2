//! Runs of pointwise operations as one kernel: which of them may run as one, and the kernel's source. Nothing here knows of a device.
//!
//! A kernel has the bits of the single operations: each step computes what libtorch's CUDA kernel of that operation computes, in 32 bits,
//! and its result is rounded to the operation's type before the next step reads it. `operation` says which operations are known that
//! well, `groups` which of those that are to run may run as one, `chain` what such a kernel reads, computes and writes, and `source`
//! writes it down in CUDA C++.

mod chain;
mod groups;
#[cfg(test)]
mod host;
mod layout;
mod norm;
mod operation;
mod source;

pub(crate) use self::chain::{ALIGNMENT, Bound, Chain, Member, bind};
pub(crate) use self::groups::{Vertex, groups};
pub(crate) use self::norm::is_norm;
pub(crate) use self::operation::{Pointwise, Read};
pub(crate) use self::source::{ENTRY, THREADS, source};
