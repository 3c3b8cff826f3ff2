//! The behaviour of the crate, tested on a stand-in for the library.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod driver;
mod library;
mod registrations;
mod settings;
#[path = "../stand_in/mod.rs"]
mod stand_in;
mod transfers;

use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use tempfile::NamedTempFile;

/// An open file with these bytes and a name; cuFile accepts no file without a name.
fn file(bytes: &[u8]) -> Arc<NamedTempFile> {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    Arc::new(file)
}

/// The contents of `file`.
fn contents(file: &NamedTempFile) -> Vec<u8> {
    let file = file.as_file();
    let mut bytes = vec![0; file.metadata().unwrap().len().try_into().unwrap()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}
