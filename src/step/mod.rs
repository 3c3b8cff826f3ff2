//! One step on the threads that work on it: its state, where in the model each thread is, and the hooks that see what autograd saves.
//!
//! It sits on the cache, and below what computes results again: that tells it of recipes as [`Recomputed`].

mod context;
mod marks;
mod orders;
mod recorder;
mod scope;

pub(crate) use self::context::{StepContext, Unplanned};
pub(crate) use self::marks::{Marks, Recomputed};
pub(crate) use self::orders::Orders;
pub(crate) use self::recorder::Recorder;
pub(crate) use self::scope::{Level, Within, current_scope, current_step, enter};
pub use self::scope::{Scope, scope};
