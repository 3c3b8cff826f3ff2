//! How a store's bytes are moved.

use std::fmt;

use super::backend::{BackendInfo, CuFileMode};
use super::region::Medium;

/// What moves a store's bytes, and why nothing faster does.
///
/// Displays as `io_uring, O_DIRECT`, or
/// `thread pool, O_DIRECT, encrypted (io_uring refused: Operation not permitted (os error 1))`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorePath {
    /// Its notes are complete: they include those of the regions and of the choice of backend.
    pub(super) backend: BackendInfo,
    pub(super) medium: Medium,
    pub(super) encrypted: bool,
}

impl StorePath {
    /// The backend's name.
    pub fn backend(&self) -> &str {
        self.backend.name
    }

    /// Whether every transfer moves directly between memory and the disk, past the page cache.
    pub fn is_direct(&self) -> bool {
        self.medium == Medium::Direct
    }

    /// Whether everything that is written is encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.encrypted
    }

    /// How cuFile moves the bytes, if it is in use: according to cuFile's own counters, once it has moved any.
    pub fn cufile(&self) -> Option<CuFileMode> {
        self.backend.cufile
    }

    /// Whether the GPU memory that cuFile accesses directly is registered with it, and by whom; `None` if it accesses
    /// none directly.
    pub fn registered(&self) -> Option<&str> {
        self.backend.registered.as_deref()
    }

    /// Why a faster way was not taken; empty if this is the fastest.
    pub fn notes(&self) -> &[String] {
        &self.backend.notes
    }
}

impl fmt::Display for StorePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let medium = match self.medium {
            Medium::Direct => "O_DIRECT",
            Medium::Buffered => "buffered",
            Medium::Memory => "memory",
        };
        let BackendInfo { name, cufile, registered, notes } = &self.backend;
        match cufile {
            Some(mode) => write!(f, "{name}, {mode}")?,
            None => write!(f, "{name}, {medium}")?,
        }
        if let Some(registered) = registered {
            write!(f, ", {registered}")?;
        }
        if self.encrypted {
            f.write_str(", encrypted")?;
        }
        if notes.is_empty() { Ok(()) } else { write!(f, " ({})", notes.join("; ")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_the_way_and_why() {
        let fast =
            StorePath { backend: BackendInfo::named("io_uring"), medium: Medium::Direct, encrypted: false };
        assert_eq!(fast.to_string(), "io_uring, O_DIRECT");
        assert!(fast.is_direct());
        let notes = vec!["a".to_owned(), "b".to_owned()];
        let pool = BackendInfo { notes, ..BackendInfo::named("thread pool") };
        let slow = StorePath { backend: pool, medium: Medium::Buffered, encrypted: false };
        assert_eq!(slow.to_string(), "thread pool, buffered (a; b)");
        assert!(!slow.is_direct());
        let cufile = BackendInfo { cufile: Some(CuFileMode::Compatibility), ..BackendInfo::named("cuFile") };
        let host = StorePath { backend: cufile.clone(), ..fast };
        assert_eq!(host.to_string(), "cuFile, compatibility mode, through host memory");
        let cufile = BackendInfo { registered: Some("GPU memory registered by X".to_owned()), ..cufile };
        let registered = StorePath { backend: cufile, ..host };
        assert!(registered.to_string().ends_with("host memory, GPU memory registered by X"), "{registered}");
        let encrypted = StorePath { encrypted: true, ..slow };
        assert_eq!(encrypted.to_string(), "thread pool, buffered, encrypted (a; b)");
    }
}
