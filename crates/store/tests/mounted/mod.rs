//! File systems that are mounted for a test, and what the tests do with a store on them.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]
#![allow(dead_code, reason = "every test file uses its own part of this module")]

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use ssdtrain_store::{AlignedBuf, BackendKind, Blob, Completion, Result, Store, StoreConfig};
use tempfile::TempDir;

pub(crate) const MIB: usize = 1 << 20;
const EXT4: &[&str] = &["-q", "-F", "-O", "^has_journal", "-m", "0"];
/// How long a disk is waited for.
const LIMIT: Duration = Duration::from_millis(300);

/// What a device does: a target of the device-mapper, whose table is in Linux's `admin-guide/device-mapper`.
#[derive(Clone, Copy)]
pub(crate) enum Target {
    /// Passes everything on.
    Linear,
    /// Answers everything with an error.
    Error,
    /// Passes everything on for so many seconds, has these features for so many, and so on, from when it is set. Without
    /// features it answers everything with an error.
    Flakey { up: u32, down: u32, features: &'static [&'static str] },
    /// Passes everything on, so many milliseconds later.
    Delay(u32),
}

impl Target {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Target::Linear => "linear",
            Target::Error => "error",
            Target::Flakey { .. } => "flakey",
            Target::Delay(_) => "delay",
        }
    }

    /// The table of a device with this target alone, on all of the device below.
    fn table(&self, sectors: usize, below: &str) -> String {
        let arguments = match self {
            Target::Linear => format!(" {below} 0"),
            Target::Error => String::new(),
            Target::Flakey { up, down, features } => {
                let features: String = features.iter().map(|word| format!(" {word}")).collect();
                let words = features.split_whitespace().count();
                format!(" {below} 0 {up} {down} {words}{features}")
            }
            Target::Delay(ms) => format!(" {below} 0 {ms}"),
        };
        format!("0 {sectors} {}{arguments}", self.name())
    }

    /// An error if the kernel does not have it, which names it.
    fn find(&self) -> Result<(), String> {
        // The kernel loads it for its first table, but lists only what is loaded.
        run("modprobe", &[&format!("dm-{}", self.name())]).ok();
        let missing = format!("there is no target `{}` of the device-mapper here", self.name());
        let listed = run("dmsetup", &["targets"]).map_err(|why| format!("{missing}: {why}"))?;
        let is_listed = listed.lines().any(|line| line.split_whitespace().next() == Some(self.name()));
        if is_listed { Ok(()) } else { Err(missing) }
    }
}

/// A file system in a directory of its own, until it is dropped.
pub(crate) struct Mounted {
    pub(crate) place: TempDir,
    /// The loop device below it, and the file below that.
    pub(crate) device: Option<(String, PathBuf)>,
    /// The file system that its files are on.
    below: Option<Box<Mounted>>,
    /// The device-mapper's device on the loop device, and its size in sectors.
    mapped: Option<(String, usize)>,
    /// What others mount it as.
    served: Option<String>,
    frozen: bool,
}

impl Mounted {
    /// In memory. The error says why it cannot be had here.
    pub(crate) fn tmpfs(bytes: usize) -> Result<Mounted, String> {
        let mounted = Mounted::nothing();
        let size = format!("size={bytes},mode=1777");
        run("mount", &["-t", "tmpfs", "-o", &size, "tmpfs", &mounted.path()])?;
        Ok(mounted)
    }

    /// ext4 on a loop device. The error says why it cannot be had here.
    pub(crate) fn ext4(bytes: usize) -> Result<Mounted, String> {
        Mounted::on_loop("ext4", EXT4, bytes)
    }

    /// btrfs, of which no more may be used than a quota allows. The error says why it cannot be had here.
    pub(crate) fn btrfs_with_quota(bytes: usize) -> Result<Mounted, String> {
        let mounted = Mounted::on_loop("btrfs", &["-q"], bytes)?;
        run("btrfs", &["quota", "enable", &mounted.path()])?;
        Ok(mounted)
    }

