//! A region together with the bookkeeping of its space: which parts are in use, and how far it has grown.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::sync::Mutex;
use bytesize::ByteSize;

use super::extent::{Slot, Space};
use super::region::{Disk, Region, RegionInfo};
use crate::completion::contained;
use crate::mem::BLOCK;

/// Regions grow by this many bytes at a time, so that the first step of a run pays for the growth and later steps do
/// not.
pub(super) const GROWTH_BYTES: u64 = 256 << 20;
/// Largest region: file offsets are signed.
const MAX_REGION_BYTES: u64 = i64::MAX as u64;
/// After a region has failed to grow, no region that has failed is tried again for this long.
const GROWTH_PAUSE: Duration = Duration::from_secs(1);

/// A region and the space in it.
pub(super) struct Volume {
    region: Arc<dyn Region>,
    info: RegionInfo,
    cap_bytes: u64,
    /// Bytes of the disk that are left to others; `None` for the default.
    keep_free: Option<u64>,
    books: Mutex<Books>,
    /// Held while the region grows, which may take long; extents are still taken and freed meanwhile.
    growing: Mutex<()>,
    refusals: Arc<Refusals>,
    /// Bytes that operations have written to it, padding included.
    written: Arc<AtomicU64>,
}

/// When a region last failed to grow, shared by all volumes of a store. If each volume had its own pause, that pause
/// might end while another volume takes long to fail, and nobody would ever learn that there is no room.
#[derive(Default)]
pub(super) struct Refusals {
    latest: Mutex<Option<Instant>>,
}

struct Books {
    /// Covers only what the region has grown to, so that the region does not grow while there is room within.
    space: Space,
    /// Somebody has taken on the job of growing or shrinking the region.
    changes: bool,
    /// Why the latest attempt to grow the region failed, if it did.
    refused: Option<io::Error>,
    /// The disk has not answered an attempt to do so that is still under way.
    overdue: bool,
}

/// A contiguous range of a volume; freed on drop.
pub(super) struct Extent {
    volume: Arc<Volume>,
    slot: Slot,
}

/// Why a volume has no room.
#[derive(Debug)]
pub(super) enum Full {
    /// No free range within the volume's share of the cap is large enough.
    Cap,
    /// There is no room until the region has grown to this many bytes.
    Until(u64),
    /// The region could not grow.
    Refused(io::Error),
}

impl Volume {
    /// Takes a region that was just opened, uses at most `cap_bytes` of it, and leaves `keep_free` bytes of its disk to
    /// others. The region grows by its first step
    /// here, which also shows whether the file system can preallocate.
    pub(super) fn new(
        region: Arc<dyn Region>,
        cap_bytes: u64,
        keep_free: Option<u64>,
        refusals: &Arc<Refusals>,
    ) -> Volume {
        let cap_bytes = cap_bytes.min(MAX_REGION_BYTES) / BLOCK as u64 * BLOCK as u64;
        let books = Books { space: Space::default(), changes: false, refused: None, overdue: false };
        let info = region.describe();
        let mut volume = Volume {
            region,
            info,
            cap_bytes,
            keep_free,
            books: Mutex::new(books),
            growing: Mutex::default(),
            refusals: Arc::clone(refusals),
            written: Arc::default(),
        };
        volume.grow(BLOCK as u64);
        volume.info = volume.region.describe();
        volume
    }

    /// Reserves a free range of `bytes`, which must not be 0, rounded up to whole blocks. It never waits for the
    /// region.
    pub(super) fn reserve(self: &Arc<Self>, bytes: u64) -> Result<Extent, Full> {
        let mut books = self.books.lock();
        if let Some(slot) = books.space.take(bytes) {
            return Ok(Extent { volume: Arc::clone(self), slot });
        }
        let end = books.space.end_with(bytes).filter(|&end| end <= self.cap_bytes).ok_or(Full::Cap)?;
        if books.overdue {
            let message = "the disk has not answered in time; check it (dmesg)";
            return Err(Full::Refused(io::Error::new(io::ErrorKind::TimedOut, message)));
        }
        match books.refused.as_ref().filter(|_| self.refusals.are_recent()) {
            Some(refused) => Err(Full::Refused(again(refused))),
            None => Err(Full::Until(end)),
        }
    }

