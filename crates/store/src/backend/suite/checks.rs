//! Work on bytes: which threads do it, and what it may not change.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use crate::sync::Mutex;

use super::super::{Direction, Fault, Faulty};
use super::buffers::{Part, aligned, bytes, contents, pattern};
use super::{Bench, MIB, assert_holds_pattern, read, result, start, write, write_pattern};
use crate::error::{ErrorKind, Result};
use crate::mem::{AlignedBuf, IoBuf};
use crate::{Blob, Completion, Store, StoreConfig};

/// Memory that notes which threads ask where it is.
pub(super) struct Watched {
    inner: AlignedBuf,
    asked: Mutex<BTreeSet<String>>,
}

impl Watched {
    pub(super) fn new(contents: &[u8]) -> Arc<Watched> {
        let mut inner = AlignedBuf::new(contents.len()).unwrap();
        inner.as_mut_slice()[..contents.len()].copy_from_slice(contents);
        Arc::new(Watched { inner, asked: Mutex::default() })
    }

    pub(super) fn asked(&self) -> BTreeSet<String> {
        self.asked.lock().clone()
    }

    pub(super) fn forget(&self) {
        self.asked.lock().clear();
    }
}

// SAFETY: all of it is the inner memory's.
unsafe impl IoBuf for Watched {
    fn part(&self, offset: usize) -> (*mut u8, usize) {
        let name = thread::current().name().unwrap_or_default().to_owned();
        self.asked.lock().insert(name);
        self.inner.part(offset)
    }

    fn len(&self) -> usize {
        self.inner.len()
    }
}

/// Memory that may go.
pub(super) struct Passing(pub(super) AlignedBuf);

// SAFETY: all of it is the inner memory's.
unsafe impl IoBuf for Passing {
    fn part(&self, offset: usize) -> (*mut u8, usize) {
        self.0.part(offset)
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn stays(&self) -> bool {
        false
    }
}

pub(super) fn is_for_bytes(name: &str) -> bool {
    name.starts_with("ssdtrain-bytes-")
}

fn checked(bench: &Bench) -> StoreConfig {
    StoreConfig { checksums: true, ..bench.config() }
}

pub(super) fn checksums_are_taken_by_threads_that_carry_out_no_io(bench: &Bench) {
    let (store, faulty) = bench.open_faulty(checked(bench));
    let blob = store.reserve(MIB as u64).unwrap();
    let source = Watched::new(&pattern(1, MIB));
    write(&store, &blob, Arc::<Watched>::clone(&source)).unwrap();
    assert!(source.asked().iter().any(|name| is_for_bytes(name)));
    assert_only_they_touch_what_was_read(&store, &faulty, &blob);
}

/// Reads a blob of `pattern(1, MIB)`. What follows once the disk has read everything is the work of the threads for bytes alone.
pub(super) fn assert_only_they_touch_what_was_read(store: &Store, faulty: &Faulty, blob: &Arc<Blob>) {
    let target = Watched::new(&vec![0; MIB]);
    faulty.hold(Direction::Read);
    let outcome = start(store, Direction::Read, blob, Arc::<Watched>::clone(&target));
    faulty.wait_held(blob.spans(|_| 256 << 10).count());
    target.forget();
    faulty.release();
    result(&outcome).unwrap();
    let asked = target.asked();
    assert!(!asked.is_empty() && asked.iter().all(|name| is_for_bytes(name)), "{asked:?}");
    assert!(contents(&*target, MIB) == pattern(1, MIB));
}

pub(super) fn copies_out_of_bounce_buffers_are_made_by_them_too(bench: &Bench) {
    let store = bench.open(bench.config());
    let blob = write_pattern(&store, 1, MIB + 1);
    let whole = AlignedBuf::new(MIB + 16).unwrap();
    let target = Arc::new(Part { whole, start: 3, len: MIB + 1 });
    let (tell, told) = mpsc::channel();
    let done = move |outcome: Result<()>| {
        tell.send((outcome, thread::current().name().unwrap_or_default().to_owned())).unwrap();
    };
    store.read(blob, Arc::<Part>::clone(&target), Completion::new(done));
    let (outcome, thread) = told.recv().unwrap();
    outcome.unwrap();
    let bounced = store.stats().bounced > 0;
    assert_eq!(is_for_bytes(&thread), bounced, "{thread}");
    assert!(contents(&*target, MIB + 1) == pattern(1, MIB + 1));
}

pub(super) fn a_blob_is_read_as_it_was_written_whatever_was_decided_since(bench: &Bench) {
    let (store, faulty) = bench.open_faulty(bench.config());
    let without = write_pattern(&store, 1, MIB + 5);
    store.take_checksums(true);
    assert_holds_pattern(&store, &without, 1);
    let with = write_pattern(&store, 2, MIB + 5);
    store.take_checksums(false);
    assert_holds_pattern(&store, &with, 2);
    let stats = store.stats();
    assert_eq!((stats.reads, stats.reads_checked, stats.bytes_checked), (2, 1, MIB as u64 + 5));
    faulty.inject(Direction::Read, Fault::FlippedBit, 0, u64::MAX);
    let error = read(&store, &with, aligned(&vec![0; MIB + 5])).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    read(&store, &without, aligned(&vec![0; MIB + 5])).unwrap();
    // Written anew, it has no checksums left.
    faulty.heal();
    write(&store, &with, aligned(&pattern(3, MIB + 5))).unwrap();
    assert_holds_pattern(&store, &with, 3);
    assert_eq!(store.stats().reads_checked, 1);
}

pub(super) fn a_write_that_fails_while_its_checksums_are_taken_lets_go(bench: &Bench) {
    let (store, faulty) = bench.open_faulty(checked(bench));
    faulty.inject(Direction::Write, Fault::Errno(libc::EIO), 0, 1);
    let (blob, buf) = (store.reserve(3 * MIB as u64).unwrap(), aligned(&pattern(1, 3 * MIB)));
    let (weak_blob, weak_buf) = (Arc::downgrade(&blob), Arc::downgrade(&buf));
    let (tell, told) = mpsc::channel();
    let done = move |outcome: Result<()>| {
        tell.send((outcome, weak_blob.strong_count(), weak_buf.strong_count())).unwrap();
    };
    store.write(blob, buf, Completion::new(done));
    let (outcome, blobs, bufs) = told.recv().unwrap();
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Io);
    assert_eq!((blobs, bufs), (0, 0));
}

