//! Disks that really fail: file systems that are mounted for a test, and filled, frozen or damaged. Each test needs root
//! and says so where it is skipped:
//!
//! ```sh
//! cargo test --package ssdtrain-store --test real_disks -- --ignored --nocapture
//! ```
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use ssdtrain_store::{AlignedBuf, BackendKind, Blob, Completion, ErrorKind, Result, Store, StoreConfig};
use tempfile::TempDir;

const MIB: usize = 1 << 20;
const EXT4: &[&str] = &["mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-m", "0"];
/// How long a frozen disk is waited for.
const LIMIT: Duration = Duration::from_millis(300);

/// A file system in a directory of its own, until it is dropped.
struct Mounted {
    place: TempDir,
    /// The loop device below it, and the file below that.
    device: Option<(String, PathBuf)>,
    /// The device-mapper's device between the two.
    mapped: Option<String>,
    frozen: bool,
}

impl Mounted {
    /// In memory. The error says why it cannot be had here.
    fn tmpfs(bytes: usize) -> Result<Mounted, String> {
        let mounted = Mounted::nothing();
        let size = format!("size={bytes},mode=1777");
        run("mount", &["-t", "tmpfs", "-o", &size, "tmpfs", &mounted.path()])?;
        Ok(mounted)
    }

    /// ext4 on a loop device, with direct I/O. The error says why it cannot be had here.
    fn ext4(bytes: usize) -> Result<Mounted, String> {
        let (mounted, device) = Mounted::looped(bytes, EXT4)?;
        run("mount", &[&device, &mounted.path()])?;
        Ok(mounted)
    }

    /// btrfs, of which no more may be used than a quota allows. The error says why it cannot be had here.
    fn btrfs_with_quota(bytes: usize) -> Result<Mounted, String> {
        let (mounted, device) = Mounted::looped(bytes, &["mkfs.btrfs", "-q"])?;
        run("mount", &[&device, &mounted.path()])?;
        run("btrfs", &["quota", "enable", &mounted.path()])?;
        Ok(mounted)
    }

    /// ext4 on a device whose kind can be changed. The error says why it cannot be had here.
    fn mapped(bytes: usize) -> Result<Mounted, String> {
        let (mut mounted, device) = Mounted::looped(bytes, EXT4)?;
        let name = format!("ssdtrain-test-{}", std::process::id());
        run("dmsetup", &["create", &name, "--table", &format!("0 {} linear {device} 0", bytes / 512)])?;
        mounted.mapped = Some(name.clone());
        run("mount", &[&format!("/dev/mapper/{name}"), &mounted.path()])?;
        Ok(mounted)
    }

    /// A loop device with a file system that `make` makes in a file.
    fn looped(bytes: usize, make: &[&str]) -> Result<(Mounted, String), String> {
        let mut mounted = Mounted::nothing();
        let image = mounted.place.path().with_extension("image");
        File::create(&image)
            .and_then(|file| file.set_len(bytes as u64))
            .map_err(|error| error.to_string())?;
        let shown = image.display().to_string();
        let made = run(make[0], &[&make[1..], &[&shown]].concat())
            .and_then(|_| run("losetup", &["--find", "--show", &shown]));
        let device = made.inspect_err(|_| drop(fs::remove_file(&image)))?.trim().to_owned();
        mounted.device = Some((device.clone(), image));
        Ok((mounted, device))
    }

    fn nothing() -> Mounted {
        Mounted { place: tempfile::tempdir().unwrap(), device: None, mapped: None, frozen: false }
    }

    fn path(&self) -> String {
        self.place.path().display().to_string()
    }

    fn config(&self, backend: BackendKind) -> StoreConfig {
        StoreConfig {
            directories: vec![self.place.path().to_owned()],
            backend,
            keep_free: Some(0),
            timeout: LIMIT,
            ..StoreConfig::default()
        }
    }

    /// From now on, whatever writes to it waits in the kernel.
    fn freeze(&mut self) -> Result<(), String> {
        run("fsfreeze", &["--freeze", &self.path()])?;
        self.frozen = true;
        Ok(())
    }

    fn thaw(&mut self) {
        if std::mem::take(&mut self.frozen) {
            run("fsfreeze", &["--unfreeze", &self.path()]).unwrap();
        }
    }

    /// From now on no more than this may be used, such as `32M`.
    fn set_quota(&self, most: &str) {
        run("btrfs", &["qgroup", "limit", most, &self.path()]).unwrap();
    }

    /// The limit of a quota that is exceeded cannot be raised.
    fn end_quota(&self) {
        run("btrfs", &["quota", "disable", &self.path()]).unwrap();
    }

    /// Has the device-mapper answer everything with an error from now on.
    fn fail(&self, bytes: usize) {
        let name = self.mapped.as_ref().unwrap();
        run("dmsetup", &["suspend", "--noflush", "--nolockfs", name]).unwrap();
        run("dmsetup", &["load", name, "--table", &format!("0 {} error", bytes / 512)]).unwrap();
        run("dmsetup", &["resume", name]).unwrap();
    }

