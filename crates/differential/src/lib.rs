//! Random programs of tensor operations, run with and without the cache: the same bits come of both, or an error.
//!
//! A [`Program`] is plain data, and text: a line for the cache, one for the seed of random numbers, and one for each operation.
//! [`generate`] makes one of a seed, running it as it goes so that most operations can be done. [`check`] runs it twice as plain
//! autograd, passing over programs that are not alike from run to run, and then with its cache: every loss, gradient, value and parameter
//! must have the same bits, an error must be where autograd has one, and in the end the cache must hold nothing. [`shrink`] makes a
//! program that fails small.
//!
//! What may differ:
//! - a segment, or an operation that is computed again, may be refused when what it holds has changed since, as its documentation says;
//!   and it may serve where autograd has an error, since what it computes again was not changed. The rest of the program is not
//!   compared then;
//! - how far a backward came that ends in an error, if something is computed again in it;
//! - autograd's error about a saved tensor that was detached in place, which no program gets that has hooks.
//!
//! What no program does: write to tensors other than by libtorch's operations; replace what a saved tensor is
//! (`set_data`), which autograd itself sees only without hooks; `rrelu` in training mode, which writes its noise after it is saved.

mod bits;
mod check;
mod config;
mod draw;
mod generate;
mod operations;
mod program;
mod random;
mod run;
mod shrink;
mod text;
mod values;

pub use bits::Bits;
pub use check::{Lab, Verdict, check};
pub use config::Config;
pub use generate::{Programs, generate};
pub use program::{Op, Program, Slot};
pub use random::Random;
pub use run::{Ran, run};
pub use shrink::shrink;
pub use values::{Event, Values, Watched};
