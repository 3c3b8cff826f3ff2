//! The store: reserves, writes and reads blobs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytesize::ByteSize;

use crate::allowance::{Allowance, Outlook};
use crate::backend::{Backend, Direction};
use crate::blob::Blob;
use crate::completion::Completion;
use crate::config::StoreConfig;
use crate::drive;
use crate::encryption::Encryption;
use crate::error::{Error, ErrorKind, Result};
use crate::growth::Growth;
use crate::mem::{BLOCK, IoBuf};
use crate::open;
use crate::path::StorePath;
use crate::region::{Medium, Place};
use crate::stats::{Counters, StoreStats};
use crate::transfer::{Rules, Transfer};
use crate::volume::Volume;
use crate::volumes::{Reservation, Volumes};
use crate::watch::Watch;
use crate::workers::Workers;
use crate::writes::{FileWrites, Writes};

/// Reserves, writes and reads blobs. A cheap handle: clones share one store.
///
/// Dropping the last handle waits for the transfers that were started, unless it is dropped inside a completion or a
/// [listener](Store::on_growth). A transfer that has [timed out](StoreConfig::timeout) is not waited for. Blobs may outlive
/// the store; the spill files are freed once the store and all of its blobs have been dropped, and every transfer has
/// really ended.
#[derive(Clone)]
pub struct Store {
    shared: Arc<Shared>,
}

struct Shared {
    // Declared first so that it is dropped first: its thread is joined before the other fields are dropped.
    growth: Growth,
    // Declared before the backend: what they do may need another attempt of it. From then on its threads do their work.
    workers: Workers,
    backend: Arc<dyn Backend>,
    // Declared after the backend: what the backend's drop waits for may have to be given up.
    _watch: Watch,
    volumes: Volumes,
    writes: Writes,
    allowance: Arc<Allowance>,
    rules: Arc<Rules>,
    medium: Medium,
    /// Why transfers are slower than they could be, apart from what the backend itself reports.
    notes: Vec<String>,
}

impl Store {
    /// Opens the spill files and starts the backend.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] if a setting is out of range, [`ErrorKind::Directory`] if a directory cannot be used,
    /// [`ErrorKind::Unmet`] if [`BackendKind::Uring`](crate::BackendKind::Uring) or
    /// [`BackendKind::CuFile`](crate::BackendKind::CuFile) is requested but not available, [`ErrorKind::Io`] if no
    /// thread can be started or no file opened because of a limit, or there are no random bytes for a key.
    pub fn open(config: StoreConfig) -> Result<Store> {
        let config = config.checked()?;
        let (backend, note) = config.backend.start(&config)?;
        Store::assemble(config, backend, note)
    }

    /// Opens the spill files with a backend that the caller supplies. [`StoreConfig::backend`] is ignored, except
    /// that with [`BackendKind::Memory`](crate::BackendKind::Memory) the backend opens its regions in memory.
    ///
    /// # Errors
    ///
    /// As [`Store::open`].
    pub fn open_with(config: StoreConfig, backend: Arc<dyn Backend>) -> Result<Store> {
        Store::assemble(config.checked()?, backend, None)
    }

