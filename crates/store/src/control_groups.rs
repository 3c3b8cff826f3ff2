//! The memory limits of the control groups that this process is in, of both versions.
//!
//! `/proc/self/cgroup` has the process's group in each hierarchy, and the mount table where that hierarchy is to be seen
//! and from which group on: in a container, that may be the container's own group.

use std::fs;
use std::path::{Component, Path, PathBuf};

/// Limits from here on are none: version 1 has a number for that.
const UNLIMITED: u64 = 1 << 60;

/// The memory of a control group with a limit, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupMemory {
    /// The limit: what the group may use, or what it may use before its processes are made to wait.
    pub limit: u64,
    /// What it uses, cached files included.
    pub used: u64,
    /// The part of `used` that is freed as soon as memory is needed: cached files that were not read lately.
    pub reclaimable: u64,
}

impl GroupMemory {
    /// What the limit leaves.
    pub fn left(&self) -> u64 {
        self.limit.saturating_sub(self.used.saturating_sub(self.reclaimable))
    }

    fn read(folder: &Path, version: &Version) -> Option<GroupMemory> {
        let statistics = folder.join("memory.stat");
        let limits = version.limits.iter().filter_map(|name| number(&folder.join(name)));
        let limits = limits.chain(version.inherited.and_then(|name| field(&statistics, name)));
        Some(GroupMemory {
            limit: limits.min().filter(|limit| *limit < UNLIMITED)?,
            used: number(&folder.join(version.used)).unwrap_or(0),
            reclaimable: field(&statistics, version.reclaimable).unwrap_or(0),
        })
    }
}

/// What the files of one version of control groups are called.
struct Version {
    limits: &'static [&'static str],
    /// In the statistics: the least limit of the group and those that contain it, also those outside of the container.
    inherited: Option<&'static str>,
    used: &'static str,
    reclaimable: &'static str,
}

const V1: Version = Version {
    limits: &["memory.limit_in_bytes"],
    inherited: Some("hierarchical_memory_limit"),
    used: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file",
};
const V2: Version = Version {
    limits: &["memory.max", "memory.high"],
    inherited: None,
    used: "memory.current",
    reclaimable: "inactive_file",
};

/// The groups with a limit that the process is in whose machine has its files below `root`.
pub(super) fn limited(root: &Path) -> Vec<GroupMemory> {
    let own = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mounts = fs::read_to_string(root.join("proc/self/mountinfo")).unwrap_or_default();
    let folders = folders(&own, &mounts);
    let below_root = |folder: &Path| root.join(folder.strip_prefix("/").unwrap_or(folder));
    folders.iter().filter_map(|(version, folder)| GroupMemory::read(&below_root(folder), version)).collect()
}

/// The folders of the groups in `own` (`/proc/self/cgroup`), as far as `mounts` (`/proc/self/mountinfo`) shows them.
fn folders(own: &str, mounts: &str) -> Vec<(&'static Version, PathBuf)> {
    let mounts: Vec<Mount> = mounts.lines().filter_map(Mount::parse).collect();
    let mut folders = Vec::new();
    for (version, group) in own.lines().filter_map(group_of) {
        let mounts = mounts.iter().filter(|mount| mount.is_v2 == version.inherited.is_none());
        folders.extend(mounts.flat_map(|mount| mount.folders(group)).map(|folder| (version, folder)));
    }
    folders
}

/// Reads what a machine's files say: the tables, and statistics of a group. Returns the number of folders, which are all
/// below a mount point.
#[cfg(fuzzing)]
pub fn read_texts(own: &str, mounts: &str, statistics: &str) -> usize {
    let points: Vec<PathBuf> = mounts.lines().filter_map(Mount::parse).map(|mount| mount.point).collect();
    let folders = folders(own, mounts);
    assert!(folders.iter().all(|(_, folder)| points.iter().any(|point| folder.starts_with(point))));
    [V1, V2].iter().for_each(|version| _ = field_in(statistics, version.reclaimable));
    folders.len()
}

/// The version and the group in a line of `/proc/self/cgroup`, if it is of a hierarchy that may limit memory.
fn group_of(line: &str) -> Option<(&'static Version, &Path)> {
    let (_, rest) = line.split_once(':')?;
    let (controllers, group) = rest.split_once(':')?;
    let version = match controllers {
        "" => &V2,
        _ if controllers.split(',').any(|controller| controller == "memory") => &V1,
        _ => return None,
    };
    Some((version, Path::new(group)))
}

/// Where a hierarchy that may limit memory is mounted.
struct Mount {
    is_v2: bool,
    /// The group that is seen at the mount point.
    root: PathBuf,
    point: PathBuf,
}

impl Mount {
    /// A line of `/proc/self/mountinfo`; see `proc_pid_mountinfo(5)`.
    fn parse(line: &str) -> Option<Mount> {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ').skip(3);
        let (root, point) = (left.next()?, left.next()?);
        let mut right = right.split(' ');
        let is_v2 = match right.next()? {
            "cgroup2" => true,
            // The last field has the controllers.
            "cgroup" if right.nth(1)?.split(',').any(|option| option == "memory") => false,
            _ => return None,
        };
        Some(Mount { is_v2, root: unescaped(root), point: unescaped(point) })
    }

    /// The folders of a group and of those that contain it, as far as they are seen here; none if the group is not.
    fn folders(&self, group: &Path) -> Vec<PathBuf> {
        match group.strip_prefix(&self.root) {
            // A group outside of the namespace of control groups begins with `/..`.
            Ok(inner) if inner.components().all(|part| matches!(part, Component::Normal(_))) => {
                inner.ancestors().map(|folder| self.point.join(folder)).collect()
            }
            _ => Vec::new(),
        }
    }
}

/// A path from the mount table, where spaces and backslashes are octal numbers.
fn unescaped(text: &str) -> PathBuf {
    let escapes = [(r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", r"\")];
    escapes.iter().fold(text.to_owned(), |text, (escape, plain)| text.replace(escape, plain)).into()
}

/// The number that a file consists of; `None` if it says "max".
fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// The number that follows `name` in a file with one pair per line.
pub(super) fn field(file: &Path, name: &str) -> Option<u64> {
    field_in(&fs::read_to_string(file).ok()?, name)
}

fn field_in(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().map(str::split_whitespace);
    lines.find_map(|mut words| if words.next() == Some(name) { words.next()?.parse().ok() } else { None })
}

#[cfg(test)]
mod tests;
