//! Predicts what a step will cost under a given placement, before it is tried. The model is pure: it covers the
//! device, the copies, the host pool and the disk.
//!
//! A [`Workload`] describes a step with everything kept, a [`Machine`] what moves the bytes, and [`Budgets`] the
//! cache's settings. [`Workload::simulate`] walks through forward and backward with one [`Placement`] per activation
//! and predicts the step time, the stalls and the peaks. It follows the cache's own rules: storages leave in the
//! order in which they were saved and as late as the device budget allows, loads look ahead by `prefetch` bytes, and
//! the disk serves reads before queued writes.
//!
//! Activations may be recomputed from each other, by the operations that made them ([`Recompute`]). Besides what
//! autograd saves, a workload has results that may be saved in its place, or recomputed through ([`Role`]).
//!
//! A [`Frontier`] orders what to recompute by the time it takes for each byte that it frees, simulates placements
//! worth considering, and [`Frontier::plan`] picks the one that a [`Goal`] asks for. [`Workload::explain`] tells who
//! holds the peak and what is recomputed how often. [`Scaling`] predicts the step for other micro-batch sizes. A
//! [`Profile`] holds the workload and the machine that a step has shown; once saved, it can be used for planning
//! elsewhere.
//!
//! A [`Policy`] decides what a training step does with what autograd saves: [`Keep`], [`Offload`], [`Adaptive`] and
//! [`Auto`], which plans. It is asked for a [`StepPlan`] when a step begins, and is told of an [`Observation`] when it
//! has ended. A step that is profiled shows a [`StepProfile`]. The `ssdtrain` crate measures, and carries out what is
//! decided here.
//!
//! ```
//! use std::time::Duration;
//!
//! use ssdtrain_plan::{Activation, Budgets, Caps, Frontier, Goal, Machine, Placement, Workload};
//!
//! let ms = Duration::from_millis;
//! let activation = Activation { bytes: 1 << 30, forward: ms(25), backward: ms(50), ..Activation::default() };
//! let step = Workload { activations: vec![activation; 8], turn: ms(10), rest: ms(5), ..Workload::default() };
//! let machine = Machine { copy_out: 50e9, copy_in: 50e9, ..Machine::default() };
//! let kept = step.simulate(&[Placement::Keep; 8], &machine, &Budgets::default());
//! let budgets = Budgets { device_budget: 2 << 30, prefetch: 1 << 30, ..Budgets::default() };
//! let moved = step.simulate(&[Placement::Host; 8], &machine, &budgets);
//! assert_eq!(kept.step, ms(8 * 75 + 15));
//! assert!(moved.step < kept.step + ms(1) && moved.peak() < kept.peak() / 2);
//!
//! let frontier = Frontier::new(&step, &machine, Caps::default());
//! let plan = frontier.plan(Goal::budget(4 << 30)).unwrap();
//! assert_eq!(plan.prediction.step, kept.step, "half the memory for nothing");
//! ```

mod choices;
mod explanation;
mod frontier;
mod goal;
mod graph;
mod level;
mod links;
mod machine;
mod parallel;
mod policy;
mod position;
mod prediction;
mod profile;
mod report;
mod reruns;
mod scaling;
mod schedule;
mod scope;
mod simulate;
mod step_profile;
mod tally;
mod workload;

pub use self::explanation::{Explanation, Holder, Holding, Moment, Peak, Sample};
pub use self::frontier::Frontier;
pub use self::goal::{Caps, Goal, OutOfReach, Plan};
pub use self::machine::{Budgets, Machine, Release};
pub use self::policy::{
    Adaptive, AdaptiveReport, Adherence, Auto, Course, Decided, Decision, Followed, Headroom, InTurn, Keep,
    Needs, Observation, Offload, Outset, Planning, Policy, PolicyReport, Recomputed, Resources, Room,
    SavedPlan, Saves, StepPlan, Today,
};
pub use self::position::Position;
pub use self::prediction::{Prediction, Stall};
pub use self::profile::{Implausible, Profile};
pub use self::report::{Baseline, OperationRow, PeakPhase, PeakReport, PeakRow, PlanReport, PlanRow};
pub use self::scaling::Scaling;
pub use self::schedule::{Found, Place, PlannedSave, Saving, Schedule, Strand};
pub use self::scope::ScopeId;
pub use self::step_profile::{Rates, Save, StepProfile};
pub use self::tally::Tally;
pub use self::workload::{Activation, Handling, Placement, Recompute, Role, Workload};
