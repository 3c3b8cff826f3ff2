//! `doctor`: what this machine has, which path bytes will take, and why they do not take a better one.

mod bundle;
mod cuda;
mod cufile;
mod disks;
mod facts;
mod findings;
mod health;
mod host;
#[cfg(test)]
mod machines;
mod nvme;
mod page;
mod pci;
mod place;
mod redact;
#[cfg(test)]
mod samples;
mod sections;
mod spill;
mod tree;
mod verdict;
mod wear;

use std::fs;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::SystemTime;

use anyhow::{Result, ensure};
use io_uring::IoUring;
use ssdtrain::{TensorCache, TensorCacheBuilder};
use ssdtrain_store::{Day, History, HistoryFile, Store, StoreConfig};
use tch::Device;

use self::bundle::BundleArgs;
use self::facts::{Facts, Tried};
use self::page::{Check, Status};
use self::redact::Redactor;
use self::tree::Tree;
use crate::common::endurance::EnduranceArgs;
use crate::common::size;
use crate::common::spill::SpillArgs;
use crate::common::table::OutputArgs;

/// The version of libtorch that this program was built for.
const BUILT_FOR: &str = ssdtrain_libtorch::VERSION;

/// Say which path bytes will take here, and why not a better one: GPUs, drivers, cuFile, disks, io_uring, O_DIRECT, memory
///
/// Each line is ok, warn (it costs something, or a slower way will be taken), missing, blocks (it stands in the way of
/// GPUDirect Storage, and of nothing else) or unknown, and says what it costs and what mends it. The last line is the
/// verdict: whether bytes can go directly between GPU and SSD, and what is used. docs/gds.md explains each line. The exit code
/// is 1 if a spill directory cannot be used.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    spill: SpillArgs,
    #[command(flatten)]
    endurance: EnduranceArgs,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    bundle: BundleArgs,
    /// Read /proc, /sys, /run and /etc below this directory
    #[arg(long, value_name = "DIR", default_value = "/", hide = true)]
    root: PathBuf,
}

const EXAMPLES: &str = "\
Examples:
  ssdtrain-bench doctor
  ssdtrain-bench doctor --spill-dir /mnt/nvme0 --spill-dir /mnt/nvme1
  ssdtrain-bench doctor --spill-dir /mnt/nvme0 --disk-endurance 600TB
  ssdtrain-bench doctor --json
  ssdtrain-bench doctor --bundle report.md

JSON: name, status, found, advice.";

pub(crate) fn run(args: &Args) -> Result<()> {
    let bundle = args.bundle.prepare()?;
    let directories = args.spill.directories()?;
    let tree = Tree::new(&args.root);
    let gpus = cuda::devices();
    let libtorch_directory = libtorch_directory();
    let tried = Tried {
        io_uring: IoUring::new(8).map(drop).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO)),
        cufile: cufile::find(libtorch_directory.as_deref()),
        gpus: *gpus.as_ref().unwrap_or(&0),
    };
    let real: Vec<_> = directories
        .iter()
        .map(|directory| directory.canonicalize().unwrap_or_else(|_| directory.clone()))
        .collect();
    let facts = Facts::read(&tree, &real, tried);

    let mut checks = vec![libtorch(libtorch_directory.as_deref())];
    checks.extend(cuda::cuda(gpus, &facts));
    checks.extend(findings::direct(&facts));
    for (directory, place) in directories.iter().zip(&facts.places) {
        checks.push(spill::spill(directory, place));
        checks.extend(disks::disks(&facts, place));
    }
    let history = HistoryFile::of_user(true).map_or_else(|| Ok(History::default()), |file| file.read());
    let today = Day::of(SystemTime::now());
    checks.extend(wear::wear(&tree, &facts.places, history, args.endurance.rating(), today));
    checks.extend(health::health(&tree, &facts.places));
    checks.extend(host::host(&facts));
    let has_gpu = !facts.gpus.is_empty();
    checks.extend(args.spill.encrypt().then(|| encryption(has_gpu)));
    let (used, way) = used(&directories, &args.spill);
    checks.extend([threads(), route(&directories, &args.spill, has_gpu), used]);
    checks.push(verdict::verdict(&facts, &checks, &way));
    if let Some(bundle) = bundle {
        let version = libtorch_directory.as_deref().and_then(libtorch_version);
        let sections = sections::sections(&tree, &facts, version.as_deref().unwrap_or(BUILT_FOR));
        return bundle.write(sections, &checks, &Redactor::new(&tree, &directories, &facts));
    }
    checks.insert(1, package(libtorch_directory.as_deref()));
    page::print(&checks, args.output.json)?;
    let unusable = checks.iter().filter(|check| check.needed && check.status == Status::Missing).count();
    ensure!(
        unusable == 0,
        "{unusable} of the lines above must be set right before activations can go to disk"
    );
    Ok(())
}

