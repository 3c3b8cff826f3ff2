//! Operations that were given up: how many of them a backend goes on without, and what comes after that.

use std::io;

use super::Op;

/// A backend goes on as before while it has lost no more than this many operations.
pub(super) const MAX_LOST: usize = 32;

/// Fails operations that cannot be begun because the disk has not answered too many others.
pub(super) fn refuse(ops: impl IntoIterator<Item = Op>) {
    for op in ops {
        // A transfer that tries again is refused again, and gives up in the end.
        let mut refused = vec![op];
        while let Some(op) = refused.pop() {
            refused.extend(op.complete(Err(refusal())));
        }
    }
}

/// Why such an operation fails.
pub(super) fn refusal() -> io::Error {
    let message = "the disk has not answered too many earlier operations, and they still occupy the backend";
    io::Error::new(io::ErrorKind::TimedOut, message)
}