    /// Grows the region to at least `end`, a multiple of the block size; by a whole step if there is room for it. It
    /// may take long. The outcome shows when [`reserve`](Volume::reserve) is called again.
    pub(super) fn grow(&self, end: u64) {
        let _alone = self.growing.lock();
        let grown = self.grown_bytes();
        if end <= grown {
            return;
        }
        let step_end = end.next_multiple_of(GROWTH_BYTES).min(self.cap_bytes);
        let mut refused = None;
        for end in [step_end, end] {
            let outcome = contained("the growth of a spill file", || {
                self.leaves_enough(end - grown)?;
                self.region.grow(grown, end)
            });
            match outcome.unwrap_or_else(|| Err(io::Error::from_raw_os_error(libc::EIO))) {
                Ok(()) => {
                    let mut books = self.books.lock();
                    books.space.grow(end);
                    books.refused = None;
                    return;
                }
                Err(error) => refused = Some(error),
            }
        }
        if let Some(error) = refused {
            // A full disk is asked again and again.
            let is_first = self.books.lock().refused.is_none();
            match is_first {
                true => tracing::warn!(file = self.info.name, %error, "a spill file cannot grow"),
                false => tracing::debug!(file = self.info.name, %error, "a spill file still cannot grow"),
            }
            *self.refusals.latest.lock() = Some(Instant::now());
            self.books.lock().refused = Some(error);
        }
    }

    /// Fails if the disk would have less free space than is kept for others once the region has grown by `bytes`.
    fn leaves_enough(&self, bytes: u64) -> io::Result<()> {
        let Some(disk) = self.region.disk() else { return Ok(()) };
        let keep_free = self.keep_free.unwrap_or_else(|| kept_free(disk));
        if disk.free.saturating_sub(bytes) >= keep_free {
            return Ok(());
        }
        let [free, kept, all] = [disk.free, keep_free, disk.bytes].map(ByteSize);
        let message = format!(
            "{free} of {all} are free on its disk, of which {kept} are kept for others; free some space, or keep less free \
             (disk_keep_free, --disk-keep-free)"
        );
        Err(io::Error::new(io::ErrorKind::StorageFull, message))
    }

    /// Gives back what lies behind the last extent. Returns the bytes. The region grows again when somebody needs them. It
    /// may take long.
    pub(super) fn shrink(&self) -> u64 {
        // A disk that does not answer may hold up growth for ever.
        let Some(_alone) = self.growing.try_lock() else { return 0 };
        let (end, last) = {
            let space = &mut self.books.lock().space;
            let end = space.end();
            space.shrink();
            (end, space.end())
        };
        if last == end {
            return 0;
        }
        let outcome = contained("giving back a spill file", || self.region.shrink(last));
        match outcome.unwrap_or_else(|| Err(io::Error::from_raw_os_error(libc::EIO))) {
            Ok(()) => end - last,
            Err(error) => {
                if error.kind() != io::ErrorKind::Unsupported {
                    tracing::warn!(file = self.info.name, %error, "a spill file gives nothing back");
                }
                self.books.lock().space.grow(end);
                0
            }
        }
    }

    /// Claims the job of growing or shrinking the region. If true, the caller must do it and then call
    /// [`has_changed`](Volume::has_changed); nobody else will.
    pub(super) fn takes_change_on(&self) -> bool {
        !std::mem::replace(&mut self.books.lock().changes, true)
    }

    pub(super) fn has_changed(&self) {
        let mut books = self.books.lock();
        (books.changes, books.overdue) = (false, false);
    }

    /// The disk has not answered the attempt to grow or to shrink that is under way. Until it does, there is no further one.
    pub(super) fn is_overdue(&self) {
        tracing::warn!(
            file = self.info.name,
            "a spill file does not change its size: the disk has not answered in time"
        );
        self.books.lock().overdue = true;
    }

    /// Bytes that belong to extents now.
    pub(super) fn reserved_bytes(&self) -> u64 {
        self.books.lock().space.taken()
    }

    /// Bytes that the region has grown to.
    pub(super) fn grown_bytes(&self) -> u64 {
        self.books.lock().space.end()
    }

    /// The most bytes that the region may take.
    pub(super) fn cap_bytes(&self) -> u64 {
        self.cap_bytes
    }

