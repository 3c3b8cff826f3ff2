//! The one error type of the library.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::sync::Arc;

use ssdtrain_store as store;

/// What went wrong, in terms that a caller can act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A setting is out of range or contradicts another; the message names it.
    Config,
    /// A spill directory cannot be used; the message names it and says why.
    Directory,
    /// The spill files, their hard cap or the host's memory have no room for a transfer.
    NoSpace,
    /// The kernel or the device refused a transfer, or the kernel a file or a thread.
    Io,
    /// The disk did not answer a transfer in time ([`disk_timeout`](crate::TensorCacheBuilder::disk_timeout)), or the GPU did not do what
    /// it was given ([`device_timeout`](crate::TensorCacheBuilder::device_timeout)).
    TimedOut,
    /// Bytes read back from the disk differ from those written.
    Corrupt,
    /// A condition set with `require_path`, `require_direct_io` or `fail_if_nothing_offloaded` is not met.
    Unmet,
    /// A tensor was changed in place after autograd had saved it.
    ChangedInPlace,
    /// libtorch refused an operation.
    Torch,
    /// A step, or a tensor saved in one, belongs to the process that this one was forked from.
    Forked,
    /// The GPU, its driver or host memory pinned for it refused an operation, or is missing.
    Device,
}

/// An error of the library: a kind to act on, and one line that says what happened, to what, and what to do. Its
/// [source](std::error::Error::source) is the cause: the error of a load that made backward fail, or that of the system.
#[derive(Clone, Debug)]
pub struct Error {
    kind: ErrorKind,
    /// The whole message, including the source's.
    message: String,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

/// Called once with the outcome of a transfer, as the library's own error.
pub(crate) type Completion = store::Completion<Error>;

/// The library's result type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error { kind, message: message.into(), source: None }
    }

    /// An error of a system call.
    pub(crate) fn io(kind: ErrorKind, message: impl fmt::Display, source: io::Error) -> Error {
        Error { kind, message: format!("{message}: {source}"), source: Some(Arc::new(source)) }
    }

    /// The error that libtorch reports with the message `text`, caused by this one.
    pub(crate) fn told_as(self, text: String) -> Error {
        Error { kind: self.kind, message: text, source: Some(Arc::new(self)) }
    }

    /// An error that libtorch reports.
    pub(crate) fn torch(error: impl fmt::Display) -> Error {
        Error::new(ErrorKind::Torch, error.to_string())
    }

    /// This error, its message prefixed with what failed because of it.
    pub(crate) fn within(self, what: impl fmt::Display) -> Error {
        Error { message: format!("{what}: {}", self.message), ..self }
    }

    /// What kind of error this is.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_ref().map(|source| &**source as _)
    }
}

impl From<store::Error> for Error {
    fn from(error: store::Error) -> Error {
        let kind = match error.kind() {
            store::ErrorKind::Config => ErrorKind::Config,
            store::ErrorKind::Directory => ErrorKind::Directory,
            store::ErrorKind::NoSpace => ErrorKind::NoSpace,
            store::ErrorKind::Corrupt => ErrorKind::Corrupt,
            store::ErrorKind::TimedOut => ErrorKind::TimedOut,
            store::ErrorKind::Unmet => ErrorKind::Unmet,
            _ => ErrorKind::Io,
        };
        let source = error.os_error().cloned().map(|source| source as Arc<dyn StdError + Send + Sync>);
        Error { kind, message: error.to_string(), source }
    }
}
