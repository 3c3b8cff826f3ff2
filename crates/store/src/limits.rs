//! What to do about a limit, of this process or of the system, that a call ran into.

use std::io;

use crate::error::{Error, ErrorKind};

const FILES: &str = "raise the limit of open files (ulimit -n)";
const THREADS: &str = "raise the limit of threads (ulimit -u, or pids.max of the control group)";

/// For a file that could not be opened; `None` if no limit was the cause.
pub(super) fn on_files(error: &io::Error) -> Option<&'static str> {
    match error.raw_os_error()? {
        libc::EMFILE => Some(FILES),
        libc::ENFILE => Some("raise the system's limit of open files (sysctl fs.file-max)"),
        _ => None,
    }
}

/// For an io_uring that could not be had; `None` if no limit was the cause.
pub(super) fn on_rings(error: &io::Error) -> Option<&'static str> {
    match error.raw_os_error()? {
        // Whether a ring counts as locked memory depends on the kernel: before Linux 5.12 it does, and in 6.18 again.
        libc::ENOMEM => Some("raise the limit of locked memory (ulimit -l), or free memory"),
        libc::EAGAIN => Some(THREADS),
        _ => on_files(error),
    }
}

/// The error of a thread that the system has refused. It says what to do about that.
pub fn no_thread(which: &str, error: io::Error) -> Error {
    let advice = if error.kind() == io::ErrorKind::WouldBlock { THREADS } else { "free memory" };
    Error::io(ErrorKind::Io, format!("{which} could not be started; {advice}"), error)
}
