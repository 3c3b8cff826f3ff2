//! Spill directories: which of them are safe to create files in.
//!
//! A spill file without a name cannot be reached by anybody else, wherever it is. A file that has a name for a moment
//! (cuFile, and file systems without `O_TMPFILE`) can be moved away or replaced by whoever may rename what is in its
//! directory: the directory's owner and, unless it is sticky, everybody who may write to it. One that is opened again by
//! its name (cuFile) can be replaced by whoever may do so in a directory above as well.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::error::{Error, ErrorKind, Result};
use crate::limits;

/// A directory that was checked. It stays the same one, whatever its path leads to later.
pub(super) struct Directory {
    opened: File,
    /// Without symbolic links.
    path: PathBuf,
}

/// Whose directory it is, and who else may write to it.
#[derive(Clone, Copy, Debug)]
struct Access {
    /// The owner, and the user who asks.
    owner: u32,
    user: u32,
    mode: u32,
}

impl Directory {
    /// Opens the directory that `path` leads to, through symbolic links or not.
    pub(super) fn open(path: &Path) -> Result<Directory> {
        let unusable = |error| Directory::unusable(path, error);
        let real = fs::canonicalize(path).map_err(unusable)?;
        let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_PATH;
        // Nobody can have put a link there since: that would be an error.
        let opened = OpenOptions::new().read(true).custom_flags(flags).open(&real).map_err(unusable)?;
        let metadata = opened.metadata().map_err(unusable)?;
        Access::to(&metadata).check().map_err(|why| {
            let message = format!("spill directory {}: {why}", real.display());
            Error::new(ErrorKind::Directory, message)
        })?;
        Ok(Directory { opened, path: real })
    }

    /// Refuses a directory that anybody may move away, since one above it is open to all. It matters only to files that are
    /// opened again by their names.
    pub(super) fn check_above(&self) -> Result<()> {
        for above in self.path.ancestors().skip(1) {
            let metadata = fs::metadata(above).map_err(|error| Directory::unusable(above, error))?;
            if is_open_to_all(metadata.mode()) {
                let (path, above, mode) = (self.path.display(), above.display(), metadata.mode() & 0o7777);
                let message = format!(
                    "spill directory {path}: everybody may write to {above} above it (mode {mode:04o}), and could put another \
                     in its place; make that sticky (chmod +t {above}), or name a directory elsewhere"
                );
                return Err(Error::new(ErrorKind::Directory, message));
            }
        }
        Ok(())
    }

    /// The error of a directory that cannot be opened or written to.
    pub(super) fn unusable(path: &Path, error: io::Error) -> Error {
        if let Some(advice) = limits::on_files(&error) {
            let message =
                format!("no file can be opened in the spill directory {}; {advice}", path.display());
            return Error::io(ErrorKind::Io, message, error);
        }
        let message = match error.kind() {
            io::ErrorKind::NotFound => "does not exist; create it or name another",
            io::ErrorKind::NotADirectory => "is not a directory; name one",
            io::ErrorKind::ReadOnlyFilesystem => "is on a read-only file system; name a writable one",
            io::ErrorKind::PermissionDenied => "is not writable by this user; allow it or name another",
            io::ErrorKind::StorageFull => "is on a full file system; free some space or name another",
            io::ErrorKind::QuotaExceeded => {
                "is where this user's quota is used up; free some space or name another"
            }
            _ => "cannot hold a spill file; name another",
        };
        Error::directory(path, message, error)
    }

    /// Its path without symbolic links.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// A path to it that leads to no other directory, whoever renames what, for as long as this value exists; where there
    /// is no `/proc`, its path.
    pub(super) fn fixed_path(&self) -> PathBuf {
        let fixed = PathBuf::from(format!("/proc/self/fd/{}", self.opened.as_raw_fd()));
        if fixed.exists() { fixed } else { self.path.clone() }
    }
}

impl Access {
    fn to(directory: &Metadata) -> Access {
        // SAFETY: the call has no arguments and cannot fail.
        let user = unsafe { libc::geteuid() };
        Access { owner: directory.uid(), user, mode: directory.mode() }
    }

    /// Why files in the directory are not safe from others, and what to do about it.
    fn check(self) -> Result<(), String> {
        const ROOT: u32 = 0;
        let Access { owner, user, mode } = self;
        if owner == user {
            // A group that one's own directory is open to is of one's own choice: often nobody else is in it.
            if !is_open_to_all(mode) {
                return Ok(());
            }
            return Err(format!(
                "is writable by everybody (mode {:04o}), who could replace what is in it; keep others out (chmod o-w), make it \
                 sticky (chmod +t), or name another",
                mode & 0o7777
            ));
        }
        // Root of another user namespace, or over NFS.
        let trusted = owner == ROOT || owner == overflow_user() || user == ROOT;
        if !trusted {
            return Err(format!(
                "belongs to another user (uid {owner}), who could replace what is in it; create a directory of your own, \
                 in it or elsewhere, and name that"
            ));
        }
        if mode & 0o022 != 0 && mode & libc::S_ISVTX == 0 {
            return Err(format!(
                "is writable by others (mode {:04o}), who could replace what is in it; make it sticky (chmod +t), or \
                 create a directory of your own in it and name that",
                mode & 0o7777
            ));
        }
        Ok(())
    }
}

