//! What a step did and what it cost.

mod report;
mod scopes;
mod stats;

pub use report::{KeptReport, ScopeReport, StallReport, StepReport};
pub(crate) use scopes::{ScopeRecord, Scopes};
pub(crate) use ssdtrain_plan::ScopeId;
pub(crate) use stats::{Counter, Counters, StallCause};