/// The folder of the libtorch in use, unless it is linked into this program.
fn libtorch_directory() -> Option<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let mut paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    Some(Path::new(paths.find(|path| path.contains("libtorch_cpu.so"))?).parent()?.to_owned())
}

fn libtorch(directory: Option<&Path>) -> Check {
    let Some(directory) = directory else {
        return Check::ok("libtorch", format!("{BUILT_FOR}, linked into this program"));
    };
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

/// How a user's package depends on the library.
fn package(libtorch: Option<&Path>) -> Check {
    let folder = libtorch.and_then(Path::parent).unwrap_or_else(|| Path::new("DIR"));
    Check::ok(
        "your package",
        format!(
            "needs `ssdtrain = {{ path = \"CHECKOUT\" }}`, `tch = {{ version = \"=0.24.0\", default-features = false }}`, the build.rs of \
             examples/outside, and `export LIBTORCH={}`",
            folder.display()
        ),
    )
}

/// The version recorded next to a libtorch: a wheel has it in version.py, an archive in build-version.
fn libtorch_version(directory: &Path) -> Option<String> {
    let root = directory.parent()?;
    let archive = fs::read_to_string(root.join("build-version")).ok();
    archive.map(|text| text.trim().to_owned()).or_else(|| {
        let wheel = fs::read_to_string(root.join("version.py")).ok()?;
        let line = wheel.lines().find(|line| line.starts_with("__version__ = "))?;
        line.split('\'').nth(1).map(str::to_owned)
    })
}

fn threads() -> Check {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    Check::ok(
        "threads",
        format!("{cores} cores for this process, {} threads that compute", tch::get_num_threads()),
    )
}

/// What encryption stands in the way of.
fn encryption(has_gpu: bool) -> Check {
    let check = Check::ok("encryption", "what is written to disk is encrypted".to_owned());
    let reason = "what is encrypted goes through host memory, where the processor encrypts it";
    if has_gpu { check.blocks(reason, "it goes straight without `--encrypt`") } else { check }
}

/// The path that saved bytes would take, as a cache with these settings determines it.
fn route(directories: &[PathBuf], spill: &SpillArgs, has_gpu: bool) -> Check {
    let builder = TensorCache::builder().backend(spill.backend()).encrypt(spill.encrypt());
    let builder = directories.iter().fold(builder, TensorCacheBuilder::spill_to);
    let told = |device| match builder.clone().device(device).route() {
        Ok(route) => route.to_string(),
        Err(error) => format!("nowhere: {error}"),
    };
    let cpu = format!("CPU tensors: {}", told(Device::Cpu));
    let gpu = has_gpu.then(|| format!("; a GPU's: {}", told(Device::Cuda(0))));
    Check::ok("route", cpu + &gpu.unwrap_or_default())
}

/// What a run with these settings would do, and a short description of its path to the disk.
fn used(directories: &[PathBuf], spill: &SpillArgs) -> (Check, String) {
    let name = "used";
    let config = StoreConfig {
        directories: directories.to_vec(),
        cap_bytes: directories.len() as u64 * 4096,
        backend: spill.backend(),
        encrypt: spill.encrypt(),
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
            (Check::ok(name, found), store.path().to_string())
        }
        Err(error) => {
            let check = Check::ok(name, format!("nothing: {error}"));
            let check =
                check.but(Status::Missing, "see the lines above, or let it be chosen: `--backend auto`");
            (Check { needed: true, ..check }, "no disk".to_owned())
        }
    }
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
    fn what_a_package_needs_is_said_with_the_libtorch_that_runs() {
        let check = package(Some(Path::new("/opt/torch/lib")));
        assert!(
            check.status == Status::Ok && check.found.contains("LIBTORCH=/opt/torch`"),
            "{}",
            check.found
        );
    }

    #[test]
    fn encryption_stands_in_the_way_of_gpus_alone() {
        assert_eq!(encryption(false).status, Status::Ok);
        assert_eq!(encryption(true).status, Status::Blocks);
    }
}
