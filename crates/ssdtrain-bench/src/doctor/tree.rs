//! A tree of the kernel's files, read as text.

use std::fs;
use std::path::{Path, PathBuf};

/// The files of a machine: those below `/`, or a made-up tree.
#[derive(Debug)]
pub(super) struct Tree {
    root: PathBuf,
}

impl Tree {
    /// The files below this directory.
    pub(super) fn new(root: &Path) -> Tree {
        Tree { root: root.canonicalize().unwrap_or_else(|_| root.to_owned()) }
    }

    /// The directory that the tree is below.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// The contents of a file, without surrounding white space.
    pub(super) fn text(&self, path: &str) -> Option<String> {
        let bytes = fs::read(self.at(path)).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// The value after a name at the start of a line, as in `/proc/meminfo`.
    pub(super) fn value(&self, path: &str, name: &str) -> Option<String> {
        let text = self.text(path)?;
        text.lines().find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()))
    }

    /// The entries of a directory, sorted.
    pub(super) fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.at(path)).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort_unstable();
        names
    }

    /// The target of a path once its links are resolved, as a path of the tree.
    pub(super) fn real(&self, path: &str) -> Option<String> {
        let real = self.at(path).canonicalize().ok()?;
        Some(format!("/{}", real.strip_prefix(&self.root).ok()?.to_str()?))
    }

    pub(super) fn has(&self, path: &str) -> bool {
        self.at(path).exists()
    }
}
