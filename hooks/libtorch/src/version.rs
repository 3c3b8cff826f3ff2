//! The libtorch release that this crate is made for.

/// The release that tch requires: torch-sys refuses to build with any other. This is the only place that names it.
/// `cargo x`, which runs before libtorch is installed, includes this very file as a module.
pub const VERSION: &str = "2.11.0";
