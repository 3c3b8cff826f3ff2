//! The release of libtorch that all of this is made for.

/// The one that tch is made for: torch-sys refuses to be built with any other. This is the only place that names it; `cargo x`, which
/// is there before libtorch is, has this very file as a module.
pub const VERSION: &str = "2.11.0";
