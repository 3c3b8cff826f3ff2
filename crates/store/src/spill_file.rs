//! Spill files: nameless, preallocated, and opened for direct I/O where the file system supports it.

use std::any::Any;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use super::directory::Directory;
use super::limits;
use super::open::{
    Name, create_named, create_nameless, disk_of, remove_left_over, set_direct, write_in_place,
};
use super::region::{Disk, Medium, Place, Region, RegionInfo};
use crate::error::{Error, ErrorKind, Result};

/// One spill file.
pub(super) struct SpillFile {
    file: File,
    /// `None` if the file is in memory.
    directory: Option<PathBuf>,
    /// The alignment that direct I/O requires of memory, or why the file goes through the page cache.
    direct: Result<usize, String>,
    /// Why the file system goes on copying what is written again, if it does.
    copies: Option<io::Error>,
    /// Whether the file system can preallocate, as far as is known: true until it has refused.
    preallocates: AtomicBool,
}

impl SpillFile {
    /// Creates a nameless file that may take at most `cap_bytes`.
    pub(super) fn create(place: Place<'_>, cap_bytes: u64) -> Result<SpillFile> {
        match place {
            Place::Directory(directory) => {
                let nameless = |directory: &Directory| {
                    let unusable = |error| Directory::unusable(directory.path(), error);
                    Ok((create_nameless(&directory.fixed_path()).map_err(unusable)?, ()))
                };
                SpillFile::open(directory, cap_bytes, nameless).map(|(file, ())| file)
            }
            Place::Memory => SpillFile::in_memory(),
        }
    }

    /// Like [`create`](SpillFile::create), but the file has a name in its directory, which the caller must remove. A
    /// file in memory has none.
    pub(super) fn create_named(place: Place<'_>, cap_bytes: u64) -> Result<(SpillFile, Option<Name>)> {
        match place {
            Place::Directory(directory) => {
                // cuFile reopens the file by its name, so that is a path which means the same to everybody.
                let named = |directory: &Directory| {
                    directory.check_above()?;
                    create_named(directory.path())
                        .map_err(|error| Directory::unusable(directory.path(), error))
                };
                SpillFile::open(directory, cap_bytes, named).map(|(file, name)| (file, Some(name)))
            }
            Place::Memory => SpillFile::in_memory().map(|file| (file, None)),
        }
    }

    /// Whether this is the file that the name leads to.
    pub(super) fn is_at(&self, name: &Name) -> bool {
        name.leads_to(&self.file)
    }

    fn open<N>(
        directory: &Path,
        cap_bytes: u64,
        create: impl FnOnce(&Directory) -> Result<(File, N)>,
    ) -> Result<(SpillFile, N)> {
        let checked = Directory::open(directory)?;
        let (file, name) = create(&checked)?;
        remove_left_over(&checked.fixed_path(), &file);
        if let Ok(Disk { free, .. }) = disk_of(&file)
            && free < cap_bytes
        {
            let directory = directory.display();
            tracing::info!(%directory, free_bytes = free, cap_bytes, "a spill directory has less free space than it may take");
        }
        let copies = write_in_place(&file).err();
        let direct = set_direct(&file);
        let directory = Some(directory.to_owned());
        Ok((SpillFile { file, directory, direct, copies, preallocates: AtomicBool::new(true) }, name))
    }

    /// Creates a file in memory. It takes no more memory than has been written to it.
    fn in_memory() -> Result<SpillFile> {
        let refused = |error| {
            let advice = limits::on_files(&error).unwrap_or("free memory");
            let message = format!("no anonymous memory file could be made for the in-memory store; {advice}");
            Error::io(ErrorKind::Io, message, error)
        };
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: the name is a valid C string for the length of the call.
        let fd = unsafe { libc::memfd_create(c"ssdtrain-spill".as_ptr(), flags) };
        if fd < 0 {
            return Err(refused(io::Error::last_os_error()));
        }
        // SAFETY: `fd` was just opened and nobody else has it.
        let file = unsafe { File::from_raw_fd(fd) };
        let direct = Err("it is in memory".to_owned());
        Ok(SpillFile { file, directory: None, direct, copies: None, preallocates: AtomicBool::new(false) })
    }
}

