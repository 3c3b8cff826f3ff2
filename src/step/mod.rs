//! One step on the threads that work on it: its state, the position of each thread in the model, and the hooks that see what autograd
//! saves.
//!
//! It builds on the cache and is independent of the recompute module, which passes recipes in as [`Recomputed`] and [`Part`].

mod context;
mod keeper;
mod marks;
mod orders;
mod part;
mod recorder;
mod room;
mod scope;

pub(crate) use self::context::StepContext;
pub(crate) use self::keeper::Keeper;
pub(crate) use self::marks::{Marks, Recomputed};
pub(crate) use self::orders::{Latest, Orders};
pub(crate) use self::part::Part;
pub(crate) use self::recorder::Recorder;
pub(crate) use self::scope::{Level, Within, current_scope, current_step, enter};
pub use self::scope::{Scope, scope};
