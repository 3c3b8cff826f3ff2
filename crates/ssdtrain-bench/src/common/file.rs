//! Files that are replaced atomically.

use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result};
use tempfile::NamedTempFile;

/// Replaces a file atomically: whenever the program ends, the file has either the old contents or the new.
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

/// Creates a file, with all of the text or not at all.
///
/// # Errors
/// If there is such a file already, or it cannot be written.
pub(crate) fn create(path: &Path, text: &str) -> Result<()> {
    let create = || -> Result<()> {
        let mut file = beside(path)?;
        file.write_all(text.as_bytes())?;
        file.as_file().sync_all()?;
        file.persist_noclobber(path)?;
        Ok(())
    };
    create().with_context(|| format!("cannot write {}", path.display()))
}

/// An error if [`replace`] or [`create`] would fail because there is no writable directory.
pub(crate) fn ensure_replaceable(path: &Path) -> Result<()> {
    beside(path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(())
}

fn beside(path: &Path) -> Result<NamedTempFile> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    // The permissions of an ordinary new file, instead of those of a private temporary one.
    let permissions = Permissions::from_mode(0o666);
    let directory = directory.unwrap_or_else(|| Path::new("."));
    Ok(tempfile::Builder::new().permissions(permissions).tempfile_in(directory)?)
}