    /// An operation has written so many bytes.
    pub(super) fn has_written(&self, bytes: u64) {
        self.written.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The bytes that operations have written, padding included.
    pub(super) fn written(&self) -> &Arc<AtomicU64> {
        &self.written
    }

    pub(super) fn region(&self) -> &Arc<dyn Region> {
        &self.region
    }

    /// Describes the region.
    pub(super) fn info(&self) -> &RegionInfo {
        &self.info
    }
}

/// What is kept free of a disk by default: the larger of 1 GiB and 1 %, but no more than a tenth of a small one.
fn kept_free(disk: Disk) -> u64 {
    (disk.bytes / 100).max(1 << 30).min(disk.bytes / 10)
}

/// The same error once more.
fn again(error: &io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(code) => io::Error::from_raw_os_error(code),
        None => io::Error::new(error.kind(), error.to_string()),
    }
}

impl Refusals {
    fn are_recent(&self) -> bool {
        self.latest.lock().is_some_and(|when| when.elapsed() < GROWTH_PAUSE)
    }
}

impl Extent {
    pub(super) fn volume(&self) -> &Arc<Volume> {
        &self.volume
    }

    /// Where the range begins in its region, in bytes.
    pub(super) fn offset(&self) -> u64 {
        self.slot.offset()
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        self.volume.books.lock().space.give_back(self.slot);
    }
}

#[cfg(test)]
impl Volume {
    /// Pretends that the pause after the latest refusal is over.
    pub(super) fn end_pause(&self) {
        self.refusals.latest.lock().iter_mut().for_each(|when| *when -= GROWTH_PAUSE);
    }
}

#[cfg(test)]
impl Extent {
    /// Length of the range, in bytes.
    pub(super) fn len(&self) -> u64 {
        self.slot.len()
    }
}

#[cfg(test)]
mod tests {
    use std::any::Any;
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::region::Place;
    use crate::region::tests::Pretended;
    use crate::spill_file::SpillFile;

    /// Reserves, and first grows the region if necessary.
    fn reserve(volume: &Arc<Volume>, bytes: u64) -> Result<Extent, Full> {
        match volume.reserve(bytes) {
            Err(Full::Until(end)) => {
                volume.grow(end);
                volume.reserve(bytes)
            }
            outcome => outcome,
        }
    }

    #[test]
    fn the_region_grows_in_steps_up_to_its_cap() {
        let directory = tempfile::tempdir().unwrap();
        let cap = GROWTH_BYTES + 1024 * BLOCK as u64;
        let file = Arc::new(SpillFile::create(Place::Directory(directory.path()), cap).unwrap());
        let metadata = || File::from(file.as_fd().try_clone_to_owned().unwrap()).metadata().unwrap();
        let volume = Arc::new(Volume::new(Arc::<SpillFile>::clone(&file), cap, None, &Arc::default()));
        assert_eq!(volume.grown_bytes(), GROWTH_BYTES, "the first step is taken at the start");
        let first = reserve(&volume, GROWTH_BYTES).unwrap();
        assert_eq!(volume.grown_bytes(), GROWTH_BYTES);
        let second = reserve(&volume, BLOCK as u64).unwrap();
        assert_eq!((volume.grown_bytes(), metadata().len()), (cap, cap));
        assert!(metadata().blocks() * 512 >= cap, "space is taken, not promised");
        assert_eq!(first.len() + second.len(), volume.reserved_bytes());
        drop((first, second));
        assert_eq!((volume.reserved_bytes(), volume.grown_bytes()), (0, cap));
    }

    #[test]
    fn what_lies_behind_the_last_extent_is_given_back_and_taken_again() {
        let directory = tempfile::tempdir().unwrap();
        let cap = 2 * GROWTH_BYTES;
        let file = Arc::new(SpillFile::create(Place::Directory(directory.path()), cap).unwrap());
        let metadata = || File::from(file.as_fd().try_clone_to_owned().unwrap()).metadata().unwrap();
        let volume = Arc::new(Volume::new(Arc::<SpillFile>::clone(&file), cap, None, &Arc::default()));
        let [first, second] = [(); 2].map(|()| reserve(&volume, BLOCK as u64).unwrap());
        drop(first);
        let held = second.offset() + second.len();
        assert_eq!((volume.shrink(), volume.shrink()), (GROWTH_BYTES - held, 0));
        assert_eq!((volume.grown_bytes(), metadata().len()), (held, held));
        let again = reserve(&volume, GROWTH_BYTES).unwrap();
        assert_eq!((again.offset(), metadata().len()), (held, cap));
        drop((second, again));
        assert_eq!((volume.shrink(), metadata().len(), metadata().blocks()), (cap, 0, 0));
    }

