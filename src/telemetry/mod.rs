//! What a step did and what it cost.

mod planned;
mod report;
mod scopes;
mod stats;

pub use planned::{Baseline, PlanReport, PlanRow};
pub use report::{AdaptiveReport, KeptReport, ScopeReport, StallReport, StepReport};
pub(crate) use scopes::{ScopeId, ScopeRecord, Scopes};
pub use stats::Tally;
pub(crate) use stats::{Counters, StallCause};
