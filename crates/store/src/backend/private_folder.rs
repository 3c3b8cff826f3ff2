//! A folder private to this process, below the system's temporary one. Nobody else can look into it, or place a link
//! where a file is about to be created. It is removed when the process exits.

use std::ffi::{CString, OsStr};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::{env, fs, process};

use crate::sync::Mutex;

/// The folder, and the process that made it.
static FOLDER: Mutex<Option<(PathBuf, u32)>> = Mutex::new(None);

/// The path of the folder. The first call creates it.
pub(super) fn private_folder() -> io::Result<PathBuf> {
    let mut folder = FOLDER.lock();
    if let Some((path, _)) = &*folder {
        return Ok(path.clone());
    }
    let path = make(&env::temp_dir())?;
    // SAFETY: the function is part of this program, takes no arguments and does not unwind. If `atexit` has no room
    // for it, the folder is left behind.
    unsafe { libc::atexit(remove) };
    *folder = Some((path.clone(), process::id()));
    Ok(path)
}

/// Creates a folder that only its owner may enter, under an unpredictable name.
fn make(below: &Path) -> io::Result<PathBuf> {
    let template = CString::new(below.join("ssdtrain-XXXXXX").as_os_str().as_bytes())?;
    let mut name = template.into_bytes_with_nul();
    // SAFETY: `name` ends with a zero and is written to within its length.
    if unsafe { libc::mkdtemp(name.as_mut_ptr().cast()) }.is_null() {
        return Err(io::Error::last_os_error());
    }
    name.pop();
    Ok(PathBuf::from(OsStr::from_bytes(&name)))
}

/// Removes the folder and its contents when the process that created it exits. A fork of that process leaves it in
/// place.
extern "C" fn remove() {
    if let Some((path, maker)) = FOLDER.try_lock().and_then(|mut folder| folder.take())
        && maker == process::id()
    {
        // Nobody is left to report a failure to.
        drop(fs::remove_dir_all(path));
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn each_is_new_and_its_owners_alone() {
        let below = tempfile::tempdir().unwrap();
        let (first, second) = (make(below.path()).unwrap(), make(below.path()).unwrap());
        assert_ne!(first, second);
        for folder in [first, second] {
            assert_eq!(fs::metadata(folder).unwrap().permissions().mode() & 0o7777, 0o700);
        }
    }

    #[test]
    fn one_that_cannot_be_made_is_an_error() {
        assert_eq!(make(Path::new("/nowhere")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
