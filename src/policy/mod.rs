//! Decisions, apart from the machinery that carries them out: pure functions of what is known.

mod filter;
mod keeping;
mod paper;

pub(crate) use self::filter::{Facts, Filter, KeepReason, Placement};
pub(crate) use self::keeping::{Keeping, Rule};
pub(crate) use self::paper::{Module, Profile, Stay};
