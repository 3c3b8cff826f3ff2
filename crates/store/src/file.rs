//! Spill files: nameless, preallocated in steps, direct where the file system can.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytesize::ByteSize;
use parking_lot::Mutex;

use super::extent::{MAX_FILE_BYTES, Slot, Space};
use super::open::{Name, create_named, create_nameless, free_bytes, set_direct};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::BLOCK;

/// Files grow by this many bytes at a time, so that a run's first step pays for it and no later one.
const GROWTH_BYTES: u64 = 256 << 20;
/// After the disk refused to let a file grow, it is not asked again for this long.
const GROWTH_PAUSE: Duration = Duration::from_secs(1);

/// One spill file and the space in it.
pub(super) struct SpillFile {
    file: File,
    place: String,
    /// What transfers' memory must be aligned to; `None` when they go through the page cache.
    direct: Option<usize>,
    /// Why transfers go a slower way than they might.
    notes: Vec<String>,
    cap_bytes: u64,
    room: Mutex<Room>,
}

struct Room {
    space: Space,
    /// Bytes from the file's start that are there to be written.
    grown: u64,
    preallocate: bool,
    refused: Option<(Instant, i32)>,
}

/// A contiguous range of a spill file; freed on drop.
pub(super) struct Extent {
    file: Arc<SpillFile>,
    slot: Slot,
}

/// Why a file has no room.
#[derive(Debug)]
pub(super) enum Full {
    /// No free range within the file's share of the cap is large enough.
    Cap,
    /// The disk refused to let the file grow.
    Disk(io::Error),
}

impl SpillFile {
    /// A nameless file of at most `cap_bytes` in `directory`.
    pub(super) fn create(directory: &Path, cap_bytes: u64) -> Result<SpillFile> {
        let nameless = |directory: &Path| Ok((create_nameless(directory)?, ()));
        SpillFile::open(directory, cap_bytes, nameless).map(|(file, ())| file)
    }

    /// The same with a name, which is the caller's to remove.
    pub(super) fn create_named(directory: &Path, cap_bytes: u64) -> Result<(SpillFile, Name)> {
        SpillFile::open(directory, cap_bytes, create_named)
    }

    fn open<N>(
        directory: &Path,
        cap_bytes: u64,
        create: impl FnOnce(&Path) -> io::Result<(File, N)>,
    ) -> Result<(SpillFile, N)> {
        let unusable = |error: io::Error| {
            let message = match error.kind() {
                io::ErrorKind::NotFound => "does not exist; create it or name another",
                io::ErrorKind::NotADirectory => "is not a directory; name one",
                io::ErrorKind::ReadOnlyFilesystem => "is on a read-only file system; name a writable one",
                io::ErrorKind::PermissionDenied => "is not writable by this user; allow it or name another",
                io::ErrorKind::StorageFull => "is on a full file system; free some space or name another",
                _ => "cannot hold a spill file; name another",
            };
            Error::directory(directory, message, error)
        };
        if !fs::metadata(directory).map_err(unusable)?.is_dir() {
            return Err(unusable(io::ErrorKind::NotADirectory.into()));
        }
        let (file, name) = create(directory).map_err(unusable)?;
        let shown = directory.display();
        let mut notes = Vec::new();
        let direct = match set_direct(&file) {
            Ok(alignment) => Some(alignment),
            Err(reason) => {
                notes.push(format!("O_DIRECT refused in {shown}: {reason}"));
                None
            }
        };
        if let Ok(free) = free_bytes(&file)
            && free < cap_bytes
        {
            let (free, share) = (ByteSize(free), ByteSize(cap_bytes));
            tracing::info!("spill directory {shown} has {free} free, less than the {share} it may take");
        }
        let mut spill =
            SpillFile::new(file, format!("spill file in {shown}"), direct, notes, cap_bytes, true);
        spill.grow_first(&shown.to_string());
        Ok((spill, name))
    }

    /// A file in memory; of memory it takes no more than was ever written to it.
    pub(super) fn in_memory(cap_bytes: u64) -> Result<SpillFile> {
        let refused = |error| {
            let message = "no anonymous memory file could be made for the in-memory store";
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
        Ok(SpillFile::new(file, "spill memory".to_owned(), None, Vec::new(), cap_bytes, false))
    }

    fn new(
        file: File,
        place: String,
        direct: Option<usize>,
        notes: Vec<String>,
        cap_bytes: u64,
        preallocate: bool,
    ) -> SpillFile {
        let cap_bytes = cap_bytes.min(MAX_FILE_BYTES) / BLOCK as u64 * BLOCK as u64;
        let room = Room { space: Space::new(cap_bytes), grown: 0, preallocate, refused: None };
        SpillFile { file, place, direct, notes, cap_bytes, room: Mutex::new(room) }
    }

    /// Takes the first step of growth, and learns whether the file system can preallocate.
    fn grow_first(&mut self, directory: &str) {
        let room = self.room.get_mut();
        match grow(&self.file, room, 1, self.cap_bytes) {
            Ok(()) if !room.preallocate => {
                self.notes.push(format!("{directory} cannot preallocate"));
            }
            Ok(()) => {}
            Err(error) => tracing::warn!("{} cannot grow yet: {error}", self.place),
        }
    }

    /// A free range of `bytes`, which must not be 0, rounded up to whole blocks.
    pub(super) fn reserve(self: &Arc<Self>, bytes: u64) -> Result<Extent, Full> {
        let mut room = self.room.lock();
        let slot = room.space.take(bytes).ok_or(Full::Cap)?;
        if let Err(error) = grow(&self.file, &mut room, slot.offset() + slot.len(), self.cap_bytes) {
            room.space.give_back(slot);
            return Err(Full::Disk(error));
        }
        drop(room);
        Ok(Extent { file: Arc::clone(self), slot })
    }

    /// Bytes that belong to extents now.
    pub(super) fn reserved_bytes(&self) -> u64 {
        self.room.lock().space.taken()
    }

    /// Bytes the file has grown to.
    pub(super) fn file_bytes(&self) -> u64 {
        self.room.lock().grown
    }

    /// Most bytes the file may take.
    pub(super) fn cap_bytes(&self) -> u64 {
        self.cap_bytes
    }

    /// The file in words, for messages.
    pub(super) fn place(&self) -> &str {
        &self.place
    }

    /// What transfers' memory must be aligned to, in bytes.
    pub(super) fn memory_alignment(&self) -> usize {
        self.direct.unwrap_or(1)
    }

    pub(super) fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    pub(super) fn notes(&self) -> &[String] {
        &self.notes
    }
}

impl AsFd for SpillFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Extent {
    pub(super) fn file(&self) -> &Arc<SpillFile> {
        &self.file
    }

