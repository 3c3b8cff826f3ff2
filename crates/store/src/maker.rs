//! The process in which something was made, which may have been forked since.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// How many forks, since the first [`Maker`], lie between this process and the one that it began as.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// The process in which something was made. Its number would not do: a process and its child have the same one if each is the
/// first of its own namespace, and numbers are used again.
#[derive(Debug)]
pub(super) struct Maker {
    forks: u64,
}

impl Maker {
    /// This process. An error if it could not tell its children from itself.
    pub(super) fn new() -> io::Result<Maker> {
        static COUNTS: AtomicBool = AtomicBool::new(false);
        // Not a `Once`: a process that is forked off meanwhile would wait for it. Two threads may both do this, and forks then count twice.
        if !COUNTS.load(Ordering::Acquire) {
            // SAFETY: the handler only adds to a number.
            let error = unsafe { libc::pthread_atfork(None, None, Some(is_child)) };
            if error != 0 {
                return Err(io::Error::from_raw_os_error(error));
            }
            COUNTS.store(true, Ordering::Release);
        }
        Ok(Maker { forks: FORKS.load(Ordering::Relaxed) })
    }

    /// Whether this is not that process, but one that was forked from it.
    pub(super) fn is_parent(&self) -> bool {
        self.forks != FORKS.load(Ordering::Relaxed)
    }
}

unsafe extern "C" fn is_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Whether `check` holds in a process that is forked off now. It must not panic, nor wait for another thread.
    pub(in super::super) fn holds_in_child(check: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child runs the check on its only thread, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let failed = !check();
            // SAFETY: a plain system call.
            unsafe { libc::_exit(i32::from(failed)) };
        }
        let mut status = 0;
        // SAFETY: `status` is a valid place for the result.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
    }

    #[test]
    fn a_child_knows_its_parents_and_what_it_has_made_itself() {
        let first = Maker::new().unwrap();
        assert!(!first.is_parent());
        assert!(holds_in_child(|| {
            let second = Maker::new().unwrap();
            first.is_parent()
                && !second.is_parent()
                && holds_in_child(|| first.is_parent() && second.is_parent())
        }));
        assert!(!first.is_parent());
    }
}
