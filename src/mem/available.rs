//! Memory that is available at present.

use std::fs;
use std::path::Path;

use ssdtrain_libtorch as torch;
use ssdtrain_libtorch::CudaDevice;
use tch::Device;

/// Bytes of memory that are available at present: what the kernel calls available, but no more than the limits of the process's control
/// groups leave. Unlimited if the kernel does not say.
pub(crate) fn available_memory() -> u64 {
    available(Path::new("/proc"), Path::new("/sys/fs/cgroup"))
}

/// Bytes of the device's memory that are available at present.
pub(crate) fn free_memory(device: Device) -> u64 {
    match device {
        Device::Cuda(index) => CudaDevice::new(index).and_then(CudaDevice::free).unwrap_or(0),
        _ => available_memory().saturating_add(idle_memory()),
    }
}

/// Bytes that the CPU allocator holds but nobody uses.
fn idle_memory() -> u64 {
    let held = torch::memory(Device::Cpu);
    held.reserved.saturating_sub(held.allocated)
}

/// The file names of one version of control groups.
struct Names {
    limits: &'static [&'static str],
    used: &'static str,
    reclaimable: &'static str,
}

const V1: Names = Names {
    limits: &["memory.limit_in_bytes"],
    used: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file",
};
const V2: Names =
    Names { limits: &["memory.max", "memory.high"], used: "memory.current", reclaimable: "inactive_file" };

fn available(proc: &Path, groups: &Path) -> u64 {
    let system = field(&proc.join("meminfo"), "MemAvailable:").map(|kib| kib << 10);
    let own = fs::read_to_string(proc.join("self/cgroup")).unwrap_or_default();
    let left = own.lines().filter_map(|line| left_in(line, groups));
    left.chain(system).min().unwrap_or(u64::MAX)
}

/// Bytes that the group in this line of `/proc/self/cgroup`, and the groups that contain it, leave.
fn left_in(line: &str, groups: &Path) -> Option<u64> {
    let (_, group) = line.split_once(':')?;
    let (controllers, path) = group.split_once(':')?;
    let (root, names) = match controllers {
        "" => (groups.to_owned(), V2),
        _ if controllers.split(',').any(|controller| controller == "memory") => (groups.join("memory"), V1),
        _ => return None,
    };
    // In a container the path may be the host's. Folders of it that do not exist then say nothing, but the root does.
    let folders = Path::new(path.trim_start_matches('/')).ancestors();
    folders.filter_map(|folder| left_of(&root.join(folder), &names)).min()
}

fn left_of(group: &Path, names: &Names) -> Option<u64> {
    let limit = names.limits.iter().filter_map(|name| number(&group.join(name))).min()?;
    let used = number(&group.join(names.used)).unwrap_or(0);
    // Pages of files that were not read lately are freed when memory is needed.
    let reclaimable = field(&group.join("memory.stat"), names.reclaimable).unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(reclaimable)))
}

/// The number that a file consists of; `None` if it says "max".
fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// The number that follows `name` in a file with one pair per line.
fn field(file: &Path, name: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let mut lines = text.lines().map(str::split_whitespace);
    lines.find_map(|mut words| if words.next() == Some(name) { words.next()?.parse().ok() } else { None })
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// The available memory if `files` were all of `/proc` and `/sys/fs/cgroup`.
    fn available_with(files: &[(&str, String)]) -> u64 {
        let root = TempDir::new().unwrap();
        for (name, text) in files {
            let file = root.path().join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        available(&root.path().join("proc"), &root.path().join("cgroup"))
    }

    fn mib(count: u64) -> String {
        format!("{}\n", count * MIB)
    }

    fn machine(groups: &str) -> [(&'static str, String); 2] {
        let meminfo = "MemTotal:  9999999 kB\nMemAvailable:    819200 kB\n".to_owned();
        [("proc/meminfo", meminfo), ("proc/self/cgroup", groups.to_owned())]
    }

    #[test]
    fn without_limits_it_is_what_the_kernel_calls_available() {
        assert_eq!(available_with(&machine("0::/\n")), 800 * MIB);
        assert_eq!(available_with(&[]), u64::MAX);
    }

    #[test]
    fn the_smallest_limit_of_a_group_and_those_it_is_in_counts() {
        let group = [
            ("cgroup/a/memory.max", mib(500)),
            ("cgroup/a/memory.high", "max\n".to_owned()),
            ("cgroup/a/memory.current", mib(450)),
            ("cgroup/a/memory.stat", format!("anon 1\ninactive_file {}\n", 150 * MIB)),
            ("cgroup/a/b/memory.max", "max\n".to_owned()),
            ("cgroup/a/b/memory.high", mib(400)),
            ("cgroup/a/b/memory.current", mib(100)),
        ];
        let files = [&machine("0::/a/b\n")[..], &group].concat();
        assert_eq!(available_with(&files), 200 * MIB);
        let files = [&machine("0::/a/b\n")[..], &group[4..]].concat();
        assert_eq!(available_with(&files), 300 * MIB);
    }

    #[test]
    fn groups_of_the_first_version_count_too() {
        let group = [
            ("cgroup/memory/memory.limit_in_bytes", mib(600)),
            ("cgroup/memory/memory.usage_in_bytes", mib(300)),
            ("cgroup/memory/memory.stat", format!("total_inactive_file {}\n", 100 * MIB)),
        ];
        // A container sees its own group as the root, but under the host's path.
        let files = [&machine("5:cpu,memory:/docker/7\n3:cpuset:/x\n")[..], &group].concat();
        assert_eq!(available_with(&files), 400 * MIB);
    }

    #[test]
    fn a_group_that_is_full_leaves_nothing() {
        let group = [("cgroup/memory.max", mib(1)), ("cgroup/memory.current", mib(2))];
        assert_eq!(available_with(&[&machine("0::/\n")[..], &group].concat()), 0);
    }
}
