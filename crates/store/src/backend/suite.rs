//! The tests that every backend passes, by itself and below [`Faulty`].

mod buffers;
mod checks;
mod encryption;
mod faults;
mod overdue;
#[expect(dead_code, reason = "shared with the tests of cuFile itself")]
#[path = "../../../../cufile-sys/tests/stand_in/mod.rs"]
pub(super) mod stand_in;

use std::any::Any;
use std::cell::RefCell;
use std::fs;
use std::io;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

use tempfile::TempDir;

use self::buffers::{Part, Scattered, Unpinned, aligned, bytes, contents, fill, pattern};
use self::checks::{
    a_blob_is_read_as_it_was_written_whatever_was_decided_since,
    a_checked_transfer_has_let_go_when_it_completes, a_read_that_was_compared_may_drop_the_store,
    a_write_that_fails_while_its_checksums_are_taken_lets_go,
    checksums_are_taken_by_threads_that_carry_out_no_io, copies_out_of_bounce_buffers_are_made_by_them_too,
    dropping_the_store_waits_for_what_is_compared_and_tried_again, many_checked_transfers_at_once,
    no_checksums_are_taken_of_memory_that_may_go,
};
use self::encryption::{
    a_devices_memory_is_not_encrypted_and_refused,
    a_write_that_begins_meanwhile_changes_nothing_of_what_a_read_demands,
    an_encrypted_transfer_has_let_go_when_it_completes, another_store_does_not_decrypt_with_its_own_key,
    changed_bytes_are_not_decrypted, checksums_are_not_taken_of_what_is_encrypted,
    dropping_the_store_waits_for_what_is_encrypted_and_written,
    encrypted_blobs_of_all_sizes_come_back_whatever_the_memory, many_encrypted_transfers_at_once,
    memory_that_may_go_is_copied_before_a_write_returns_and_then_encrypted,
    nothing_is_decrypted_that_was_not_written_whole, nothing_of_what_is_encrypted_is_on_the_disk,
    slots_are_decrypted_where_they_are, threads_that_carry_out_no_io_encrypt_and_decrypt,
    what_is_encrypted_leaves_the_memory_of_the_caller_alone,
};
use self::faults::{
    a_disk_that_vanishes_takes_only_what_is_on_it_until_it_is_back,
    a_file_of_a_disk_that_has_vanished_neither_shrinks_nor_grows, a_read_that_fails_is_tried_three_times,
    a_write_that_fails_is_reported_at_once, busy_time_runs_while_a_transfer_is_in_flight,
    changed_bytes_are_noticed, completions_can_be_held_back, interrupted_transfers_are_tried_again,
    only_the_transfer_that_fails_fails, short_transfers_go_on,
};
use self::overdue::{
    a_time_out_may_drop_the_store, delayed_and_reversed_completions_change_nothing,
    dropping_the_store_does_not_wait_for_what_was_given_up,
    memory_and_room_of_what_was_given_up_are_not_used_again,
    one_operation_that_never_completes_takes_its_whole_transfer,
    what_never_completes_is_given_up_and_kept_until_it_does,
};
use self::stand_in::StandIn;
use super::cufile::CuFileRegion;
use super::{Backend, CuFile, Direction, Faulty, Op, Pool, Throttled, Uring};
use crate::error::{ErrorKind, Result};
use crate::mem::{AlignedBuf, BLOCK, HostPool, IoBuf};
use crate::region::{Medium, Place, Region, RegionInfo};
use crate::spill_file::SpillFile;
use crate::{BackendKind, Blob, Completion, Store, StoreConfig};

const MIB: usize = 1 << 20;
const SIZES: [usize; 10] = [1, 511, 4095, 4096, 4097, 65_537, MIB - 1, MIB, MIB + 1, 3 * MIB + 12_345];

