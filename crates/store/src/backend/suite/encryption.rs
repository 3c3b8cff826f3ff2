//! Encrypted blobs: what the disk gets, what comes back, and what is an error.

use std::collections::BTreeSet;
use std::sync::{Arc, mpsc};
use std::thread;

use super::super::{Direction, Fault};
use super::buffers::{Part, Scattered, Unpinned, aligned, bytes, contents, pattern};
use super::checks::{Passing, Watched, assert_only_they_touch_what_was_read, is_for_bytes};
use super::{
    Bench, MIB, SIZES, assert_holds_pattern, assert_round_trip, read, result, start, write, write_pattern,
};
use crate::error::{ErrorKind, Result};
use crate::mem::{AlignedBuf, BLOCK, HostPool, IoBuf};
use crate::{Blob, Completion, Store, StoreConfig};

/// The length of what is looked for on the disk.
const TELLING: usize = 16;

fn encrypted(bench: &Bench) -> StoreConfig {
    StoreConfig { encrypt: true, checksums: false, ..bench.striped() }
}

/// What is on the disk, whatever was noted of it.
fn raw(plain: &Store, blob: &Arc<Blob>) -> Vec<u8> {
    let (marks, len) = (blob.marks(), blob.len() as usize);
    blob.set_marks(None);
    let mut buf = aligned(&vec![0; len]);
    read(plain, blob, Arc::<AlignedBuf>::clone(&buf)).unwrap();
    blob.set_marks(marks);
    bytes(&mut buf, blob.padded_len() as usize).to_vec()
}

pub(super) fn encrypted_blobs_of_all_sizes_come_back_whatever_the_memory(bench: &Bench) {
    let store = bench.open(encrypted(bench));
    let pool = HostPool::new(16 * MIB as u64, Arc::new(Unpinned));
    pool.grow(16 * MIB as u64).unwrap();
    for len in SIZES {
        let blob = write_pattern(&store, len, len);
        assert_holds_pattern(&store, &blob, len);
        let part = || Arc::new(Part { whole: AlignedBuf::new(len + 16).unwrap(), start: 3, len });
        assert_round_trip(&store, &blob, part);
        assert_round_trip(&store, &blob, || Arc::new(Scattered::new(len, 0)));
        assert_round_trip(&store, &blob, || Arc::new(Scattered::new(len, 8)));
        assert_round_trip(&store, &blob, || Arc::new(pool.take(len as u64).unwrap()));
    }
    let stats = store.stats();
    assert_eq!((stats.retried, stats.failures), (0, 0));
    assert_eq!(stats.reads_checked, stats.reads, "all of them were decrypted");
    let padded = SIZES.iter().map(|&len| len.next_multiple_of(BLOCK) as u64).sum::<u64>();
    assert_eq!(stats.disk_bytes_written, 5 * padded, "nothing becomes longer");
}

pub(super) fn slots_are_decrypted_where_they_are(bench: &Bench) {
    let store = bench.open(encrypted(bench));
    let pool = HostPool::new(4 * MIB as u64, Arc::new(Unpinned));
    pool.grow(4 * MIB as u64).unwrap();
    // Every other page stays taken, so that none of those that are free has a free neighbour.
    let mut pages: Vec<_> = std::iter::from_fn(|| pool.take(1)).enumerate().collect();
    pages.retain(|(index, _)| index % 2 == 0);
    let blob = write_pattern(&store, 1, MIB);
    let before = store.stats().bounced;
    read(&store, &blob, Arc::new(pool.take(MIB as u64).unwrap())).unwrap();
    assert_eq!(store.stats().bounced, before);
}

pub(super) fn nothing_of_what_is_encrypted_is_on_the_disk(bench: &Bench) {
    let (store, _) = bench.open_faulty_again(encrypted(bench));
    let (plain, _) = bench.open_faulty_again(bench.config());
    let len = MIB + 5;
    let blobs = [(); 2].map(|()| write_pattern(&store, 1, len));
    let [first, second] = blobs.each_ref().map(|blob| raw(&plain, blob));
    let blob = write_pattern(&plain, 1, len);
    let not_encrypted = raw(&plain, &blob);
    let told: BTreeSet<_> = not_encrypted[..len].chunks_exact(TELLING).collect();
    let tells = |disk: &[u8]| disk.windows(TELLING).any(|bytes| told.contains(bytes));
    assert!(tells(&not_encrypted), "this would show");
    assert!(!tells(&first) && !tells(&second));
    let alike = first.iter().zip(&second).take(len).filter(|(first, second)| first == second).count();
    assert!(alike < len / 100, "{alike} of {len} bytes are the same although it was encrypted twice");
    // Written anew in the same place, it is another thing again.
    write(&store, &blobs[0], aligned(&pattern(1, len))).unwrap();
    assert!(raw(&plain, &blobs[0])[..len] != first[..len]);
    assert_holds_pattern(&store, &blobs[0], 1);
}