    #[test]
    fn a_region_that_cannot_shrink_keeps_what_it_has() {
        let region = Arc::new(Pretended(|_, _| Ok(())));
        let volume = Arc::new(Volume::new(region, GROWTH_BYTES, None, &Arc::default()));
        assert_eq!((volume.shrink(), volume.grown_bytes()), (0, GROWTH_BYTES));
        assert_eq!(volume.reserve(GROWTH_BYTES).unwrap().offset(), 0);
    }

    #[test]
    fn no_region_grows_while_there_is_room_in_it() {
        const TAIL: u64 = GROWTH_BYTES / 8;
        let file = Arc::new(SpillFile::create(Place::Memory, 0).unwrap());
        let volume = Arc::new(Volume::new(file, GROWTH_BYTES + TAIL, None, &Arc::default()));
        let [hole, _rest] = [GROWTH_BYTES - TAIL, TAIL].map(|bytes| volume.reserve(bytes).unwrap());
        drop(hole);
        let small = volume
            .reserve(TAIL / 2)
            .expect("the hole is free and there, though the rest of the cap would fit better");
        assert_eq!((small.offset(), volume.grown_bytes()), (0, GROWTH_BYTES));
    }

    #[test]
    fn a_region_that_cannot_grow_gives_the_space_back() {
        let file = Arc::new(SpillFile::create(Place::Memory, 0).unwrap());
        let volume =
            Arc::new(Volume::new(Arc::<SpillFile>::clone(&file), 2 * GROWTH_BYTES, None, &Arc::default()));
        let first = reserve(&volume, GROWTH_BYTES).unwrap();
        file.forbid_growth();
        assert!(matches!(reserve(&volume, GROWTH_BYTES), Err(Full::Refused(_))));
        assert!(matches!(reserve(&volume, 2 * GROWTH_BYTES), Err(Full::Cap)));
        assert_eq!(volume.reserved_bytes(), first.len());
        drop(first);
        assert_eq!(
            reserve(&volume, GROWTH_BYTES).unwrap().offset(),
            0,
            "what the region has is still of use"
        );
    }

    /// A region of no bytes on a disk that is as full as the test says.
    struct OnDisk(Mutex<Disk>);

    impl Region for OnDisk {
        fn grow(&self, from: u64, to: u64) -> io::Result<()> {
            self.0.lock().free -= to - from;
            Ok(())
        }

        fn describe(&self) -> RegionInfo {
            Pretended(|_, _| Ok(())).describe()
        }

        fn disk(&self) -> Option<Disk> {
            Some(*self.0.lock())
        }

        fn backing(&self) -> &dyn Any {
            self
        }
    }

    #[test]
    fn the_last_part_of_a_disk_is_left_to_others_and_the_refusal_names_it() {
        const GIB: u64 = 1 << 30;
        for (bytes, kept) in [(GIB, GIB / 10), (20 * GIB, GIB), (1000 * GIB, 10 * GIB)] {
            assert_eq!(kept_free(Disk { bytes, free: 0 }), kept);
            for (keep_free, kept) in [(None, kept), (Some(kept), kept), (Some(kept + 1), kept + 1)] {
                let free = kept + GROWTH_BYTES + BLOCK as u64;
                let region = Arc::new(OnDisk(Mutex::new(Disk { bytes, free })));
                let volume =
                    Arc::new(Volume::new(Arc::clone(&region) as _, bytes, keep_free, &Arc::default()));
                assert_eq!(volume.grown_bytes(), GROWTH_BYTES);
                let _first = volume.reserve(GROWTH_BYTES).unwrap();
                let rest = reserve(&volume, BLOCK as u64);
                assert_eq!(rest.is_ok(), keep_free != Some(kept + 1), "down to the last block");
                let Err(Full::Refused(error)) = reserve(&volume, BLOCK as u64) else { panic!("it is full") };
                assert_eq!(error.kind(), io::ErrorKind::StorageFull);
                let kept = ByteSize(keep_free.unwrap_or(kept)).to_string();
                assert!(error.to_string().contains(&format!("{kept} are kept for others")), "{error}");
            }
        }
    }

    #[test]
    fn a_region_that_panics_cannot_grow() {
        let region = Pretended(|from, _| {
            assert_eq!(from, 0, "on purpose");
            Ok(())
        });
        let volume = Arc::new(Volume::new(Arc::new(region), 2 * GROWTH_BYTES, None, &Arc::default()));
        let _full = volume.reserve(GROWTH_BYTES).unwrap();
        assert!(matches!(reserve(&volume, 1), Err(Full::Refused(_))));
    }
}