pub(super) fn a_checked_transfer_has_let_go_when_it_completes(bench: &Bench) {
    let store = bench.open(checked(bench));
    let kept = write_pattern(&store, 1, 3 * MIB);
    for direction in [Direction::Write, Direction::Read] {
        let blob = if direction == Direction::Read { Arc::clone(&kept) } else { store.reserve(1).unwrap() };
        let (buf, before) = (aligned(&vec![1; 3 * MIB]), Arc::strong_count(&blob) - 1);
        let (weak_blob, weak_buf) = (Arc::downgrade(&blob), Arc::downgrade(&buf));
        let (tell, told) = mpsc::channel();
        let done =
            Completion::new(move |_| tell.send((weak_blob.strong_count(), weak_buf.strong_count())).unwrap());
        match direction {
            Direction::Write => store.write(blob, buf, done),
            Direction::Read => store.read(blob, buf, done),
        }
        assert_eq!(told.recv().unwrap(), (before, 0), "{direction:?}");
    }
}

pub(super) fn no_checksums_are_taken_of_memory_that_may_go(bench: &Bench) {
    let store = bench.open(checked(bench));
    let blob = store.reserve(1).unwrap();
    write(&store, &blob, Arc::new(Passing(AlignedBuf::new(1).unwrap()))).unwrap();
    read(&store, &blob, aligned(&[1])).unwrap();
    write(&store, &blob, aligned(&[1])).unwrap();
    read(&store, &blob, aligned(&[1])).unwrap();
    assert_eq!((store.stats().reads, store.stats().reads_checked), (2, 1));
}

/// Begins to read each blob; counts those that end well.
fn read_all(store: &Store, blobs: &[Arc<Blob>], right: &Arc<AtomicUsize>) {
    for blob in blobs {
        let right = Arc::clone(right);
        let done = move |outcome: Result<()>| {
            outcome.unwrap();
            right.fetch_add(1, Ordering::SeqCst);
        };
        store.read(Arc::clone(blob), aligned(&vec![0; MIB]), Completion::new(done));
    }
}

pub(super) fn dropping_the_store_waits_for_what_is_compared_and_tried_again(bench: &Bench) {
    let (store, faulty) = bench.open_faulty(checked(bench));
    let blobs: Vec<_> = (0..8).map(|seed| write_pattern(&store, seed, MIB)).collect();
    // Even if both meet the same read, it has a third attempt.
    for skip in [0, 20] {
        faulty.inject(Direction::Read, Fault::FlippedBit, skip, 1);
    }
    drop(faulty);
    let right = Arc::new(AtomicUsize::new(0));
    read_all(&store, &blobs, &right);
    drop(store);
    assert_eq!(right.load(Ordering::SeqCst), blobs.len());
}

pub(super) fn a_read_that_was_compared_may_drop_the_store(bench: &Bench) {
    /// Sends a message when its thread ends.
    struct Ends(mpsc::Sender<()>);
    impl Drop for Ends {
        fn drop(&mut self) {
            self.0.send(()).unwrap();
        }
    }
    thread_local!(static ENDS: RefCell<Option<Ends>> = const { RefCell::new(None) });

    let store = bench.open(checked(bench));
    let blob = write_pattern(&store, 1, MIB);
    let (sender, ended) = mpsc::channel();
    let (go, gone) = mpsc::channel::<()>();
    let last = store.clone();
    let done = move |outcome: Result<()>| {
        outcome.unwrap();
        // The test has dropped its handle when this returns.
        assert!(gone.recv().is_err());
        assert!(thread::current().name().is_some_and(is_for_bytes));
        ENDS.set(Some(Ends(sender)));
        drop(last);
    };
    store.read(blob, aligned(&vec![0; MIB]), Completion::new(done));
    drop(store);
    drop(go);
    ended.recv().expect("the thread ends by itself");
}

pub(super) fn many_checked_transfers_at_once(bench: &Bench) {
    let store = bench.open(StoreConfig { checksums: true, ..bench.striped() });
    let blobs: Vec<_> = (0..20).map(|seed| write_pattern(&store, seed, MIB)).collect();
    let mut reads: Vec<_> = blobs
        .iter()
        .map(|blob| {
            let buf = aligned(&vec![0; MIB]);
            (start(&store, Direction::Read, blob, Arc::<AlignedBuf>::clone(&buf)), buf)
        })
        .collect();
    for (seed, (outcome, buf)) in reads.iter_mut().enumerate() {
        result(outcome).unwrap();
        assert!(bytes(buf, MIB) == pattern(seed, MIB));
    }
    assert_eq!(store.stats().reads_checked, 20);
}