pub(super) fn what_is_encrypted_leaves_the_memory_of_the_caller_alone(bench: &Bench) {
    let store = bench.open(encrypted(bench));
    let blob = store.reserve(MIB as u64).unwrap();
    let mut buf = aligned(&pattern(1, MIB));
    write(&store, &blob, Arc::<AlignedBuf>::clone(&buf)).unwrap();
    assert!(bytes(&mut buf, MIB) == pattern(1, MIB));
}

pub(super) fn changed_bytes_are_not_decrypted(bench: &Bench) {
    let (store, faulty) = bench.open_faulty(StoreConfig { encrypt: true, ..bench.config() });
    let blob = write_pattern(&store, 1, MIB + 5);
    faulty.inject(Direction::Read, Fault::FlippedBit, 0, 1);
    assert_holds_pattern(&store, &blob, 1);
    assert_eq!(store.stats().retried, 1);

    faulty.inject(Direction::Read, Fault::FlippedBit, 0, u64::MAX);
    let error = read(&store, &blob, aligned(&vec![0; MIB + 5])).unwrap_err();
    let (message, piece) = (error.to_string(), &blob.pieces()[0]);
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    let place = format!("offset {} of the {}", piece.offset(), piece.volume().info().name);
    assert!(message.contains(&place) && message.contains("tag of its encryption"), "{message}");

    faulty.heal();
    assert_holds_pattern(&store, &blob, 1);
}

pub(super) fn a_write_that_begins_meanwhile_changes_nothing_of_what_a_read_demands(bench: &Bench) {
    let (store, faulty) = bench.open_faulty(StoreConfig { encrypt: true, ..bench.config() });
    let blob = write_pattern(&store, 1, MIB);
    faulty.hold(Direction::Read);
    let target = aligned(&vec![0; MIB]);
    let outcome = start(&store, Direction::Read, &blob, Arc::<AlignedBuf>::clone(&target));
    faulty.wait_held(blob.spans(|_| 256 << 10).count());
    // The disk has read everything, and nothing is written.
    faulty.inject(Direction::Write, Fault::Errno(libc::EIO), 0, u64::MAX);
    write(&store, &blob, aligned(&pattern(2, MIB))).unwrap_err();
    faulty.release();
    result(&outcome).unwrap();
    assert!(contents(&*target, MIB) == pattern(1, MIB));
}

pub(super) fn nothing_is_decrypted_that_was_not_written_whole(bench: &Bench) {
    let (store, faulty) = bench.open_faulty(encrypted(bench));
    let blob = store.reserve(MIB as u64).unwrap();
    let unreadable = || {
        let error = read(&store, &blob, aligned(&vec![0; MIB])).unwrap_err();
        assert!(error.kind() == ErrorKind::Io && error.to_string().contains("was not written"), "{error}");
    };
    unreadable();
    write(&store, &blob, aligned(&pattern(1, MIB))).unwrap();
    faulty.inject(Direction::Write, Fault::Errno(libc::EIO), 3, 1);
    assert_eq!(write(&store, &blob, aligned(&pattern(2, MIB))).unwrap_err().kind(), ErrorKind::Io);
    unreadable();
    write(&store, &blob, aligned(&pattern(3, MIB))).unwrap();
    assert_holds_pattern(&store, &blob, 3);
}

pub(super) fn another_store_does_not_decrypt_with_its_own_key(bench: &Bench) {
    let stores = [(); 2].map(|()| bench.open_faulty_again(encrypted(bench)).0);
    let blobs = stores.each_ref().map(|store| write_pattern(store, 1, MIB));
    // What was noted with a blob has the key that it needs.
    assert_holds_pattern(&stores[1], &blobs[0], 1);
    blobs[0].set_marks(blobs[1].marks());
    let error = read(&stores[0], &blobs[0], aligned(&vec![0; MIB])).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
}

pub(super) fn threads_that_carry_out_no_io_encrypt_and_decrypt(bench: &Bench) {
    let (store, faulty) = bench.open_faulty(StoreConfig { encrypt: true, ..bench.config() });
    let blob = store.reserve(MIB as u64).unwrap();
    let source = Watched::new(&pattern(1, MIB));
    write(&store, &blob, Arc::<Watched>::clone(&source)).unwrap();
    let asked = source.asked();
    assert!(!asked.is_empty() && asked.iter().all(|name| is_for_bytes(name)), "{asked:?}");
    assert_only_they_touch_what_was_read(&store, &faulty, &blob);
}

