//! `doctor`: what this machine has, and what will be used.

mod cuda;

use std::fs;
use std::io;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{Result, ensure};
use io_uring::IoUring;
use serde::Serialize;
use ssdtrain::store::{Store, StoreConfig};

use crate::cache::{Backend, probe, spill_directories};
use crate::{size, table};

/// Less free space than this is worth a word: a small model's activations fill it.
const LITTLE_SPACE: u64 = 4 << 30;
/// The version of libtorch that this program was built for.
const BUILT_FOR: &str = "2.11.0";

/// Say what this machine has and what will be used: libtorch, GPUs, pinned memory, io_uring, O_DIRECT, free space
///
/// Each line is ok, warn (a slower way will be taken) or missing, and says what to do. The exit code is 1 if a spill
/// directory cannot be used.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Spill directory to look at; may be repeated. Without it: where train would spill to
    #[arg(long = "spill-dir", value_name = "DIR")]
    spill_dirs: Vec<PathBuf>,
    /// How bytes would be moved
    #[arg(long, value_enum, default_value_t)]
    backend: Backend,
    /// Print one JSON object per line: name, status, found, advice
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  ssdtrain-bench doctor
  ssdtrain-bench doctor --spill-dir /mnt/nvme0 --spill-dir /mnt/nvme1
  ssdtrain-bench doctor --json";

pub(crate) fn run(args: &Args) -> Result<()> {
    let directories = spill_directories(&args.spill_dirs)?;
    let mut checks = vec![libtorch()];
    checks.extend(cuda::cuda());
    checks.push(io_uring());
    checks.extend(directories.iter().map(|directory| spill_directory(directory)));
    checks.extend([memory(), locked_memory(), huge_pages(), threads(), used(&directories, args.backend)]);
    for check in &checks {
        if args.json {
            table::print_json(check)?;
        } else {
            check.print();
        }
    }
    let unusable = checks.iter().filter(|check| check.needed && check.status == Status::Missing).count();
    ensure!(
        unusable == 0,
        "{unusable} of the lines above must be set right before activations can go to disk"
    );
    Ok(())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    Ok,
    Warn,
    Missing,
}

/// One line of the diagnosis.
#[derive(Debug, Serialize)]
struct Check {
    name: String,
    status: Status,
    found: String,
    /// What to do about it.
    advice: Option<String>,
    /// Whether nothing can be offloaded while it is missing.
    #[serde(skip)]
    needed: bool,
}

impl Check {
    fn ok(name: impl Into<String>, found: impl Into<String>) -> Check {
        Check { name: name.into(), status: Status::Ok, found: found.into(), advice: None, needed: false }
    }

    fn but(self, status: Status, advice: impl Into<String>) -> Check {
        Check { status, advice: Some(advice.into()), ..self }
    }

    fn print(&self) {
        let status = match self.status {
            Status::Ok => "ok",
            Status::Warn => "warn",
            Status::Missing => "missing",
        };
        println!("{status:<8} {:<14} {}", self.name, self.found);
        if let Some(advice) = &self.advice {
            println!("{:<8} {:<14} -> {advice}", "", "");
        }
    }
}

fn libtorch() -> Check {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let Some(library) = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .find(|path| path.contains("libtorch_cpu.so"))
    else {
        return Check::ok("libtorch", format!("{BUILT_FOR}, linked into this program"));
    };
    let directory = Path::new(library).parent().unwrap_or_else(|| Path::new("/"));
    match libtorch_version(directory) {
        Some(version) => {
            let check = Check::ok("libtorch", format!("{version} in {}", directory.display()));
            if version.starts_with(BUILT_FOR) {
                return check;
            }
            check.but(
                Status::Warn,
                format!(
                    "this program was built for {BUILT_FOR}: `python3 -m pip install torch=={BUILT_FOR}`, and set \
                     LD_LIBRARY_PATH to the lib folder of that torch"
                ),
            )
        }
        None => Check::ok("libtorch", format!("{BUILT_FOR} in {}", directory.display())),
    }
}

/// The version that lies beside a libtorch: a wheel says it in version.py, an archive in build-version.
fn libtorch_version(directory: &Path) -> Option<String> {
    let root = directory.parent()?;
    let archive = fs::read_to_string(root.join("build-version")).ok();
    archive.map(|text| text.trim().to_owned()).or_else(|| {
        let wheel = fs::read_to_string(root.join("version.py")).ok()?;
        let line = wheel.lines().find(|line| line.starts_with("__version__ = "))?;
        line.split('\'').nth(1).map(str::to_owned)
    })
}

fn huge_pages() -> Check {
    const SETTING: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
    let setting = read_trimmed(SETTING);
    let chosen = setting.split(['[', ']']).nth(1).unwrap_or("unknown").to_owned();
    let found = format!("transparent huge pages: {chosen}");
    match chosen.as_str() {
        "always" | "madvise" => Check::ok("huge pages", found),
        _ => Check::ok("huge pages", found).but(
            Status::Warn,
            format!("memory in small pages is slower to pin and to move to the disk; `echo madvise | sudo tee {SETTING}` allows large ones"),
        ),
    }
}

