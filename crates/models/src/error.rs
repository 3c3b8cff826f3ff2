//! The only error type of the crate; every message is one line.

use std::io;
use std::path::{Path, PathBuf};

use tch::TchError;

/// What went wrong, to which argument or file, in one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is out of range or contradicts another.
    #[error("{0}")]
    Argument(String),
    /// The operating system refused an operation on a file.
    #[error("cannot {action} {}: {cause}", .path.display())]
    Io {
        /// What was tried, as in "cannot read FILE".
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        cause: io::Error,
    },
    /// Text or tokens cannot be used as training data.
    #[error("{name}: {message}")]
    Data {
        /// The file, the directory or the name of the corpus.
        name: String,
        /// What is wrong with it.
        message: String,
    },
    /// A checkpoint is damaged or belongs to another model.
    #[error("checkpoint {}: {message}", .path.display())]
    Checkpoint {
        /// The checkpoint.
        path: PathBuf,
        /// What is wrong with it, or what differs.
        message: String,
    },
    /// libtorch refused an operation because memory ran out or shapes do not match.
    #[error("libtorch: {}", first_line(.0))]
    Torch(TchError),
}

/// The crate's result type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn argument(message: impl Into<String>) -> Error {
        Error::Argument(message.into())
    }

    pub(crate) fn data(name: impl Into<String>, message: impl Into<String>) -> Error {
        Error::Data { name: name.into(), message: message.into() }
    }

    /// For `map_err`: the error of `action` on `path`.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
        move |cause| Error::Io { action, path: path.to_owned(), cause }
    }
}

impl From<TchError> for Error {
    fn from(error: TchError) -> Error {
        Error::Torch(error)
    }
}

/// libtorch appends its C++ call stack; the first line is the message.
fn first_line(error: &TchError) -> String {
    let text = match error {
        TchError::Torch(message) => message.clone(),
        other => other.to_string(),
    };
    text.lines().next().unwrap_or_default().to_owned()
}