/// Runs each case over a backend; `$make` is `None` where the machine does not have it.
macro_rules! suite {
    ($($backend:ident, $kind:ident, $make:expr;)*) => {
        $(suite!(@backend $backend, $kind, $make,
            round_trips_of_all_sizes
            memory_that_does_not_suit_goes_through_a_copy
            scattered_memory_needs_no_copy
            scattered_memory_that_does_not_suit_goes_through_a_copy
            slots_of_a_host_pool_need_no_copy
            many_transfers_at_once
            large_blobs_are_striped_and_small_ones_go_round
            the_cap_holds_and_freed_room_is_used_again
            the_store_has_let_go_when_a_transfer_completes
            dropping_the_store_waits_for_its_transfers
            a_completion_may_drop_the_store
            a_panic_in_a_completion_stays_there
            files_close_with_the_last_of_store_and_blobs
            an_empty_blob_needs_no_disk
            memory_that_is_too_small_is_refused
            the_end_of_the_file_is_an_error
            what_the_kernel_refuses_is_an_error
            a_region_of_some_other_backend_is_an_error
            short_transfers_go_on
            interrupted_transfers_are_tried_again
            a_read_that_fails_is_tried_three_times
            a_write_that_fails_is_reported_at_once
            only_the_transfer_that_fails_fails
            a_disk_that_vanishes_takes_only_what_is_on_it_until_it_is_back
            a_file_of_a_disk_that_has_vanished_neither_shrinks_nor_grows
            changed_bytes_are_noticed
            completions_can_be_held_back
            busy_time_runs_while_a_transfer_is_in_flight
            delayed_and_reversed_completions_change_nothing
            what_never_completes_is_given_up_and_kept_until_it_does
            memory_and_room_of_what_was_given_up_are_not_used_again
            one_operation_that_never_completes_takes_its_whole_transfer
            dropping_the_store_does_not_wait_for_what_was_given_up
            a_time_out_may_drop_the_store
            checksums_are_taken_by_threads_that_carry_out_no_io
            copies_out_of_bounce_buffers_are_made_by_them_too
            a_blob_is_read_as_it_was_written_whatever_was_decided_since
            a_write_that_fails_while_its_checksums_are_taken_lets_go
            a_checked_transfer_has_let_go_when_it_completes
            dropping_the_store_waits_for_what_is_compared_and_tried_again
            a_read_that_was_compared_may_drop_the_store
            many_checked_transfers_at_once
            no_checksums_are_taken_of_memory_that_may_go
            encrypted_blobs_of_all_sizes_come_back_whatever_the_memory
            slots_are_decrypted_where_they_are
            nothing_of_what_is_encrypted_is_on_the_disk
            what_is_encrypted_leaves_the_memory_of_the_caller_alone
            a_write_that_begins_meanwhile_changes_nothing_of_what_a_read_demands
            changed_bytes_are_not_decrypted
            nothing_is_decrypted_that_was_not_written_whole
            another_store_does_not_decrypt_with_its_own_key
            threads_that_carry_out_no_io_encrypt_and_decrypt
            memory_that_may_go_is_copied_before_a_write_returns_and_then_encrypted
            an_encrypted_transfer_has_let_go_when_it_completes
            dropping_the_store_waits_for_what_is_encrypted_and_written
            checksums_are_not_taken_of_what_is_encrypted
            many_encrypted_transfers_at_once
            a_devices_memory_is_not_encrypted_and_refused
        );)*
    };
    (@backend $backend:ident, $kind:ident, $make:expr, $($case:ident)*) => {
        mod $backend {
            use super::*;
            $(
                #[test]
                fn $case() {
                    match $make {
                        Some(backend) => super::$case(&Bench::new(BackendKind::$kind, backend)),
                        None => eprintln!("skipped: {} is refused here", stringify!($backend)),
                    }
                }
            )*
        }
    };
}

suite! {
    uring, Uring, Uring::new(8).ok().map(|uring| Arc::new(uring) as Arc<dyn Backend>);
    pool, Pool, Pool::new(4).ok().map(|pool| Arc::new(pool) as Arc<dyn Backend>);
    memory, Memory, Pool::new(1).ok().map(|pool| Arc::new(pool) as Arc<dyn Backend>);
    faulty, Memory, Pool::new(2).ok().map(|pool| Arc::new(Faulty::new(Arc::new(pool))) as Arc<dyn Backend>);
    cufile, CuFile, Some(cufile());
    throttled, Memory, Pool::new(2).ok().and_then(|pool| throttled(Arc::new(pool)));
}

/// cuFile over a stand-in for the library, which moves bytes like the real one.
fn cufile() -> Arc<dyn Backend> {
    let transport = CuFile::over(StandIn::new().driver(), None).unwrap();
    Arc::new(Pool::over(Box::new(transport), 4).unwrap())
}

/// A limit that is never reached.
fn throttled(inner: Arc<dyn Backend>) -> Option<Arc<dyn Backend>> {
    Throttled::new(inner, NonZero::<u64>::MAX).ok().map(|throttled| Arc::new(throttled) as _)
}

