//! Small limits of a process: what they refuse is an error that says so and what to do, or is done without. Each test sets limits in a
//! process of its own, as a user whom they bind.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod limited;

use std::env;
use std::fs;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use limited::{is_alone, limit, next_file, open_files};
use ssdtrain_store::{
    AlignedBuf, BLOCK, BackendKind, Blob, Completion, Direction, Error, ErrorKind, Fault, Faulty, HostPool,
    IoBuf, Pin, Pool, Result, Store, StoreConfig,
};

const MIB: u64 = 1 << 20;

fn config(backend: BackendKind, files: usize) -> StoreConfig {
    StoreConfig {
        directories: vec![env::temp_dir(); files],
        backend,
        cap_bytes: 16 * MIB,
        ..StoreConfig::default()
    }
}

fn start(store: &Store, direction: Direction, blob: &Arc<Blob>, buf: Arc<dyn IoBuf>) -> Receiver<Result<()>> {
    let (tell, told) = channel();
    let done = Completion::new(move |outcome| tell.send(outcome).unwrap_or_default());
    match direction {
        Direction::Read => store.read(Arc::clone(blob), buf, done),
        Direction::Write => store.write(Arc::clone(blob), buf, done),
    }
    told
}

/// Writes some bytes and reads them.
fn assert_works(store: &Store) {
    let blob = store.reserve(MIB).unwrap();
    let (mut from, mut to) = (AlignedBuf::new(MIB as usize).unwrap(), AlignedBuf::new(MIB as usize).unwrap());
    from.as_mut_slice().fill(7);
    to.as_mut_slice().fill(1);
    let mut to = Arc::new(to);
    start(store, Direction::Write, &blob, Arc::new(from)).recv().unwrap().unwrap();
    start(store, Direction::Read, &blob, Arc::<AlignedBuf>::clone(&to)).recv().unwrap().unwrap();
    assert!(Arc::get_mut(&mut to).unwrap().as_mut_slice().iter().all(|&byte| byte == 7));
}

fn assert_says(error: &Error, kind: ErrorKind, code: i32, advice: &str) {
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(advice), "{error}");
    assert_eq!(error.os_error().and_then(|error| error.raw_os_error()), Some(code), "{error}");
}

const BACKENDS: [(BackendKind, ErrorKind); 4] = [
    (BackendKind::Auto, ErrorKind::Io),
    (BackendKind::Pool, ErrorKind::Io),
    (BackendKind::Memory, ErrorKind::Io),
    (BackendKind::Uring, ErrorKind::Unmet),
];

#[test]
fn without_files_a_store_does_not_open_and_says_which_limit_to_raise() {
    if !is_alone("without_files_a_store_does_not_open_and_says_which_limit_to_raise") {
        return;
    }
    for (backend, kind) in BACKENDS {
        let before = limit(libc::RLIMIT_NOFILE, next_file());
        let error = Store::open(config(backend, 3)).err().unwrap();
        limit(libc::RLIMIT_NOFILE, before);
        assert_says(&error, kind, libc::EMFILE, "ulimit -n");
    }
}

#[test]
fn whichever_file_cannot_be_opened_a_store_works_or_says_which_limit_to_raise() {
    if !is_alone("whichever_file_cannot_be_opened_a_store_works_or_says_which_limit_to_raise") {
        return;
    }
    let (all, mut refused, mut works) = (open_files(), 0, 0);
    for more in 0..16 {
        let before = limit(libc::RLIMIT_NOFILE, next_file() + more);
        let opened = Store::open(config(BackendKind::Auto, 3));
        if let Ok(store) = &opened {
            assert_works(store);
        }
        limit(libc::RLIMIT_NOFILE, before);
        match opened {
            Ok(store) => {
                works += 1;
                drop(store);
            }
            Err(error) => {
                refused += 1;
                assert_says(&error, ErrorKind::Io, libc::EMFILE, "ulimit -n");
            }
        }
        assert_eq!(open_files(), all, "{more}");
    }
    assert!(refused > 2 && works > 2, "{refused} were refused, and {works} work");
}

#[test]
fn without_threads_a_store_does_not_open_and_says_which_limit_to_raise() {
    if !is_alone("without_threads_a_store_does_not_open_and_says_which_limit_to_raise") {
        return;
    }
    let before = limit(libc::RLIMIT_NPROC, 0);
    for (backend, kind) in BACKENDS {
        let error = Store::open(config(backend, 1)).err().unwrap();
        assert_says(&error, kind, libc::EAGAIN, "ulimit -u");
    }
    limit(libc::RLIMIT_NPROC, before);
    assert_works(&Store::open(config(BackendKind::Auto, 1)).unwrap());
}

#[test]
fn a_store_that_gets_no_more_threads_goes_on_without_them() {
    if !is_alone("a_store_that_gets_no_more_threads_goes_on_without_them") {
        return;
    }
    for encrypt in [false, true] {
        let config =
            StoreConfig { checksums: true, encrypt, cap_bytes: 300 * MIB, ..config(BackendKind::Memory, 1) };
        let store = Store::open(config).unwrap();
        let before = limit(libc::RLIMIT_NPROC, 0);
        assert_works(&store);
        let _all = store.reserve(store.stats().file_bytes).unwrap();
        assert!(store.try_reserve(MIB).unwrap().is_some(), "the file grows at once");
        limit(libc::RLIMIT_NPROC, before);
    }
}

