//! The stripe rule: which byte of a blob is in which of its pieces.
//!
//! A blob is cut into chunks of `stripe` bytes, the last one shorter. Chunk `i` is chunk `i / width` of piece
//! `i % width`, and a piece holds its chunks without gaps, so that each piece is one contiguous extent.

/// A contiguous part of a blob within one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    /// Index of the piece.
    pub(super) piece: usize,
    /// Where the span begins within the piece.
    pub(super) offset: u64,
    /// Where the span begins within the blob.
    pub(super) start: u64,
    /// Length in bytes.
    pub(super) len: u64,
}

/// How many pieces a blob of `bytes` is striped over when `files` have room.
pub(super) fn width(bytes: u64, files: usize, stripe: u64) -> usize {
    usize::try_from(bytes.div_ceil(stripe)).map_or(files, |chunks| files.min(chunks))
}

/// The number of bytes in each of the `width` pieces of a blob of `bytes`.
pub(super) fn shares(bytes: u64, width: usize, stripe: u64) -> Vec<u64> {
    let row = width as u64 * stripe;
    let (full, rest) = (bytes / row * stripe, bytes % row);
    (0..width as u64).map(|piece| full + rest.saturating_sub(piece * stripe).min(stripe)).collect()
}

/// The spans that make up a blob of `bytes` striped over `width` pieces, in the order of the blob's bytes. A span
/// that begins at `start` has at most `longest(start)` bytes; `longest` never returns 0.
pub(super) fn spans(
    bytes: u64,
    width: usize,
    stripe: u64,
    longest: impl Fn(u64) -> u64,
) -> impl Iterator<Item = Span> {
    let chunk_bytes = if width == 1 { bytes.max(1) } else { stripe };
    let mut start = 0;
    std::iter::from_fn(move || {
        let rest = bytes.checked_sub(start).filter(|&rest| rest > 0)?;
        let (chunk, within) = (start / chunk_bytes, start % chunk_bytes);
        let len = rest.min(chunk_bytes - within).min(longest(start));
        let piece = (chunk % width as u64) as usize;
        let span = Span { piece, offset: chunk / width as u64 * chunk_bytes + within, start, len };
        start += len;
        Some(span)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn chunks_go_round() {
        let spans: Vec<_> = spans(10, 3, 2, |_| 100).map(|s| (s.piece, s.offset, s.start, s.len)).collect();
        assert_eq!(spans, [(0, 0, 0, 2), (1, 0, 2, 2), (2, 0, 4, 2), (0, 2, 6, 2), (1, 2, 8, 2)]);
        assert_eq!(shares(10, 3, 2), [4, 4, 2]);
    }

    #[test]
    fn one_piece_is_not_cut_at_stripes() {
        let spans: Vec<_> = spans(10, 1, 2, |_| 6).map(|s| (s.piece, s.offset, s.len)).collect();
        assert_eq!(spans, [(0, 0, 6), (0, 6, 4)]);
    }

    #[test]
    fn no_wider_than_there_are_chunks() {
        assert_eq!([width(1, 4, 8), width(8, 4, 8), width(9, 4, 8), width(1000, 4, 8)], [1, 1, 2, 4]);
    }

    proptest! {
        #[test]
        fn spans_fill_blob_and_pieces_without_gap_or_overlap(
            bytes in 1_u64..2_000, files in 1_usize..5, stripe in 1_u64..300, longest in 1_u64..300,
            scatter in 1_u64..300,
        ) {
            let longest = |start| longest.min(scatter - start % scatter);
            let width = width(bytes, files, stripe);
            let shares = shares(bytes, width, stripe);
            prop_assert_eq!(shares.iter().sum::<u64>(), bytes);
            let (mut at, mut ends) = (0, vec![0; width]);
            for span in spans(bytes, width, stripe, longest) {
                prop_assert!(span.len > 0 && span.len <= longest(span.start));
                prop_assert_eq!(span.start, at);
                prop_assert_eq!(span.offset, ends[span.piece]);
                at += span.len;
                ends[span.piece] += span.len;
            }
            prop_assert_eq!(at, bytes);
            prop_assert_eq!(ends, shares);
        }
    }
}
