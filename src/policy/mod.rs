//! Decisions, apart from the machinery that carries them out: pure functions of what is known.

mod filter;

pub(crate) use filter::{Facts, Filter, KeepReason, Placement};
