//! Where a directory is: its file system, udev's record of it, and the disks below.

use std::path::{Path, PathBuf};

use super::pci::Device;
use super::tree::Tree;

/// A spill directory.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) directory: PathBuf,
    pub(super) mount: Option<Mount>,
    /// The udev record of the mounted device.
    pub(super) udev: Udev,
    /// The device that is mounted, as the kernel names it.
    pub(super) device: Option<String>,
    /// The RAID or volume between the file system and its disks.
    pub(super) stacked: Option<String>,
    pub(super) disks: Vec<Disk>,
}

/// The file system that a directory is on.
#[derive(Debug)]
pub(super) struct Mount {
    pub(super) point: PathBuf,
    pub(super) kind: String,
    pub(super) source: String,
    pub(super) options: Vec<String>,
    /// Major and minor number of its device; a file system without a device has a major number of 0.
    number: String,
    pub(super) journal: Journal,
}

/// How ext4 orders data and journal.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Journal {
    /// The mode is in the mount table, where cuFile looks for it.
    Shown(String),
    /// The mode is in use, but the mount table does not show it.
    Hidden(String),
    /// There is no journal.
    None,
    /// Unknown; also for other file systems.
    Unknown,
}

/// What udev's database says about a device.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Udev {
    /// It holds a file system: cuFile may register files.
    FileSystem,
    /// There is an entry, but it does not say so.
    NotTold,
    /// There is a database, but no entry.
    NoEntry,
    /// There is no database, as in most containers.
    NoData,
}

/// A disk below a directory.
#[derive(Debug)]
pub(super) struct Disk {
    pub(super) name: String,
    pub(super) kind: DiskKind,
    pub(super) device: Option<Device>,
}

/// The kind of disk, according to its driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DiskKind {
    Nvme,
    Virtio,
    Other,
}

impl Place {
    pub(super) fn read(tree: &Tree, directory: &Path) -> Place {
        let mut mount = Mount::of(tree, directory);
        let number = mount.as_ref().and_then(|mount| mount.device_number(tree));
        let real = number.as_ref().and_then(|number| tree.real(&format!("/sys/dev/block/{number}")));
        let device = real.as_deref().and_then(|path| path.rsplit('/').next()).map(str::to_owned);
        if let (Some(mount), Some(device)) = (&mut mount, &device) {
            mount.look_up_journal(tree, device);
        }
        let udev = number.as_ref().map_or(Udev::NoEntry, |number| Udev::read(tree, number));
        let mut disks = Vec::new();
        let mut stacked = None;
        if let Some(real) = &real {
            find_disks(tree, real, &mut disks, &mut stacked, 0);
        }
        Place { directory: directory.to_owned(), mount, udev, device, stacked, disks }
    }

    /// Major and minor number of the mounted device, as udev writes them.
    pub(super) fn number(&self) -> Option<&str> {
        self.mount.as_ref().map(|mount| mount.number.as_str()).filter(|number| !number.starts_with("0:"))
    }
}

impl Mount {
    /// The mount with the longest path above a directory; if several share one mount point, the last one is visible.
    fn of(tree: &Tree, directory: &Path) -> Option<Mount> {
        let table = tree.text("/proc/self/mountinfo")?;
        let mounts = table.lines().filter_map(Mount::parse);
        mounts
            .filter(|mount| directory.starts_with(&mount.point))
            .max_by_key(|mount| mount.point.components().count())
    }

    /// A line of `/proc/self/mountinfo`; see `proc_pid_mountinfo(5)`.
    pub(super) fn parse(line: &str) -> Option<Mount> {
        let (left, right) = line.split_once(" - ")?;
        let left: Vec<&str> = left.split(' ').collect();
        let mut right = right.split(' ');
        let (kind, source) = (right.next()?, right.next()?);
        let options = left.get(5)?.split(',').chain(right.next().unwrap_or_default().split(','));
        let mut unique: Vec<String> = Vec::new();
        for option in options.filter(|option| !option.is_empty()) {
            if !unique.iter().any(|known| known == option) {
                unique.push(option.to_owned());
            }
        }
        let shown = unique.iter().find_map(|option| option.strip_prefix("data="));
        Some(Mount {
            point: PathBuf::from(unescape(left.get(4)?)),
            kind: kind.to_owned(),
            source: unescape(source),
            number: (*left.get(2)?).to_owned(),
            journal: shown.map_or(Journal::Unknown, |mode| Journal::Shown(mode.to_owned())),
            options: unique,
        })
    }

