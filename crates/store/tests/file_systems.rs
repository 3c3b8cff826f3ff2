//! What each file system does with spill files. Each test mounts all that can be mounted here, needs root, and says which
//! it leaves out and why:
//!
//! ```sh
//! cargo test --package ssdtrain-store --test file_systems -- --ignored --nocapture --test-threads 1
//! ```
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod mounted;

use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ssdtrain_store::{BackendKind, Blob, ErrorKind, Store, StoreConfig};

use self::mounted::{MIB, Mounted, assert_hold, fill, run, write};

/// A file system, and what is known of it.
struct FileSystem {
    name: &'static str,
    mount: fn() -> Result<Mounted, String>,
    has_direct: bool,
}

const ALL: [FileSystem; 7] = [
    FileSystem { name: "ext4", mount: || Mounted::ext4(64 * MIB), has_direct: true },
    // It takes no smaller disk.
    FileSystem { name: "xfs", mount: || Mounted::on_loop("xfs", &["-q"], 320 * MIB), has_direct: true },
    FileSystem { name: "btrfs", mount: || Mounted::on_loop("btrfs", &["-q"], 512 * MIB), has_direct: true },
    FileSystem { name: "tmpfs", mount: || Mounted::tmpfs(64 * MIB), has_direct: false },
    FileSystem { name: "overlay", mount: || Mounted::overlay("overlay", 64 * MIB), has_direct: true },
    FileSystem {
        name: "fuse-overlayfs",
        mount: || Mounted::overlay("fuse-overlayfs", 64 * MIB),
        has_direct: true,
    },
    FileSystem { name: "NFS", mount: || Mounted::nfs(64 * MIB), has_direct: true },
];

/// Runs the test on every file system that can be mounted here.
fn on_each(test: impl Fn(&FileSystem, &Mounted)) {
    for system in &ALL {
        match (system.mount)() {
            Ok(disk) => {
                eprintln!("on {}", system.name);
                test(system, &disk);
            }
            Err(why) => eprintln!("skipped: {}: {why}", system.name),
        }
    }
}

/// The disk may be slow, but does not stop.
const LIMIT: Duration = Duration::from_secs(60);

#[test]
#[ignore = "mounts file systems, as root"]
fn what_is_written_again_comes_back_past_the_page_cache_from_a_file_without_a_name() {
    on_each(|FileSystem { name, has_direct, .. }, disk| {
        let nameless = if makes_nameless(&disk.path()) { "O_TMPFILE" } else { "no O_TMPFILE" };
        for (backend, shown) in [(BackendKind::Uring, "io_uring"), (BackendKind::Pool, "thread pool")] {
            let config = StoreConfig { checksums: true, timeout: LIMIT, ..disk.config(backend) };
            let store = Store::open(config).unwrap();
            assert_eq!((store.path().backend(), store.path().is_direct()), (shown, *has_direct), "{name}");
            let blobs: Vec<_> = (0..16).map(|_| store.reserve(MIB as u64).unwrap()).collect();
            [100, 0].into_iter().for_each(|first| write_all(&store, &blobs, first));
            assert_hold(&store, &blobs);
            assert_eq!(hidden(disk), [""; 0], "{name}");
            let cached = cached_bytes(disk);
            let alignment = blobs[0].memory_alignment();
            eprintln!("{name}: {nameless}; {}, aligned to {alignment}; {cached} bytes cached", store.path());
            assert!(!has_direct || cached == 0, "{name}: {cached} bytes are in the page cache");
        }
    });
}

