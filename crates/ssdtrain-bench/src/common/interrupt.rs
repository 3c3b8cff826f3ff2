//! Signals: the first one asks a run to stop at the next opportunity, the second ends it at once. So does the loss of
//! whoever reads what the run prints: it asks the run to stop.

use std::error::Error;
use std::fmt;
use std::fs;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGPIPE, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level;

/// The signal that asked the run to stop; zero as long as none did.
static SIGNAL: AtomicI32 = AtomicI32::new(0);
/// Whether something that was printed could not be. Ctrl-C ends a whole pipeline, so a signal may still follow.
static UNHEARD: AtomicBool = AtomicBool::new(false);

/// Starts listening for Ctrl-C, for a plain `kill`, and for the end of the terminal, unless `nohup` has that ignored. From now on, the
/// end of whoever reads what is printed no longer ends the process.
pub(crate) fn listen() -> Result<()> {
    let heeded =
        [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|&signal| signal != SIGHUP || !is_ignored(signal));
    let listen = || {
        let mut signals = Signals::new(heeded.chain([SIGPIPE]))?;
        let heed = move || signals.forever().for_each(heed);
        // It listens as long as the process lives, so nothing joins it.
        thread::Builder::new().name("ssdtrain-signal".to_owned()).spawn(heed).map(drop)
    };
    listen().context("cannot listen for signals")
}

fn heed(signal: i32) {
    if signal == SIGPIPE {
        return stop_unheard();
    }
    if SIGNAL.compare_exchange(0, signal, Ordering::Relaxed, Ordering::Relaxed).is_err() {
        // Other threads are at work, so libtorch's exit handlers and destructors must not run.
        low_level::exit(exit_code(signal).into());
    }
    // A terminal or a reader that has gone must not end the run.
    writeln!(io::stderr(), "stopping after this step; a second signal ends at once").ok();
}

/// Whether the run should stop.
pub(crate) fn requested() -> bool {
    SIGNAL.load(Ordering::Relaxed) != 0 || is_unheard()
}

/// Asks the run to stop, since what it prints goes nowhere.
pub(crate) fn stop_unheard() {
    UNHEARD.store(true, Ordering::Relaxed);
}

/// Whether something that was printed could not be.
pub(crate) fn is_unheard() -> bool {
    UNHEARD.load(Ordering::Relaxed)
}

/// The exit code of a run whose output nobody reads to the end: that of a program which SIGPIPE ends.
pub(crate) fn unheard_code() -> ExitCode {
    exit_code(SIGPIPE).into()
}

/// The exit code that shells show for a program that a signal ended.
fn exit_code(signal: i32) -> u8 {
    128_u8.saturating_add(u8::try_from(signal).unwrap_or_default())
}

/// Whether this process was started with a signal ignored. Where that cannot be read, it was not.
fn is_ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Work that a signal stopped before it was complete. As an error of a command, it makes the exit code that of the signal.
#[derive(Clone, Debug)]
pub(crate) struct Interrupted {
    how_far: String,
    signal: i32,
}

impl Interrupted {
    /// By the signal that [`requested`] knows of, or by the loss of a reader. `how_far`: what was done, and what has become of it.
    pub(crate) fn new(how_far: impl Into<String>) -> Interrupted {
        let signal = Some(SIGNAL.load(Ordering::Relaxed)).filter(|&signal| signal != 0);
        Interrupted { how_far: how_far.into(), signal: signal.unwrap_or(SIGPIPE) }
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        exit_code(self.signal).into()
    }
}

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.how_far)
    }
}

impl Error for Interrupted {}
