//! Checksums of bytes in memory: CRC-32C, a chunk at a time.

use std::convert::identity;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::mem::{IoBuf, parts_of};

/// The bytes of which checksums are taken to find out how fast that is. Most of them come from memory, as tensors do.
const TRIED_BYTES: usize = 32 << 20;
/// How often they are taken. The shortest time counts, since threads are interrupted.
const TRIES: u32 = 3;

/// The chunks, of `chunk` bytes each except for the last one, of a payload of `len` bytes.
pub(super) fn chunks(len: usize, chunk: usize) -> impl ExactSizeIterator<Item = Range<usize>> + Clone {
    let start = move |index: usize| index * chunk;
    (0..len.div_ceil(chunk)).map(move |index| start(index)..len.min(start(index + 1)))
}

/// The checksum of some bytes of `buf`, which are on the host. Nobody may write to them meanwhile.
pub(super) fn checksum(buf: &dyn IoBuf, bytes: Range<usize>) -> u32 {
    parts_of(buf, bytes).fold(0, |checksum, (memory, bytes)| {
        // SAFETY: the caller holds the buffer, in which this part is contiguous, and nobody writes it while the transfer
        // runs that the checksum belongs to.
        crc32c::crc32c_append(checksum, unsafe { std::slice::from_raw_parts(memory, bytes) })
    })
}

/// The bytes per second of which one thread takes checksums. Tried out once per process, which takes
/// some tens of milliseconds.
pub fn checksum_rate() -> f64 {
    // Its bits, or 0. Not a `OnceLock`: a process that is forked off meanwhile would wait for it.
    static RATE: AtomicU64 = AtomicU64::new(0);
    let known = match RATE.load(Ordering::Relaxed) {
        0 => {
            let tried = try_rate().to_bits();
            RATE.compare_exchange(0, tried, Ordering::Relaxed, Ordering::Relaxed)
                .map_or_else(identity, |_| tried)
        }
        known => known,
    };
    f64::from_bits(known)
}

fn try_rate() -> f64 {
    let bytes = vec![1; TRIED_BYTES];
    let time = (0..TRIES).map(|_| {
        let start = Instant::now();
        std::hint::black_box(crc32c::crc32c(&bytes));
        start.elapsed()
    });
    // A clock that stands still says that it is fast.
    let time = time.min().unwrap_or_default().max(Duration::from_nanos(1));
    TRIED_BYTES as f64 / time.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_all_bytes_once() {
        let all = |len, chunk| chunks(len, chunk).collect::<Vec<_>>();
        assert_eq!(all(10, 4), [0..4, 4..8, 8..10]);
        assert_eq!(all(8, 4), [0..4, 4..8]);
        assert_eq!(all(1, 4), [0..1; 1]);
    }

    #[test]
    fn how_fast_checksums_are_taken_is_found_out_once() {
        assert!(checksum_rate() > 0.0);
        assert_eq!(checksum_rate(), checksum_rate());
    }
}
