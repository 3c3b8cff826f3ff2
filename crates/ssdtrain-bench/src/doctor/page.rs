//! The report: one check per line for people, one object per line for programs.

use anyhow::Result;
use serde::Serialize;

use crate::common::table;

/// The page is at most this wide, unless a single word is wider.
const COLUMNS: usize = 100;
/// The column where the findings begin.
const INDENT: usize = 24;

/// What a check means for the transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Status {
    /// As good as it can be.
    Ok,
    /// It costs something, or a slower path is used.
    Warn,
    /// It does not exist.
    Missing,
    /// It prevents GPUDirect Storage, and nothing else.
    Blocks,
    /// It cannot be determined from here.
    Unknown,
}

/// One line of the diagnosis.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Check {
    pub(super) name: String,
    pub(super) status: Status,
    pub(super) found: String,
    /// What it costs and how to fix it; commands are in backquotes.
    pub(super) advice: Option<String>,
    /// Whether nothing can be offloaded while this is missing.
    #[serde(skip)]
    pub(super) needed: bool,
    /// A short text for the verdict: why bytes cannot be moved directly, or what is unknown about that.
    #[serde(skip)]
    pub(super) reason: Option<String>,
}

impl Check {
    pub(super) fn ok(name: impl Into<String>, found: impl Into<String>) -> Check {
        Check {
            name: name.into(),
            status: Status::Ok,
            found: found.into(),
            advice: None,
            needed: false,
            reason: None,
        }
    }

    pub(super) fn but(self, status: Status, advice: impl Into<String>) -> Check {
        Check { status, advice: Some(advice.into()), ..self }
    }

    /// It prevents GPUDirect Storage.
    pub(super) fn blocks(self, reason: impl Into<String>, advice: impl Into<String>) -> Check {
        Check { reason: Some(reason.into()), ..self.but(Status::Blocks, advice) }
    }

    /// It may prevent GPUDirect Storage.
    pub(super) fn unknown(self, reason: impl Into<String>, advice: impl Into<String>) -> Check {
        Check { reason: Some(reason.into()), ..self.but(Status::Unknown, advice) }
    }
}

/// Prints all checks, for people or for programs.
pub(super) fn print(checks: &[Check], json: bool) -> Result<()> {
    if json {
        return checks.iter().try_for_each(table::print_json);
    }
    print!("{}", text(checks));
    Ok(())
}

/// The page for people.
pub(super) fn text(checks: &[Check]) -> String {
    let mut page = String::new();
    for Check { name, status, found, advice, .. } in checks {
        let status = match status {
            Status::Ok => "ok",
            Status::Warn => "warn",
            Status::Missing => "missing",
            Status::Blocks => "blocks",
            Status::Unknown => "unknown",
        };
        lines(&mut page, &format!("{status:<8} {name:<14} "), found);
        if let Some(advice) = advice {
            lines(&mut page, &format!("{:INDENT$}-> ", ""), advice);
        }
    }
    page
}

/// Writes a text after a prefix and breaks it between words if it is too long; further lines are indented as far as
/// the first.
///
/// A command in backquotes stays on one line if one line can hold it, so that it can be copied.
fn lines(page: &mut String, prefix: &str, text: &str) {
    let indent = prefix.chars().count();
    let room = COLUMNS.saturating_sub(indent);
    page.push_str(prefix);
    let mut used = 0;
    for word in words(text, room) {
        let length = word.chars().count();
        if used > 0 && used + 1 + length > room {
            page.push('\n');
            page.extend(std::iter::repeat_n(' ', indent));
            used = 0;
        }
        if used > 0 {
            page.push(' ');
            used += 1;
        }
        page.push_str(&word);
        used += length;
    }
    page.push('\n');
}

/// The words of a text. A command in backquotes is one word, together with anything attached to it, unless it is
/// longer than `room`.
fn words(text: &str, room: usize) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut command = String::new();
    for word in text.split_whitespace() {
        if !command.is_empty() {
            command.push(' ');
        }
        command.push_str(word);
        if command.matches('`').count() % 2 == 1 {
            continue;
        }
        let whole = std::mem::take(&mut command);
        if whole.chars().count() <= room {
            words.push(whole);
        } else {
            words.extend(whole.split(' ').map(str::to_owned));
        }
    }
    words.extend(command.split_whitespace().map(str::to_owned));
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_broken_between_words_and_aligned() {
        let found = "word ".repeat(40);
        let check = Check::ok("locked memory", found).but(Status::Warn, "advice ".repeat(30));
        let page = text(&[check]);
        assert!(page.lines().all(|line| line.chars().count() <= COLUMNS), "{page}");
        assert!(page.starts_with("warn     locked memory  word word"), "{page}");
        assert!(page.lines().skip(1).all(|line| line.starts_with(&" ".repeat(INDENT))), "{page}");
        assert!(page.contains("\n                        -> advice"), "{page}");
    }

    #[test]
    fn a_command_that_fits_a_line_is_not_broken() {
        let command = "`docker run --volume /run/udev:/run/udev:ro image`,";
        let page = text(&[Check::ok("x", format!("{} {command} then", "word ".repeat(12)))]);
        assert!(page.contains(command), "{page}");
    }

    #[test]
    fn a_command_longer_than_a_line_is_broken_between_words() {
        let page = text(&[Check::ok("x", format!("`{}`", "word ".repeat(40)))]);
        assert!(page.lines().all(|line| line.chars().count() <= COLUMNS), "{page}");
    }
}
