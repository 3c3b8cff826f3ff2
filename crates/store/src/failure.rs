//! Why an attempt of a transfer failed, and the error that tells it.

use std::io;
use std::time::Duration;

use super::backend::Direction;
use super::blob::Blob;
use crate::error::{Error, ErrorKind};
use crate::marks::Difference;

/// How many times a read is attempted before it fails.
pub(super) const READ_ATTEMPTS: u32 = 3;

/// Why an attempt failed.
pub(super) enum Failure {
    /// An operation failed `offset` bytes into its file.
    Io { error: io::Error, piece: usize, offset: u64 },
    /// From `offset` bytes into the payload on, it differs from what was written.
    Corrupt { difference: Difference, offset: usize },
    /// The disk has not answered an operation `offset` bytes into its file.
    TimedOut { limit: Duration, piece: usize, offset: u64 },
}

impl Failure {
    /// The error, after so many attempts.
    pub(super) fn into_error(self, direction: Direction, attempts: u32, blob: &Blob) -> Error {
        match self {
            Failure::Io { error, piece, offset } => {
                let place = &blob.pieces()[piece].volume().info().name;
                let full = direction == Direction::Write
                    && matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT));
                let kind = match error.kind() {
                    _ if full => ErrorKind::NoSpace,
                    io::ErrorKind::TimedOut => ErrorKind::TimedOut,
                    _ => ErrorKind::Io,
                };
                let what = match direction {
                    Direction::Write => "could not be written".to_owned(),
                    Direction::Read => format!("could not be read (attempt {attempts} of {READ_ATTEMPTS})"),
                };
                let advice = if full { "free some space or lower the cap" } else { "check the disk" };
                let message = format!("{blob} {what}: failed at offset {offset} of the {place}; {advice}");
                Error::io(kind, message, error)
            }
            Failure::Corrupt { difference, offset } => {
                let message = format!(
                    "{blob} came back changed (attempt {attempts} of {READ_ATTEMPTS}): from byte {offset} of it on, \
                     {difference}; check the disk and the memory"
                );
                Error::new(ErrorKind::Corrupt, message)
            }
            Failure::TimedOut { limit, piece, offset } => {
                let place = &blob.pieces()[piece].volume().info().name;
                let what = match direction {
                    Direction::Write => "written",
                    Direction::Read => "read",
                };
                let message = format!(
                    "{blob} could not be {what}: the disk has not answered within {limit:?} at offset {offset} of the \
                     {place}; its memory and its room in the file are kept until it does; check the disk (dmesg), or \
                     raise the time limit (disk_timeout, --disk-timeout)"
                );
                Error::new(ErrorKind::TimedOut, message)
            }
        }
    }
}