impl Region for SpillFile {
    fn grow(&self, from: u64, to: u64) -> io::Result<()> {
        let beyond_off_t = |_| io::Error::from_raw_os_error(libc::EFBIG);
        while self.preallocates.load(Ordering::Relaxed) {
            let start = libc::off_t::try_from(from).map_err(beyond_off_t)?;
            let len = libc::off_t::try_from(to - from).map_err(beyond_off_t)?;
            // SAFETY: a plain system call on an open file.
            if unsafe { libc::fallocate(self.file.as_raw_fd(), 0, start, len) } == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EOPNOTSUPP | libc::ENOSYS) => self.preallocates.store(false, Ordering::Relaxed),
                _ => {
                    // Some file systems, ext4 among them, keep the blocks that they allocated before the disk was
                    // full.
                    if let Err(kept) = self.file.set_len(from) {
                        let name = self.describe().name;
                        tracing::warn!(file = name, error = %kept, "a spill file could not give back what it did not grow by");
                    }
                    return Err(error);
                }
            }
        }
        self.file.set_len(to)
    }

    fn shrink(&self, to: u64) -> io::Result<()> {
        self.file.set_len(to)
    }

    fn describe(&self) -> RegionInfo {
        let Some(directory) = &self.directory else {
            let name = "spill memory".to_owned();
            return RegionInfo { name, medium: Medium::Memory, alignment: 1, notes: Vec::new() };
        };
        let shown = directory.display();
        let (medium, alignment) = match &self.direct {
            Ok(alignment) => (Medium::Direct, *alignment),
            Err(_) => (Medium::Buffered, 1),
        };
        let refused = self.direct.as_ref().err().map(|why| format!("O_DIRECT refused in {shown}: {why}"));
        let preallocates = self.preallocates.load(Ordering::Relaxed);
        let sparse = (!preallocates).then(|| format!("{shown} cannot preallocate"));
        let copied = self.copies.as_ref().map(|why| format!("{shown} copies what is written again: {why}"));
        let notes = refused.into_iter().chain(sparse).chain(copied).collect();
        RegionInfo { name: format!("spill file in {shown}"), medium, alignment, notes }
    }

    fn disk(&self) -> Option<Disk> {
        self.directory.as_ref().and_then(|_| disk_of(&self.file).ok())
    }

    fn backing(&self) -> &dyn Any {
        self
    }
}

impl AsFd for SpillFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
impl SpillFile {
    /// Whatever is open, as a spill file in memory.
    pub(super) fn over(file: impl Into<File>) -> SpillFile {
        let direct = Err("it is no file".to_owned());
        SpillFile {
            file: file.into(),
            directory: None,
            direct,
            copies: None,
            preallocates: AtomicBool::new(false),
        }
    }

    /// Makes every further growth of an in-memory file fail, as on a full disk.
    pub(super) fn forbid_growth(&self) {
        // SAFETY: a plain system call on an open file.
        let sealed = unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_GROW) };
        assert_eq!(sealed, 0);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;

    fn refused(directory: &Path) -> String {
        let error = SpillFile::create(Place::Directory(directory), 1 << 20).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Directory);
        error.to_string()
    }

    #[test]
    fn a_directory_that_cannot_be_used_is_named_with_its_cause() {
        let directory = tempfile::tempdir().unwrap();
        let missing = directory.path().join("missing");
        let message = refused(&missing);
        assert!(
            message.contains(missing.to_str().unwrap()) && message.contains("does not exist"),
            "{message}"
        );

        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(refused(&file).contains("is not a directory"));

        // Nothing can be made in /proc, not even by root.
        let message = refused(Path::new("/proc"));
        assert!(
            message.contains("spill directory /proc") && !message.contains("does not exist"),
            "{message}"
        );
    }

    #[test]
    fn only_a_file_with_a_name_needs_directories_above_that_nobody_else_can_change() {
        let open = tempfile::tempdir().unwrap();
        fs::set_permissions(open.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let spill = open.path().join("spill");
        fs::create_dir(&spill).unwrap();
        let place = Place::Directory(&spill);
        assert!(SpillFile::create(place, 1 << 20).is_ok());
        let error = SpillFile::create_named(place, 1 << 20).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Directory);
        assert_eq!(fs::read_dir(&spill).unwrap().count(), 0);
    }

    #[test]
    fn a_growth_that_fails_takes_no_space() {
        const MIB: u64 = 1 << 20;
        let directory = tempfile::tempdir().unwrap();
        let spill = SpillFile::create(Place::Directory(directory.path()), MIB).unwrap();
        let size = || spill.file.metadata().map(|file| (file.len(), file.blocks())).unwrap();
        spill.grow(0, MIB).unwrap();
        if !spill.preallocates.load(Ordering::Relaxed) {
            return eprintln!("skipped: the temporary directory cannot preallocate");
        }
        let before = size();
        // An attempt that finds the disk full may get this far before it fails. The next one fails because its end is
        // beyond any file.
        spill.grow(MIB, 2 * MIB).unwrap();
        assert!(size().1 > before.1);
        let error = spill.grow(MIB, i64::MAX as u64 + MIB).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFBIG));
        assert_eq!(size(), before);
    }

    #[test]
    fn a_memory_file_system_is_used_buffered_and_says_so() {
        let Ok(directory) = tempfile::tempdir_in("/dev/shm") else {
            return eprintln!("skipped: there is no /dev/shm here");
        };
        let spill = SpillFile::create(Place::Directory(directory.path()), 1 << 20).unwrap();
        let info = spill.describe();
        assert_eq!(info.medium, Medium::Buffered);
        assert!(info.notes[0].contains("in memory"), "{info:?}");
    }
}
