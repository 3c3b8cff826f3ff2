//! Disks that really fail: file systems that are mounted for a test, and filled by others, frozen or damaged, or whose
//! devices the device-mapper has fail, lose bytes or answer late. Each test needs root and says so where it is skipped:
//!
//! ```sh
//! cargo test --package ssdtrain-store --test real_disks -- --ignored --nocapture
//! ```
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod mounted;

use std::error::Error as _;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use ssdtrain_store::{BackendKind, Blob, Error, ErrorKind, Store, StoreConfig};

use self::mounted::{MIB, Mounted, Target, assert_hold, fill, read, run, write};

/// The file system, or a return from the test that prints why there is none. In a loop, `continue` leaves the others to be tried.
macro_rules! or_skip {
    ($mounted:expr) => {
        or_skip!($mounted, return)
    };
    ($mounted:expr, $leave:expr) => {
        match $mounted {
            Ok(mounted) => mounted,
            Err(why) => {
                eprintln!("skipped: {why}");
                $leave
            }
        }
    };
}

const BACKENDS: [BackendKind; 2] = [BackendKind::Auto, BackendKind::Pool];

#[test]
#[ignore = "mounts file systems, as root"]
fn a_disk_that_others_fill_is_used_again_when_they_have_gone() {
    let disk = or_skip!(Mounted::ext4(64 * MIB));
    let store =
        Store::open(StoreConfig { cap_bytes: 40 * MIB as u64, ..disk.config(BackendKind::Auto) }).unwrap();
    let theirs = disk.place.path().join("theirs");
    let mut file = OpenOptions::new().create(true).append(true).open(&theirs).unwrap();
    while file.write_all(&[1; MIB]).and_then(|()| file.sync_all()).is_ok() {}
    let (blobs, _) = fill(&store);
    assert_hold(&store, &blobs);
    drop((file, blobs));
    fs::remove_file(theirs).unwrap();
    let (blobs, _) = fill(&store);
    assert_eq!(blobs.len(), 40);
    assert_hold(&store, &blobs);
}

/// Its disk has lost what lies beyond the first part: what is there cannot be read.
#[test]
#[ignore = "mounts file systems, as root"]
fn a_disk_that_fails_is_an_error_of_its_own() {
    for backend in BACKENDS {
        let disk = or_skip!(Mounted::ext4(64 * MIB), continue);
        let store = Store::open(disk.config(backend)).unwrap();
        assert!(store.path().is_direct(), "{}", store.path());
        let blob = store.reserve(MIB as u64).unwrap();
        write(&store, &blob, 7).recv().unwrap().unwrap();
        let (device, image) = disk.device.as_ref().unwrap();
        OpenOptions::new().write(true).open(image).unwrap().set_len(4096).unwrap();
        // Some kernels (6.1) have no error there.
        let from = format!("if={device}");
        if run("dd", &[&from, "iflag=direct", "bs=4096", "skip=4096", "count=1", "of=/dev/null"]).is_ok() {
            eprintln!("skipped: this kernel's loop devices have zeros where their files have ended");
            continue;
        }
        let error = read(&store, &blob).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
        assert_eq!(error.os_error().unwrap().raw_os_error(), Some(libc::EIO), "{error}");
        assert!(error.source().is_some() && error.to_string().contains(&disk.path()), "{error}");
        assert_eq!((store.stats().failures, store.stats().retried), (1, 2));
    }
}

/// A quota of btrfs binds root as well.
#[test]
#[ignore = "mounts file systems, as root"]
fn a_quota_that_is_used_up_is_an_error_that_says_so_and_what_was_written_stays() {
    let disk = or_skip!(Mounted::btrfs_with_quota(256 * MIB));
    disk.set_quota("32M");
    let store = Store::open(disk.config(BackendKind::Auto)).unwrap();
    let (mut blobs, refusal) = fill(&store);
    assert_eq!(refusal.kind(), ErrorKind::NoSpace);
    assert!(refusal.to_string().contains("cannot grow: Disk quota exceeded"), "{refusal}");
    assert!((16..=32).contains(&blobs.len()), "{} blobs, {refusal}", blobs.len());
    assert_hold(&store, &blobs);
    drop(blobs.pop());
    store.reserve(MIB as u64).expect("freed room is used again");
}

