//! A device's storage as the memory of a transfer that accesses it directly.

use ssdtrain_libtorch::Block;
use ssdtrain_store::{AlignedBuf, BLOCK, IoBuf};

/// Keeps a device's storage alive for as long as a transfer from or to it runs.
///
/// The storage's whole blocks are transferred in place. The rest after the last of them goes through a block of host memory, because a
/// transfer moves whole blocks and the memory after the storage belongs to somebody else. A storage that does not begin where transfers
/// may begin goes through host memory entirely. The caller copies the [`rest`](DeviceBuf::rest).
pub(crate) struct DeviceBuf {
    block: Block,
    data: *mut u8,
    bytes: usize,
    /// Bytes that are transferred in place.
    whole: usize,
    rest: Option<AlignedBuf>,
}

/// Bytes of a storage that a transfer moves from or to host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rest {
    pub(crate) device: *mut u8,
    pub(crate) host: *mut u8,
    pub(crate) bytes: usize,
}

impl DeviceBuf {
    /// The first `bytes` bytes of `block`, which transfers may access directly if they begin at a multiple of `alignment`. `None` if host
    /// memory has run out.
    pub(crate) fn new(block: Block, bytes: usize, alignment: usize) -> Option<DeviceBuf> {
        let data: *mut u8 = block.data().cast();
        let whole = if data.addr().is_multiple_of(alignment) { bytes / BLOCK * BLOCK } else { 0 };
        let rest = match bytes - whole {
            0 => None,
            rest => Some(AlignedBuf::new(rest)?),
        };
        Some(DeviceBuf { block, data, bytes, whole, rest })
    }

    /// What has to be copied: out before a write, in after a read.
    pub(crate) fn rest(&self) -> Option<Rest> {
        let rest = self.rest.as_ref()?;
        let (device, bytes) = (self.data.wrapping_add(self.whole), self.bytes - self.whole);
        Some(Rest { device, host: rest.part(0).0, bytes })
    }
}

// SAFETY: the block keeps the storage's bytes at their address until the value is dropped, and the block of host memory
// is the value's own. A storage that is being written is not changed, or its version counter tells; one that is loaded into is
// ours alone until then.
unsafe impl IoBuf for DeviceBuf {
    fn part(&self, offset: usize) -> (*mut u8, usize) {
        match &self.rest {
            Some(rest) if offset >= self.whole => rest.part(offset - self.whole),
            _ => (self.data.wrapping_add(offset), self.whole - offset),
        }
    }

    fn len(&self) -> usize {
        self.whole + self.rest.as_ref().map_or(0, AlignedBuf::len)
    }

    fn is_on_host(&self, offset: usize) -> bool {
        offset >= self.whole
    }
}

// SAFETY: the pointer is the storage's own, and `Storage` may be sent.
unsafe impl Send for DeviceBuf {}
// SAFETY: nothing here changes through a shared reference but the block's bytes, by copies that nothing else runs beside.
unsafe impl Sync for DeviceBuf {}

impl std::fmt::Debug for DeviceBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "buffer of {:?}", self.block)
    }
}

#[cfg(test)]
mod tests {
    use ssdtrain_libtorch::Storage;

    use super::*;

    fn buf(bytes: usize, alignment: usize) -> DeviceBuf {
        DeviceBuf::new(Block::of(Storage::allocate(bytes as u64).unwrap()), bytes, alignment).unwrap()
    }

    #[test]
    fn whole_blocks_are_where_they_are_and_the_rest_has_a_block() {
        let buf = buf(2 * BLOCK + 100, 1);
        let ((data, whole), (block, padded)) = (buf.part(0), buf.part(2 * BLOCK));
        assert_eq!((data, whole, padded, buf.len()), (buf.data, 2 * BLOCK, BLOCK, 3 * BLOCK));
        let rest = Rest { device: data.wrapping_add(2 * BLOCK), host: block, bytes: 100 };
        assert_eq!(buf.rest(), Some(rest));
    }

    #[test]
    fn a_storage_of_whole_blocks_needs_no_host_memory() {
        let buf = buf(BLOCK, 1);
        assert_eq!((buf.rest(), buf.len()), (None, BLOCK));
    }

    #[test]
    fn a_storage_that_does_not_begin_where_transfers_may_goes_through_the_host() {
        let buf = buf(2 * BLOCK, usize::MAX);
        assert_eq!((buf.rest().map(|rest| rest.bytes), buf.part(0).1), (Some(2 * BLOCK), 2 * BLOCK));
        assert_ne!(buf.part(0).0, buf.data);
    }
}
