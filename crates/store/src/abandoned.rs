//! Files and folders that have a name while a process uses them, and what killed processes have left of such.
//!
//! Whoever makes one keeps it locked (`flock`) for as long as it is open. A lock ends with the last process that has it, in
//! whatever container or on whatever host that is, so what can be locked is abandoned. Where files have no locks, nothing
//! is taken for abandoned.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Locks what `make` makes. Its name must be one that nobody else has had or will have.
pub(super) fn locked(mut make: impl FnMut() -> io::Result<(File, PathBuf)>) -> io::Result<(File, PathBuf)> {
    loop {
        let (file, path) = make()?;
        let gone = |error: io::Error| error.kind() == io::ErrorKind::NotFound;
        // Before it was locked, another process may have taken it for abandoned.
        if file.lock().is_err() || !fs::symlink_metadata(&path).is_err_and(gone) {
            return Ok((file, path));
        }
    }
}

/// Removes what is abandoned in `directory` and has such a name, with `remove`, if it belongs to whom `own` belongs to.
/// Best effort: what cannot be removed only takes room.
pub(super) fn remove_abandoned(
    directory: &Path,
    own: &File,
    is_such: fn(&str) -> bool,
    remove: fn(&Path) -> io::Result<()>,
) {
    let Ok(owner) = own.metadata().map(|own| own.uid()) else { return };
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_name().to_str().is_some_and(is_such)) {
        let path = entry.path();
        if fs::symlink_metadata(&path).is_ok_and(|found| found.uid() == owner)
            && open(&path).is_ok_and(|file| file.try_lock().is_ok() && remove(&path).is_ok())
        {
            tracing::info!(path = %path.display(), "removed what a process that is gone has left");
        }
    }
}

/// Whether `name` is `prefix` and so many letters or digits.
pub(super) fn is_random(name: &str, prefix: &str, letters: usize) -> bool {
    let drawn = name.strip_prefix(prefix);
    drawn
        .is_some_and(|drawn| drawn.len() == letters && drawn.bytes().all(|byte| byte.is_ascii_alphanumeric()))
}

/// A file or a folder, and nothing that is waited for.
fn open(path: &Path) -> io::Result<File> {
    // Over NFS, only what is open for writing can be locked. No folder can be.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    OpenOptions::new().read(true).write(!path.is_dir()).custom_flags(flags).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort_unstable();
        names
    }

    fn create(path: PathBuf) -> io::Result<(File, PathBuf)> {
        Ok((File::create_new(&path)?, path))
    }

    #[test]
    fn only_what_is_locked_by_nobody_and_has_such_a_name_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let (own, _) = locked(|| create(at("own-1"))).unwrap();
        let (used, _) = locked(|| create(at("own-2"))).unwrap();
        for name in ["own-3", "own-33", "own-", "own-.", "another"] {
            fs::write(at(name), "").unwrap();
        }
        std::os::unix::fs::symlink(at("another"), at("own-4")).unwrap();
        let remove = || {
            remove_abandoned(
                directory.path(),
                &own,
                |name| is_random(name, "own-", 1),
                |path| fs::remove_file(path),
            )
        };
        remove();
        assert_eq!(
            names(directory.path()),
            ["another", "own-", "own-.", "own-1", "own-2", "own-33", "own-4"]
        );
        drop(used);
        remove();
        assert_eq!(names(directory.path()), ["another", "own-", "own-.", "own-1", "own-33", "own-4"]);
    }

    #[test]
    fn what_belongs_to_somebody_else_stays() {
        let directory = tempfile::tempdir().unwrap();
        let (own, _) = locked(|| create(directory.path().join("own-1"))).unwrap();
        let other = directory.path().join("own-2");
        fs::write(&other, "").unwrap();
        if std::os::unix::fs::chown(&other, Some(1), None).is_err() {
            return eprintln!("skipped: only root can give a file away");
        }
        remove_abandoned(directory.path(), &own, |_| true, |path| fs::remove_file(path));
        assert!(other.exists());
    }

    #[test]
    fn what_was_removed_before_it_was_locked_is_made_again() {
        let directory = tempfile::tempdir().unwrap();
        let mut made = 0;
        let (_, path) = locked(|| {
            made += 1;
            let (file, path) = create(directory.path().join(made.to_string()))?;
            if made == 1 {
                fs::remove_file(&path)?;
            }
            Ok((file, path))
        })
        .unwrap();
        assert_eq!(path, directory.path().join("2"));
    }
}
