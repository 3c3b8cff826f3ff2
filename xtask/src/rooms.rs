//! The dependency arrows between the modules of the library: each may use only those below it, so there is no cycle.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::process::root;

/// The modules of `src/`, from the ground up.
const ROOMS: &[&str] = &[
    "units",
    "sync",
    "math",
    "processes",
    "digest",
    "verify",
    "error",
    "fusion",
    "device",
    "mem",
    "telemetry",
    "endurance",
    "trace",
    "profile",
    "policy",
    "tier",
    "route",
    "cache",
    "replay",
    "step",
    "recompute",
    "config",
    "switch",
    "session",
];

/// Checks which other modules each module names, outside of its tests.
pub(crate) fn check() -> Result<()> {
    let source = root().join("src");
    let mut found = BTreeSet::new();
    let mut wrong = Vec::new();
    for file in files(&source)? {
        let inner = file.strip_prefix(&source).unwrap_or(&file);
        let Some(room) = room_of(inner) else { continue };
        let Some(floor) = floor_of(&room) else {
            bail!("src/{}: module `{room}` has no place in xtask/src/rooms.rs", inner.display());
        };
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        found.insert(room.clone());
        if is_test(&file, &text)? {
            continue;
        }
        for used in used_by(&text) {
            // What `lib.rs` shows is above all of them: it is to be had from its own module.
            if floor_of(&used).is_none_or(|other| other > floor) {
                wrong.push(format!("src/{} uses `{used}`, which is above `{room}`", inner.display()));
            }
        }
    }
    let gone: Vec<_> = ROOMS.iter().filter(|room| !found.contains(**room)).collect();
    ensure!(gone.is_empty(), "xtask/src/rooms.rs names modules that are no more: {gone:?}");
    ensure!(wrong.is_empty(), "modules use what is above them:\n  {}", wrong.join("\n  "));
    println!("{} modules of src/, and none uses one above it", ROOMS.len());
    Ok(())
}

pub(crate) fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    let entries = fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    for entry in entries {
        let path = entry.with_context(|| format!("cannot list {}", folder.display()))?.path();
        if path.is_dir() {
            all.extend(files(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            all.push(path);
        }
    }
    Ok(all)
}

/// The module that a file of `src/` belongs to; `None` for `lib.rs`, which shows them all.
fn room_of(file: &Path) -> Option<String> {
    let first = Path::new(file.iter().next()?);
    let name = first.file_stem()?.to_str()?;
    (name != "lib").then(|| name.to_owned())
}

fn floor_of(room: &str) -> Option<usize> {
    ROOMS.iter().position(|known| *known == room)
}

/// Whether the file is a module that only tests have.
pub(crate) fn is_test(file: &Path, text: &str) -> Result<bool> {
    let (Some(folder), Some(name)) = (file.parent(), file.file_stem().and_then(|name| name.to_str())) else {
        return Ok(false);
    };
    let declared = format!("#[cfg(test)]\nmod {name};");
    let parents = [folder.join("mod.rs"), folder.with_extension("rs")];
    for parent in parents.iter().filter(|parent| parent.is_file() && *parent != file) {
        let parent =
            fs::read_to_string(parent).with_context(|| format!("cannot read {}", parent.display()))?;
        if parent.contains(&declared) {
            return Ok(true);
        }
    }
    Ok(text.starts_with("#![cfg(test)]"))
}

/// A file's text without comments and tests.
pub(crate) fn code_of(text: &str) -> String {
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let lines: Vec<&str> = code.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    lines.join("\n")
}

/// The modules that code names as `crate::…`, comments and tests left out.
fn used_by(text: &str) -> BTreeSet<String> {
    let code = code_of(text);
    let lines = code.lines();
    let named = |line: &str| -> Vec<String> {
        let name = |rest: &str| rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        line.split("crate::").skip(1).map(name).collect()
    };
    lines.flat_map(named).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_counts_and_comments_and_tests_do_not() {
        let text = "//! [`crate::a`]\nuse crate::b::{C, D};\n/// crate::c\nfn f() { crate::d::g(crate::e::H) }\n\
                    #[cfg(test)]\nmod tests {\n    use crate::f;\n}\n";
        let used = ["b", "d", "e"].map(str::to_owned).into();
        assert_eq!(used_by(text), used);
    }

    #[test]
    fn a_file_belongs_to_the_module_of_its_first_folder() {
        let rooms = ["cache/table/saving.rs", "error.rs", "lib.rs"].map(|file| room_of(Path::new(file)));
        assert_eq!(rooms, [Some("cache".to_owned()), Some("error".to_owned()), None]);
    }

    #[test]
    fn the_library_keeps_to_its_floors() {
        check().unwrap();
    }
}
