//! Backends keep bytes and carry out operations: the [`Backend`] trait and its implementations.

mod cufile;
mod faulty;
mod kind;
mod lost;
mod malloc_hook;
mod op;
mod pool;
mod private_folder;
mod queue;
mod registered;
#[cfg(test)]
pub(crate) mod suite;
mod throttled;
mod uring;

use std::fmt;
use std::sync::Arc;

pub(crate) use cufile::CuFile;
pub use faulty::{Fault, Faulty};
pub use kind::BackendKind;
pub use op::{Direction, Op};
pub use pool::Pool;
pub use throttled::Throttled;
pub use uring::Uring;

use crate::error::Result;
use crate::region::{Place, Region};

/// Keeps bytes in regions, and carries out operations on them.
///
/// Dropping a backend finishes every operation that was submitted and then ends its threads. If it is dropped on one
/// of those threads, it only arranges for that. It does not wait for operations that were [given up](Op::is_given_up):
/// they, and what carries them out, are left behind.
pub trait Backend: Send + Sync {
    /// Opens a new region; the store will use at most `cap_bytes` of it.
    fn open(&self, place: Place<'_>, cap_bytes: u64) -> Result<Arc<dyn Region>>;

    /// Starts the operations, in order, and returns without waiting for them.
    ///
    /// For each operation, the backend moves up to [`Op::len`] bytes between [`Op::ptr`] and [`Op::offset`] of
    /// [`Op::region`] in the operation's direction, passes the result to [`Op::complete`] and carries out the
    /// operations that it returns. It keeps the operation until nothing accesses its memory and region any more, also
    /// after it was given up. It calls [`Op::begin`] when it hands the operation to what may not answer.
    fn submit(&self, ops: Vec<Op>);

    /// Describes the backend and how it moves bytes. A backend that passes operations on describes the one it passes
    /// them to.
    fn describe(&self) -> BackendInfo;
}

/// A description of a backend, for reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BackendInfo {
    /// The backend in words.
    pub name: &'static str,
    /// How cuFile moves the bytes, if it is in use: according to cuFile's own counters, once it has moved any.
    pub cufile: Option<CuFileMode>,
    /// Whether the GPU memory that the backend accesses directly is registered, and by whom; `None` if it accesses
    /// none directly.
    pub registered: Option<String>,
    /// Why it is slower than it could be.
    pub notes: Vec<String>,
}

impl BackendInfo {
    /// A description that consists of a name only.
    pub fn named(name: &'static str) -> BackendInfo {
        BackendInfo { name, ..BackendInfo::default() }
    }
}

/// How cuFile moves bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CuFileMode {
    /// GPUDirect Storage through the kernel module nvidia-fs: directly between a GPU and the disk.
    NvidiaFs,
    /// GPUDirect Storage through the kernel's own PCI peer-to-peer transfers.
    PciP2pDma,
    /// Through host memory owned by cuFile, which NVIDIA calls compatibility mode.
    Compatibility,
}

impl fmt::Display for CuFileMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CuFileMode::NvidiaFs => "GPUDirect Storage by nvidia-fs",
            CuFileMode::PciP2pDma => "GPUDirect Storage by PCI P2PDMA",
            CuFileMode::Compatibility => "compatibility mode, through host memory",
        })
    }
}