    /// The number of the device: the mount's own or, if that is anonymous, that of the device it names.
    fn device_number(&self, tree: &Tree) -> Option<String> {
        if !self.number.starts_with("0:") {
            return Some(self.number.clone());
        }
        let name = self.source.strip_prefix("/dev/")?;
        tree.text(&format!("/sys/class/block/{name}/dev"))
    }

    /// ext4 lists all of its options, including the defaults, in a file of its own.
    fn look_up_journal(&mut self, tree: &Tree, device: &str) {
        if self.kind != "ext4" || self.journal != Journal::Unknown {
            return;
        }
        if let Some(options) = tree.text(&format!("/proc/fs/ext4/{device}/options")) {
            let mode = options.lines().find_map(|line| line.strip_prefix("data="));
            self.journal = mode.map_or(Journal::None, |mode| Journal::Hidden(mode.to_owned()));
        }
    }
}

impl Udev {
    fn read(tree: &Tree, number: &str) -> Udev {
        const DATA: &str = "/run/udev/data";
        match tree.text(&format!("{DATA}/b{number}")) {
            Some(text) if text.lines().any(|line| line == "E:ID_FS_USAGE=filesystem") => Udev::FileSystem,
            Some(_) => Udev::NotTold,
            None if tree.has(DATA) => Udev::NoEntry,
            None => Udev::NoData,
        }
    }
}

/// Adds the disks below a block device, given by its directory in sysfs: through partitions, RAIDs and volumes.
fn find_disks(tree: &Tree, real: &str, disks: &mut Vec<Disk>, stacked: &mut Option<String>, depth: usize) {
    // Nobody stacks devices this deep; a tree with a cycle ends here.
    const DEEPEST: usize = 8;
    let whole = match real.rsplit_once('/') {
        Some((disk, _)) if tree.has(&format!("{real}/partition")) => disk,
        _ => real,
    };
    let Some(name) = whole.rsplit('/').next() else { return };
    let below = tree.names(&format!("{whole}/slaves"));
    if below.is_empty() || depth == DEEPEST {
        if !disks.iter().any(|disk| disk.name == name) {
            disks.push(Disk::read(tree, whole, name));
        }
        return;
    }
    stacked.get_or_insert_with(|| name.to_owned());
    for slave in below {
        if let Some(real) = tree.real(&format!("{whole}/slaves/{slave}")) {
            find_disks(tree, &real, disks, stacked, depth + 1);
        }
    }
}

impl Disk {
    fn read(tree: &Tree, real: &str, name: &str) -> Disk {
        let kind = if name.starts_with("nvme") {
            DiskKind::Nvme
        } else if real.contains("/virtio") {
            DiskKind::Virtio
        } else {
            DiskKind::Other
        };
        // With multipath, a namespace belongs to a subsystem, next to links to its controllers.
        let controller = || {
            let (subsystem, _) = real.rsplit_once('/').filter(|_| real.contains("/nvme-subsystem/"))?;
            let is_controller = |name: &String| {
                name.strip_prefix("nvme").is_some_and(|rest| rest.chars().all(|digit| digit.is_ascii_digit()))
            };
            let controller = tree.names(subsystem).into_iter().find(is_controller)?;
            Device::above(tree, &tree.real(&format!("{subsystem}/{controller}"))?)
        };
        let device = Device::above(tree, real).or_else(controller);
        Disk { name: name.to_owned(), kind, device }
    }
}

/// A text from `/proc/self/mountinfo`, where spaces and similar characters are octal numbers.
fn unescape(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                plain.push(char::from(byte));
                plain.push_str(&part[3..]);
            }
            None => {
                plain.push('\\');
                plain.push_str(part);
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_mount_table_is_read_with_optional_fields_and_spaces() {
        let line = r"36 35 259:1 / /mnt/my\040ssd rw,noatime shared:1 - ext4 /dev/nvme0n1p1 rw,data=ordered";
        let mount = Mount::parse(line).unwrap();
        assert_eq!((mount.point, mount.kind.as_str()), (PathBuf::from("/mnt/my ssd"), "ext4"));
        assert_eq!(mount.options, ["rw", "noatime", "data=ordered"]);
        assert_eq!((mount.number.as_str(), mount.journal), ("259:1", Journal::Shown("ordered".into())));
        assert!(Mount::parse("").is_none() && Mount::parse("1 2 0:1 / / rw").is_none());
    }

    #[test]
    fn octal_numbers_become_characters_and_other_backslashes_stay() {
        assert_eq!(unescape(r"a\040b\134c\x"), "a b\\c\\x");
    }
}