/// What a test case runs on: a backend and three directories.
struct Bench {
    kind: BackendKind,
    backend: RefCell<Option<Arc<dyn Backend>>>,
    directories: Vec<TempDir>,
}

impl Bench {
    fn new(kind: BackendKind, backend: Arc<dyn Backend>) -> Bench {
        let directories = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
        Bench { kind, backend: RefCell::new(Some(backend)), directories }
    }

    fn config(&self) -> StoreConfig {
        StoreConfig {
            directories: vec![self.directories[0].path().to_owned()],
            cap_bytes: 64 * MIB as u64,
            backend: self.kind,
            io_bytes: 256 << 10,
            ..StoreConfig::default()
        }
    }

    /// Over all three directories, in small stripes, with checksums.
    fn striped(&self) -> StoreConfig {
        let directories = self.directories.iter().map(|directory| directory.path().to_owned()).collect();
        StoreConfig { directories, stripe_bytes: 64 << 10, checksums: true, ..self.config() }
    }

    /// The backend. From then on only the store holds it.
    fn backend(&self) -> Arc<dyn Backend> {
        self.backend.take().expect("a case opens one store")
    }

    fn open(&self, config: StoreConfig) -> Store {
        Store::open_with(config, self.backend()).unwrap()
    }

    fn open_faulty(&self, config: StoreConfig) -> (Store, Arc<Faulty>) {
        let faulty = Arc::new(Faulty::new(self.backend()));
        (Store::open_with(config, Arc::<Faulty>::clone(&faulty)).unwrap(), faulty)
    }

    /// As [`open_faulty`](Bench::open_faulty), for a case that opens several stores over the backend.
    fn open_faulty_again(&self, config: StoreConfig) -> (Store, Arc<Faulty>) {
        let backend = self.backend.borrow().clone().expect("nobody has taken it");
        let faulty = Arc::new(Faulty::new(backend));
        (Store::open_with(config, Arc::<Faulty>::clone(&faulty)).unwrap(), faulty)
    }
}

type Outcome = mpsc::Receiver<Result<()>>;

fn start(store: &Store, direction: Direction, blob: &Arc<Blob>, buf: Arc<dyn IoBuf>) -> Outcome {
    let (sender, outcome) = mpsc::channel();
    let done = Completion::new(move |result| sender.send(result).expect("the test waits"));
    match direction {
        Direction::Read => store.read(Arc::clone(blob), buf, done),
        Direction::Write => store.write(Arc::clone(blob), buf, done),
    }
    outcome
}

/// The single result that a transfer completes with.
fn result(outcome: &Outcome) -> Result<()> {
    let result = outcome.recv().expect("every transfer completes");
    assert!(outcome.recv().is_err(), "no transfer completes twice");
    result
}

fn write(store: &Store, blob: &Arc<Blob>, buf: Arc<dyn IoBuf>) -> Result<()> {
    result(&start(store, Direction::Write, blob, buf))
}

fn read(store: &Store, blob: &Arc<Blob>, buf: Arc<dyn IoBuf>) -> Result<()> {
    result(&start(store, Direction::Read, blob, buf))
}

fn write_pattern(store: &Store, seed: usize, len: usize) -> Arc<Blob> {
    let blob = store.reserve(len as u64).unwrap();
    write(store, &blob, aligned(&pattern(seed, len))).unwrap();
    blob
}

fn assert_holds_pattern(store: &Store, blob: &Arc<Blob>, seed: usize) {
    let len = blob.len() as usize;
    let mut buf = aligned(&vec![0xee; len]);
    read(store, blob, Arc::<AlignedBuf>::clone(&buf)).unwrap();
    assert!(bytes(&mut buf, len) == pattern(seed, len), "blob of {len} bytes came back changed");
}

/// Writes `blob` from some memory and reads it into other memory of the same kind.
fn assert_round_trip<B: IoBuf + 'static>(store: &Store, blob: &Arc<Blob>, memory: impl Fn() -> Arc<B>) {
    let len = blob.len() as usize;
    let (source, target) = (memory(), memory());
    fill(&*source, &pattern(len, len));
    write(store, blob, source).unwrap();
    read(store, blob, Arc::<B>::clone(&target)).unwrap();
    assert!(contents(&*target, len) == pattern(len, len), "blob of {len} bytes came back changed");
}

