//! What a running command shows: a bar on a terminal, plain lines elsewhere, JSON lines if asked for.

use anyhow::Result;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use crate::common::output::{print, print_on_stderr};
use crate::common::table::print_json;

/// The bar's full length: fine enough for its 24 characters.
const FULL: f64 = 1_000.0;

/// The only writer of a command. The bar is written to stderr; lines go to stdout, or to stderr if stdout is for
/// JSON.
pub(crate) struct Progress {
    bar: ProgressBar,
    json: bool,
    /// What was done before the current part, the part's share of the whole, and its name.
    part: (f64, f64, String),
}

impl Progress {
    pub(crate) fn new(json: bool) -> Progress {
        let bar = ProgressBar::with_draw_target(Some(FULL as u64), ProgressDrawTarget::hidden());
        if let Ok(style) = ProgressStyle::with_template("{bar:24} {percent:>3} %  {wide_msg}") {
            bar.set_style(style);
        }
        Progress { bar, json, part: (0.0, 1.0, String::new()) }
    }

    /// A permanent line for people.
    pub(crate) fn line(&self, text: &str) {
        self.bar.suspend(|| if self.json { print_on_stderr(text) } else { print(text) });
    }

    /// A line for programs; printed only if they were asked for.
    pub(crate) fn event(&self, object: &impl Serialize) -> Result<()> {
        if self.json { self.bar.suspend(|| print_json(object)) } else { Ok(()) }
    }

    /// Shows the bar from now on, if stderr is a terminal.
    pub(crate) fn start(&self) {
        self.bar.reset();
        self.bar.set_message(self.part.2.clone());
        self.at(0.0);
        self.bar.set_draw_target(ProgressDrawTarget::stderr());
    }

    /// Whether a bar is visible.
    pub(crate) fn is_live(&self) -> bool {
        !self.bar.is_hidden()
    }

    /// What follows is part `index` of `parts`, with this name.
    pub(crate) fn part(&mut self, index: usize, parts: usize, name: String) {
        self.part = (index as f64 / parts as f64, 1.0 / parts as f64, name);
    }

    /// Moves the bar to a share of its length, or of the current part.
    pub(crate) fn at(&self, share: f64) {
        let (before, length, _) = self.part;
        self.bar.set_position(((before + share * length) * FULL) as u64);
    }

    /// What is going on now: next to the bar, or on a line of its own if there is no bar.
    pub(crate) fn status(&self, text: String) {
        if self.is_live() {
            self.bar.set_message(text);
        } else if !self.json {
            print(&text);
        }
    }

    /// Removes the bar.
    pub(crate) fn clear(&self) {
        self.bar.finish_and_clear();
    }

    pub(crate) fn is_json(&self) -> bool {
        self.json
    }
}
