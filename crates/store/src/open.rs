//! Opens spill files, and finds out what their file system supports.

use std::fs::{self, File, Metadata, OpenOptions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use libc::c_int;

use crate::abandoned::{is_random, locked, remove_abandoned};
use crate::mem::BLOCK;
use crate::region::Disk;

/// The memory alignment assumed for direct I/O where the kernel does not report it (before Linux 6.1).
const UNKNOWN_ALIGNMENT: usize = 4096;
/// The attribute of files that are changed in place (`chattr +C`).
const NO_COPY_ON_WRITE: c_int = 0x0080_0000;
/// Devices may report smaller memory alignments; those are not relied on.
const LEAST_ALIGNMENT: usize = 512;

/// How the names of spill files begin. The rest is random, of so many digits.
const PREFIX: &str = ".ssdtrain-";
const DIGITS: usize = 16;

/// The unguessable name of a file that needs one for a moment. The name is removed from its directory on drop.
#[derive(Debug)]
pub(super) struct Name(Option<PathBuf>);

/// Creates a file without a name. Only its owner can read and write it, and it is closed on exec.
pub(super) fn create_nameless(directory: &Path) -> io::Result<File> {
    // O_EXCL: the file can never be given a name either.
    match owner_only().custom_flags(libc::O_TMPFILE | libc::O_EXCL).open(directory) {
        // Not every file system supports O_TMPFILE.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {
            let (file, name) = create_named(directory)?;
            name.remove()?;
            Ok(file)
        }
        opened => opened,
    }
}

/// Like [`create_nameless`], but with a name. The file is locked, so that [`remove_left_over`] leaves it alone.
pub(super) fn create_named(directory: &Path) -> io::Result<(File, Name)> {
    let (file, path) = locked(|| {
        let path =
            directory.join(format!("{PREFIX}{:0DIGITS$x}", RandomState::new().build_hasher().finish()));
        // O_EXCL, by `create_new`: the file is new, whatever others put there, and no link is followed. cuFile refuses descriptors
        // that were opened with O_NOFOLLOW besides.
        let file = owner_only().create_new(true).open(&path).map_err(|error| match error.kind() {
            // The directory exists. The error must not suggest otherwise if no file can be created in it.
            io::ErrorKind::NotFound => io::ErrorKind::Unsupported.into(),
            _ => error,
        })?;
        Ok((file, path))
    })?;
    Ok((file, Name(Some(path))))
}

/// Removes the files whose names processes that are gone could not remove any more. `own` is a file of this process.
pub(super) fn remove_left_over(directory: &Path, own: &File) {
    remove_abandoned(directory, own, |name| is_random(name, PREFIX, DIGITS), |path| fs::remove_file(path));
}

impl Name {
    /// Whether it still leads to this file: whoever may rename a directory above could put another one there.
    pub(super) fn leads_to(&self, file: &File) -> bool {
        let number = |of: io::Result<Metadata>| of.ok().map(|of| (of.dev(), of.ino()));
        let found = self.0.as_ref().and_then(|path| number(fs::symlink_metadata(path)));
        found.is_some() && found == number(file.metadata())
    }

    /// Removes the name from its directory. The file is freed once nobody has it open.
    pub(super) fn remove(mut self) -> io::Result<()> {
        self.0.take().map_or(Ok(()), fs::remove_file)
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        if let Some(path) = self.0.take()
            && let Err(error) = fs::remove_file(&path)
        {
            tracing::warn!(file = %path.display(), %error, "a spill file could not be removed");
        }
    }
}

fn owner_only() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    options
}

/// Turns on direct I/O and returns the memory alignment it requires, or says why direct I/O is not possible.
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

/// The alignments that direct I/O requires of memory and of file offsets, 0 if it is not supported; `None` if the
/// kernel does not report them.
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