fn io_uring() -> Check {
    let kernel = read_trimmed("/proc/sys/kernel/osrelease");
    match IoUring::new(8) {
        Ok(_) => Check::ok("io_uring", format!("allowed by Linux {kernel}")),
        Err(error) => {
            let disabled = read_trimmed("/proc/sys/kernel/io_uring_disabled");
            let advice = match (error.raw_os_error(), disabled.as_str()) {
                (_, "1" | "2") => format!(
                    "threads are used instead; `sysctl kernel.io_uring_disabled=0` allows it (now {disabled})"
                ),
                (Some(libc::ENOSYS), _) => "threads are used instead; a kernel from 5.6 on has it".to_owned(),
                _ => "threads are used instead; in a container `docker run --security-opt seccomp=unconfined` allows it"
                    .to_owned(),
            };
            Check::ok("io_uring", format!("refused by Linux {kernel}: {error}")).but(Status::Warn, advice)
        }
    }
}

fn spill_directory(directory: &Path) -> Check {
    let name = "spill";
    let store = match Store::open(probe(directory)) {
        Ok(store) => store,
        Err(error) => {
            let check = Check::ok(name, error.to_string());
            return Check {
                needed: true,
                ..check.but(
                    Status::Missing,
                    "name a directory on a local disk that you may write to: `--spill-dir DIR`",
                )
            };
        }
    };
    let alignment = store.reserve(4096).map_or(4096, |blob| blob.memory_alignment());
    let direct = if store.path().is_direct() {
        format!("O_DIRECT, memory aligned to {alignment} bytes")
    } else {
        store.path().notes().join("; ")
    };
    let free = free_bytes(directory);
    let space = free.as_ref().map_or_else(
        |error| format!("free space unknown: {error}"),
        |&free| format!("{} free", size::format(free)),
    );
    let kind = file_system(directory).unwrap_or_else(|| "unknown file system".to_owned());
    let check = Check::ok(name, format!("{}: {kind}, {direct}, {space}", directory.display()));
    if !store.path().is_direct() {
        check.but(
            Status::Warn,
            "bytes go through the page cache, and take memory; name a directory on a local ext4 or xfs: `--spill-dir DIR`",
        )
    } else if free.is_ok_and(|free| free < LITTLE_SPACE) {
        check.but(
            Status::Warn,
            "what does not fit stays in memory; free some space or name another directory: `--spill-dir DIR`",
        )
    } else {
        check
    }
}

fn free_bytes(directory: &Path) -> io::Result<u64> {
    let found = rustix::fs::statvfs(directory)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// The type of the file system that a directory is on, by the longest mount point above it.
fn file_system(directory: &Path) -> Option<String> {
    let directory = directory.canonicalize().ok()?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mounts = mounts.lines().filter_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        Some((PathBuf::from(left.split(' ').nth(4)?), right.split(' ').next()?))
    });
    // Of several mounts on one point the last one is seen.
    mounts
        .filter(|(point, _)| directory.starts_with(point))
        .max_by_key(|(point, _)| point.components().count())
        .map(|(_, kind)| kind.to_owned())
}

fn memory() -> Check {
    let of = |name| meminfo(name).map_or_else(|| "unknown".to_owned(), size::format);
    Check::ok("memory", format!("{}, {} available", of("MemTotal:"), of("MemAvailable:")))
}

/// A line of /proc/meminfo, in bytes.
fn meminfo(name: &str) -> Option<u64> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find(|line| line.starts_with(name))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? << 10)
}

fn locked_memory() -> Check {
    let shown = locked_limit().map_or_else(|text| text, size::format);
    Check::ok("locked memory", format!("limit {shown}; nothing is locked when training on the CPU"))
}

/// The limit of this process in bytes, or what is said instead.
fn locked_limit() -> Result<u64, String> {
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let limit = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"));
    let limit = limit.and_then(|line| line.split_whitespace().next()).unwrap_or("unknown");
    limit.parse().map_err(|_| limit.to_owned())
}

fn threads() -> Check {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    Check::ok(
        "threads",
        format!("{cores} cores for this process, {} threads that compute", tch::get_num_threads()),
    )
}

/// What a run with these settings would do.
fn used(directories: &[PathBuf], backend: Backend) -> Check {
    let name = "used";
    let config = StoreConfig {
        directories: directories.to_vec(),
        cap_bytes: directories.len() as u64 * 4096,
        backend: backend.kind(),
        ..StoreConfig::default()
    };
    let (depth, io_bytes) = (config.queue_depth, size::format(config.io_bytes as u64));
    match Store::open(config) {
        Ok(store) => {
            let files = directories.len();
            let found = format!(
                "{files} spill file(s) through {}; {depth} transfers of up to {io_bytes}",
                store.path()
            );
            Check::ok(name, found)
        }
        Err(error) => {
            let check = Check::ok(name, format!("nothing: {error}"));
            Check {
                needed: true,
                ..check.but(Status::Missing, "see the lines above, or let it be chosen: `--backend auto`")
            }
        }
    }
}

fn read_trimmed(path: &str) -> String {
    fs::read_to_string(path).map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_found_beside_an_archive_and_in_a_wheel() {
        let root = tempfile::tempdir().unwrap();
        let lib = root.path().join("lib");
        assert_eq!(libtorch_version(&lib), None);
        fs::write(root.path().join("version.py"), "from x import y\n__version__ = '2.11.0+cpu'\n").unwrap();
        assert_eq!(libtorch_version(&lib).as_deref(), Some("2.11.0+cpu"));
        fs::write(root.path().join("build-version"), "2.11.0\n").unwrap();
        assert_eq!(libtorch_version(&lib).as_deref(), Some("2.11.0"));
    }

    #[test]
    fn a_missing_directory_is_named() {
        let check = spill_directory(Path::new("/no/such/place"));
        assert!(check.needed && check.status == Status::Missing);
        assert!(check.found.contains("/no/such/place"), "{}", check.found);
    }
}