    /// ext4 on a device that passes everything on until it is [set](Mounted::set) to do something else. The error says why it, or
    /// a device that does that, cannot be had here.
    pub(crate) fn mapped(bytes: usize, later: &Target) -> Result<Mounted, String> {
        [later, &Target::Linear].into_iter().try_for_each(Target::find)?;
        let (mut mounted, device) = Mounted::looped("ext4", EXT4, bytes)?;
        let name = device.replace("/dev/", "ssdtrain-test-");
        let sectors = bytes / 512;
        run("dmsetup", &["create", &name, "--table", &Target::Linear.table(sectors, &device)])?;
        mounted.mapped = Some((name.clone(), sectors));
        // Makes the device's file where there is no udev to do that, and does nothing elsewhere.
        run("dmsetup", &["mknodes", &name])?;
        run("mount", &[&format!("/dev/mapper/{name}"), &mounted.path()])?;
        Ok(mounted)
    }

    /// Any file system on a loop device, with what makes it.
    pub(crate) fn on_loop(kind: &str, options: &[&str], bytes: usize) -> Result<Mounted, String> {
        let (mounted, device) = Mounted::looped(kind, options, bytes)?;
        run("mount", &["-t", kind, &device, &mounted.path()])?;
        Ok(mounted)
    }

    /// The same, not yet mounted, and the loop device.
    fn looped(kind: &str, options: &[&str], bytes: usize) -> Result<(Mounted, String), String> {
        let mut mounted = Mounted::nothing();
        let image = mounted.place.path().with_extension("image");
        File::create(&image)
            .and_then(|file| file.set_len(bytes as u64))
            .map_err(|error| error.to_string())?;
        let shown = image.display().to_string();
        let made = run(&format!("mkfs.{kind}"), &[options, &[&shown]].concat())
            .and_then(|_| run("losetup", &["--find", "--show", &shown]));
        let device = made.inspect_err(|_| drop(fs::remove_file(&image)))?.trim().to_owned();
        mounted.device = Some((device.clone(), image));
        Ok((mounted, device))
    }

    /// A container's file system: an overlay whose files are on ext4, by the kernel or by a program.
    pub(crate) fn overlay(by: &str, bytes: usize) -> Result<Mounted, String> {
        let below = Mounted::ext4(bytes)?;
        let [lower, upper, work] = ["lower", "upper", "work"].map(|name| format!("{}/{name}", below.path()));
        for folder in [&lower, &upper, &work] {
            fs::create_dir(folder).map_err(|error| error.to_string())?;
        }
        let mut mounted = Mounted::nothing();
        mounted.below = Some(Box::new(below));
        let folders = format!("lowerdir={lower},upperdir={upper},workdir={work}");
        match by {
            "overlay" => run("mount", &["-t", by, "-o", &folders, by, &mounted.path()])?,
            program => run(program, &["-o", &folders, &mounted.path()])?,
        };
        Ok(mounted)
    }

    /// A directory of an ext4 that this machine serves to itself.
    pub(crate) fn nfs(bytes: usize) -> Result<Mounted, String> {
        let mut below = Mounted::ext4(bytes)?;
        let served = format!("127.0.0.1:{}", below.path());
        run("exportfs", &["-o", "rw,no_root_squash,insecure,fsid=7", &served])?;
        below.served = Some(served.clone());
        let mut mounted = Mounted::nothing();
        mounted.below = Some(Box::new(below));
        run("mount", &["-t", "nfs", &served, &mounted.path()])?;
        Ok(mounted)
    }

    fn nothing() -> Mounted {
        let place = tempfile::tempdir().unwrap();
        Mounted { place, device: None, below: None, mapped: None, served: None, frozen: false }
    }

    pub(crate) fn path(&self) -> String {
        self.place.path().display().to_string()
    }

    pub(crate) fn config(&self, backend: BackendKind) -> StoreConfig {
        StoreConfig {
            directories: vec![self.place.path().to_owned()],
            backend,
            keep_free: Some(0),
            timeout: LIMIT,
            ..StoreConfig::default()
        }
    }

