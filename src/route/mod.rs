//! Where saved bytes go from the device: resolved once, when a cache is built, into a value that planner, tiers, reports and
//! tools share.
//!
//! `path` is what can be asked for and what a trial finds, `way` the route, and `resolve` the rule that makes it of both, pure; `open`
//! opens the tiers of a route, and `probe` tries the ways of a GPU's bytes out with `trial`.

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
