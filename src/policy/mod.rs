//! Decisions, apart from the machinery that carries them out: pure functions of what is known.

mod attempts;
mod auto;
mod filter;
mod keeping;
mod paper;
mod planned;
mod script;
mod unforeseen;
mod watch;

pub(crate) use self::auto::{Auto, Course, Observed, Room, Went};
pub(crate) use self::filter::{Facts, Filter, KeepReason, Placement};
pub(crate) use self::keeping::{Keeping, Rule};
pub(crate) use self::paper::{Module, Profile, Stay};
pub(crate) use self::planned::Aim;
pub(crate) use self::script::{Followed, Reading};
