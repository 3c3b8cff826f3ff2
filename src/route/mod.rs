//! Where saved bytes go from the device. Resolved once, when a cache is built, into a value that the planner, tiers, reports and tools
//! share.
//!
//! `path` defines what can be requested and what a trial finds, and `way` the route. `resolve` is the rule that derives the route from
//! both, and is pure. `open` opens a route's tiers. `probe` measures, with `trial`, the ways that a GPU's bytes can take.

mod open;
mod path;
mod probe;
mod resolve;
mod trial;
mod way;

pub(crate) use self::open::open;
pub use self::path::{IoPath, PathRates, PathTrial};
pub(crate) use self::probe::probed;
pub(crate) use self::resolve::{RouteRequest, resolve};
pub use self::way::{Route, Way};
