//! What a backend keeps bytes in.

use std::any::Any;
use std::io;
use std::path::Path;

/// Where a region is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Place<'a> {
    /// On the disk that this directory is on.
    Directory(&'a Path),
    /// In the host's memory: for tests, and to see what a run costs without a disk.
    Memory,
}

/// Bytes that a backend has opened, by offsets from 0 on. Its operations read and write them; which of them belong to whom is the
/// store's business.
///
/// It is gone, with its bytes, once nobody holds it.
pub trait Region: Send + Sync + 'static {
    /// Makes the bytes `from..to` ones that can be written; those before `from` are already. It may take long; one thread at a time
    /// calls it. After an error all is as before.
    fn grow(&self, from: u64, to: u64) -> io::Result<()>;

    /// What the region is.
    fn describe(&self) -> RegionInfo;

    /// Itself, as what the backend that moves its bytes knows; around another region, that one's.
    fn backing(&self) -> &dyn Any;
}

/// What a region is, for those who make transfers for it and for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionInfo {
    /// The region in words, for messages, such as `spill file in /mnt/nvme`.
    pub name: String,
    /// What its bytes lie on.
    pub medium: Medium,
    /// What transfers' memory must be aligned to, in bytes.
    pub alignment: usize,
    /// Why it is slower than it might be.
    pub notes: Vec<String>,
}

/// What lies below a backend.
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

    /// A region of nothing, which grows as it is told.
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
