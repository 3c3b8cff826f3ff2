//! Operations that complete late, in another order, or never.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use super::super::{Direction, Fault};
use super::buffers::{aligned, bytes, pattern};
use super::{Bench, MIB, assert_holds_pattern, read, result, start, write, write_pattern};
use crate::error::ErrorKind;
use crate::mem::{AlignedBuf, BLOCK};
use crate::{Completion, StoreConfig};

/// How long an operation may take that never completes. All others have two minutes.
const SOON: Duration = Duration::from_millis(2);

pub(super) fn delayed_and_reversed_completions_change_nothing(bench: &Bench) {
    let (store, faulty) = bench.open_faulty(bench.striped());
    for direction in [Direction::Write, Direction::Read] {
        faulty.inject(direction, Fault::Delayed(SOON), 0, 3);
        faulty.inject(direction, Fault::Delayed(2 * SOON), 1, 1);
    }
    let blobs: Vec<_> = (0..5).map(|seed| write_pattern(&store, seed, MIB + seed)).collect();
    for (seed, blob) in blobs.iter().enumerate() {
        assert_holds_pattern(&store, blob, seed);
    }
    faulty.heal();
    faulty.hold(Direction::Read);
    let mut reads: Vec<_> = blobs
        .iter()
        .map(|blob| {
            let buf = aligned(&vec![0; blob.len() as usize]);
            (start(&store, Direction::Read, blob, Arc::<AlignedBuf>::clone(&buf)), buf)
        })
        .collect();
    faulty.wait_held(blobs.iter().map(|blob| blob.spans(|_| 64 << 10).count()).sum());
    while faulty.release_newest() {}
    for (seed, (outcome, buf)) in reads.iter_mut().enumerate() {
        result(outcome).unwrap();
        assert!(bytes(buf, MIB + seed) == pattern(seed, MIB + seed));
    }
    assert_eq!((store.stats().retried, store.stats().failures), (0, 0));
    faulty.release();
}

pub(super) fn what_never_completes_is_given_up_and_kept_until_it_does(bench: &Bench) {
    for direction in [Direction::Write, Direction::Read] {
        let (store, faulty) = bench.open_faulty_again(bench.config());
        faulty.never_within(SOON);
        let other = write_pattern(&store, 1, MIB);
        let blob = write_pattern(&store, 2, 3 * BLOCK);
        faulty.inject(direction, Fault::Never, 0, 1);
        let buf = aligned(&[7; 3 * BLOCK]);
        let (weak_blob, weak_buf) = (Arc::downgrade(&blob), Arc::downgrade(&buf));
        let outcome = start(&store, direction, &blob, buf);
        let error = result(&outcome).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        let (message, piece) = (error.to_string(), &blob.pieces()[0]);
        let place = format!("offset {} of the {}", piece.offset(), piece.volume().info().name);
        assert!(message.contains("within 120s at ") && message.contains(&place), "{message}");
        let stats = store.stats();
        assert_eq!((stats.failures, stats.timed_out, stats.retried), (1, 1, 0));
        assert_eq!(stats.busy, store.stats().busy, "nobody waits for it");
        drop(blob);
        assert!(weak_blob.strong_count() > 0 && weak_buf.strong_count() > 0, "the kernel may still use them");
        assert_eq!(store.stats().reserved_bytes, (MIB + 3 * BLOCK) as u64);
        assert_holds_pattern(&store, &other, 1);
        faulty.release();
        assert_eq!((weak_blob.strong_count(), weak_buf.strong_count()), (0, 0), "now it has ended");
        assert_eq!(store.stats().reserved_bytes, MIB as u64);
        assert_eq!(store.stats().failures, 1, "the late end is nobody's");
    }
}

pub(super) fn memory_and_room_of_what_was_given_up_are_not_used_again(bench: &Bench) {
    let cap = StoreConfig { cap_bytes: 4 * BLOCK as u64, ..bench.config() };
    let (store, faulty) = bench.open_faulty(cap);
    faulty.never_within(SOON);
    let blob = write_pattern(&store, 1, 2 * BLOCK);
    faulty.inject(Direction::Read, Fault::Never, 0, 1);
    // Neither aligned nor padded, so it goes through a bounce buffer, which is the kernel's until the end.
    let small = store.reserve(1).unwrap();
    write(&store, &small, aligned(&[9])).unwrap();
    let error = read(&store, &blob, aligned(&[0; 2 * BLOCK])).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    drop((blob, small));
    assert_eq!(store.reserve(3 * BLOCK as u64).unwrap_err().kind(), ErrorKind::NoSpace);
    let again = write_pattern(&store, 3, 2 * BLOCK);
    let mut buf = aligned(&[0; 2 * BLOCK]);
    read(&store, &again, Arc::<AlignedBuf>::clone(&buf)).unwrap();
    // The late end of a read leaves garbage in its memory.
    faulty.release();
    assert!(bytes(&mut buf, 2 * BLOCK) == pattern(3, 2 * BLOCK));
    assert_holds_pattern(&store, &again, 3);
    drop(again);
    store.reserve(4 * BLOCK as u64).unwrap();
}

pub(super) fn one_operation_that_never_completes_takes_its_whole_transfer(bench: &Bench) {
    let (store, faulty) = bench.open_faulty(bench.striped());
    faulty.never_within(SOON);
    let blob = store.reserve(MIB as u64).unwrap();
    faulty.inject(Direction::Write, Fault::Never, 5, 1);
    let error = write(&store, &blob, aligned(&pattern(1, MIB))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert_eq!(store.stats().timed_out, 1);
    let next = write_pattern(&store, 2, MIB);
    assert_holds_pattern(&store, &next, 2);
    drop((blob, next));
    assert_eq!(store.stats().reserved_bytes, MIB as u64);
    faulty.release();
    assert_eq!(store.stats().reserved_bytes, 0);
}

pub(super) fn dropping_the_store_does_not_wait_for_what_was_given_up(bench: &Bench) {
    let (store, faulty) = bench.open_faulty(bench.config());
    faulty.never_within(5 * SOON);
    faulty.inject(Direction::Write, Fault::Never, 1, 1);
    let outcomes = [(); 3].map(|()| {
        let blob = store.reserve(BLOCK as u64).unwrap();
        start(&store, Direction::Write, &blob, aligned(&[1; BLOCK]))
    });
    faulty.wait_never(1);
    drop(faulty);
    drop(store);
    let ended: Vec<_> = outcomes.iter().map(|outcome| outcome.try_recv().unwrap()).collect();
    assert_eq!(ended[1].as_ref().unwrap_err().kind(), ErrorKind::TimedOut);
    assert!(ended[0].is_ok() && ended[2].is_ok());
}

pub(super) fn a_time_out_may_drop_the_store(bench: &Bench) {
    let (store, faulty) = bench.open_faulty(bench.config());
    faulty.never_within(SOON);
    faulty.inject(Direction::Write, Fault::Never, 0, 1);
    let (blob, last) = (store.reserve(1).unwrap(), store.clone());
    let (tell, told) = mpsc::channel();
    let done = move |outcome: crate::Result<()>| {
        drop(last);
        tell.send(outcome.unwrap_err().kind()).unwrap();
    };
    store.write(blob, aligned(&[1]), Completion::new(done));
    drop((store, faulty));
    assert_eq!(told.recv().unwrap(), ErrorKind::TimedOut);
}