    /// From now on, whatever writes to it waits in the kernel.
    pub(crate) fn freeze(&mut self) -> Result<(), String> {
        run("fsfreeze", &["--freeze", &self.path()])?;
        self.frozen = true;
        Ok(())
    }

    pub(crate) fn thaw(&mut self) {
        if std::mem::take(&mut self.frozen) {
            run("fsfreeze", &["--unfreeze", &self.path()]).unwrap();
        }
    }

    /// From now on no more than this may be used, such as `32M`.
    pub(crate) fn set_quota(&self, most: &str) {
        run("btrfs", &["qgroup", "limit", most, &self.path()]).unwrap();
    }

    /// The limit of a quota that is exceeded cannot be raised.
    pub(crate) fn end_quota(&self) {
        run("btrfs", &["quota", "disable", &self.path()]).unwrap();
    }

    /// From now on its device has this target. What an earlier one held back is done first.
    pub(crate) fn set(&self, target: &Target) {
        self.try_set(target).unwrap();
    }

    fn try_set(&self, target: &Target) -> Result<(), String> {
        let (Some((name, sectors)), Some((below, _))) = (&self.mapped, &self.device) else { return Ok(()) };
        run("dmsetup", &["suspend", "--noflush", "--nolockfs", name])?;
        run("dmsetup", &["load", name, "--table", &target.table(*sectors, below)])?;
        run("dmsetup", &["resume", name])?;
        Ok(())
    }

    /// Bytes that are free.
    pub(crate) fn free(&self) -> u64 {
        let told = run("stat", &["-f", "-c", "%a %S", &self.path()]).unwrap();
        told.split_whitespace().map(|number| number.parse::<u64>().unwrap()).product()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.thaw();
        // Unmounting writes, and is not to be held back.
        self.try_set(&Target::Linear).ok();
        if let Some(served) = &self.served {
            run("exportfs", &["-u", served]).ok();
        }
        // What was not mounted is not to be unmounted.
        run("umount", &["--lazy", &self.path()]).ok();
        if let Some((name, _)) = &self.mapped {
            run("dmsetup", &["remove", "--force", name]).ok();
            run("dmsetup", &["mknodes", name]).ok();
        }
        if let Some((device, image)) = &self.device {
            run("losetup", &["--detach", device]).ok();
            fs::remove_file(image).ok();
        }
    }
}

/// Runs a program. Returns what it prints, or why it has failed.
pub(crate) fn run(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(arguments).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

pub(crate) type Outcome = Receiver<Result<()>>;

pub(crate) fn buf(fill: u8) -> Arc<AlignedBuf> {
    let mut buf = AlignedBuf::new(MIB).unwrap();
    buf.as_mut_slice().fill(fill);
    Arc::new(buf)
}

pub(crate) fn write(store: &Store, blob: &Arc<Blob>, fill: u8) -> Outcome {
    let (tell, told) = channel();
    store.write(Arc::clone(blob), buf(fill), Completion::new(move |outcome| tell.send(outcome).unwrap()));
    told
}

pub(crate) fn read(store: &Store, blob: &Arc<Blob>) -> Result<Vec<u8>> {
    let (tell, told) = channel();
    let mut into = buf(0);
    let done = Completion::new(move |outcome| tell.send(outcome).unwrap());
    store.read(Arc::clone(blob), Arc::<AlignedBuf>::clone(&into), done);
    told.recv().unwrap()?;
    Ok(Arc::get_mut(&mut into).unwrap().as_mut_slice().to_vec())
}

/// Reserves blobs and writes them until there is no more room; returns them and the refusal.
pub(crate) fn fill(store: &Store) -> (Vec<Arc<Blob>>, ssdtrain_store::Error) {
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

pub(crate) fn assert_hold(store: &Store, blobs: &[Arc<Blob>]) {
    for (index, blob) in blobs.iter().enumerate() {
        assert!(read(store, blob).unwrap().iter().all(|&byte| byte == index as u8));
    }
}