fn round_trips_of_all_sizes(bench: &Bench) {
    let store = bench.open(bench.config());
    let blobs: Vec<_> = SIZES.iter().map(|&len| write_pattern(&store, len, len)).collect();
    for blob in &blobs {
        assert_holds_pattern(&store, blob, blob.len() as usize);
    }
    let (stats, total) = (store.stats(), SIZES.iter().sum::<usize>() as u64);
    assert_eq!((stats.bytes_written, stats.bytes_read), (total, total));
    assert_eq!((stats.writes, stats.reads), (SIZES.len() as u64, SIZES.len() as u64));
    assert_eq!((stats.bounced, stats.failures, stats.retried), (0, 0, 0));
    assert_eq!(stats.reserved_bytes, blobs.iter().map(|blob| blob.padded_len()).sum::<u64>());
    drop(blobs);
    assert_eq!(store.stats().reserved_bytes, 0);
}

fn memory_that_does_not_suit_goes_through_a_copy(bench: &Bench) {
    let store = bench.open(bench.config());
    for len in SIZES {
        // Neither aligned nor with a byte of room for padding.
        let part = |fill: &[u8]| {
            let mut whole = AlignedBuf::new(len + 16).unwrap();
            whole.as_mut_slice().fill(0x77);
            whole.as_mut_slice()[3..3 + len].copy_from_slice(fill);
            Arc::new(Part { whole, start: 3, len })
        };
        let blob = store.reserve(len as u64).unwrap();
        write(&store, &blob, part(&pattern(len, len))).unwrap();
        let mut buf = part(&vec![0; len]);
        read(&store, &blob, Arc::<Part>::clone(&buf)).unwrap();
        let whole = Arc::get_mut(&mut buf).unwrap().whole.as_mut_slice();
        assert!(whole[3..3 + len] == pattern(len, len));
        assert!(
            whole[..3].iter().chain(&whole[3 + len..]).all(|&byte| byte == 0x77),
            "nothing around is touched"
        );
    }
    assert!(store.stats().bounced > 0);
}

fn scattered_memory_needs_no_copy(bench: &Bench) {
    let store = bench.open(bench.striped());
    for len in SIZES {
        let blob = store.reserve(len as u64).unwrap();
        assert_round_trip(&store, &blob, || Arc::new(Scattered::new(len, 0)));
    }
    assert_eq!((store.stats().bounced, store.stats().retried), (0, 0));
}

fn scattered_memory_that_does_not_suit_goes_through_a_copy(bench: &Bench) {
    let store = bench.open(bench.striped());
    for len in SIZES {
        // Aligned, but the parts meet within blocks, or there is no room for the padding.
        let blob = store.reserve(len as u64).unwrap();
        assert_round_trip(&store, &blob, || Arc::new(Scattered::new(len, 8)));
    }
    assert_eq!(store.stats().bounced, 2 * SIZES.len() as u64);
}

fn slots_of_a_host_pool_need_no_copy(bench: &Bench) {
    let (store, pool) = (bench.open(bench.striped()), HostPool::new(16 * MIB as u64, Arc::new(Unpinned)));
    pool.grow(16 * MIB as u64).unwrap();
    // Every third page stays taken, so what is free is scattered.
    let mut pages: Vec<_> = std::iter::from_fn(|| pool.take(1)).enumerate().collect();
    pages.retain(|(index, _)| index % 3 == 0);
    for len in SIZES {
        let blob = store.reserve(len as u64).unwrap();
        assert_round_trip(&store, &blob, || Arc::new(pool.take(len as u64).unwrap()));
    }
    assert_eq!((store.stats().bounced, store.stats().retried), (0, 0));
    drop(pages);
    assert_eq!(pool.free_bytes(), pool.capacity(), "transfers have let their slots go");
}

fn many_transfers_at_once(bench: &Bench) {
    let store = bench.open(bench.config());
    let lens: Vec<usize> = (0..100).map(|index| 1 + index * 7_919 % 300_000).collect();
    let blobs: Vec<_> = lens.iter().map(|&len| store.reserve(len as u64).unwrap()).collect();
    let writes: Vec<_> = blobs
        .iter()
        .map(|blob| {
            start(&store, Direction::Write, blob, aligned(&pattern(blob.len() as usize, blob.len() as usize)))
        })
        .collect();
    writes.iter().for_each(|outcome| result(outcome).unwrap());
    let reads: Vec<_> = blobs
        .iter()
        .map(|blob| {
            let buf = aligned(&vec![0; blob.len() as usize]);
            (start(&store, Direction::Read, blob, Arc::<AlignedBuf>::clone(&buf)), buf)
        })
        .collect();
    for ((outcome, mut buf), len) in reads.into_iter().zip(lens) {
        result(&outcome).unwrap();
        assert!(bytes(&mut buf, len) == pattern(len, len));
    }
}

