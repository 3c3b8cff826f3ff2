//! Which way a store's bytes go.

use std::fmt;

use super::backend::CuFileMode;

/// What moves a store's bytes, and why it is not something faster.
///
/// Displays as `io_uring, O_DIRECT`, or
/// `thread pool, O_DIRECT (io_uring refused: Operation not permitted (os error 1))`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorePath {
    pub(super) backend: &'static str,
    pub(super) medium: Medium,
    pub(super) cufile: Option<CuFileMode>,
    pub(super) registered: Option<String>,
    pub(super) notes: Vec<String>,
}

/// What lies below the backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Medium {
    Direct,
    Buffered,
    Memory,
}

impl StorePath {
    /// The backend's name.
    pub fn backend(&self) -> &str {
        self.backend
    }

    /// Whether every transfer goes straight between its memory and the disk, past the page cache.
    pub fn is_direct(&self) -> bool {
        self.medium == Medium::Direct
    }

    /// How cuFile moves the bytes, if it does: as it counts itself, once there were any.
    pub fn cufile(&self) -> Option<CuFileMode> {
        self.cufile
    }

    /// Whether the GPU memory that cuFile reaches directly is registered with it, and who does that; none where it reaches none.
    pub fn registered(&self) -> Option<&str> {
        self.registered.as_deref()
    }

    /// Why a faster way was not taken; empty when this is the fastest.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }
}

impl fmt::Display for StorePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let medium = match self.medium {
            Medium::Direct => "O_DIRECT",
            Medium::Buffered => "buffered",
            Medium::Memory => "memory",
        };
        match self.cufile {
            Some(mode) => write!(f, "{}, {mode}", self.backend)?,
            None => write!(f, "{}, {medium}", self.backend)?,
        }
        if let Some(registered) = &self.registered {
            write!(f, ", {registered}")?;
        }
        if self.notes.is_empty() { Ok(()) } else { write!(f, " ({})", self.notes.join("; ")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_the_way_and_why() {
        let fast = StorePath {
            backend: "io_uring",
            medium: Medium::Direct,
            cufile: None,
            registered: None,
            notes: Vec::new(),
        };
        assert_eq!(fast.to_string(), "io_uring, O_DIRECT");
        assert!(fast.is_direct());
        let notes = vec!["a".to_owned(), "b".to_owned()];
        let slow = StorePath { backend: "thread pool", medium: Medium::Buffered, notes, ..fast.clone() };
        assert_eq!(slow.to_string(), "thread pool, buffered (a; b)");
        assert!(!slow.is_direct());
        let host = StorePath { backend: "cuFile", cufile: Some(CuFileMode::Compatibility), ..fast };
        assert_eq!(host.to_string(), "cuFile, compatibility mode, through host memory");
        let registered = StorePath { registered: Some("GPU memory registered by X".to_owned()), ..host };
        assert!(registered.to_string().ends_with("host memory, GPU memory registered by X"), "{registered}");
    }
}
