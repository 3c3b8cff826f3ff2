//! Files that are written whole.

use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result};
use tempfile::NamedTempFile;

/// Writes a file whole: whenever the program ends, it has the old contents or the new.
///
/// # Errors
/// If that is not possible.
pub(crate) fn replace(path: &Path, text: &str) -> Result<()> {
    let replace = || -> Result<()> {
        let mut file = beside(path)?;
        file.write_all(text.as_bytes())?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        Ok(())
    };
    replace().with_context(|| format!("cannot write {}", path.display()))
}

/// An error if [`replace`] would fail for want of a directory that can be written to.
pub(crate) fn ensure_replaceable(path: &Path) -> Result<()> {
    beside(path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(())
}

fn beside(path: &Path) -> Result<NamedTempFile> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    // The permissions of any new file, instead of a secret one's.
    let permissions = Permissions::from_mode(0o666);
    let directory = directory.unwrap_or_else(|| Path::new("."));
    Ok(tempfile::Builder::new().permissions(permissions).tempfile_in(directory)?)
}