fn large_blobs_are_striped_and_small_ones_go_round(bench: &Bench) {
    let store = bench.open(bench.striped());
    let files =
        |blob: &Blob| -> Vec<_> { blob.pieces().iter().map(|piece| Arc::as_ptr(piece.volume())).collect() };
    let distinct = |mut files: Vec<_>| {
        files.sort();
        files.dedup();
        files.len()
    };

    let large = write_pattern(&store, 5, MIB + 777);
    assert_eq!((large.pieces().len(), distinct(files(&large))), (3, 3));
    assert_holds_pattern(&store, &large, 5);

    let small: Vec<_> = (0..3).map(|seed| write_pattern(&store, seed, 64 << 10)).collect();
    assert!(small.iter().all(|blob| blob.pieces().len() == 1));
    assert_eq!(distinct(small.iter().flat_map(|blob| files(blob)).collect()), 3);
    for (seed, blob) in small.iter().enumerate() {
        assert_holds_pattern(&store, blob, seed);
    }
}

fn the_cap_holds_and_freed_room_is_used_again(bench: &Bench) {
    let store = bench.open(StoreConfig { cap_bytes: 4 * MIB as u64, ..bench.config() });
    let mut blobs: Vec<_> = (0..4).map(|seed| write_pattern(&store, seed, MIB)).collect();
    for bytes in [1, MIB as u64, 4 * MIB as u64 + 1, u64::MAX] {
        let error = store.reserve(bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        assert!(error.to_string().contains("4.0 MiB of at most 4.0 MiB"), "{error}");
    }
    drop(blobs.remove(1));
    blobs.insert(1, write_pattern(&store, 1, MIB));
    for (seed, blob) in blobs.iter().enumerate() {
        assert_holds_pattern(&store, blob, seed);
    }
    assert!(store.stats().file_bytes <= 4 * MIB as u64);
}

fn the_store_has_let_go_when_a_transfer_completes(bench: &Bench) {
    let store = bench.open(bench.config());
    let blob = store.reserve(3 * MIB as u64).unwrap();
    let buf = aligned(&pattern(1, 3 * MIB));
    let (weak_blob, weak_buf) = (Arc::downgrade(&blob), Arc::downgrade(&buf));
    let (sender, outcome) = mpsc::channel();
    let done = move |_| sender.send((weak_blob.strong_count(), weak_buf.strong_count())).unwrap();
    store.write(blob, buf, Completion::new(done));
    assert_eq!(outcome.recv().unwrap(), (0, 0));
}

fn dropping_the_store_waits_for_its_transfers(bench: &Bench) {
    let store = bench.open(bench.config());
    let completed = Arc::new(AtomicUsize::new(0));
    for _ in 0..20 {
        let blob = store.reserve(MIB as u64).unwrap();
        let completed = Arc::clone(&completed);
        let done = move |result: Result<()>| {
            result.unwrap();
            completed.fetch_add(1, Ordering::SeqCst);
        };
        store.write(blob, aligned(&pattern(0, MIB)), Completion::new(done));
    }
    drop(store);
    assert_eq!(completed.load(Ordering::SeqCst), 20);
}

fn a_completion_may_drop_the_store(bench: &Bench) {
    /// Sends a message when its thread ends.
    struct Ends(mpsc::Sender<()>);
    impl Drop for Ends {
        fn drop(&mut self) {
            self.0.send(()).unwrap();
        }
    }
    thread_local!(static ENDS: RefCell<Option<Ends>> = const { RefCell::new(None) });

    let store = bench.open(bench.config());
    let blob = store.reserve(1).unwrap();
    let (sender, ended) = mpsc::channel();
    let (go, gone) = mpsc::channel::<()>();
    let last = store.clone();
    let done = move |_| {
        // The test has dropped its handle when this returns.
        assert!(gone.recv().is_err());
        ENDS.set(Some(Ends(sender)));
        drop(last);
    };
    store.write(blob, aligned(&[1]), Completion::new(done));
    drop(store);
    drop(go);
    ended.recv().expect("the I/O thread ends by itself");
}

fn a_panic_in_a_completion_stays_there(bench: &Bench) {
    let store = bench.open(bench.config());
    let blob = store.reserve(1).unwrap();
    store.write(blob, aligned(&[1]), Completion::new(|_| panic!("on purpose, in a completion")));
    let blob = write_pattern(&store, 1, MIB);
    assert_holds_pattern(&store, &blob, 1);
}

fn files_close_with_the_last_of_store_and_blobs(bench: &Bench) {
    let directory = bench.directories[0].path().to_str().unwrap().to_owned();
    let open_files = || {
        let links =
            fs::read_dir("/proc/self/fd").unwrap().filter_map(|fd| fs::read_link(fd.unwrap().path()).ok());
        links.filter(|path| path.to_string_lossy().contains(&directory)).count()
    };
    let on_disk = usize::from(bench.kind != BackendKind::Memory);
    let store = bench.open(bench.config());
    let blob = write_pattern(&store, 1, MIB);
    drop(store);
    assert_eq!(open_files(), on_disk);
    drop(blob);
    assert_eq!(open_files(), 0);
}

fn an_empty_blob_needs_no_disk(bench: &Bench) {
    let store = bench.open(bench.config());
    let blob = write_pattern(&store, 1, 0);
    assert_holds_pattern(&store, &blob, 1);
    assert_eq!((store.stats().operations, store.stats().reserved_bytes), (0, 0));
}

fn memory_that_is_too_small_is_refused(bench: &Bench) {
    let store = bench.open(bench.config());
    let blob = store.reserve(4097).unwrap();
    for direction in [Direction::Write, Direction::Read] {
        let error = result(&start(&store, direction, &blob, aligned(&[0; 4096]))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
        assert!(error.to_string().contains("4096 bytes"), "{error}");
    }
    assert_eq!(store.stats().failures, 2);
}

fn the_end_of_the_file_is_an_error(bench: &Bench) {
    // A region of one block, and an operation that reads two: it comes back short, continues, and finds the end.
    let grown = |region: &dyn Region| region.grow(0, BLOCK as u64).unwrap();
    let error = carry_out(bench, Direction::Read, grown, 2).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
}

fn what_the_kernel_refuses_is_an_error(bench: &Bench) {
    let error = carry_out(bench, Direction::Write, forbid_growth, 1).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EPERM));
}

