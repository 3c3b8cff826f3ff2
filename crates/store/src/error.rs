//! The errors of a store.

use std::error;
use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// The kind of error, by what a caller can do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A setting is out of range or contradicts another, or memory cannot be pinned; the message names it.
    Config,
    /// A spill directory cannot be used; the message names it and says why.
    Directory,
    /// There is no room left in the spill files, under their hard cap or in memory.
    NoSpace,
    /// The kernel refused a transfer, or a file or a thread for the store.
    Io,
    /// The disk did not answer in time.
    TimedOut,
    /// Bytes read from the disk differ from those written.
    Corrupt,
    /// A backend that was asked for cannot be used.
    Unmet,
}

/// An error of the store: a kind to act on and one line that says what happened, to what, and what to do.
#[derive(Clone, Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    source: Option<Arc<io::Error>>,
}

/// The store's result type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error without a cause from the operating system.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error { kind, message: message.into(), source: None }
    }

    /// An error caused by one from the operating system.
    pub fn io(kind: ErrorKind, message: impl Into<String>, source: io::Error) -> Error {
        Error { kind, message: message.into(), source: Some(Arc::new(source)) }
    }

    pub(crate) fn directory(path: &Path, message: &str, source: io::Error) -> Error {
        Error::io(ErrorKind::Directory, format!("spill directory {}: {message}", path.display()), source)
    }

    /// What kind of error this is.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The error's message, without the operating system's part.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The operating system's error, if there is one.
    pub fn os_error(&self) -> Option<&Arc<io::Error>> {
        self.source.as_ref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl error::Error for Error {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        self.source.as_ref().map(|source| &**source as _)
    }
}