/// Whether everybody may rename what is in a directory of this mode.
fn is_open_to_all(mode: u32) -> bool {
    mode & libc::S_IWOTH != 0 && mode & libc::S_ISVTX == 0
}

/// Whom the kernel names where it cannot name the owner.
fn overflow_user() -> u32 {
    let told = fs::read_to_string("/proc/sys/kernel/overflowuid").ok();
    told.and_then(|told| told.trim().parse().ok()).unwrap_or(65_534)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn whose_directories_are_used() {
        let nobody = overflow_user();
        let check = |owner, user, mode| Access { owner, user, mode: libc::S_IFDIR | mode }.check();
        for (owner, user, mode) in [
            (1000, 1000, 0o700),
            // One's own, also open to a group (umask 002), or sticky.
            (1000, 1000, 0o2775),
            (1000, 1000, 0o1777),
            // The likes of /tmp and /mnt/nvme, also where root is somebody else's.
            (0, 1000, 0o1777),
            (nobody, 1000, 0o1777),
            (0, 1000, 0o755),
            (0, 1000, 0o3775),
            // Root in a container.
            (0, 0, 0o755),
            (1000, 0, 0o755),
            (1000, 0, 0o1777),
        ] {
            assert_eq!(check(owner, user, mode), Ok(()), "{owner}, {user}, {mode:o}");
        }
        for (owner, user, mode, reason) in [
            (1000, 1000, 0o777, "mode 0777"),
            (1000, 1000, 0o702, "chmod o-w"),
            // Root in a container, and an `emptyDir`.
            (0, 0, 0o2777, "chmod +t"),
            (0, 1000, 0o777, "mode 0777"),
            (0, 1000, 0o2775, "mode 2775"),
            (nobody, 1000, 0o777, "chmod +t"),
            (1000, 0, 0o777, "writable by others"),
            // Even a sticky directory's owner may rename what is in it.
            (1001, 1000, 0o1777, "uid 1001"),
            (1001, 1000, 0o755, "of your own"),
        ] {
            let why = check(owner, user, mode).unwrap_err();
            assert!(why.contains(reason), "{owner}, {user}, {mode:o}: {why}");
        }
    }

    #[test]
    fn a_link_is_followed_once_and_the_real_directory_is_checked() {
        let below = tempfile::tempdir().unwrap();
        let (real, link) = (below.path().join("real"), below.path().join("link"));
        fs::create_dir(&real).unwrap();
        symlink(&real, &link).unwrap();
        let directory = Directory::open(&link).unwrap();
        assert_eq!(directory.path(), fs::canonicalize(&real).unwrap());
        // Whatever takes its place now, files are created in what was checked.
        let moved = below.path().join("moved");
        fs::rename(&real, &moved).unwrap();
        fs::create_dir(&real).unwrap();
        fs::write(directory.fixed_path().join("file"), "").unwrap();
        assert!(moved.join("file").exists() && !real.join("file").exists());
    }

    #[test]
    fn a_directory_that_others_may_write_to_is_named_with_the_remedy() {
        let below = tempfile::tempdir().unwrap();
        let open = below.path().join("open");
        fs::create_dir(&open).unwrap();
        let allow = |mode| fs::set_permissions(&open, fs::Permissions::from_mode(mode)).unwrap();
        allow(0o777);
        let error = Directory::open(&open).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Directory);
        let message = error.to_string();
        assert!(message.contains("/open: is writable by everybody (mode 0777)"), "{message}");
        for mode in [0o1777, 0o775] {
            allow(mode);
            assert!(Directory::open(&open).is_ok(), "{mode:o}");
        }
        if std::os::unix::fs::chown(&open, Some(1), None).is_err() {
            return eprintln!("skipped: only root can give a directory away");
        }
        let message = Directory::open(&open).err().unwrap().to_string();
        assert!(message.contains("/open: is writable by others (mode 0775)"), "{message}");
        allow(0o1777);
        assert!(Directory::open(&open).is_ok());
    }

    #[test]
    fn a_directory_that_anybody_may_move_away_is_named_with_what_is_above_it() {
        let below = tempfile::tempdir().unwrap();
        let open = below.path().join("open");
        let spill = open.join("between/spill");
        fs::create_dir_all(&spill).unwrap();
        let directory = Directory::open(&spill).unwrap();
        let allow = |mode| fs::set_permissions(&open, fs::Permissions::from_mode(mode)).unwrap();
        for mode in [0o755, 0o775, 0o1777] {
            allow(mode);
            assert!(directory.check_above().is_ok(), "{mode:o}");
        }
        allow(0o777);
        let error = directory.check_above().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Directory);
        let (message, open) = (error.to_string(), fs::canonicalize(&open).unwrap());
        assert!(message.contains(&format!("(chmod +t {})", open.display())), "{message}");
    }
}