pub(super) fn memory_that_may_go_is_copied_before_a_write_returns_and_then_encrypted(bench: &Bench) {
    let (store, faulty) = bench.open_faulty(encrypted(bench));
    faulty.hold(Direction::Write);
    let blob = store.reserve(MIB as u64).unwrap();
    let buf = Arc::new(Passing(Arc::into_inner(aligned(&pattern(1, MIB))).unwrap()));
    let weak = Arc::downgrade(&buf);
    let outcome = start(&store, Direction::Write, &blob, buf);
    assert_eq!(weak.strong_count(), 0, "nobody reads it any more");
    faulty.release();
    result(&outcome).unwrap();
    assert_holds_pattern(&store, &blob, 1);
}

pub(super) fn an_encrypted_transfer_has_let_go_when_it_completes(bench: &Bench) {
    let (store, faulty) = bench.open_faulty(encrypted(bench));
    let blob = write_pattern(&store, 1, 3 * MIB);
    for (direction, fault) in [(Direction::Write, false), (Direction::Read, false), (Direction::Write, true)]
    {
        if fault {
            faulty.inject(direction, Fault::Errno(libc::EIO), 0, 1);
        }
        let (buf, before) = (aligned(&vec![1; 3 * MIB]), Arc::strong_count(&blob));
        let (weak_blob, weak_buf) = (Arc::downgrade(&blob), Arc::downgrade(&buf));
        let (tell, told) = mpsc::channel();
        let done = Completion::new(move |outcome: Result<()>| {
            tell.send((outcome.is_ok(), weak_blob.strong_count(), weak_buf.strong_count())).unwrap();
        });
        match direction {
            Direction::Write => store.write(Arc::clone(&blob), buf, done),
            Direction::Read => store.read(Arc::clone(&blob), buf, done),
        }
        assert_eq!(told.recv().unwrap(), (!fault, before, 0), "{direction:?}");
    }
}

pub(super) fn dropping_the_store_waits_for_what_is_encrypted_and_written(bench: &Bench) {
    let store = bench.open(encrypted(bench));
    let writes: Vec<_> = (0..8)
        .map(|seed| {
            let blob = store.reserve(MIB as u64).unwrap();
            start(&store, Direction::Write, &blob, aligned(&pattern(seed, MIB)))
        })
        .collect();
    drop(store);
    assert!(writes.iter().all(|outcome| outcome.try_recv().is_ok_and(|outcome| outcome.is_ok())));
}

pub(super) fn checksums_are_not_taken_of_what_is_encrypted(bench: &Bench) {
    let store = bench.open(StoreConfig { checksums: true, ..encrypted(bench) });
    store.take_checksums(true);
    let blob = write_pattern(&store, 1, MIB);
    assert!(blob.marks().is_some_and(|marks| marks.are_seals()));
}

pub(super) fn many_encrypted_transfers_at_once(bench: &Bench) {
    let store = bench.open(encrypted(bench));
    let all: Vec<_> = (0..20)
        .map(|seed| {
            let blob = store.reserve((MIB + seed) as u64).unwrap();
            (start(&store, Direction::Write, &blob, aligned(&pattern(seed, MIB + seed))), blob)
        })
        .collect();
    all.iter().for_each(|(outcome, _)| result(outcome).unwrap());
    thread::scope(|scope| {
        for (seed, (_, blob)) in all.iter().enumerate() {
            let store = &store;
            scope.spawn(move || assert_holds_pattern(store, blob, seed));
        }
    });
}

/// Memory that the processor does not see.
struct Foreign(AlignedBuf);

// SAFETY: all of it is the inner memory's.
unsafe impl IoBuf for Foreign {
    fn part(&self, offset: usize) -> (*mut u8, usize) {
        self.0.part(offset)
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn is_on_host(&self, _: usize) -> bool {
        false
    }
}

pub(super) fn a_devices_memory_is_not_encrypted_and_refused(bench: &Bench) {
    let store = bench.open(encrypted(bench));
    let blob = write_pattern(&store, 1, MIB);
    for direction in [Direction::Write, Direction::Read] {
        let buf = Arc::new(Foreign(AlignedBuf::new(MIB).unwrap()));
        let error = result(&start(&store, direction, &blob, buf)).unwrap_err();
        assert!(
            error.kind() == ErrorKind::Io && error.to_string().contains("only host memory is encrypted"),
            "{error}"
        );
    }
}