    /// Bytes that are free.
    fn free(&self) -> u64 {
        let told = run("stat", &["-f", "-c", "%a %S", &self.path()]).unwrap();
        told.split_whitespace().map(|number| number.parse::<u64>().unwrap()).product()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.thaw();
        // What was not mounted is not to be unmounted.
        run("umount", &["--lazy", &self.path()]).ok();
        if let Some(name) = &self.mapped {
            run("dmsetup", &["remove", "--force", name]).ok();
        }
        if let Some((device, image)) = &self.device {
            run("losetup", &["--detach", device]).ok();
            fs::remove_file(image).ok();
        }
    }
}

/// Runs a program. Returns what it prints, or why it has failed.
fn run(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(arguments).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

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

type Outcome = Receiver<Result<()>>;

fn buf(fill: u8) -> Arc<AlignedBuf> {
    let mut buf = AlignedBuf::new(MIB).unwrap();
    buf.as_mut_slice().fill(fill);
    Arc::new(buf)
}

fn write(store: &Store, blob: &Arc<Blob>, fill: u8) -> Outcome {
    let (tell, told) = channel();
    store.write(Arc::clone(blob), buf(fill), Completion::new(move |outcome| tell.send(outcome).unwrap()));
    told
}

fn read(store: &Store, blob: &Arc<Blob>) -> Result<Vec<u8>> {
    let (tell, told) = channel();
    let mut into = buf(0);
    let done = Completion::new(move |outcome| tell.send(outcome).unwrap());
    store.read(Arc::clone(blob), Arc::<AlignedBuf>::clone(&into), done);
    told.recv().unwrap()?;
    Ok(Arc::get_mut(&mut into).unwrap().as_mut_slice().to_vec())
}

/// Reserves blobs and writes them until there is no more room; returns them and the refusal.
fn fill(store: &Store) -> (Vec<Arc<Blob>>, ssdtrain_store::Error) {
    let mut blobs = Vec::new();
    loop {
        match store.reserve(MIB as u64) {
            Ok(blob) => {
                write(store, &blob, blobs.len() as u8).recv().unwrap().unwrap();
                blobs.push(blob);
            }
            Err(refusal) => return (blobs, refusal),
        }
    }
}

fn assert_hold(store: &Store, blobs: &[Arc<Blob>]) {
    for (index, blob) in blobs.iter().enumerate() {
        assert!(read(store, blob).unwrap().iter().all(|&byte| byte == index as u8));
    }
}

const BACKENDS: [BackendKind; 2] = [BackendKind::Auto, BackendKind::Pool];

#[test]
#[ignore = "mounts file systems, as root"]
fn a_file_system_that_is_full_is_an_error_that_says_so_and_what_was_written_stays() {
    for mount in [|| Mounted::tmpfs(24 * MIB), || Mounted::ext4(48 * MIB)] {
        let disk = or_skip!(mount(), continue);
        let store = Store::open(disk.config(BackendKind::Auto)).unwrap();
        let (mut blobs, refusal) = fill(&store);
        assert_eq!(refusal.kind(), ErrorKind::NoSpace);
        assert!(refusal.to_string().contains("cannot grow: "), "{refusal}");
        assert!(blobs.len() > 16, "{} blobs, {refusal}", blobs.len());
        assert_hold(&store, &blobs);
        blobs.pop();
        blobs.push(store.reserve(MIB as u64).expect("freed room is used again"));
    }
}

#[test]
#[ignore = "mounts file systems, as root"]
fn the_last_part_of_a_file_system_is_left_to_others() {
    for mount in [|| Mounted::tmpfs(40 * MIB), || Mounted::ext4(64 * MIB)] {
        let disk = or_skip!(mount(), continue);
        let config = StoreConfig { keep_free: None, ..disk.config(BackendKind::Auto) };
        let all = disk.free();
        let store = Store::open(config).unwrap();
        let (blobs, refusal) = fill(&store);
        assert!(refusal.to_string().contains("are kept for others"), "{refusal}");
        assert!(disk.free() >= all / 12 && disk.free() < all / 5, "{} of {all} are free", disk.free());
        assert_hold(&store, &blobs);
    }
}

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
        let (_, image) = disk.device.as_ref().unwrap();
        OpenOptions::new().write(true).open(image).unwrap().set_len(4096).unwrap();
        let error = read(&store, &blob).unwrap_err();
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
        let disk = or_skip!(Mounted::mapped(64 * MIB), continue);
        let store = Store::open(disk.config(backend)).unwrap();
        let blob = store.reserve(MIB as u64).unwrap();
        write(&store, &blob, 7).recv().unwrap().unwrap();
        disk.fail(64 * MIB);
        for error in [read(&store, &blob).unwrap_err(), write(&store, &blob, 8).recv().unwrap().unwrap_err()]
        {
            assert_eq!(error.kind(), ErrorKind::Io);
            assert_eq!(error.os_error().unwrap().raw_os_error(), Some(libc::EIO), "{error}");
        }
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

/// Whether this process has a file open below `place`.
fn is_open(place: &Path) -> bool {
    let links =
        fs::read_dir("/proc/self/fd").unwrap().filter_map(|fd| fs::read_link(fd.unwrap().path()).ok());
    links.into_iter().any(|link| link.starts_with(place))
}
