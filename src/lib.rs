//! placeholder, being written
pub mod error;
pub use error::{Error, ErrorKind, Result};

/// Guard of a named scope; see [`scope`].
#[must_use = "the scope ends when this guard is dropped"]
pub struct Scope(());

/// Names what the calling thread does until the guard is dropped.
pub fn scope(_name: &str) -> Scope {
    Scope(())
}