/// Has btrfs change the file, which must be empty, in place, and take no checksums of it. Otherwise each write takes new
/// room, so that on a full disk even what the file already has cannot be written. Other file systems are left as they are.
pub(super) fn write_in_place(file: &File) -> io::Result<()> {
    if !is_on_btrfs(file)? {
        return Ok(());
    }
    let mut attributes: c_int = 0;
    // SAFETY: a plain system call on an open file. Despite its definition, the kernel writes an int, which there is room for.
    if unsafe { libc::ioctl(file.as_raw_fd(), libc::FS_IOC_GETFLAGS, &raw mut attributes) } < 0 {
        return Err(io::Error::last_os_error());
    }
    attributes |= NO_COPY_ON_WRITE;
    // SAFETY: as above; the kernel reads an int.
    if unsafe { libc::ioctl(file.as_raw_fd(), libc::FS_IOC_SETFLAGS, &raw const attributes) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Whether the file is in memory: such file systems accept `O_DIRECT` and ignore it.
pub(super) fn is_in_memory(file: &File) -> io::Result<bool> {
    const RAMFS_MAGIC: u32 = 0x8584_58f6;
    let kind = file_system(file)?;
    Ok(kind == libc::TMPFS_MAGIC as u32 || kind == RAMFS_MAGIC)
}

fn is_on_btrfs(file: &File) -> io::Result<bool> {
    Ok(file_system(file)? == libc::BTRFS_SUPER_MAGIC as u32)
}

/// The number that stands for the kind of file system that the file is on.
fn file_system(file: &File) -> io::Result<u32> {
    let mut buffer = MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: `buffer` has room for the answer.
    if unsafe { libc::fstatfs(file.as_raw_fd(), buffer.as_mut_ptr()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeroed above, and a statfs of zeroes is valid.
    Ok(unsafe { buffer.assume_init() }.f_type as u32)
}

/// Whether files in a directory are in memory. One that cannot be opened is an error elsewhere.
pub(super) fn holds_memory(directory: &Path) -> bool {
    File::open(directory).and_then(|directory| is_in_memory(&directory)).unwrap_or(false)
}

/// How full the file's disk is. On btrfs, which counts what files have taken only when it commits, every 30 seconds, it has
/// that done first.
pub(super) fn disk_of(file: &File) -> io::Result<Disk> {
    // SAFETY: a plain system call on an open file.
    if is_on_btrfs(file)? && unsafe { libc::syncfs(file.as_raw_fd()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut buffer = MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: `buffer` has room for the answer.
    if unsafe { libc::fstatvfs(file.as_raw_fd(), buffer.as_mut_ptr()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeroed above, and a statvfs of zeroes is valid.
    let answer = unsafe { buffer.assume_init() };
    let bytes = |blocks: u64| blocks.saturating_mul(answer.f_frsize);
    Ok(Disk { bytes: bytes(answer.f_blocks), free: bytes(answer.f_bavail) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_else_can_open_the_file_however_it_was_made() {
        let directory = tempfile::tempdir().unwrap();
        let (named, name) = create_named(directory.path()).unwrap();
        assert_eq!(named.metadata().unwrap().mode() & 0o777, 0o600);
        name.remove().unwrap();
        for file in [create_nameless(directory.path()).unwrap(), named] {
            let metadata = file.metadata().unwrap();
            assert_eq!((metadata.nlink(), metadata.mode() & 0o777), (0, 0o600));
        }
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_name_that_leads_to_another_file_is_noticed() {
        let below = tempfile::tempdir().unwrap();
        let (spill, moved) = (below.path().join("spill"), below.path().join("moved"));
        fs::create_dir(&spill).unwrap();
        let (file, name) = create_named(&spill).unwrap();
        assert!(name.leads_to(&file));
        fs::rename(&spill, &moved).unwrap();
        assert!(!name.leads_to(&file), "it leads nowhere");
        fs::create_dir(&spill).unwrap();
        fs::write(name.0.as_ref().unwrap(), "").unwrap();
        assert!(!name.leads_to(&file));
    }

    #[test]
    fn a_name_goes_however_its_holder_ends() {
        let directory = tempfile::tempdir().unwrap();
        drop(create_named(directory.path()).unwrap());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
