//! The file that a bug report needs: what this machine is and what doctor says of it, without what is the user's own.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, json};

use super::page::{self, Check};
use super::redact::Redactor;
use super::sections::Section;
use crate::common::file;
use crate::common::size;

/// GitHub takes no more characters in one comment.
const PASTED: usize = 65_536;

/// Where the bundle goes, and what is added to it.
#[derive(Debug, clap::Args)]
pub(super) struct BundleArgs {
    /// Write what a bug report needs to FILE, as Markdown to paste into an issue: versions, system, memory, limits, GPUs, disks,
    /// the environment variables that matter, and the lines of doctor. Paths, names of users and hosts, and UUIDs are replaced
    #[arg(long, value_name = "FILE", conflicts_with = "json")]
    bundle: Option<PathBuf>,
    /// Add a profile of --save-profile, or what --json printed, to the bundle. It has the names of your scopes
    #[arg(long, value_name = "FILE", requires = "bundle")]
    profile: Option<PathBuf>,
}

impl BundleArgs {
    /// The bundle that was asked for. What was given is looked at first.
    ///
    /// # Errors
    /// If the file is there already or could not be written, or what is to be added cannot be read.
    pub(super) fn prepare(&self) -> Result<Option<Bundle<'_>>> {
        let Some(path) = self.bundle.as_deref() else { return Ok(None) };
        ensure!(
            path.symlink_metadata().is_err(),
            "--bundle: {} is there already; name another file, or remove it",
            path.display()
        );
        file::ensure_replaceable(path).context("--bundle")?;
        let added = self.profile.as_deref().map(read).transpose()?;
        Ok(Some(Bundle { path, added }))
    }
}

/// A bundle to be written.
pub(super) struct Bundle<'a> {
    path: &'a Path,
    /// What the user adds, line by line.
    added: Option<Vec<Value>>,
}

impl Bundle<'_> {
    /// Writes the file, and says what is in it.
    pub(super) fn write(self, sections: Vec<Section>, checks: &[Check], redactor: &Redactor) -> Result<()> {
        let Bundle { path, added } = self;
        let mut titles: Vec<&str> = sections.iter().map(|section| section.title).chain(["doctor"]).collect();
        titles.extend(added.as_ref().map(|_| ADDED));
        let text = markdown(sections, checks, added.unwrap_or_default(), redactor)?;
        file::create(path, &text)?;
        println!(
            "saved  {}, {}, with these sections and nothing else:",
            path.display(),
            size::format(text.len() as u64)
        );
        println!("       {}; and the same as JSON", titles.join(", "));
        println!("Paths, names of users and hosts, and UUIDs are replaced by words such as <path>.");
        let how = if text.chars().count() > PASTED { "attach it" } else { "paste it" };
        println!("Look it over before you {how} to an issue: it is plain text.");
        Ok(())
    }
}

const ADDED: &str = "profile";

fn markdown(
    sections: Vec<Section>,
    checks: &[Check],
    mut added: Vec<Value>,
    redactor: &Redactor,
) -> Result<String> {
    let mut text = "# ssdtrain on this machine\n\nWritten by `ssdtrain-bench doctor --bundle`.\n".to_owned();
    let mut data = Map::new();
    for Section { title, facts } in sections {
        // A block of code, since in Markdown `<path>` is a tag.
        write!(text, "\n## {title}\n\n```text\n")?;
        let mut object = Map::new();
        for (name, value) in facts {
            let mut shown = serde_json::to_value(&value)?;
            redactor.value(&mut shown);
            writeln!(text, "{name}: {}", shown.as_str().map_or_else(|| value.to_string(), str::to_owned))?;
            object.insert(name, shown);
        }
        text.push_str("```\n");
        data.insert(title.to_owned(), Value::Object(object));
    }
    let checks: Vec<Check> = checks.iter().map(|check| shown(check, redactor)).collect();
    write!(text, "\n## doctor\n\n```text\n{}```\n", page::text(&checks))?;
    let told =
        |Check { name, status, found, .. }: &Check| json!({ "name": name, "status": status, "found": found });
    data.insert("doctor".to_owned(), checks.iter().map(told).collect());
    if !added.is_empty() {
        let mut lines = String::new();
        for line in &mut added {
            redactor.value(line);
            writeln!(lines, "{line}")?;
        }
        write!(text, "\n## {ADDED}\n\n{}", folded(&lines))?;
    }
    let data = serde_json::to_string_pretty(&data)?;
    write!(text, "\n## the same for programs\n\n{}", folded(&format!("{data}\n")))?;
    Ok(text)
}

/// JSON that a page shows once it is opened.
fn folded(json: &str) -> String {
    format!("<details><summary>JSON, sizes in bytes</summary>\n\n```json\n{json}```\n\n</details>\n")
}

/// What a check has found. What to do about it is in the program that made it.
fn shown(check: &Check, redactor: &Redactor) -> Check {
    Check { found: redactor.text(&check.found), advice: None, ..check.clone() }
}

/// The JSON values in a file, one a line.
fn read(path: &Path) -> Result<Vec<Value>> {
    let text =
        fs::read_to_string(path).with_context(|| format!("--profile: cannot read {}", path.display()))?;
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    let values: Vec<Value> =
        lines.map(serde_json::from_str).collect::<Result<_, _>>().with_context(|| {
            format!(
                "--profile: {} is neither a profile of --save-profile nor what --json printed",
                path.display()
            )
        })?;
    ensure!(!values.is_empty(), "--profile: {} is empty", path.display());
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::super::samples::bare_metal;
    use super::*;

    #[test]
    fn the_json_has_what_the_text_has_and_advice_is_left_out() {
        let checks = bare_metal().checks();
        let text =
            markdown(Vec::new(), &checks, vec![json!({ "of": "/home/x/y" })], &Redactor::default()).unwrap();
        let (page, data) = text.split_once("## the same for programs").unwrap();
        assert!(
            page.contains("verdict") && page.contains("{\"of\":\"<path>\"}") && !page.contains("->"),
            "{page}"
        );
        let data: Value = data.split("```json").nth(1).unwrap().split("```").next().unwrap().parse().unwrap();
        assert_eq!(data["doctor"].as_array().unwrap().len(), checks.len());
    }
}
