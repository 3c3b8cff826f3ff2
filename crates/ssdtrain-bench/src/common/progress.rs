//! What a running command shows: a bar on a terminal, plain lines elsewhere, JSON lines where asked for.

use anyhow::Result;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use crate::common::table::print_json;

/// The bar's full length: fine enough for its 24 characters.
const FULL: f64 = 1_000.0;

/// The one writer of a command. A bar goes to stderr; lines to stdout, or to stderr where stdout is for JSON.
pub(crate) struct Progress {
    bar: ProgressBar,
    json: bool,
    /// What is done before the part under way, its share of the whole, and its name.
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

    /// A line for people that stays.
    pub(crate) fn line(&self, text: &str) {
        self.bar.suspend(|| if self.json { eprintln!("{text}") } else { println!("{text}") });
    }

    /// A line for programs; shown only if they were asked for.
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

    /// Whether there is a bar to see.
    pub(crate) fn is_live(&self) -> bool {
        !self.bar.is_hidden()
    }

    /// What is shown from now on is part `index` of `parts`, by this name.
    pub(crate) fn part(&mut self, index: usize, parts: usize, name: String) {
        self.part = (index as f64 / parts as f64, 1.0 / parts as f64, name);
    }

    /// Moves the bar to a share of its length, or of the part's.
    pub(crate) fn at(&self, share: f64) {
        let (before, length, _) = self.part;
        self.bar.set_position(((before + share * length) * FULL) as u64);
    }

    /// What is going on now: beside the bar, or a line of its own where there is no bar.
    pub(crate) fn status(&self, text: String) {
        if self.is_live() {
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
