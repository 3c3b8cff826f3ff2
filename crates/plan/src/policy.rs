//! What a step does with the activations that autograd saves, and what is learned from it.

mod adaptive;
mod attempts;
mod auto;
mod clocks;
mod corrections;
mod cost;
mod daily;
mod decisions;
mod disk_watch;
mod fitting;
mod free_memory;
mod in_turn;
mod keep;
mod kind;
mod kinds;
mod labels;
mod moving;
mod objective;
mod offload;
mod planned;
mod planning;
mod saved;
mod scarcity;
mod shown;
mod sizes;
mod start;
mod step;
mod unforeseen;
mod unseen;
mod watch;
mod weighing;

use std::fmt;
use std::sync::Arc;

pub use self::adaptive::{Adaptive, AdaptiveReport};
pub use self::auto::Auto;
pub use self::decisions::{Decided, Decision};
pub use self::in_turn::InTurn;
pub use self::keep::Keep;
pub use self::offload::Offload;
pub use self::planning::Planning;
pub use self::saved::SavedPlan;
pub use self::step::{
    Adherence, Course, Followed, Headroom, Observation, Outset, Recomputed, Resources, Room, Saves, StepPlan,
    Today,
};
use crate::report::PlanReport;
use crate::{Profile, ScopeId};

/// Decides about each step before it begins, and learns from it once it has ended.
///
/// A policy is a pure function of what it is told: it has no clock, moves no bytes and knows no tensors, so that a run
/// can be repeated. Its settings are its own. Policies are handed to `TensorCacheBuilder::policy`; those of this crate
/// are [`Keep`], [`Offload`], [`Adaptive`] and [`Auto`].
///
/// ```
/// use ssdtrain_plan::{Observation, Outset, Policy, Saves, StepPlan};
///
/// /// Moves everything in every other step.
/// #[derive(Clone, Debug)]
/// struct EveryOther;
///
/// impl Policy for EveryOther {
///     fn begin(&mut self, outset: &Outset<'_>) -> StepPlan {
///         let saves = if outset.step % 2 == 0 { Saves::Move } else { Saves::Keep };
///         StepPlan { saves, ..StepPlan::default() }
///     }
///
///     fn end(&mut self, _plan: &StepPlan, _observed: Observation) {}
/// }
/// ```
pub trait Policy: fmt::Debug + Send + Sync {
    /// A step begins: what it shall do.
    fn begin(&mut self, outset: &Outset<'_>) -> StepPlan;

    /// A step that was told `plan` has ended. Steps that are dropped before their `finish` end without a word.
    fn end(&mut self, plan: &StepPlan, observed: Observation);

    /// What it needs of the cache. Default: that bytes can be moved and steps profiled.
    fn needs(&self) -> Needs {
        Needs::default()
    }

    /// Fails if a setting is out of range, with a message that names it. Default: never.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    /// Whether it has settled: as far as is known, steps will go like the last one. Default: always.
    fn is_settled(&self) -> bool {
        true
    }

    /// What users should know of a step that was told `plan`, one line each; asked before [`end`](Policy::end). Default: nothing.
    fn warnings(&self, _plan: &StepPlan, _observed: &Observation) -> Vec<String> {
        Vec::new()
    }

    /// What a step that was told `plan` had to do with a plan; asked before [`end`](Policy::end). Default: `None`, for policies
    /// that do not plan.
    fn planning(&self, _plan: &StepPlan, _observed: &Observation) -> Option<Planning> {
        None
    }

    /// What has become of its plans since this was last asked, in order, for logs and counters; asked after
    /// [`begin`](Policy::begin) and after [`end`](Policy::end). Default: nothing, for policies that do not plan.
    fn decisions(&mut self) -> Vec<Decision> {
        Vec::new()
    }

    /// Explains what it has decided, for reports: of the latest step's courses, the one with the number `course`. Once the
    /// step has ended, the one that it followed comes first. `name` returns the path of a scope. Default: nothing.
    fn report(&mut self, _course: usize, _name: &dyn Fn(ScopeId) -> String) -> Option<PolicyReport> {
        None
    }

    /// The profile that it decides by, if there is one. `name` returns the path of a scope. Default: none.
    fn profile(&self, _name: &dyn Fn(ScopeId) -> String) -> Option<Profile> {
        None
    }

    /// Its present plan, for another run to start with, if there is one. `name` returns the path of a scope. Default: none.
    fn saved_plan(&self, _name: &dyn Fn(ScopeId) -> String) -> Option<SavedPlan> {
        None
    }
}

/// What a policy needs of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// Bytes can be moved: without it, there is no tier below the device, and no spill directory is needed.
    pub tiers: bool,
    /// Steps can be profiled.
    pub profiles: bool,
    /// A GPU's bytes take one path to the disk whose speed is not tried out first, because decisions are made for one path.
    pub one_path: bool,
    /// What all runs write in a day is counted together, so that [`Today`] is right for more than one of them.
    pub days: bool,
}

impl Default for Needs {
    fn default() -> Needs {
        Needs { tiers: true, profiles: true, one_path: false, days: false }
    }
}

/// What a policy has decided.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum PolicyReport {
    /// A plan for each storage.
    Plan(Arc<PlanReport>),
    /// Which scopes move what they save.
    Adaptive(AdaptiveReport),
}
