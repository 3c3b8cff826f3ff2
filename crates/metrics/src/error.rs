//! Why metrics cannot be served.

use std::io;
use std::net::SocketAddr;

/// Why metrics cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The address cannot be listened at.
    #[error("metrics cannot be served at {address}: {}", advice(source))]
    Bind {
        /// The address that was asked for.
        address: SocketAddr,
        /// What the system says.
        source: io::Error,
    },
    /// The system refused a thread, or what it needs.
    #[error("there is no thread to serve metrics")]
    Thread(#[source] io::Error),
    /// Two caches have the same name, so their figures could not be told apart.
    #[error("two caches are called {0:?} in the metrics: give each a name of its own")]
    Name(String),
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "another program has this port, perhaps another run; give another one, or 0 for any that is free"
        }
        io::ErrorKind::AddrNotAvailable => "this machine does not have that address; give one of its own",
        io::ErrorKind::PermissionDenied => "the system does not allow that port; give one from 1024 on",
        _ => "the system does not allow it; give another address or port",
    }
}
