//! What a step will cost under a placement, before it is tried: a pure model of the device, the copies, the host pool and the disk.
//!
//! A [`Workload`] is a step as it runs with everything kept, a [`Machine`] is what moves bytes, [`Budgets`] are the cache's settings.
//! [`Workload::simulate`] goes through forward and backward under one [`Placement`] per activation and tells step time, stalls and peaks. It
//! follows the cache's own rules: storages leave in the order in which they were saved and as late as the device budget allows,
//! loads look ahead by `prefetch` bytes, and the disk serves reads before the writes that wait.
//!
//! A [`Frontier`] does that for every placement worth considering, and [`Frontier::plan`] picks the one that a [`Goal`] asks for.
//! [`Scaling`] tells the same of other sizes of the micro-batch. A [`Profile`] is what a step has shown of both; saved, it can be planned
//! elsewhere.
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
