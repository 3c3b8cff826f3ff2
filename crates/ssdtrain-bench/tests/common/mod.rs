//! What the tests of the command line share.

use tempfile::TempDir;

/// A directory with a text to train on.
pub(crate) fn workplace() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    let text = "the quick brown fox jumps over the lazy dog\n".repeat(200);
    std::fs::write(directory.path().join("text.txt"), text).unwrap();
    directory
}
