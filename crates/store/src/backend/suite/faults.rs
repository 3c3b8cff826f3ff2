//! Faults of a disk: what is tried again, and what is an error.

use std::sync::Arc;
use std::time::Duration;

use super::super::{Direction, Fault};
use super::buffers::{Scattered, aligned, contents, pattern};
use super::{Bench, MIB, assert_holds_pattern, read, result, start, write, write_pattern};
use crate::error::ErrorKind;
use crate::{BackendKind, StoreConfig};

pub(super) fn short_transfers_go_on(bench: &Bench) {
    let (store, faulty) = bench.open_faulty(bench.config());
    faulty.inject(Direction::Write, Fault::Short, 0, 9);
    faulty.inject(Direction::Read, Fault::Short, 1, 9);
    let blob = write_pattern(&store, 1, MIB + 5);
    assert_holds_pattern(&store, &blob, 1);
    assert_eq!(store.stats().retried, 0);
}

pub(super) fn interrupted_transfers_are_tried_again(bench: &Bench) {
    let (store, faulty) = bench.open_faulty(bench.config());
    for direction in [Direction::Write, Direction::Read] {
        faulty.inject(direction, Fault::Errno(libc::EINTR), 0, 3);
        faulty.inject(direction, Fault::Errno(libc::EAGAIN), 2, 3);
    }
    let blob = write_pattern(&store, 1, MIB + 5);
    assert_holds_pattern(&store, &blob, 1);
    assert_eq!((store.stats().retried, store.stats().failures), (0, 0));
}

pub(super) fn a_read_that_fails_is_tried_three_times(bench: &Bench) {
    let (store, faulty) = bench.open_faulty(bench.config());
    let blob = write_pattern(&store, 1, MIB + 5);

    faulty.inject(Direction::Read, Fault::Errno(libc::EIO), 2, 1);
    assert_holds_pattern(&store, &blob, 1);
    assert_eq!((store.stats().retried, store.stats().failures), (1, 0));

    faulty.inject(Direction::Read, Fault::Errno(libc::EIO), 0, u64::MAX);
    let error = read(&store, &blob, aligned(&vec![0; MIB + 5])).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    let (message, place) = (error.to_string(), &blob.pieces()[0].volume().info().name);
    assert!(
        message.contains(place) && message.contains("offset 0") && message.contains("attempt 3"),
        "{message}"
    );
    assert_eq!((store.stats().retried, store.stats().failures), (3, 1));

    faulty.heal();
    assert_holds_pattern(&store, &blob, 1);
}

pub(super) fn a_write_that_fails_is_reported_at_once(bench: &Bench) {
    let (store, faulty) = bench.open_faulty(bench.config());
    let blob = store.reserve(MIB as u64).unwrap();
    for (errno, kind) in [(libc::EIO, ErrorKind::Io), (libc::ENOSPC, ErrorKind::NoSpace)] {
        faulty.inject(Direction::Write, Fault::Errno(errno), 3, 1);
        let error = write(&store, &blob, aligned(&pattern(1, MIB))).unwrap_err();
        assert_eq!(error.kind(), kind);
        assert!(error.to_string().contains(&*blob.pieces()[0].volume().info().name), "{error}");
    }
    let stats = store.stats();
    assert_eq!((stats.failures, stats.retried, stats.writes, stats.bytes_written), (2, 0, 0, 0));
    write(&store, &blob, aligned(&pattern(1, MIB))).unwrap();
    assert_holds_pattern(&store, &blob, 1);
}

pub(super) fn only_the_transfer_that_fails_fails(bench: &Bench) {
    let (store, faulty) = bench.open_faulty(bench.config());
    faulty.inject(Direction::Write, Fault::Errno(libc::EIO), 5, 1);
    let outcomes: Vec<_> = (0..10)
        .map(|_| start(&store, Direction::Write, &store.reserve(4096).unwrap(), aligned(&[7; 4096])))
        .collect();
    let failed: Vec<bool> = outcomes.iter().map(|outcome| result(outcome).is_err()).collect();
    assert_eq!(failed.iter().position(|&failed| failed), Some(5));
    assert_eq!(failed.iter().filter(|&&failed| failed).count(), 1);
    assert_eq!(store.stats().reserved_bytes, 0, "a failed transfer lets its blob go too");
}

pub(super) fn a_disk_that_vanishes_takes_only_what_is_on_it_until_it_is_back(bench: &Bench) {
    let (store, faulty) = bench.open_faulty(bench.striped());
    let on_second = |work: &mut dyn FnMut()| {
        let before = faulty.submitted_to(Some(1));
        work();
        faulty.submitted_to(Some(1)) > before
    };
    let mut blobs = Vec::new();
    let on_it = [0, 1, 2].map(|seed| on_second(&mut || blobs.push(write_pattern(&store, seed, 4096))));
    assert_eq!(on_it.iter().filter(|&&on_it| on_it).count(), 1);
    let lost = on_it.iter().position(|&on_it| on_it).unwrap();

    faulty.vanish(Some(1), libc::ENODEV, 1);
    assert_holds_pattern(&store, &blobs[lost], lost);
    for (seed, blob) in blobs.iter().enumerate().filter(|(seed, _)| *seed != lost) {
        assert_holds_pattern(&store, blob, seed);
    }
    let failed = [
        read(&store, &blobs[lost], aligned(&[0; 4096])),
        write(&store, &blobs[lost], aligned(&[0; 4096])),
        write(&store, &store.reserve(MIB as u64).unwrap(), aligned(&pattern(3, MIB))),
    ];
    for error in failed.map(Result::unwrap_err) {
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
        assert_eq!(error.os_error().unwrap().raw_os_error(), Some(libc::ENODEV), "{error}");
        assert!(error.to_string().contains(&*blobs[lost].pieces()[0].volume().info().name), "{error}");
    }
    faulty.heal();
    write(&store, &blobs[lost], aligned(&pattern(lost, 4096))).unwrap();
    assert_holds_pattern(&store, &blobs[lost], lost);
}

