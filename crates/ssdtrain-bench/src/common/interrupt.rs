//! Ctrl-C: the first one asks the run to stop at the next opportunity, the second stops it at once.

use std::error::Error;
use std::fmt;
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// The exit code of a program that was ended by a signal, as shells report it.
const KILLED: i32 = 130;

/// Starts listening. A plain `kill` counts as Ctrl-C.
pub(crate) fn listen() -> Result<()> {
    ctrlc::set_handler(|| {
        if REQUESTED.swap(true, Ordering::Relaxed) {
            process::exit(KILLED);
        }
        eprintln!("stopping after this step; Ctrl-C again stops at once");
    })
    .context("cannot listen for Ctrl-C")
}

/// Whether the run should stop.
pub(crate) fn requested() -> bool {
    REQUESTED.load(Ordering::Relaxed)
}

/// A measurement that was stopped before it was complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interrupted {
    /// Rounds done, including those of warm-up.
    pub(crate) rounds: usize,
    /// Rounds that were planned.
    pub(crate) of: usize,
}

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "interrupted after {} of {} rounds", self.rounds, self.of)
    }
}

impl Error for Interrupted {}
