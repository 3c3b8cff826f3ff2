//! Keys of entries and tapes.

/// Identifies an entry: its slot in the table, and a number that is never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct EntryKey {
    pub(crate) index: usize,
    pub(crate) serial: u64,
}

/// Identifies a tape by a number that is never used again.
pub(crate) type TapeKey = u64;

/// No tape has this key.
pub(crate) const NO_TAPE: TapeKey = TapeKey::MAX;
