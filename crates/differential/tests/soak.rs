//! A short endurance run, as CI has it:
//!
//! ```sh
//! cargo test --package ssdtrain-differential --test soak -- --ignored --nocapture
//! ```
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::process::Command;

/// Of what a run that fails says besides, which tells of every fault that it made.
const LAST_LINES: usize = 40;

#[test]
#[ignore = "takes minutes"]
fn bits_are_right_and_nothing_grows_in_a_minute() {
    let mut run = Command::new(env!("CARGO_BIN_EXE_ssdtrain-differential"));
    let output = run.args(["soak", "--minutes", "1"]).output().unwrap();
    print!("{}", String::from_utf8_lossy(&output.stdout));
    let said = String::from_utf8_lossy(&output.stderr);
    let from = said.lines().count().saturating_sub(LAST_LINES);
    let last: Vec<&str> = said.lines().skip(from).collect();
    assert!(output.status.success(), "{}:\n{}", output.status, last.join("\n"));
}