    fn assemble(config: StoreConfig, backend: Arc<dyn Backend>, note: Option<String>) -> Result<Store> {
        let share = config.cap_bytes / config.files() as u64;
        let refusals = Arc::default();
        let open = |place| {
            Ok(Arc::new(Volume::new(backend.open(place, share)?, share, config.keep_free, &refusals)))
        };
        let volumes: Vec<Arc<Volume>> = config.places().into_iter().map(open).collect::<Result<_>>()?;
        let files = config.places().into_iter().zip(&volumes);
        let files = files.map(|(place, volume)| FileWrites {
            bytes: Arc::clone(volume.written()),
            drives: match place {
                Place::Directory(directory) if !open::holds_memory(directory) => drive::below(directory),
                _ => Vec::new(),
            },
        });
        let writes = Writes::new(files.collect());
        let media = || volumes.iter().map(|volume| volume.info().medium);
        let medium =
            [Medium::Memory, Medium::Direct].into_iter().find(|one| media().all(|medium| medium == *one));
        let notes = volumes.iter().flat_map(|volume| volume.info().notes.clone());
        let notes = note.into_iter().chain(notes).collect();
        let encryption = if config.encrypt { Some(Encryption::new()?) } else { None };
        let watch = Watch::new(config.timeout)?;
        let workers = Workers::new();
        let rules = Rules {
            checksums: AtomicBool::new(config.checksums),
            encryption,
            io_bytes: config.io_bytes,
            counters: Counters::default(),
            watcher: Arc::clone(watch.watcher()),
            workers: Arc::clone(workers.queue()),
            backend: Arc::downgrade(&backend),
        };
        let shared = Shared {
            growth: Growth::new(watch.watcher()),
            workers,
            backend,
            _watch: watch,
            volumes: Volumes::new(volumes, config.stripe_bytes as u64),
            writes,
            allowance: Arc::default(),
            rules: Arc::new(rules),
            medium: medium.unwrap_or(Medium::Buffered),
            notes,
        };
        Ok(Store { shared: Arc::new(shared) })
    }

    /// Reserves room for `bytes`. The call may have to wait until a spill file has grown; it does no other I/O.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NoSpace`] if the cap or a full disk leaves no contiguous room.
    pub fn reserve(&self, bytes: u64) -> Result<Arc<Blob>> {
        loop {
            match self.reserve_now(bytes)? {
                Reservation::Made(blob) => return Ok(blob),
                Reservation::Until(volume, end) => volume.grow(end),
            }
        }
    }

    /// Like [`reserve`](Store::reserve), but does not wait: returns `None` if a spill file has to grow first. The
    /// file then grows on a thread of the store's own, and a [listener](Store::on_growth) is called when it is time
    /// to ask again. If the system refuses that thread, the call lets the file grow itself, and waits for it.
    ///
    /// # Errors
    ///
    /// As [`Store::reserve`].
    pub fn try_reserve(&self, bytes: u64) -> Result<Option<Arc<Blob>>> {
        loop {
            match self.reserve_now(bytes)? {
                Reservation::Made(blob) => return Ok(Some(blob)),
                Reservation::Until(volume, end) if self.shared.growth.begin(volume, end) => return Ok(None),
                Reservation::Until(..) => {}
            }
        }
    }

    /// Calls `listener`, on a thread of the store's own, each time a spill file has grown or shrunk, or has failed to. It
    /// is called for as long as the caller holds the `Arc`. The listener must not wait for a transfer.
    pub fn on_growth(&self, listener: &Arc<dyn Fn() + Send + Sync>) {
        self.shared.growth.listen(listener);
    }

