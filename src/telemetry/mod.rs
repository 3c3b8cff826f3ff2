//! What steps did and what they cost: one step's report, and the metrics of all.

mod accounts;
mod activity;
mod disks;
pub(crate) mod events;
mod metrics;
mod report;
mod scopes;
mod stats;

pub(crate) use accounts::Accounts;
pub use activity::{Activity, KeptReport, StallReport};
pub use disks::DiskReport;
pub use metrics::{DecisionCounts, HostPoolMetrics, LastStep, Metrics, PlanMetrics, StepCounts};
pub use report::{ScopeReport, StepReport};
pub(crate) use scopes::{ScopeRecord, Scopes};
pub(crate) use ssdtrain_plan::ScopeId;
pub(crate) use stats::{Counter, Counters, DeviceReruns, Level, StallCause};
