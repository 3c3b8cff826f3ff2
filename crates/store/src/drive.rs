//! The drives that a directory's bytes end up on, and what each is known by from run to run.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// Nobody stacks devices this deep; a tree with a cycle ends here.
const DEEPEST: usize = 8;
/// Longer names of drives than this are cut.
const LONGEST_ID: usize = 200;

/// A block device with no other one below it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Drive {
    /// The kernel's name for it, such as `nvme0n1`, which may change from boot to boot.
    pub name: String,
    /// What it is known by from run to run: its model and serial number or its world-wide name. Most virtual disks have neither, and are
    /// known by name and size.
    pub id: String,
}

/// A drive, and how many bytes it takes for each that is written above it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Portion {
    pub(super) drive: Drive,
    pub(super) share: f64,
}

impl Drive {
    /// The drive with this name, as the files below `root` describe it (`/`, or a copy of another machine's `/sys`).
    pub fn named(root: &Path, name: &str) -> Drive {
        Drive::at(&root.join("sys/class/block").join(name), name)
    }

    fn at(device: &Path, name: &str) -> Drive {
        let text = |file: &str| words(&device.join(file));
        // The namespaces of one NVMe drive wear together, and have its serial number in common.
        let of_device = text("device/serial")
            .map(|serial| format!("{} {serial}", text("device/model").unwrap_or_default()));
        let id = of_device
            .or_else(|| text("wwid"))
            .or_else(|| text("device/wwid"))
            .or_else(|| text("serial"))
            .unwrap_or_else(|| format!("{name} of {} sectors", text("size").unwrap_or_default()));
        Drive { name: name.to_owned(), id: id.trim().chars().take(LONGEST_ID).collect() }
    }

    /// What stands for drives that cannot be told.
    fn unknown() -> Drive {
        let name = "unknown disk".to_owned();
        Drive { id: name.clone(), name }
    }
}

/// The drives below a directory: through partitions, RAIDs and volumes. The one that is not known, if it cannot be told.
pub(super) fn below(directory: &Path) -> Vec<Portion> {
    let root = Path::new("/");
    let device = fs::metadata(directory).ok().and_then(|metadata| {
        let (major, minor) = (libc::major(metadata.dev()), libc::minor(metadata.dev()));
        match major {
            // btrfs, for one, has a number of its own. Of several devices it names the first.
            0 => mounted(root, &directory.canonicalize().ok()?),
            _ => root.join(format!("sys/dev/block/{major}:{minor}")).canonicalize().ok(),
        }
    });
    let mut found = Vec::new();
    if let Some(device) = device {
        collect(&device, 1.0, 0, &mut found);
    }
    if found.is_empty() { vec![Portion { drive: Drive::unknown(), share: 1.0 }] } else { found }
}

/// The directory in sysfs of the device that is mounted where `directory` is, as the mount table names it.
fn mounted(root: &Path, directory: &Path) -> Option<PathBuf> {
    let table = fs::read_to_string(root.join("proc/self/mountinfo")).ok()?;
    let mounts = table.lines().filter_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        Some((PathBuf::from(plain(left.split(' ').nth(4)?)), plain(right.split(' ').nth(1)?)))
    });
    let (_, source) = mounts
        .filter(|(point, _)| directory.starts_with(point))
        .max_by_key(|(point, _)| point.components().count())?;
    let device =
        root.join(source.strip_prefix("/dev/").map(|name| format!("dev/{name}"))?).canonicalize().ok()?;
    root.join("sys/class/block").join(device.file_name()?).canonicalize().ok()
}

/// A text of the mount table, in which four characters are octal numbers.
fn plain(text: &str) -> String {
    let escapes = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    escapes.iter().fold(text.to_owned(), |text, (escape, plain)| text.replace(escape, plain))
}

/// Adds the drives below a block device, given by its directory in sysfs, which takes `share` of the bytes.
fn collect(device: &Path, share: f64, depth: usize, found: &mut Vec<Portion>) {
    let whole = match device.parent() {
        Some(disk) if device.join("partition").exists() => disk,
        _ => device,
    };
    let Some(name) = whole.file_name().and_then(|name| name.to_str()) else { return };
    let slaves: Vec<PathBuf> = fs::read_dir(whole.join("slaves"))
        .into_iter()
        .flatten()
        .filter_map(|slave| slave.ok()?.path().canonicalize().ok())
        .collect();
    if slaves.is_empty() || depth == DEEPEST {
        let drive = Drive::at(whole, name);
        match found.iter_mut().find(|portion| portion.drive.id == drive.id) {
            Some(portion) => portion.share += share,
            None => found.push(Portion { drive, share }),
        }
        return;
    }
    let each = share * share_of_each(words(&whole.join("md/level")).as_deref(), slaves.len());
    slaves.iter().for_each(|slave| collect(slave, each, depth + 1, found));
}

/// How much of what is written to an array each of its devices takes. Where that is not known, as in a volume over several devices, it may be
/// all.
fn share_of_each(level: Option<&str>, devices: usize) -> f64 {
    let devices = devices as f64;
    let share = match level {
        Some("raid0") => devices.recip(),
        Some("raid10") => 2.0 / devices,
        Some("raid4" | "raid5") => (devices - 1.0).recip(),
        Some("raid6") => (devices - 2.0).recip(),
        _ => 1.0,
    };
    share.clamp(0.0, 1.0)
}

