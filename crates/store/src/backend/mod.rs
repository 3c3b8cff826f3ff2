//! What keeps bytes and carries operations out: the [`Backend`] trait and its implementations.

mod cufile;
mod faulty;
mod kind;
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

/// Keeps bytes in regions, and carries operations on them out.
///
/// Dropping a backend finishes every operation that was submitted and then ends its threads; dropped on one of
/// those threads, it only arranges for that.
pub trait Backend: Send + Sync {
    /// Opens a new region, of which the store will use at most `cap_bytes`.
    fn open(&self, place: Place<'_>, cap_bytes: u64) -> Result<Arc<dyn Region>>;

    /// Starts the operations, in order, and returns without waiting for them.
    ///
    /// For each of them the backend moves up to [`Op::len`] bytes between [`Op::ptr`] and [`Op::offset`] of
    /// [`Op::region`] in the operation's direction, then hands the result to [`Op::complete`] and carries out what
    /// that returns. It keeps the operation until nothing touches its memory and region any more.
    fn submit(&self, ops: Vec<Op>);

    /// What the backend is, and how it goes. One that passes operations on describes what it passes them to.
    fn describe(&self) -> BackendInfo;
}

/// What a backend is, for reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BackendInfo {
    /// The backend in words.
    pub name: &'static str,
    /// How bytes go if cuFile moves them: as it counts itself, once there were any.
    pub cufile: Option<CuFileMode>,
    /// Whether the GPU memory that it reaches directly is registered, and who does it; none if it reaches none.
    pub registered: Option<String>,
    /// Why it is slower than it might be.
    pub notes: Vec<String>,
}

impl BackendInfo {
    /// A backend of which there is no more to be told than its name.
    pub fn named(name: &'static str) -> BackendInfo {
        BackendInfo { name, ..BackendInfo::default() }
    }
}

/// How cuFile moves bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CuFileMode {
    /// GPUDirect Storage, by the kernel module nvidia-fs: straight between a GPU and the disk.
    NvidiaFs,
    /// GPUDirect Storage, by the kernel's own PCI peer-to-peer transfers.
    PciP2pDma,
    /// Through host memory of cuFile's own, which NVIDIA calls compatibility mode.
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