/// btrfs writes to other blocks each time, so also a file that has all its room may exceed a quota.
#[test]
#[ignore = "mounts file systems, as root"]
fn a_write_beyond_a_quota_is_an_error_of_its_own_and_the_next_one_within_it_works() {
    for backend in BACKENDS {
        let disk = or_skip!(Mounted::btrfs_with_quota(256 * MIB), continue);
        let store = Store::open(StoreConfig { cap_bytes: 8 * MIB as u64, ..disk.config(backend) }).unwrap();
        let blob = store.reserve(MIB as u64).unwrap();
        write(&store, &blob, 1).recv().unwrap().unwrap();
        run("sync", &["-f", &disk.path()]).unwrap();
        disk.set_quota("4M");
        let error = write(&store, &blob, 2).recv().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        assert_eq!(error.os_error().unwrap().raw_os_error(), Some(libc::EDQUOT), "{error}");
        disk.end_quota();
        write(&store, &blob, 3).recv().unwrap().unwrap();
        assert!(read(&store, &blob).unwrap().iter().all(|&byte| byte == 3));
    }
}

#[test]
#[ignore = "mounts file systems, as root"]
fn a_device_that_answers_with_errors_is_an_error_of_its_own() {
    for backend in BACKENDS {
        let disk = or_skip!(Mounted::mapped(64 * MIB, &Target::Error), continue);
        let store = Store::open(disk.config(backend)).unwrap();
        let blob = written(&store, 7);
        disk.set(&Target::Error);
        assert_failed(&read(&store, &blob).map(drop).unwrap_err());
        assert_failed(&write(&store, &blob, 8).recv().unwrap().unwrap_err());
        disk.set(&Target::Linear);
        assert_works(&store, &blob);
    }
}

/// Up for a second and down for one, in turn.
#[test]
#[ignore = "mounts file systems, as root"]
fn a_device_that_fails_now_and_then_has_the_right_bytes_or_an_error_of_its_own() {
    let now_and_then = Target::Flakey { up: 1, down: 1, features: &[] };
    for backend in BACKENDS {
        let disk = or_skip!(Mounted::mapped(64 * MIB, &now_and_then), continue);
        let store = Store::open(disk.config(backend)).unwrap();
        let (kept, blob) = (written(&store, 7), written(&store, 0));
        disk.set(&now_and_then);
        let holds = |blob, fill| {
            read(&store, blob)
                .map(|bytes| assert!(bytes.iter().all(|&byte| byte == fill), "not all are {fill}"))
        };
        let start = Instant::now();
        let (mut writes, mut reads) = ([0; 2], [0; 2]);
        let mut fills = (0..=u8::MAX).cycle();
        // Twice up and twice down.
        while start.elapsed() < Duration::from_secs(4) {
            let fill = fills.next().unwrap();
            let wrote = write(&store, &blob, fill).recv().unwrap();
            // What a write that has failed leaves is nobody's.
            let came_back = wrote.is_ok().then(|| holds(&blob, fill));
            writes[usize::from(wrote.is_err())] += 1;
            for outcome in came_back.into_iter().chain([holds(&kept, 7)]) {
                reads[usize::from(outcome.is_err())] += 1;
                outcome.err().iter().for_each(assert_failed);
            }
            wrote.err().iter().for_each(assert_failed);
        }
        assert!([writes, reads].as_flattened().iter().all(|&count| count > 0), "{writes:?}, {reads:?}");
        disk.set(&Target::Linear);
        assert_works(&store, &blob);
    }
}

#[test]
#[ignore = "mounts file systems, as root"]
fn a_device_that_fails_writes_alone_still_has_what_was_written_before() {
    let read_only = Target::Flakey { up: 0, down: 1, features: &["error_writes"] };
    for backend in BACKENDS {
        let disk = or_skip!(Mounted::mapped(64 * MIB, &read_only), continue);
        let store = Store::open(disk.config(backend)).unwrap();
        let (kept, blob) = (written(&store, 7), written(&store, 8));
        disk.set(&read_only);
        assert_failed(&write(&store, &blob, 9).recv().unwrap().unwrap_err());
        assert!(read(&store, &kept).unwrap().iter().all(|&byte| byte == 7));
        disk.set(&Target::Linear);
        assert_works(&store, &blob);
        assert!(read(&store, &kept).unwrap().iter().all(|&byte| byte == 7));
    }
}

