//! Random programs of tensor operations, run with and without the cache: both must give the same bits, or an error.
//!
//! A [`Program`] is plain data, and text: one line for the cache, one for the random seed, and one for each
//! operation. [`generate`] makes a program from a seed, and runs it at the same time so that most operations are
//! possible. [`check`] runs it twice as plain autograd, skips programs whose runs are not alike, and then runs it
//! with its cache: every loss, gradient, value and parameter must have the same bits, errors must occur where
//! autograd has them, and in the end the cache must hold nothing. [`shrink`] makes a failing program small.
//!
//! What may differ:
//! - a segment or a recomputed operation may be refused if what it holds has changed since, as its documentation says. It may
//!   also succeed where autograd has an error, since what it recomputes was not changed. The rest of the program is then not
//!   compared;
//! - how far a failed backward got, if it recomputes something;
//! - autograd's error about a saved tensor that was detached in place, which never occurs in a program with hooks.
//!
//! No program writes to tensors other than through libtorch's operations, replaces the contents of a saved tensor
//! (`set_data`, which autograd itself notices only without hooks), or uses `rrelu` in training mode, which writes its
//! noise after it has been saved.

mod bits;
mod check;
mod config;
mod draw;
mod fallible;
mod faults;
mod generate;
mod operations;
mod program;
mod random;
mod run;
mod shrink;
mod text;
mod values;

pub use bits::Bits;
pub use check::{Lab, Verdict, check, said_by};
pub use config::Config;
pub use generate::{Programs, generate};
pub use program::{Op, Program, Slot};
pub use random::Random;
pub use run::{Ran, run};
pub use shrink::shrink;
pub use values::{Event, Failure, Values, Watched};