/// The words of a file; `None` if it has none.
fn words(path: &Path) -> Option<String> {
    let text = fs::read(path).ok()?;
    let text = String::from_utf8_lossy(&text).replace('\0', " ");
    let words: Vec<&str> = text.split_whitespace().collect();
    (!words.is_empty()).then(|| words.join(" "))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Block devices of a made-up machine.
    struct Devices(tempfile::TempDir);

    impl Devices {
        fn new() -> Devices {
            Devices(tempfile::tempdir().unwrap())
        }

        /// A device, or a partition such as `sda/sda1`, with these files.
        fn with(self, path: &str, files: &[(&str, &str)]) -> Devices {
            fs::create_dir_all(self.at(path)).unwrap();
            for (file, text) in files {
                let file = self.at(path).join(file);
                fs::create_dir_all(file.parent().unwrap()).unwrap();
                fs::write(file, text).unwrap();
            }
            self
        }

        /// `device` consists of `slaves`.
        fn over(self, device: &str, slaves: &[&str]) -> Devices {
            let folder = self.at(device).join("slaves");
            fs::create_dir_all(&folder).unwrap();
            for slave in slaves {
                symlink(self.at(slave), folder.join(Path::new(slave).file_name().unwrap())).unwrap();
            }
            self
        }

        fn at(&self, path: &str) -> PathBuf {
            self.0.path().join(path)
        }

        fn below(&self, path: &str) -> Vec<(String, f64)> {
            let mut found = Vec::new();
            collect(&self.at(path), 1.0, 0, &mut found);
            found.sort_by(|left, right| left.drive.name.cmp(&right.drive.name));
            found.into_iter().map(|portion| (portion.drive.name, portion.share)).collect()
        }
    }

    fn named(names: &[&str], share: f64) -> Vec<(String, f64)> {
        names.iter().map(|name| ((*name).to_owned(), share)).collect()
    }

    #[test]
    fn partitions_and_encrypted_volumes_lead_to_their_drive() {
        let devices = Devices::new()
            .with("nvme0n1/nvme0n1p2", &[("partition", "2\n")])
            .over("dm-1", &["nvme0n1/nvme0n1p2"])
            .over("dm-2", &["dm-1"]);
        for path in ["nvme0n1", "nvme0n1/nvme0n1p2", "dm-1", "dm-2"] {
            assert_eq!(devices.below(path), named(&["nvme0n1"], 1.0), "{path}");
        }
    }

    #[test]
    fn each_drive_of_an_array_takes_its_share() {
        let drives = ["sda", "sdb", "sdc", "sdd"];
        let array = |level: &str| {
            let devices = drives.iter().fold(Devices::new(), |devices, drive| devices.with(drive, &[]));
            devices.with("md0", &[("md/level", level)]).over("md0", &drives)
        };
        for (level, share) in [
            ("raid0\n", 0.25),
            ("raid1\n", 1.0),
            ("raid10\n", 0.5),
            ("raid5\n", 1.0 / 3.0),
            ("raid6\n", 0.5),
            ("something\n", 1.0),
        ] {
            assert_eq!(array(level).below("md0"), named(&drives, share), "{level}");
        }
    }

    #[test]
    fn a_drive_is_known_by_what_stays_the_same() {
        let id = |files: &[(&str, &str)]| Drive::at(&Devices::new().with("x", files).at("x"), "x").id;
        let nvme = [("device/model", "SSD  9000   \n"), ("device/serial", " S1 \n"), ("wwid", "eui.1\n")];
        assert_eq!(id(&nvme), "SSD 9000 S1");
        assert_eq!(id(&nvme[2..]), "eui.1");
        assert_eq!(id(&[("device/wwid", "naa.5\n"), ("size", "8\n")]), "naa.5");
        assert_eq!(id(&[("serial", "vol-1"), ("size", "8\n")]), "vol-1");
        assert_eq!(id(&[("serial", "\n"), ("size", "8\n")]), "x of 8 sectors");
        assert_eq!(id(&[("wwid", &"w".repeat(1000))]).len(), LONGEST_ID);
    }

    #[test]
    fn where_the_device_has_no_number_the_mount_table_names_it() {
        let machine = Devices::new().with("sys/devices/vdb/vdb1", &[("partition", "1")]);
        let machine = machine.with("dev", &[("vdb1", "")]).with("sys/class/block", &[]);
        symlink(machine.at("sys/devices/vdb/vdb1"), machine.at("sys/class/block/vdb1")).unwrap();
        let table = "1 0 0:20 / / rw - btrfs /dev/vda rw\n2 1 0:21 /s /mnt/my\\040ssd rw - btrfs /dev/vdb1 rw\n\
                     3 1 0:22 / /mnt/none rw - overlay overlay rw\nbroken\n";
        let machine = machine.with("proc/self", &[("mountinfo", table)]);
        let found = mounted(machine.0.path(), Path::new("/mnt/my ssd/spill")).unwrap();
        assert_eq!(found, machine.at("sys/devices/vdb/vdb1").canonicalize().unwrap());
        assert_eq!(mounted(machine.0.path(), Path::new("/mnt/none/x")), None);
    }

    #[test]
    fn a_directory_that_cannot_be_looked_into_is_on_an_unknown_drive() {
        let found = below(Path::new("/no/such/place"));
        assert_eq!(found, [Portion { drive: Drive::unknown(), share: 1.0 }]);
    }
}