#[test]
#[ignore = "mounts file systems, as root"]
fn writes_that_a_device_loses_or_changes_are_noticed_by_checksums_and_by_encryption() {
    let loses = Target::Flakey { up: 0, down: 1, features: &["drop_writes"] };
    // The 32nd byte of each write becomes 1.
    let changes = Target::Flakey { up: 0, down: 1, features: &["corrupt_bio_byte", "32", "w", "1", "0"] };
    for backend in BACKENDS {
        for (target, encrypt) in [(loses, false), (loses, true), (changes, false), (changes, true)] {
            let disk = or_skip!(Mounted::mapped(64 * MIB, &target), continue);
            // Many writes: what is encrypted may have that byte.
            let config = StoreConfig { io_bytes: 64 << 10, ..disk.config(backend) };
            let store = Store::open(StoreConfig { checksums: !encrypt, encrypt, ..config }).unwrap();
            let blob = written(&store, 7);
            disk.set(&target);
            write(&store, &blob, 8).recv().unwrap().expect("the device says that it has written it");
            disk.set(&Target::Linear);
            let error = read(&store, &blob).map(drop).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
            assert_eq!((store.stats().failures, store.stats().retried), (1, 2), "{error}");
            assert_works(&store, &blob);
        }
    }
}

#[test]
#[ignore = "mounts file systems, as root"]
fn a_device_that_answers_late_but_in_time_is_waited_for() {
    let late = Target::Delay(100);
    for backend in BACKENDS {
        let disk = or_skip!(Mounted::mapped(64 * MIB, &late), continue);
        let config = StoreConfig { timeout: Duration::from_secs(60), ..disk.config(backend) };
        let store = Store::open(config).unwrap();
        let blob = written(&store, 7);
        disk.set(&late);
        let start = Instant::now();
        assert_works(&store, &blob);
        assert!(start.elapsed() >= Duration::from_millis(200), "the device was not late");
        assert_eq!((store.stats().failures, store.stats().retried), (0, 0));
    }
}

#[test]
#[ignore = "mounts file systems, as root"]
fn a_device_that_answers_too_late_is_given_up_and_used_again_once_it_has_answered() {
    let late = Target::Delay(60_000);
    for backend in BACKENDS {
        let disk = or_skip!(Mounted::mapped(64 * MIB, &late), continue);
        let store = Store::open(disk.config(backend)).unwrap();
        let (kept, blobs) = (written(&store, 7), [(); 2].map(|()| written(&store, 8)));
        disk.set(&late);
        let outcomes = blobs.each_ref().map(|blob| write(&store, blob, 9));
        let errors = outcomes.map(|outcome| outcome.recv().unwrap().unwrap_err());
        for error in errors.into_iter().chain([read(&store, &kept).map(drop).unwrap_err()]) {
            assert_eq!(error.kind(), ErrorKind::TimedOut);
            assert!(error.to_string().contains("within 300ms"), "{error}");
        }
        drop(blobs);
        assert_eq!(store.stats().reserved_bytes, 3 * MIB as u64, "the device may still write two of them");
        // What it has held back it does now.
        disk.set(&Target::Linear);
        while store.stats().reserved_bytes > MIB as u64 {
            std::thread::yield_now();
        }
        assert!(read(&store, &kept).unwrap().iter().all(|&byte| byte == 7));
        assert_works(&store, &kept);
    }
}

#[test]
#[ignore = "mounts file systems, as root"]
fn a_disk_that_does_not_answer_is_given_up_and_used_again_once_it_does() {
    for backend in BACKENDS {
        let mut disk = or_skip!(Mounted::ext4(64 * MIB), continue);
        let store = Store::open(disk.config(backend)).unwrap();
        let blobs = [(); 3].map(|()| store.reserve(MIB as u64).unwrap());
        write(&store, &blobs[0], 1).recv().unwrap().unwrap();
        or_skip!(disk.freeze(), continue);
        let writes = [1, 2].map(|index| write(&store, &blobs[index], 9));
        for outcome in writes {
            let error = outcome.recv().unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TimedOut);
            assert!(error.to_string().contains("within 300ms"), "{error}");
        }
        drop(blobs);
        assert_eq!(store.stats().reserved_bytes, 2 * MIB as u64, "the kernel may still write them");
        disk.thaw();
        while store.stats().reserved_bytes > 0 {
            std::thread::yield_now();
        }
        let blob = store.reserve(MIB as u64).unwrap();
        write(&store, &blob, 3).recv().unwrap().unwrap();
        assert!(read(&store, &blob).unwrap().iter().all(|&byte| byte == 3));
    }
}

