//! The storage that a backend keeps bytes in.

use std::any::Any;
use std::io;
use std::path::Path;

/// Where a region is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Place<'a> {
    /// On the disk that this directory is on.
    Directory(&'a Path),
    /// In host memory: for tests, and to measure the cost of a run without a disk.
    Memory,
}

/// Bytes that a backend has opened, addressed by offsets from 0. The backend's operations read and write them; the
/// store decides which of them belong to which blob.
///
/// A region and its bytes are freed once nobody holds it.
pub trait Region: Send + Sync + 'static {
    /// Makes the bytes `from..to` writable; those before `from` already are. It may take long, and only one thread at
    /// a time calls it. After an error the region is as it was before.
    fn grow(&self, from: u64, to: u64) -> io::Result<()>;

    /// Gives the bytes from `to` on back, which are in no operation's hands. As with [`grow`](Region::grow), only one thread at a time
    /// calls it. After an error the region is as it was before. A region that cannot shrink says `Unsupported`.
    fn shrink(&self, _to: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Describes the region.
    fn describe(&self) -> RegionInfo;

    /// How full the disk is that it grows on; `None` if there is none, or it cannot be told.
    fn disk(&self) -> Option<Disk> {
        None
    }

    /// The concrete type that the backend knows its regions by. A region that wraps another returns the inner one's.
    fn backing(&self) -> &dyn Any;
}

/// A description of a region, for the code that creates its transfers and for messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionInfo {
    /// The region's name for messages, such as `spill file in /mnt/nvme`.
    pub name: String,
    /// Where its bytes are kept.
    pub medium: Medium,
    /// The alignment that transfers need in memory, in bytes.
    pub alignment: usize,
    /// Why it is slower than it could be.
    pub notes: Vec<String>,
}

/// How full a disk is, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disk {
    /// What it holds in all.
    pub bytes: u64,
    /// What is free for this user.
    pub free: u64,
}

/// The medium that a backend stores bytes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Medium {
    /// A disk, past the page cache (`O_DIRECT`).
    Direct,
    /// A disk, through the page cache.
    Buffered,
    /// The host's memory.
    Memory,
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A region that holds no bytes and grows as its closure says.
    pub(crate) struct Pretended<F>(pub(crate) F);

    impl<F: Fn(u64, u64) -> io::Result<()> + Send + Sync + 'static> Region for Pretended<F> {
        fn grow(&self, from: u64, to: u64) -> io::Result<()> {
            (self.0)(from, to)
        }

        fn describe(&self) -> RegionInfo {
            let name = "pretended region".to_owned();
            RegionInfo { name, medium: Medium::Memory, alignment: 1, notes: Vec::new() }
        }

        fn backing(&self) -> &dyn Any {
            self
        }
    }
}
