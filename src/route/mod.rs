//! Which way bytes go from the device, and what lies at its end.

mod open;
mod trial;

pub(crate) use self::open::{Below, open};
