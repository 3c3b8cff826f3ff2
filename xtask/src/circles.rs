//! Circles between files: within a folder of sources, no module uses one that uses it in turn.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::process::root;
use crate::rooms::{code_of, files, is_test};

/// The folders whose files are checked, with all that is in them.
const SOURCES: &[&str] = &[
    "src",
    "crates/plan/src",
    "crates/store/src",
    "crates/metrics/src",
    "crates/models/src",
    "crates/differential/src",
    "crates/ssdtrain-bench/src",
    "cufile-sys/src",
    "hooks/libtorch/src",
    "hooks/malloc/src",
    "xtask/src",
];

/// A module by the folder that it is in and its name.
type Module = (PathBuf, String);

/// Checks that modules side by side use each other in one direction only.
pub(crate) fn check() -> Result<()> {
    let mut found = Vec::new();
    let mut modules = 0;
    for source in SOURCES {
        let uses = uses(&root().join(source))?;
        modules += uses.len();
        found.extend(circle(&uses));
    }
    ensure!(found.is_empty(), "modules use each other in circles:\n  {}", found.join("\n  "));
    println!("{modules} modules, and no circle between those of one folder");
    Ok(())
}

/// Which modules beside it each module uses.
fn uses(source: &Path) -> Result<BTreeMap<Module, BTreeSet<Module>>> {
    let mut texts = Vec::new();
    for file in files(source)? {
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let is_shown =
            ["mod", "lib", "main"].iter().any(|name| file.file_stem().is_some_and(|stem| stem == *name));
        if !is_shown && !is_test(&file, &text)? {
            texts.push((file, text));
        }
    }
    let mut uses: BTreeMap<Module, BTreeSet<Module>> = BTreeMap::new();
    for (file, text) in &texts {
        let Some(own) = module_of(file) else { continue };
        let code = code_of(text);
        let mut names = named(&code, "super::");
        if own.0 == source {
            names.extend(named(&code, "crate::"));
        }
        names.remove(&own.1);
        let others = names.into_iter().map(|name| (own.0.clone(), name));
        uses.entry(own.clone()).or_default().extend(others);
    }
    Ok(uses)
}

fn module_of(file: &Path) -> Option<Module> {
    Some((file.parent()?.to_path_buf(), file.file_stem()?.to_str()?.to_owned()))
}

/// What code names right after `prefix`, one by one or within braces.
fn named(code: &str, prefix: &str) -> BTreeSet<String> {
    let is_letter = |letter: char| letter.is_alphanumeric() || letter == '_';
    code.split(prefix)
        .skip(1)
        .map(|rest| rest.chars().take_while(|letter| is_letter(*letter)).collect::<String>())
        .filter(|name| !name.is_empty())
        .collect()
}

/// A circle, as the way around, if there is one.
fn circle(uses: &BTreeMap<Module, BTreeSet<Module>>) -> Option<String> {
    let mut left: BTreeMap<&Module, BTreeSet<&Module>> = uses
        .iter()
        .map(|(module, used)| (module, used.iter().filter(|other| uses.contains_key(*other)).collect()))
        .collect();
    // What uses nothing that is left is in no circle, again and again.
    while let Some(module) = left.iter().find(|(_, used)| used.is_empty()).map(|(module, _)| *module) {
        left.remove(module);
        left.values_mut().for_each(|used| {
            used.remove(module);
        });
    }
    let (mut at, mut way) = (*left.keys().next()?, Vec::new());
    while !way.contains(&at) {
        way.push(at);
        at = left.get(at)?.iter().next()?;
    }
    way.push(at);
    let names: Vec<&str> = way.iter().map(|(_, name)| name.as_str()).collect();
    Some(format!("{}: {}", at.0.display(), names.join(" -> ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uses(edges: &[(&str, &[&str])]) -> BTreeMap<Module, BTreeSet<Module>> {
        let module = |name: &str| (PathBuf::from("src"), name.to_owned());
        edges
            .iter()
            .map(|(name, used)| (module(name), used.iter().map(|used| module(used)).collect()))
            .collect()
    }

    #[test]
    fn a_circle_is_told_by_its_way() {
        let none = uses(&[("a", &["b", "c"]), ("b", &["c"]), ("c", &["elsewhere"])]);
        assert_eq!(circle(&none), None);
        let one = uses(&[("a", &["b"]), ("b", &["c"]), ("c", &["b"])]);
        assert_eq!(circle(&one).unwrap(), "src: a -> b -> c -> b");
    }

    #[test]
    fn modules_beside_are_those_after_super() {
        let code = "use super::a::B;\nuse super::c;\nfn f() { super::d::e() }\nuse crate::x::Y;\n";
        assert_eq!(named(code, "super::"), ["a", "c", "d"].map(str::to_owned).into());
    }

    #[test]
    fn the_sources_have_no_circles() {
        check().unwrap();
    }
}
