//! Memory that transfers read from and write to.

mod aligned;

pub use aligned::AlignedBuf;

/// The grain of the library's transfers: direct I/O wants addresses, lengths and offsets that are multiples of
/// the device's logical block, and 4 KiB suits every device that this library transfers to directly.
pub const BLOCK: usize = 4096;

/// `bytes` rounded up to whole blocks.
pub(crate) const fn round_to_block(bytes: u64) -> u64 {
    bytes.next_multiple_of(BLOCK as u64)
}

/// Memory that a transfer reads from or writes to.
///
/// # Safety
///
/// From creation to drop, `as_ptr` names the same `len` bytes, valid for reads and writes. Whoever holds the
/// value sees to it that nobody writes those bytes while a transfer from them runs, and that nobody touches them
/// while a transfer into them runs. All `len` bytes belong to the transfer, not only its payload: a transfer may
/// read or overwrite what follows the payload up to the next multiple of [`BLOCK`].
pub unsafe trait IoBuf: Send + Sync {
    /// The first byte.
    fn as_ptr(&self) -> *mut u8;

    /// How many bytes from the first one a transfer may use: the capacity, not the payload.
    fn len(&self) -> usize;

    /// Whether there is no byte to use.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