#[test]
#[ignore = "mounts file systems, as root"]
fn a_store_ends_while_its_disk_does_not_answer() {
    for backend in BACKENDS {
        let mut disk = or_skip!(Mounted::ext4(64 * MIB), continue);
        let store = Store::open(disk.config(backend)).unwrap();
        let blob = store.reserve(MIB as u64).unwrap();
        or_skip!(disk.freeze(), continue);
        let outcome = write(&store, &blob, 9);
        drop((store, blob));
        assert_eq!(outcome.try_recv().unwrap().unwrap_err().kind(), ErrorKind::TimedOut);
        assert!(is_open(disk.place.path()), "the kernel may still write to the file");
        disk.thaw();
        while is_open(disk.place.path()) {
            std::thread::yield_now();
        }
    }
}

#[test]
#[ignore = "mounts file systems, as root"]
fn a_file_that_does_not_grow_in_time_is_full_until_it_does() {
    let mut disk = or_skip!(Mounted::ext4(700 * MIB));
    let store = Store::open(disk.config(BackendKind::Auto)).unwrap();
    let (grown, told) = channel();
    let listener: Arc<dyn Fn() + Send + Sync> = Arc::new(move || grown.send(()).unwrap_or_default());
    store.on_growth(&listener);
    let first = store.reserve(store.stats().file_bytes).unwrap();
    or_skip!(disk.freeze());
    assert!(store.try_reserve(MIB as u64).unwrap().is_none());
    told.recv().unwrap();
    let error = store.try_reserve(MIB as u64).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    assert!(error.to_string().contains("has not answered in time"), "{error}");
    disk.thaw();
    told.recv().unwrap();
    assert!(store.try_reserve(MIB as u64).unwrap().is_some());
    drop(first);
}

#[test]
#[ignore = "mounts file systems, as root"]
fn a_file_that_does_not_shrink_in_time_is_not_waited_for_and_shrinks_later() {
    let mut disk = or_skip!(Mounted::ext4(64 * MIB));
    let store =
        Store::open(StoreConfig { cap_bytes: 40 * MIB as u64, ..disk.config(BackendKind::Auto) }).unwrap();
    let (changed, told) = channel();
    let listener: Arc<dyn Fn() + Send + Sync> = Arc::new(move || changed.send(()).unwrap_or_default());
    store.on_growth(&listener);
    assert_eq!(store.stats().file_bytes, 40 * MIB as u64);
    or_skip!(disk.freeze());
    assert_eq!(store.shrink(), 0);
    told.recv().unwrap();
    let free = disk.free();
    disk.thaw();
    told.recv().unwrap();
    assert_eq!(disk.free(), free + 40 * MIB as u64);
    let blob = store.try_reserve(MIB as u64).unwrap();
    assert!(blob.is_none(), "it grows again first");
    told.recv().unwrap();
    assert!(store.try_reserve(MIB as u64).unwrap().is_some());
}

/// A blob with these bytes, which the file system has room for.
fn written(store: &Store, fill: u8) -> Arc<Blob> {
    let blob = store.reserve(MIB as u64).unwrap();
    write(store, &blob, fill).recv().unwrap().unwrap();
    blob
}

/// Writes other bytes to a blob and reads them.
fn assert_works(store: &Store, blob: &Arc<Blob>) {
    write(store, blob, 3).recv().unwrap().unwrap();
    assert!(read(store, blob).unwrap().iter().all(|&byte| byte == 3));
}

/// Asserts that this is a device's own error.
fn assert_failed(error: &Error) {
    assert_eq!(error.kind(), ErrorKind::Io, "{error}");
    assert_eq!(error.os_error().unwrap().raw_os_error(), Some(libc::EIO), "{error}");
}

/// Whether this process has a file open below `place`.
fn is_open(place: &Path) -> bool {
    let links =
        fs::read_dir("/proc/self/fd").unwrap().filter_map(|fd| fs::read_link(fd.unwrap().path()).ok());
    links.into_iter().any(|link| link.starts_with(place))
}