fn a_region_of_some_other_backend_is_an_error(bench: &Bench) {
    struct Other;
    impl Region for Other {
        fn grow(&self, _from: u64, _to: u64) -> io::Result<()> {
            Ok(())
        }

        fn describe(&self) -> RegionInfo {
            RegionInfo { name: "another".to_owned(), medium: Medium::Memory, alignment: 1, notes: Vec::new() }
        }

        fn backing(&self) -> &dyn Any {
            self
        }
    }
    let backend = bench.backend();
    let error = outcome_of(&*backend, Direction::Write, Arc::new(Other), 1).unwrap_err();
    assert!(error.to_string().contains("some other backend"), "{error}");
    let region = backend.open(Place::Memory, BLOCK as u64).unwrap();
    outcome_of(&*backend, Direction::Write, region, 1).unwrap();
}

/// Makes every further growth of a region in memory fail, as on a full disk.
pub(crate) fn forbid_growth(region: &dyn Region) {
    let region = region.backing();
    let registered = || region.downcast_ref().map(|CuFileRegion { file, .. }| &**file);
    let file: &SpillFile = region.downcast_ref().or_else(registered).expect("all of them are files");
    file.forbid_growth();
}

/// The outcome of an operation from the start of a region in memory, without a store.
fn carry_out(
    bench: &Bench,
    direction: Direction,
    prepare: impl FnOnce(&dyn Region),
    blocks: usize,
) -> io::Result<()> {
    let backend = bench.backend();
    let region = backend.open(Place::Memory, BLOCK as u64).unwrap();
    prepare(&*region);
    outcome_of(&*backend, direction, region, blocks)
}

fn outcome_of(
    backend: &dyn Backend,
    direction: Direction,
    region: Arc<dyn Region>,
    blocks: usize,
) -> io::Result<()> {
    let (sender, outcome) = mpsc::channel();
    let done = Box::new(move |result| {
        sender.send(result).unwrap();
        Vec::new()
    });
    let buf = aligned(&vec![0; blocks * BLOCK]);
    backend.submit(vec![Op::new(direction, (region, 0), (buf, 0, blocks * BLOCK), done)]);
    outcome.recv().unwrap()
}
