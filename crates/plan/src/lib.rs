//! Predicts what a step will cost under a given placement, before it is tried. The model is pure: it covers the
//! device, the copies, the host pool and the disk.
//!
//! A [`Workload`] describes a step with everything kept, a [`Machine`] what moves the bytes, and [`Budgets`] the
//! cache's settings. [`Workload::simulate`] walks through forward and backward with one [`Placement`] per activation
//! and predicts the step time, the stalls and the peaks. It follows the cache's own rules: storages leave in the
//! order in which they were saved and as late as the device budget allows, loads look ahead by `prefetch` bytes, and
//! the disk serves reads before queued writes.
//!
//! A [`Frontier`] does that for every placement worth considering, and [`Frontier::plan`] picks the one that a
//! [`Goal`] asks for. [`Scaling`] predicts the step for other micro-batch sizes. A [`Profile`] holds the workload and
//! the machine that a step has shown; once saved, it can be used for planning elsewhere.
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

mod frontier;
mod links;
mod machine;
mod prediction;
mod profile;
mod scaling;
mod simulate;
mod workload;

pub use self::frontier::{Caps, Frontier, Goal, OutOfReach, Plan};
pub use self::machine::{Budgets, Machine, Release};
pub use self::prediction::{Prediction, Stall};
pub use self::profile::{Implausible, Profile};
pub use self::scaling::Scaling;
pub use self::workload::{Activation, Placement, Recompute, Workload};