    /// Where the range begins in its file, in bytes.
    pub(super) fn offset(&self) -> u64 {
        self.slot.offset()
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        self.file.room.lock().space.give_back(self.slot);
    }
}

/// Makes the file at least `end` bytes long, by whole steps where there is room for them.
fn grow(file: &File, room: &mut Room, end: u64, cap_bytes: u64) -> io::Result<()> {
    if end <= room.grown {
        return Ok(());
    }
    if let Some((_, code)) = room.refused.filter(|(when, _)| when.elapsed() < GROWTH_PAUSE) {
        return Err(io::Error::from_raw_os_error(code));
    }
    let step_end = end.next_multiple_of(GROWTH_BYTES).min(cap_bytes);
    for end in [step_end, end] {
        match extend(file, room, end) {
            Ok(()) => {
                room.grown = end;
                room.refused = None;
                return Ok(());
            }
            Err(error) => room.refused = Some((Instant::now(), error.raw_os_error().unwrap_or(libc::EIO))),
        }
    }
    let code = room.refused.map_or(libc::EIO, |(_, code)| code);
    Err(io::Error::from_raw_os_error(code))
}

fn extend(file: &File, room: &mut Room, end: u64) -> io::Result<()> {
    let beyond_off_t = |_| io::Error::from_raw_os_error(libc::EFBIG);
    while room.preallocate {
        let from = libc::off_t::try_from(room.grown).map_err(beyond_off_t)?;
        let len = libc::off_t::try_from(end - room.grown).map_err(beyond_off_t)?;
        // SAFETY: a plain system call on an open file.
        if unsafe { libc::fallocate(file.as_raw_fd(), 0, from, len) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            Some(libc::EOPNOTSUPP | libc::ENOSYS) => room.preallocate = false,
            _ => return Err(error),
        }
    }
    file.set_len(end)
}

#[cfg(test)]
impl SpillFile {
    /// Makes every further growth of an in-memory file fail, as on a full disk.
    pub(super) fn forbid_growth(&self) {
        // SAFETY: a plain system call on an open file.
        let sealed = unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_GROW) };
        assert_eq!(sealed, 0);
    }
}

#[cfg(test)]
impl Extent {
    /// Bytes of the range.
    pub(super) fn len(&self) -> u64 {
        self.slot.len()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn refused(directory: &Path) -> String {
        let error = SpillFile::create(directory, 1 << 20).err().unwrap();
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
    fn a_memory_file_system_is_used_buffered_and_says_so() {
        let Ok(directory) = tempfile::tempdir_in("/dev/shm") else {
            return eprintln!("skipped: there is no /dev/shm here");
        };
        let spill = SpillFile::create(directory.path(), 1 << 20).unwrap();
        assert!(!spill.is_direct());
        assert!(spill.notes()[0].contains("in memory"), "{:?}", spill.notes());
    }

    #[test]
    fn the_file_grows_in_steps_up_to_its_cap() {
        let directory = tempfile::tempdir().unwrap();
        let spill =
            Arc::new(SpillFile::create(directory.path(), GROWTH_BYTES + 1024 * BLOCK as u64).unwrap());
        assert_eq!(spill.file_bytes(), GROWTH_BYTES, "the first step is taken when the file is made");
        let first = spill.reserve(GROWTH_BYTES).unwrap();
        assert_eq!(spill.file_bytes(), GROWTH_BYTES);
        let second = spill.reserve(BLOCK as u64).unwrap();
        assert_eq!(spill.file_bytes(), spill.cap_bytes());
        assert_eq!(spill.file.metadata().unwrap().len(), spill.cap_bytes());
        assert!(
            spill.file.metadata().unwrap().blocks() * 512 >= spill.cap_bytes(),
            "space is taken, not promised"
        );
        assert_eq!(first.len() + second.len(), spill.reserved_bytes());
        drop((first, second));
        assert_eq!(spill.reserved_bytes(), 0);
        assert_eq!(spill.file_bytes(), spill.cap_bytes());
    }

    #[test]
    fn a_file_that_cannot_grow_gives_the_space_back() {
        let spill = Arc::new(SpillFile::in_memory(2 * GROWTH_BYTES).unwrap());
        let first = spill.reserve(GROWTH_BYTES).unwrap();
        spill.forbid_growth();
        assert!(matches!(spill.reserve(GROWTH_BYTES), Err(Full::Disk(_))));
        assert!(matches!(spill.reserve(2 * GROWTH_BYTES), Err(Full::Cap)));
        assert_eq!(spill.reserved_bytes(), first.len());
        drop(first);
        assert_eq!(spill.reserve(GROWTH_BYTES).unwrap().offset(), 0, "what the file has is still of use");
    }
}