#[test]
fn transfers_are_watched_as_soon_as_there_is_a_thread_for_it() {
    if !is_alone("transfers_are_watched_as_soon_as_there_is_a_thread_for_it") {
        return;
    }
    let faulty = Arc::new(Faulty::new(Arc::new(Pool::new(1).unwrap())));
    let config = StoreConfig { timeout: Duration::from_millis(50), ..config(BackendKind::Memory, 1) };
    let store = Store::open_with(config, Arc::<Faulty>::clone(&faulty)).unwrap();
    let write = || {
        let blob = store.reserve(1).unwrap();
        start(&store, Direction::Write, &blob, Arc::new(AlignedBuf::new(BLOCK).unwrap()))
    };
    let before = limit(libc::RLIMIT_NPROC, 0);
    faulty.inject(Direction::Write, Fault::Never, 0, 1);
    let never = write();
    faulty.wait_never(1);
    limit(libc::RLIMIT_NPROC, before);
    write().recv().unwrap().unwrap();
    assert_eq!(never.recv().unwrap().unwrap_err().kind(), ErrorKind::TimedOut);
}

/// Pins memory as a driver does that keeps to the limit of locked memory.
struct Lock;

impl Pin for Lock {
    unsafe fn pin(&self, memory: NonNull<u8>, bytes: usize) -> Result<(), String> {
        // SAFETY: the memory is mapped.
        match unsafe { libc::mlock(memory.as_ptr().cast(), bytes) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error().to_string()),
        }
    }

    unsafe fn unpin(&self, memory: NonNull<u8>, bytes: usize) {
        // SAFETY: the memory is still mapped.
        unsafe { libc::munlock(memory.as_ptr().cast(), bytes) };
    }
}

#[test]
fn memory_that_may_not_be_locked_is_an_error_that_says_which_limit_to_raise() {
    if !is_alone("memory_that_may_not_be_locked_is_an_error_that_says_which_limit_to_raise") {
        return;
    }
    let pool = HostPool::new(8 * MIB, Arc::new(Lock));
    let assert_refused = |bytes| {
        let error = pool.grow(bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("ulimit -l"), "{error}");
    };
    let before = limit(libc::RLIMIT_MEMLOCK, 64 << 10);
    assert_refused(2 * MIB);
    assert_eq!((pool.capacity(), pool.pins()), (0, 0));
    if before < 3 * MIB {
        return eprintln!("skipped in part: no more than {before} bytes may be locked here");
    }
    limit(libc::RLIMIT_MEMLOCK, 3 * MIB);
    pool.grow(2 * MIB).unwrap();
    assert_refused(2 * MIB);
    assert_eq!((pool.capacity(), pool.pins()), (2 * MIB, 1));
    assert_eq!(pool.shrink().bytes(), 2 * MIB);
    pool.grow(2 * MIB).expect("what is given back is unlocked");
}

#[test]
fn a_ring_needs_no_locked_memory_or_says_which_limit_to_raise() {
    if !is_alone("a_ring_needs_no_locked_memory_or_says_which_limit_to_raise") {
        return;
    }
    limit(libc::RLIMIT_MEMLOCK, 0);
    let auto = Store::open(config(BackendKind::Auto, 1)).unwrap();
    assert_works(&auto);
    match Store::open(config(BackendKind::Uring, 1)) {
        Ok(store) => assert_works(&store),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Unmet);
            let is_limit = error.os_error().unwrap().raw_os_error() == Some(libc::ENOMEM);
            for text in [error.to_string(), auto.path().to_string()] {
                assert_eq!(text.contains("ulimit -l"), is_limit, "{text}");
            }
        }
    }
}

/// Memory without room for the padding of a blob.
struct Part(AlignedBuf);

// SAFETY: it is a part of the buffer's.
unsafe impl IoBuf for Part {
    fn part(&self, offset: usize) -> (*mut u8, usize) {
        let (memory, bytes) = self.0.part(offset);
        (memory, bytes - 1)
    }

    fn len(&self) -> usize {
        self.0.len() - 1
    }
}

#[test]
fn a_copy_that_finds_no_memory_is_an_error_that_says_so_and_the_next_one_works() {
    if !is_alone("a_copy_that_finds_no_memory_is_an_error_that_says_so_and_the_next_one_works") {
        return;
    }
    const BYTES: u64 = 64 * MIB;
    for encrypt in [false, true] {
        let config = StoreConfig { cap_bytes: 2 * BYTES, encrypt, ..config(BackendKind::Memory, 1) };
        let store = Store::open(config).unwrap();
        let blob = store.reserve(BYTES - 1).unwrap();
        let memory = || Arc::new(Part(AlignedBuf::new(BYTES as usize).unwrap()));
        let (from, to) = (memory(), memory());
        let short = |direction, memory: &Arc<Part>| {
            let pages = fs::read_to_string("/proc/self/statm").unwrap();
            let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
            let before = limit(libc::RLIMIT_AS, pages * 4096 + BYTES / 2);
            let outcome = start(&store, direction, &blob, Arc::<Part>::clone(memory) as _).recv().unwrap();
            limit(libc::RLIMIT_AS, before);
            assert!(outcome.is_err(), "{direction:?}, encrypt({encrypt})");
            assert_says(&outcome.unwrap_err(), ErrorKind::NoSpace, libc::ENOMEM, "bounce buffer");
        };
        short(Direction::Write, &from);
        start(&store, Direction::Write, &blob, Arc::<Part>::clone(&from) as _).recv().unwrap().unwrap();
        short(Direction::Read, &to);
        start(&store, Direction::Read, &blob, to).recv().unwrap().unwrap();
        assert_eq!(store.stats().failures, 2);
    }
}
