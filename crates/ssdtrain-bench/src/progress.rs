//! What a running command shows: a bar on a terminal, plain lines elsewhere, JSON lines where asked for.

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::table::print_json;

/// The one writer of a command. A bar goes to stderr; lines to stdout, or to stderr where stdout is for JSON.
pub(crate) struct Progress {
    bar: ProgressBar,
    json: bool,
}

impl Progress {
    pub(crate) fn new(json: bool) -> Progress {
        let bar = ProgressBar::new(0);
        if let Ok(style) = ProgressStyle::with_template("{bar:24} {pos}/{len}  {msg}") {
            bar.set_style(style);
        }
        Progress { bar, json }
    }

    /// A line for people that stays.
    pub(crate) fn line(&self, text: &str) {
        self.bar.suspend(|| if self.json { eprintln!("{text}") } else { println!("{text}") });
    }

    /// A line for programs; shown only if they were asked for.
    pub(crate) fn event(&self, object: &impl Serialize) -> Result<()> {
        if self.json { self.bar.suspend(|| print_json(object)) } else { Ok(()) }
    }

    /// Moves the bar.
    pub(crate) fn at(&self, done: u64, of: u64) {
        self.bar.set_length(of);
        self.bar.set_position(done);
    }

    /// What is going on now: beside the bar, or a line of its own where there is no bar.
    pub(crate) fn status(&self, text: String) {
        if !self.bar.is_hidden() {
            self.bar.set_message(text);
        } else if !self.json {
            println!("{text}");
        }
    }

    /// Takes the bar away.
    pub(crate) fn clear(&self) {
        self.bar.finish_and_clear();
    }

    pub(crate) fn is_json(&self) -> bool {
        self.json
    }
}
