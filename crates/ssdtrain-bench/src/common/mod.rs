//! What several commands share: arguments, the steps that are measured, and how results are shown.

pub(crate) mod cache;
pub(crate) mod data;
pub(crate) mod defaults;
pub(crate) mod drawing;
pub(crate) mod failure;
pub(crate) mod file;
pub(crate) mod float;
pub(crate) mod gpu;
pub(crate) mod interrupt;
pub(crate) mod learner;
pub(crate) mod model;
pub(crate) mod model_device;
pub(crate) mod optimizer;
pub(crate) mod policy;
pub(crate) mod profile;
pub(crate) mod progress;
pub(crate) mod setup;
pub(crate) mod shape;
pub(crate) mod size;
pub(crate) mod spill;
pub(crate) mod stats;
pub(crate) mod strategy;
pub(crate) mod strategy_run;
pub(crate) mod table;
pub(crate) mod task;
pub(crate) mod turns;
