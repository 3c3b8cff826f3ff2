//! How a spill file is opened, and what its file system can do.

use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::mem::BLOCK;

/// Memory alignment for direct transfers where the kernel does not tell it (before Linux 6.1).
const UNKNOWN_ALIGNMENT: usize = 4096;
/// Smaller memory alignments that a device may report are not relied on.
const LEAST_ALIGNMENT: usize = 512;

/// How a spill file comes to be without a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Birth {
    /// It never has one.
    Nameless,
    /// It loses it at once: cuFile takes no files opened with `O_TMPFILE`.
    Unlinked,
}

/// Opens a file that has no name, readable and writable by its owner only and closed on exec.
pub(super) fn create(directory: &Path, birth: Birth) -> io::Result<File> {
    match birth {
        Birth::Nameless => create_nameless(directory),
        Birth::Unlinked => create_and_unlink(directory),
    }
}

fn create_nameless(directory: &Path) -> io::Result<File> {
    // O_EXCL: nor can the file ever be given a name.
    match owner_only().custom_flags(libc::O_TMPFILE | libc::O_EXCL).open(directory) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {
            create_and_unlink(directory)
        }
        opened => opened,
    }
}

/// For file systems without nameless files: makes one under a name nobody can guess, and removes the name.
fn create_and_unlink(directory: &Path) -> io::Result<File> {
    let path = directory.join(format!(".ssdtrain-{:016x}", RandomState::new().build_hasher().finish()));
    let file = owner_only().create_new(true).open(&path).map_err(|error| match error.kind() {
        // The directory is there; that nothing can be made in it must not read as if it were not.
        io::ErrorKind::NotFound => io::ErrorKind::Unsupported.into(),
        _ => error,
    })?;
    fs::remove_file(&path)?;
    Ok(file)
}

fn owner_only() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    options
}

/// Turns on direct I/O and returns the alignment it wants of memory, or says why it cannot be.
pub(super) fn set_direct(file: &File) -> Result<usize, String> {
    if is_in_memory(file).map_err(|error| error.to_string())? {
        return Err("it is in memory (tmpfs)".to_owned());
    }
    let alignment = direct_alignment(file).map_err(|error| error.to_string())?;
    let (memory, offset) = alignment.unwrap_or((UNKNOWN_ALIGNMENT, BLOCK));
    if offset == 0 {
        return Err("the file system has no direct I/O".to_owned());
    }
    if memory > BLOCK || offset > BLOCK {
        return Err(format!("it wants blocks of {} bytes", memory.max(offset)));
    }
    // SAFETY: a plain system call on an open file.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error().to_string());
    }
    // SAFETY: as above; only this file's flags change.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags | libc::O_DIRECT) } < 0 {
        return Err(io::Error::last_os_error().to_string());
    }
    Ok(memory.max(LEAST_ALIGNMENT))
}

/// The alignments that direct I/O wants of memory and of file offsets, 0 if it cannot be; `None` if untold.
fn direct_alignment(file: &File) -> io::Result<Option<(usize, usize)>> {
    let mut buffer = MaybeUninit::<libc::statx>::zeroed();
    let (fd, flags, mask) = (file.as_raw_fd(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN);
    // SAFETY: the path is an empty C string, and `buffer` has room for the answer.
    if unsafe { libc::statx(fd, c"".as_ptr(), flags, mask, buffer.as_mut_ptr()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeroed above, and a statx of zeroes is valid.
    let answer = unsafe { buffer.assume_init() };
    let told = answer.stx_mask & libc::STATX_DIOALIGN != 0;
    Ok(told.then_some((answer.stx_dio_mem_align as usize, answer.stx_dio_offset_align as usize)))
}

/// Whether the file lies in memory: such file systems take `O_DIRECT` and ignore it.
fn is_in_memory(file: &File) -> io::Result<bool> {
    const RAMFS_MAGIC: u32 = 0x8584_58f6;
    let mut buffer = MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: `buffer` has room for the answer.
    if unsafe { libc::fstatfs(file.as_raw_fd(), buffer.as_mut_ptr()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeroed above, and a statfs of zeroes is valid.
    let kind = unsafe { buffer.assume_init() }.f_type as u32;
    Ok(kind == libc::TMPFS_MAGIC as u32 || kind == RAMFS_MAGIC)
}

/// Bytes free on the file's disk for this user.
pub(super) fn free_bytes(file: &File) -> io::Result<u64> {
    let mut buffer = MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: `buffer` has room for the answer.
    if unsafe { libc::fstatvfs(file.as_raw_fd(), buffer.as_mut_ptr()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeroed above, and a statvfs of zeroes is valid.
    let answer = unsafe { buffer.assume_init() };
    Ok(answer.f_bavail.saturating_mul(answer.f_frsize))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn nobody_else_can_open_the_file_however_it_was_made() {
        let directory = tempfile::tempdir().unwrap();
        for birth in [Birth::Nameless, Birth::Unlinked] {
            let metadata = create(directory.path(), birth).unwrap().metadata().unwrap();
            assert_eq!((metadata.nlink(), metadata.mode() & 0o777), (0, 0o600));
            assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        }
    }
}