    fn reserve_now(&self, bytes: u64) -> Result<Reservation<'_>> {
        let Shared { allowance, volumes, .. } = &*self.shared;
        if bytes == 0 {
            return Ok(Reservation::Made(volumes.no_bytes()));
        }
        let padded = bytes.div_ceil(BLOCK as u64).saturating_mul(BLOCK as u64);
        let Some(grant) = allowance.take(padded) else {
            let message = format!("{} are more than may be written to the disks at present", ByteSize(bytes));
            return Err(Error::new(ErrorKind::NoSpace, message));
        };
        volumes.reserve(bytes, grant)
    }

    /// Starts to write the first [`Blob::len`] bytes of `buf` to `blob`, and returns without waiting for the disk.
    ///
    /// Memory that needs a bounce buffer is copied before the call returns; what is encrypted, later. No other transfer of the same blob, and
    /// none into the same memory, may run meanwhile. After [`ErrorKind::TimedOut`] the kernel may still read the memory
    /// and write the blob: both stay with the transfer until it really ends.
    pub fn write(&self, blob: Arc<Blob>, buf: Arc<dyn IoBuf>, done: Completion) {
        self.start(Direction::Write, blob, buf, done);
    }

    /// Starts to read `blob` into the first [`Blob::len`] bytes of `buf`, and returns without waiting for the disk.
    ///
    /// If the read fails, the contents of the memory are unspecified. No other transfer from or into the same memory,
    /// and no write of the same blob, may run meanwhile. After [`ErrorKind::TimedOut`] the kernel may still write to the
    /// memory, which stays with the transfer until it really ends: it must not be used for anything else.
    pub fn read(&self, blob: Arc<Blob>, buf: Arc<dyn IoBuf>, done: Completion) {
        self.start(Direction::Read, blob, buf, done);
    }

    fn start(&self, direction: Direction, blob: Arc<Blob>, buf: Arc<dyn IoBuf>, done: Completion) {
        let Shared { backend, rules, .. } = &*self.shared;
        if blob.is_empty() {
            drop((blob, buf));
            return done.call(Ok(()));
        }
        match Transfer::new(Arc::clone(rules), direction, blob, buf, done) {
            Ok(transfer) => match transfer.begin() {
                // The workers submit them.
                operations if operations.is_empty() => {}
                operations => backend.submit(operations),
            },
            Err((error, done)) => {
                rules.counters.failures.fetch_add(1, Ordering::Relaxed);
                done.call(Err(error));
            }
        }
    }

    /// Whether checksums are taken of what is written from now on, unless it is encrypted. What was written before is read as it was written:
    /// with a comparison of its checksums, if there are any.
    pub fn take_checksums(&self, take: bool) {
        self.shared.rules.checksums.store(take, Ordering::Relaxed);
    }

    /// Whether checksums are taken of what is written.
    pub fn takes_checksums(&self) -> bool {
        self.shared.rules.checksums.load(Ordering::Relaxed)
    }

    /// How many threads, at most, take checksums at once.
    pub fn checksum_threads(&self) -> usize {
        self.shared.workers.queue().most()
    }

    /// How the bytes are moved, and why a faster way was not taken.
    pub fn path(&self) -> StorePath {
        let Shared { backend, medium, notes, rules, .. } = &*self.shared;
        let mut backend = backend.describe();
        backend.notes.extend(notes.iter().cloned());
        StorePath { backend, medium: *medium, encrypted: rules.encryption.is_some() }
    }

    /// What the store has done so far and how full it is. Waits for no disk and for no transfer.
    pub fn stats(&self) -> StoreStats {
        let Shared { volumes, rules, .. } = &*self.shared;
        StoreStats {
            reserved_bytes: volumes.reserved_bytes(),
            file_bytes: volumes.grown_bytes(),
            disk_bytes_written: volumes.written_bytes(),
            cap_bytes: volumes.cap_bytes(),
            ..rules.counters.stats()
        }
    }

    /// What is written to each drive.
    pub fn writes(&self) -> Writes {
        self.shared.writes.clone()
    }

    /// What is reserved and not yet written, for [`allow`](Store::allow).
    pub fn outlook(&self) -> Outlook {
        self.shared.allowance.outlook()
    }

    /// So many bytes may be written after the moment of `since`, whole blocks counted. What was reserved before it and was not yet
    /// written is among them. Once the rest is reserved, [`reserve`](Store::reserve) fails with [`ErrorKind::NoSpace`].
    /// `None`: there is no limit, as at first.
    pub fn allow(&self, bytes: Option<u64>, since: Outlook) {
        self.shared.allowance.set(bytes, since);
    }

    /// Gives back the space of the spill files behind the last blob in each. Returns the bytes. The files grow again when
    /// they are needed, as they did at first. A disk that does not answer is waited for up to its
    /// [time limit](StoreConfig::timeout), once; its file then counts as full until it has answered.
    pub fn shrink(&self) -> u64 {
        self.shared.growth.shrink(self.shared.volumes.all())
    }

    /// Gives back the memory that encrypted blobs are written from, as far as nothing is in it. Returns the bytes. Later writes take
    /// memory again.
    pub fn trim(&self) -> u64 {
        self.shared.rules.encryption.as_ref().map_or(0, Encryption::trim)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use proptest::prelude::*;

    use super::*;
    use crate::backend::suite::forbid_growth;
    use crate::backend::{BackendKind, Faulty, Pool};
    use crate::maker::tests::holds_in_child;
    use crate::mem::AlignedBuf;
    use crate::volume::GROWTH_BYTES;

    const SHARE: u64 = 256 * BLOCK as u64;

    fn config(files: usize, share: u64) -> StoreConfig {
        StoreConfig {
            directories: vec!["unused".into(); files],
            cap_bytes: files as u64 * share,
            backend: BackendKind::Memory,
            stripe_bytes: 8 * BLOCK,
            ..StoreConfig::default()
        }
    }

    fn memory(files: usize) -> Store {
        Store::open(config(files, SHARE)).unwrap()
    }

    /// A blob that takes everything that a store of one file has grown to when it opens.
    fn first_step(store: &Store) -> Arc<Blob> {
        store.reserve(GROWTH_BYTES).unwrap()
    }

    /// Registers a listener; the receiver gets a message each time the listener is called.
    fn listen(store: &Store) -> (Arc<dyn Fn() + Send + Sync>, mpsc::Receiver<()>) {
        let (tell, told) = mpsc::channel();
        let listener: Arc<dyn Fn() + Send + Sync> = Arc::new(move || tell.send(()).unwrap());
        store.on_growth(&listener);
        (listener, told)
    }

    #[test]
    fn a_process_that_was_forked_off_writes_nothing_with_the_key_of_its_parent() {
        let store = Store::open(StoreConfig { encrypt: true, ..config(1, SHARE) }).unwrap();
        let (blob, buf) = (store.reserve(100).unwrap(), Arc::new(AlignedBuf::new(BLOCK).unwrap()));
        let write = || {
            let (tell, told) = mpsc::channel();
            store.write(
                Arc::clone(&blob),
                buf.clone(),
                Completion::new(move |done| tell.send(done).unwrap()),
            );
            told
        };
        // At once: no other thread is there that could do it.
        let is_refused =
            |error: Error| error.to_string().contains("the process that this one was forked from");
        assert!(holds_in_child(|| write().try_recv().is_ok_and(|done| done.is_err_and(is_refused))));
        write().recv().unwrap().unwrap();
    }

    #[test]
    fn the_way_taken_is_told() {
        assert_eq!(memory(1).path().to_string(), "thread pool, memory");
        let directory = tempfile::tempdir().unwrap();
        let config = |backend| StoreConfig {
            directories: vec![directory.path().to_owned()],
            cap_bytes: 1 << 20,
            backend,
            ..StoreConfig::default()
        };
        assert_eq!(Store::open(config(BackendKind::Pool)).unwrap().path().backend(), "thread pool");
        let auto = Store::open(config(BackendKind::Auto)).unwrap();
        match Store::open(config(BackendKind::Uring)) {
            Ok(uring) => assert_eq!(uring.path(), auto.path()),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unmet);
                assert!(auto.path().to_string().contains("io_uring refused"), "{}", auto.path());
            }
        }
    }

    #[test]
    fn room_that_has_to_grow_is_not_waited_for_and_told_of() {
        let faulty = Arc::new(Faulty::new(Arc::new(Pool::new(1).unwrap())));
        let store = Store::open_with(config(1, 2 * GROWTH_BYTES), Arc::<Faulty>::clone(&faulty)).unwrap();
        let (listener, told) = listen(&store);
        let _full = first_step(&store);
        faulty.hold_growth();
        for _ in 0..2 {
            assert!(store.try_reserve(1).unwrap().is_none());
        }
        faulty.wait_growing();
        assert!(store.try_reserve(1).unwrap().is_none() && told.try_recv().is_err());
        faulty.release();
        told.recv().unwrap();
        assert!(store.try_reserve(1).unwrap().is_some());
        drop((store, listener));
        assert!(told.recv().is_err(), "it has grown once");
    }

    #[test]
    fn room_that_cannot_grow_is_an_error_once_that_is_known() {
        let store = Store::open(config(1, 2 * GROWTH_BYTES)).unwrap();
        let (_listener, told) = listen(&store);
        let _full = first_step(&store);
        forbid_growth(&**store.shared.volumes.all()[0].region());
        assert!(store.try_reserve(1).unwrap().is_none());
        told.recv().unwrap();
        assert_eq!(store.try_reserve(1).unwrap_err().kind(), ErrorKind::NoSpace);
    }

    #[test]
    fn files_that_take_long_to_fail_are_an_error_in_the_end() {
        let store =
            Store::open(StoreConfig { stripe_bytes: 1 << 30, ..config(2, 2 * GROWTH_BYTES) }).unwrap();
        let _full = [(); 2].map(|()| store.reserve(GROWTH_BYTES).unwrap());
        let volumes = store.shared.volumes.all();
        volumes.iter().for_each(|volume| forbid_growth(&**volume.region()));
        let (_listener, told) = listen(&store);
        for _ in volumes {
            // The previous file has failed to grow; pretend that the next attempt took longer than the pause.
            volumes[0].end_pause();
            assert!(store.try_reserve(1).unwrap().is_none());
            told.recv().unwrap();
        }
        assert_eq!(store.try_reserve(1).unwrap_err().kind(), ErrorKind::NoSpace);
        volumes[0].end_pause();
        assert!(store.try_reserve(1).unwrap().is_none(), "there may be room by now");
    }

    #[test]
    fn no_more_is_reserved_than_is_allowed() {
        let store = memory(2);
        let block = BLOCK as u64;
        let allow = |bytes| store.allow(bytes, store.outlook());
        allow(Some(3 * block));
        let blob = store.reserve(2 * block - 1).unwrap();
        for _ in 0..3 {
            assert_eq!(store.try_reserve(block + 1).unwrap_err().kind(), ErrorKind::NoSpace);
            assert_eq!(store.reserve(4 * SHARE).unwrap_err().kind(), ErrorKind::NoSpace);
        }
        assert!(store.reserve(0).is_ok() && store.reserve(1).is_ok() && store.reserve(1).is_err());
        drop(blob);
        assert!(store.reserve(1).is_err(), "room that is free again may have been written");
        allow(Some(block));
        assert!(store.reserve(1).is_ok() && store.reserve(1).is_err());
        allow(None);
        assert!(store.reserve(1).is_ok());
    }

    /// Writes so many bytes, in a blob of its own, and waits for that.
    fn write(store: &Store, bytes: u64) -> Result<()> {
        write_to(store, store.reserve(bytes)?)
    }

    fn write_to(store: &Store, blob: Arc<Blob>) -> Result<()> {
        let (tell, told) = mpsc::channel();
        let buf = Arc::new(AlignedBuf::new(blob.len() as usize).unwrap());
        store.write(blob, buf, Completion::new(move |outcome| tell.send(outcome).unwrap()));
        told.recv().unwrap()
    }

    #[test]
    fn what_is_reserved_and_not_yet_written_counts_against_the_next_limit() {
        let store = memory(2);
        let block = BLOCK as u64;
        let allow = |bytes| store.allow(Some(bytes), store.outlook());
        let [reserved, written] = [2, 3].map(|blocks| store.reserve(blocks * block).unwrap());
        write_to(&store, Arc::clone(&written)).unwrap();
        allow(3 * block);
        assert!(store.reserve(block + 1).is_err(), "two blocks may still be written");
        drop(reserved);
        allow(3 * block);
        assert!(store.reserve(3 * block).is_ok());
    }

    #[test]
    fn whole_blocks_count_as_written_whatever_becomes_of_the_blob() {
        let directory = tempfile::tempdir().unwrap();
        let config = StoreConfig {
            directories: vec![directory.path().to_owned(); 2],
            cap_bytes: 2 * SHARE,
            stripe_bytes: 2 * BLOCK,
            ..StoreConfig::default()
        };
        let store = Store::open(config).unwrap();
        write(&store, 5 * BLOCK as u64 - 1).unwrap();
        let stats = store.stats();
        assert_eq!((stats.bytes_written, stats.disk_bytes_written), (5 * 4096 - 1, 5 * 4096));
        let drives = store.writes();
        drop(store);
        match drives.by_drive().as_slice() {
            [] => eprintln!("skipped in part: the temporary directory is in memory"),
            // A mirror takes more.
            by_drive => {
                assert!(by_drive.iter().map(|one| one.bytes).sum::<u64>() >= 5 * 4096, "{by_drive:?}")
            }
        }
    }

    #[test]
    fn memory_is_no_drive() {
        let store = memory(2);
        write(&store, 1).unwrap();
        assert_eq!((store.stats().disk_bytes_written, store.writes().by_drive()), (4096, Vec::new()));
    }

    #[test]
    fn a_file_that_is_full_is_passed_over() {
        let store = memory(3);
        let fill = store.shared.volumes.all()[1].reserve(SHARE).unwrap();
        let blobs: Vec<_> = (0..6).map(|_| store.reserve(SHARE / 4).unwrap()).collect();
        assert!(blobs.iter().all(|blob| blob.pieces().len() == 2));
        drop((fill, blobs));
        assert_eq!(store.reserve(SHARE / 4).unwrap().pieces().len(), 3);
    }

    #[test]
    fn a_disk_that_is_full_is_passed_over_and_named_when_nothing_else_is_left() {
        let share = 2 * GROWTH_BYTES;
        let store = Store::open(StoreConfig { stripe_bytes: share as usize, ..config(2, share) }).unwrap();
        let _full = store.shared.volumes.all()[0].reserve(GROWTH_BYTES).unwrap();
        forbid_growth(&**store.shared.volumes.all()[0].region());
        let blobs: Vec<_> = (0..4).map(|_| store.reserve(share / 4).unwrap()).collect();
        assert!(
            blobs.iter().all(|blob| Arc::ptr_eq(blob.pieces()[0].volume(), &store.shared.volumes.all()[1]))
        );
        let error = store.reserve(share / 4).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        assert!(error.to_string().contains("cannot grow"), "{error}");
    }

    proptest! {
        #[test]
        fn blobs_never_overlap_and_all_room_comes_back(
            steps in proptest::collection::vec((1..SHARE, any::<bool>()), 1..60),
        ) {
            let store = memory(3);
            let mut blobs: Vec<Arc<Blob>> = Vec::new();
            for (bytes, free) in steps {
                if free && !blobs.is_empty() {
                    blobs.swap_remove(bytes as usize % blobs.len());
                } else {
                    blobs.extend(store.reserve(bytes).ok());
                }
                let mut extents: Vec<_> = blobs
                    .iter()
                    .flat_map(|blob| blob.pieces())
                    .map(|piece| (Arc::as_ptr(piece.volume()), piece.offset(), piece.offset() + piece.len()))
                    .collect();
                extents.sort_unstable();
                for pair in extents.windows(2) {
                    prop_assert!(pair[0].0 != pair[1].0 || pair[0].2 <= pair[1].1, "{:?}", pair);
                }
                prop_assert!(extents.iter().all(|&(_, _, end)| end <= SHARE));
                let padded: u64 = blobs.iter().map(|blob| blob.padded_len()).sum();
                prop_assert_eq!(store.stats().reserved_bytes, padded);
            }
            blobs.clear();
            prop_assert_eq!(store.stats().reserved_bytes, 0);
            prop_assert!(store.reserve(3 * SHARE).is_ok(), "each file is one free range again");
        }
    }
}