pub(super) fn a_file_of_a_disk_that_has_vanished_neither_shrinks_nor_grows(bench: &Bench) {
    if bench.kind == BackendKind::CuFile {
        return eprintln!("skipped: files of cuFile never shrink");
    }
    let (store, faulty) = bench.open_faulty(bench.config());
    let bytes = store.stats().file_bytes;
    faulty.vanish(None, libc::ENXIO, 0);
    assert_eq!((store.shrink(), store.stats().file_bytes), (0, bytes));
    faulty.heal();
    assert_eq!(store.shrink(), bytes);
    faulty.vanish(Some(0), libc::ENXIO, 0);
    let error = store.reserve(1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    assert!(error.to_string().contains("No such device or address"), "{error}");
}

pub(super) fn changed_bytes_are_noticed(bench: &Bench) {
    let (store, faulty) = bench.open_faulty(StoreConfig { checksums: true, ..bench.config() });
    let blob = write_pattern(&store, 1, MIB + 5);
    assert_holds_pattern(&store, &blob, 1);

    faulty.inject(Direction::Read, Fault::FlippedBit, 0, 1);
    assert_holds_pattern(&store, &blob, 1);
    assert_eq!(store.stats().retried, 1);

    faulty.inject(Direction::Read, Fault::FlippedBit, 0, u64::MAX);
    let error = read(&store, &blob, aligned(&vec![0; MIB + 5])).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains(&*blob.pieces()[0].volume().info().name), "{error}");

    // What is written again is compared with its new checksum.
    faulty.heal();
    write(&store, &blob, aligned(&pattern(2, MIB + 5))).unwrap();
    assert_holds_pattern(&store, &blob, 2);

    // The checksum is the same however the memory is scattered.
    let before = store.stats().retried;
    let read_scattered = || {
        let buf = Arc::new(Scattered::new(MIB + 5, 0));
        read(&store, &blob, Arc::<Scattered>::clone(&buf)).unwrap();
        assert!(contents(&*buf, MIB + 5) == pattern(2, MIB + 5));
    };
    read_scattered();
    assert_eq!(store.stats().retried, before);
    faulty.inject(Direction::Read, Fault::FlippedBit, 0, 1);
    read_scattered();
    assert_eq!(store.stats().retried, before + 1);
}

pub(super) fn completions_can_be_held_back(bench: &Bench) {
    let (store, faulty) = bench.open_faulty(bench.config());
    faulty.hold(Direction::Write);
    let blobs: Vec<_> = (0..2).map(|_| store.reserve(4096).unwrap()).collect();
    let outcomes: Vec<_> =
        blobs.iter().map(|blob| start(&store, Direction::Write, blob, aligned(&pattern(3, 4096)))).collect();
    faulty.wait_held(2);
    assert!(outcomes.iter().all(|outcome| outcome.try_recv().is_err()));
    assert!(faulty.release_one());
    assert_eq!(outcomes.iter().filter(|outcome| outcome.try_recv().is_ok()).count(), 1);
    faulty.release();
    assert!(!faulty.release_one());
    for blob in &blobs {
        assert_holds_pattern(&store, blob, 3);
    }
}

pub(super) fn busy_time_runs_while_a_transfer_is_in_flight(bench: &Bench) {
    let (store, faulty) = bench.open_faulty(bench.config());
    let times = || [store.stats().read_busy, store.stats().write_busy, store.stats().busy];
    assert_eq!(times(), [Duration::ZERO; 3]);

    faulty.hold(Direction::Write);
    let blob = store.reserve(4096).unwrap();
    let outcome = start(&store, Direction::Write, &blob, aligned(&pattern(1, 4096)));
    faulty.wait_held(1);
    let before = times();
    while times()[2] == before[2] {}
    faulty.release();
    result(&outcome).unwrap();
    let [reads, writes, either] = times();
    assert_eq!((reads, writes), (Duration::ZERO, either), "there were only writes");
    assert_eq!(times()[2], either, "it stands still when nothing is in flight");

    faulty.inject(Direction::Read, Fault::Errno(libc::EIO), 0, u64::MAX);
    read(&store, &blob, aligned(&[0; 4096])).unwrap_err();
    let [reads, still_writes, sum] = times();
    assert_eq!((still_writes, sum), (writes, reads + writes), "one after the other, also where it fails");
    assert_eq!(times(), [reads, writes, sum]);
}
