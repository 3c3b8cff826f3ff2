//! Text to train on: a file, the files below a directory, or the Rust sources that cargo has downloaded.

use std::env;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// A larger file below a directory is likely to be data or generated code rather than text.
const FILE_LIMIT: u64 = 1 << 20;

/// UTF-8 text and its source.
#[derive(Clone, Debug)]
pub struct Corpus {
    name: String,
    text: String,
    files: usize,
    skipped: usize,
    truncated: bool,
}

impl Corpus {
    /// The first `limit` bytes of the text file `path`, or of all text files below the directory `path`, one after
    /// another in the order of their names. Below a directory, hidden names, links, files over 1 MiB and anything
    /// that is not UTF-8 text are skipped.
    ///
    /// # Errors
    /// [`Error::Io`] if `path` cannot be read, [`Error::Data`] if there is no text.
    pub fn read(path: impl AsRef<Path>, limit: usize) -> Result<Corpus> {
        let path = path.as_ref();
        let mut corpus = Corpus::from_text(path.display().to_string(), String::new());
        if fs::metadata(path).map_err(Error::io("read", path))?.is_dir() {
            corpus.append_below(path, limit, |_| true)?;
        } else {
            let text = read_text(path, limit).map_err(Error::io("read", path))?;
            let text = text.ok_or_else(|| Error::data(&corpus.name, "is not UTF-8 text"))?;
            corpus.append(&text, limit);
        }
        if corpus.text.is_empty() {
            return Err(Error::data(corpus.name, "holds no text"));
        }
        Ok(corpus)
    }

    /// The first `limit` bytes of the Rust sources that cargo keeps in `$CARGO_HOME/registry/src`.
    ///
    /// # Errors
    /// [`Error::Data`] if there are none, [`Error::Io`] if they cannot be read.
    pub fn cargo_registry(limit: usize) -> Result<Corpus> {
        let none = |root: &Path| {
            let root = root.display().to_string();
            Error::data(root, "no Rust sources downloaded by cargo; name a text file or directory instead")
        };
        let home = env::var_os("CARGO_HOME").map(PathBuf::from);
        let home = home.or_else(|| env::home_dir().map(|home| home.join(".cargo")));
        let root = home.unwrap_or_default().join("registry/src");
        if !root.is_dir() {
            return Err(none(&root));
        }
        let mut corpus = Corpus::from_text(root.display().to_string(), String::new());
        corpus
            .append_below(&root, limit, |file| file.extension().is_some_and(|extension| extension == "rs"))?;
        if corpus.text.is_empty() { Err(none(&root)) } else { Ok(corpus) }
    }

    /// Text that is already in memory; error messages refer to it as `name`.
    pub fn from_text(name: impl Into<String>, text: impl Into<String>) -> Corpus {
        Corpus { name: name.into(), text: text.into(), files: 0, skipped: 0, truncated: false }
    }

    /// The file or directory that it was read from.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Number of files in it.
    pub fn files(&self) -> usize {
        self.files
    }

    /// Number of files and directories that were skipped because they cannot be read or are not text.
    pub fn skipped(&self) -> usize {
        self.skipped
    }

    /// Whether there was more text than the limit.
    pub fn is_truncated(&self) -> bool {
        self.truncated
    }

    fn append_below(&mut self, root: &Path, limit: usize, wanted: impl Fn(&Path) -> bool) -> Result<()> {
        // A stack with the first name on top.
        let mut pending = entries(root).map_err(Error::io("read", root))?;
        while let Some(path) = pending.pop()
            && !self.truncated
        {
            // The type of the entry itself: links are not followed, so there are no cycles.
            match fs::symlink_metadata(&path) {
                Ok(found) if found.is_dir() => match entries(&path) {
                    Ok(below) => pending.extend(below),
                    Err(_) => self.skipped += 1,
                },
                Ok(found) if found.is_file() && wanted(&path) => match small_text(&path, found.len()) {
                    Some(text) => self.append(&text, limit),
                    None => self.skipped += 1,
                },
                Ok(_) => {}
                Err(_) => self.skipped += 1,
            }
        }
        Ok(())
    }

    fn append(&mut self, text: &str, limit: usize) {
        let room = limit - self.text.len();
        self.truncated = text.len() > room;
        let kept = text.floor_char_boundary(room);
        if kept > 0 {
            self.files += 1;
            self.text.push_str(&text[..kept]);
        }
    }
}

/// The entries of a directory that are not hidden, with the first name last.
fn entries(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if !entry.file_name().as_encoded_bytes().starts_with(b".") {
            names.push(entry.path());
        }
    }
    names.sort_unstable_by(|left, right| right.cmp(left));
    Ok(names)
}

/// The text of a file below a directory, unless it is too large or not text.
fn small_text(path: &Path, bytes: u64) -> Option<String> {
    if bytes > FILE_LIMIT {
        return None;
    }
    fs::read_to_string(path).ok().filter(|text| !text.contains('\0'))
}

/// The text of a file, or of a longer file a little more than `limit` bytes; `None` if it is not UTF-8.
fn read_text(path: &Path, limit: usize) -> io::Result<Option<String>> {
    // Leaves room for a character that straddles the limit.
    let most = limit.saturating_add(char::MAX_LEN_UTF8);
    let mut bytes = Vec::new();
    File::open(path)?.take(most as u64).read_to_end(&mut bytes)?;
    if let Err(error) = std::str::from_utf8(&bytes)
        && error.error_len().is_none()
        && bytes.len() == most
    {
        bytes.truncate(error.valid_up_to());
    }
    Ok(String::from_utf8(bytes).ok())
}
