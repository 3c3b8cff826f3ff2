//! Decisions, separate from the machinery that carries them out: pure functions of what is known.

mod attempts;
mod auto;
mod filter;
mod keeping;
mod paper;
mod planned;
mod schedule;
mod unforeseen;
mod watch;

pub(crate) use self::auto::{Auto, Headroom, NextStep, Observed, StepOutcome};
pub(crate) use self::filter::{Decision, Facts, Filter, KeepReason};
pub(crate) use self::keeping::{Keeping, Rule};
pub(crate) use self::paper::{Module, Profile, Stay};
pub(crate) use self::planned::Objective;
pub(crate) use self::schedule::{Adherence, Cursor};