#[test]
#[ignore = "mounts file systems, as root"]
fn one_that_is_full_says_so_and_what_it_holds_can_be_written_again() {
    on_each(|FileSystem { name, .. }, disk| {
        let config = StoreConfig { timeout: LIMIT, ..disk.config(BackendKind::Auto) };
        let store = Store::open(config).unwrap();
        let (mut blobs, refusal) = fill(&store);
        assert_eq!(refusal.kind(), ErrorKind::NoSpace, "{name}");
        assert!(refusal.to_string().contains("cannot grow: "), "{name}: {refusal}");
        assert!(blobs.len() > 16, "{name}: {} blobs, {refusal}", blobs.len());
        write_all(&store, &blobs, 100);
        write_all(&store, &blobs, 0);
        assert_hold(&store, &blobs);
        eprintln!("{name}: {} MiB, {refusal}", blobs.len());
        blobs.pop();
        blobs.push(store.reserve(MIB as u64).expect("freed room is used again"));
    });
}

#[test]
#[ignore = "mounts file systems, as root"]
fn the_last_part_is_left_to_others() {
    on_each(|FileSystem { name, .. }, disk| {
        let config = StoreConfig { keep_free: None, timeout: LIMIT, ..disk.config(BackendKind::Auto) };
        let all = free(disk);
        let store = Store::open(config).unwrap();
        let mut blobs = Vec::new();
        let refusal = loop {
            match store.reserve(MIB as u64) {
                Ok(blob) => blobs.push(blob),
                Err(refusal) => break refusal,
            }
        };
        assert!(refusal.to_string().contains("are kept for others"), "{name}: {refusal}");
        let left = free(disk);
        assert!(left >= all / 12 && left < all / 5, "{name}: {left} of {all} are free");
    });
}

#[test]
#[ignore = "mounts file systems, as root"]
fn what_is_given_back_is_free_for_others() {
    on_each(|FileSystem { name, .. }, disk| {
        let before = free(disk);
        let config =
            StoreConfig { cap_bytes: 32 * MIB as u64, timeout: LIMIT, ..disk.config(BackendKind::Auto) };
        let store = Store::open(config).unwrap();
        let blobs: Vec<_> = (0..32).map(|_| store.reserve(MIB as u64).unwrap()).collect();
        write_all(&store, &blobs, 0);
        let held = free(disk);
        assert!(before - held >= 32 * MIB as u64, "{name}: {held} of {before}");
        drop(blobs);
        assert_eq!(store.shrink(), 32 * MIB as u64, "{name}");
        let shrunk = free(disk);
        assert!(shrunk - held >= 31 * MIB as u64, "{name}: {shrunk} after {held} of {before}");
    });
}

/// Bytes that are free once the file system has counted.
fn free(disk: &Mounted) -> u64 {
    run("sync", &["-f", &disk.path()]).unwrap();
    disk.free()
}

/// Writes all blobs, each with a byte of its own.
fn write_all(store: &Store, blobs: &[Arc<Blob>], first: u8) {
    let writes =
        blobs.iter().enumerate().map(|(index, blob)| write(store, blob, first.wrapping_add(index as u8)));
    let outcomes: Vec<_> = writes.collect();
    outcomes.into_iter().for_each(|outcome| outcome.recv().unwrap().unwrap());
}

/// Whether a file without a name can be made there.
fn makes_nameless(directory: &str) -> bool {
    OpenOptions::new().write(true).custom_flags(libc::O_TMPFILE).open(directory).is_ok()
}

/// The names in the directory that a listing hides, as a spill file's is.
fn hidden(disk: &Mounted) -> Vec<String> {
    let names = fs::read_dir(disk.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string());
    names.map(|name| name.unwrap()).filter(|name| name.starts_with('.')).collect()
}

/// How much of the spill file is in the page cache.
fn cached_bytes(disk: &Mounted) -> u64 {
    let opened = fs::read_dir("/proc/self/fd").unwrap().map(|fd| fd.unwrap().path());
    let is_there = |fd: &PathBuf| {
        let file = fs::metadata(fd).is_ok_and(|metadata| metadata.is_file());
        file && fs::read_link(fd).is_ok_and(|link| link.starts_with(disk.path()))
    };
    let path = opened.into_iter().find(is_there).expect("the spill file is open");
    let path = path.display().to_string().replace("self", &std::process::id().to_string());
    run("fincore", &["-b", "-n", "-o", "RES", &path]).unwrap().trim().parse().unwrap()
}
