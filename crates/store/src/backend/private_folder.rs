//! A folder private to this process, below the system's temporary one. Nobody else can look into it, or place a link
//! where a file is about to be created. It is removed when the process exits; that of a process which was killed, when
//! another one makes its own.

use std::ffi::{CString, OsStr};
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::{env, process};

use crate::abandoned::{is_random, locked, remove_abandoned};
use crate::sync::Mutex;

/// The folder of this process.
struct Folder {
    path: PathBuf,
    /// The process that made it.
    maker: u32,
    /// Keeps it locked.
    _open: File,
}

static FOLDER: Mutex<Option<Folder>> = Mutex::new(None);

/// How such folders' names begin. The rest is random, of so many letters and digits.
const PREFIX: &str = "ssdtrain-cufile-";
const LETTERS: usize = 6;
/// How the names of cuFile's logs begin.
const LOG: &str = "cufile";

/// The path of the folder. The first call creates it.
pub(super) fn private_folder() -> io::Result<PathBuf> {
    let mut folder = FOLDER.lock();
    if let Some(folder) = &*folder {
        return Ok(folder.path.clone());
    }
    let below = env::temp_dir();
    let (open, path) = make(&below)?;
    remove_abandoned(&below, &open, |name| is_random(name, PREFIX, LETTERS), remove_log);
    // SAFETY: the function is part of this program, takes no arguments and does not unwind. If `atexit` has no room
    // for it, the folder is left behind.
    unsafe { libc::atexit(remove) };
    *folder = Some(Folder { path: path.clone(), maker: process::id(), _open: open });
    Ok(path)
}

/// Creates a folder that only its owner may enter, under an unpredictable name, and locks it.
fn make(below: &Path) -> io::Result<(File, PathBuf)> {
    locked(|| {
        let template = below.join(format!("{PREFIX}{}", "X".repeat(LETTERS)));
        let mut name = CString::new(template.as_os_str().as_bytes())?.into_bytes_with_nul();
        // SAFETY: `name` ends with a zero and is written to within its length.
        if unsafe { libc::mkdtemp(name.as_mut_ptr().cast()) }.is_null() {
            return Err(io::Error::last_os_error());
        }
        name.pop();
        let path = PathBuf::from(OsStr::from_bytes(&name));
        Ok((File::open(&path)?, path))
    })
}

/// Removes a folder with nothing but logs in it.
fn remove_log(folder: &Path) -> io::Result<()> {
    let entries = fs::read_dir(folder)?.flatten();
    for log in entries.filter(|entry| entry.file_name().as_bytes().starts_with(LOG.as_bytes())) {
        fs::remove_file(log.path())?;
    }
    fs::remove_dir(folder)
}

/// Removes the folder and its contents when the process that created it exits. A fork of that process leaves it in
/// place.
extern "C" fn remove() {
    if let Some(folder) = FOLDER.try_lock().and_then(|mut folder| folder.take())
        && folder.maker == process::id()
    {
        // Nobody is left to report a failure to.
        drop(fs::remove_dir_all(folder.path));
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn each_is_new_and_its_owners_alone() {
        let below = tempfile::tempdir().unwrap();
        let ((_, first), (_, second)) = (make(below.path()).unwrap(), make(below.path()).unwrap());
        assert_ne!(first, second);
        for folder in [first, second] {
            assert_eq!(fs::metadata(folder).unwrap().permissions().mode() & 0o7777, 0o700);
        }
    }

    #[test]
    fn one_that_cannot_be_made_is_an_error() {
        assert_eq!(make(Path::new("/nowhere")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn only_folders_of_logs_are_removed() {
        let below = tempfile::tempdir().unwrap();
        let of = |contents: &[&str]| {
            let (_, folder) = make(below.path()).unwrap();
            contents.iter().for_each(|name| fs::write(folder.join(name), "").unwrap());
            folder
        };
        let (empty, logs, others) = (of(&[]), of(&["cufile.log", "cufile_7.log"]), of(&["notes"]));
        let (open, live) = make(below.path()).unwrap();
        remove_abandoned(below.path(), &open, |name| is_random(name, PREFIX, LETTERS), remove_log);
        assert_eq!([empty, logs, others, live].map(|folder| folder.exists()), [false, false, true, true]);
    }
}
