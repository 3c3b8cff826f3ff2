//! Finds libtorch for cargo, and installs it into a per-user cache where it is missing.
//!
//! `.cargo/config.toml` sets LIBTORCH to the link `.libtorch` in the root of the workspace; [`ensure()`] makes that link.
//! A LIBTORCH in the user's environment takes precedence over cargo's, and is then only verified.

use std::collections::BTreeSet;
use std::env;
use std::fs::{self, File, TryLockError};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{self, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::pip::{self, Pip};
use crate::process::{cargo, command, root, succeeds};
use crate::version::VERSION;

/// The set of packages that is installed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Set {
    /// What libtorch needs to run on CPUs: its CPU library is linked to two small CUDA libraries nevertheless.
    Cpu,
    /// The wheel with all its dependencies.
    Cuda,
}

impl Set {
    fn detect() -> Set {
        if has_nvidia_driver() { Set::Cuda } else { Set::Cpu }
    }

    fn name(self) -> &'static str {
        match self {
            Set::Cpu => "cpu",
            Set::Cuda => "cuda",
        }
    }

    fn requirements(self) -> Vec<String> {
        let beside: &[&str] = match self {
            Set::Cpu => &["nvidia-cuda-runtime==13.0.96", "nvidia-cuda-cupti==13.0.85"],
            Set::Cuda => &[],
        };
        let torch = format!("torch=={VERSION}");
        [torch].into_iter().chain(beside.iter().map(|&package| package.to_owned())).collect()
    }

    /// Disk space in GB that an installation takes while it runs: packages and their contents.
    fn room(self) -> f64 {
        match self {
            Set::Cpu => 2.0,
            Set::Cuda => 8.0,
        }
    }

    /// The libraries whose dependencies must all be found.
    fn libraries(self) -> &'static [&'static str] {
        match self {
            Set::Cpu => &["libtorch_cpu.so"],
            Set::Cuda => &["libtorch_cpu.so", "libtorch_cuda.so"],
        }
    }
}

/// Makes plain cargo commands find libtorch: verifies what is installed, installs what is missing, and reports it.
pub(crate) fn ensure() -> Result<()> {
    ensure!(
        cfg!(all(target_os = "linux", target_arch = "x86_64", target_env = "gnu")),
        "ssdtrain runs on x86-64 Linux with glibc only; this is {} on {}",
        env::consts::OS,
        env::consts::ARCH,
    );
    check_compiler()?;
    let link = link();
    if let Some(own) = own() {
        verify(&own, Set::Cpu).with_context(|| {
            format!("LIBTORCH={} is no usable libtorch {VERSION}; mend or unset it", own.display())
        })?;
        println!("libtorch {VERSION} from LIBTORCH={}", own.display());
        return Ok(());
    }
    let set = Set::detect();
    let torch = install(set, &cache()?)?;
    point(&link, &torch)?;
    println!("libtorch {VERSION} ({} set) at {}", set.name(), torch.display());
    Ok(())
}

/// The value for LIBTORCH where this workspace's configuration does not apply.
pub(crate) fn location() -> PathBuf {
    own().unwrap_or_else(link)
}

/// A libtorch provided by the user.
fn own() -> Option<PathBuf> {
    env::var_os("LIBTORCH").map(PathBuf::from).filter(|own| *own != link())
}

/// The path named in `.cargo/config.toml`.
fn link() -> PathBuf {
    root().join(".libtorch")
}

/// Returns the directory of a sound installation of `set` in `cache`, installing it first if there is none.
fn install(set: Set, cache: &Path) -> Result<PathBuf> {
    let home = cache.join(format!("libtorch-{VERSION}-{}", set.name()));
    let torch = home.join("torch");
    if verify_installed(&home, set).is_ok() {
        return Ok(torch);
    }
    fs::create_dir_all(cache).with_context(|| format!("cannot make the cache folder {}", cache.display()))?;
    let _lock = lock(cache)?;
    // Another process may have installed it while this one waited for the lock.
    match verify_installed(&home, set) {
        Ok(()) => return Ok(torch),
        Err(error) if home.exists() => {
            println!("{} is damaged and will be replaced: {error:#}", home.display());
        }
        Err(_) => {}
    }
    let pip = Pip::find()?;
    remove_leftovers(cache, set)?;
    check_room(cache, set.room())?;

    println!("installing libtorch {VERSION} ({} set) into {}", set.name(), home.display());
    let start = Instant::now();
    // Meanwhile the sources of the crates can be downloaded. If this fails, the build will say why.
    let fetch = cargo(["fetch", "--quiet"]).stderr(Stdio::null()).spawn();
    let part = cache.join(format!("{}{}", part_prefix(set), process::id()));
    let result = fill(&home, set, &pip, &part);
    remove(&part)?;
    if let Ok(mut fetch) = fetch {
        fetch.wait().context("cannot wait for `cargo fetch`")?;
    }
    result?;
    println!("installed in {:.0} s", start.elapsed().as_secs_f64());
    Ok(torch)
}

/// Installs `set` into the folder `part` and, if the result is sound, renames it to `home`.
fn fill(home: &Path, set: Set, pip: &Pip, part: &Path) -> Result<()> {
    let site = part.join("site");
    pip.install(&set.requirements(), set == Set::Cuda, &site, &part.join("tmp"))?;
    verify_installed(&site, set).context("pip installed something that does not work as libtorch")?;
    remove(home)?;
    fs::rename(&site, home).with_context(|| format!("cannot rename {} to {}", site.display(), home.display()))
}

/// Checks that `home` holds every file that pip recorded, and a libtorch that works.
fn verify_installed(home: &Path, set: Set) -> Result<()> {
    for requirement in set.requirements() {
        pip::verify_record(home, &pip::dist_info(home, &requirement))?;
    }
    verify(&home.join("torch"), set)
}

/// Checks that `torch` is a libtorch of the right version whose libraries find what they are linked to.
fn verify(torch: &Path, set: Set) -> Result<()> {
    let version = version(torch)?;
    ensure!(version == VERSION, "{} is libtorch {version}, not {VERSION}", torch.display());
    let header = torch.join("include/torch/csrc/api/include/torch/torch.h");
    ensure!(header.is_file(), "{} is missing", header.display());
    for library in set.libraries() {
        let library = torch.join("lib").join(library);
        ensure!(library.is_file(), "{} is missing", library.display());
        let needed = crate::process::output(command("ldd", []).arg(&library))?;
        let missing: BTreeSet<&str> = needed
            .lines()
            .filter(|line| line.contains("not found"))
            .filter_map(|line| line.split_whitespace().next())
            .collect();
        ensure!(missing.is_empty(), "{} does not find {missing:?}", library.display());
    }
    Ok(())
}

/// The version of the libtorch in `torch` without its build suffix, such as `+cu130`.
fn version(torch: &Path) -> Result<String> {
    // The zip of libtorch has the one file, the wheel the other.
    let text = fs::read_to_string(torch.join("build-version"))
        .or_else(|_| fs::read_to_string(torch.join("version.py")))
        .with_context(|| format!("{} has neither build-version nor version.py", torch.display()))?;
    let line = text.lines().find_map(|line| line.strip_prefix("__version__ = ")).unwrap_or(&text);
    let version = line.trim().trim_matches('\'');
    Ok(version.split('+').next().unwrap_or(version).to_string())
}

/// Makes `link` point to `torch`. Replaces an older link in one step, and nothing but a link.
fn point(link: &Path, torch: &Path) -> Result<()> {
    if fs::read_link(link).is_ok_and(|target| target == torch) {
        return Ok(());
    }
    ensure!(
        link.is_symlink() || !link.exists(),
        "{} is in the way: move it, or set LIBTORCH to it",
        link.display()
    );
    let fresh = link.with_file_name(format!(".libtorch-{}", process::id()));
    symlink(torch, &fresh)
        .and_then(|()| fs::rename(&fresh, link))
        .with_context(|| format!("cannot make the link {}", link.display()))
}

/// Holds the cache's lock until the file is dropped.
pub(crate) fn lock(cache: &Path) -> Result<File> {
    let path = cache.join("lock");
    let context = || format!("cannot lock {}", path.display());
    let file = File::options().create(true).append(true).open(&path).with_context(context)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            println!("waiting for another set-up that holds {}", path.display());
            file.lock().with_context(context)?;
        }
        Err(TryLockError::Error(error)) => return Err(error).with_context(context),
    }
    Ok(file)
}

/// Removes what unfinished installations have left in `cache`. Call it with the lock held.
fn remove_leftovers(cache: &Path, set: Set) -> Result<()> {
    for entry in fs::read_dir(cache).with_context(|| format!("cannot list {}", cache.display()))? {
        let entry = entry.with_context(|| format!("cannot list {}", cache.display()))?;
        if entry.file_name().to_string_lossy().starts_with(&part_prefix(set)) {
            println!("removing an unfinished installation: {}", entry.path().display());
            remove(&entry.path())?;
        }
    }
    Ok(())
}

/// The prefix of folders of installations in progress; the process id follows.
fn part_prefix(set: Set) -> String {
    format!("libtorch-{VERSION}-{}.part-", set.name())
}

/// Removes the folder if it is there.
pub(crate) fn remove(folder: &Path) -> Result<()> {
    if !folder.exists() {
        return Ok(());
    }
    fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))
}

/// The per-user cache.
pub(crate) fn cache() -> Result<PathBuf> {
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = set("SSDTRAIN_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|folder| folder.join("ssdtrain")))
        .or_else(|| set("HOME").map(|folder| folder.join(".cache/ssdtrain")))
        .context(
            "neither HOME nor SSDTRAIN_CACHE is set: set SSDTRAIN_CACHE to a folder with 2 GB of room",
        )?;
    std::path::absolute(&cache).with_context(|| format!("{} is no usable path", cache.display()))
}

fn check_compiler() -> Result<()> {
    let set = env::var("CXX").ok().filter(|value| !value.trim().is_empty());
    let compiler = set.as_deref().unwrap_or("c++");
    // CXX may carry arguments or a wrapper: `ccache g++`.
    let mut words = compiler.split_whitespace();
    ensure!(
        succeeds(Command::new(words.next().unwrap_or("c++")).args(words).arg("--version")),
        "no C++ compiler: `{compiler} --version` fails. Install one (`apt-get install g++`, `dnf install gcc-c++`), \
         or set CXX to it"
    );
    Ok(())
}

fn check_room(cache: &Path, gigabytes: f64) -> Result<()> {
    let table = crate::process::output(command("df", ["-P", "-k"]).arg(cache))?;
    let Some(free) = free_kilobytes(&table) else {
        println!("could not learn how much room {} has: `df` printed {table:?}", cache.display());
        return Ok(());
    };
    let free = free as f64 * 1024.0 / 1e9;
    ensure!(
        free >= gigabytes,
        "{} has {free:.1} GB of room, but installing takes {gigabytes:.1} GB: make room, or set SSDTRAIN_CACHE to a \
         folder on a larger disk",
        cache.display()
    );
    Ok(())
}

/// The free space in the output of `df -P -k`: the column before the one with the percentage.
fn free_kilobytes(table: &str) -> Option<u64> {
    let words: Vec<&str> = table.lines().nth(1)?.split_whitespace().collect();
    let percentage = words.iter().position(|word| word.ends_with('%'))?;
    words.get(percentage.checked_sub(1)?)?.parse().ok()
}

fn has_nvidia_driver() -> bool {
    const USUAL: &[&str] = &[
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/lib/wsl/lib",
        "/usr/local/nvidia/lib64",
    ];
    let own = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    Path::new("/proc/driver/nvidia/version").exists()
        || env::split_paths(&own)
            .chain(USUAL.iter().map(PathBuf::from))
            .any(|folder| folder.join("libcuda.so.1").exists())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rooms;

    #[test]
    fn free_space_is_read_past_spaces_in_names() {
        let table = "Filesystem 1024-blocks Used Available Capacity Mounted on\n\
                     my disk 263112504 13000000 82000000 14% /my mount\n";
        assert_eq!(free_kilobytes(table), Some(82_000_000));
        assert_eq!(free_kilobytes("nonsense"), None);
    }

    #[test]
    fn version_loses_its_build_suffix() {
        let folder = env::temp_dir().join(format!("xtask-version-{}", process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("version.py"), "from typing import Optional\n__version__ = '2.11.0+cu130'\n")
            .unwrap();
        assert_eq!(version(&folder).unwrap(), "2.11.0");
        fs::write(folder.join("build-version"), "2.10.0+cpu\n").unwrap();
        assert_eq!(version(&folder).unwrap(), "2.10.0");
        fs::remove_dir_all(&folder).unwrap();
    }

    /// The folders with this workspace's Rust sources.
    const SOURCES: [&str; 7] =
        ["src", "crates", "hooks", "cufile-sys", "xtask/src", "examples/outside/src", "benches"];

    #[test]
    fn no_other_source_names_the_version() {
        let files = SOURCES.iter().flat_map(|folder| rooms::files(&root().join(folder)).unwrap());
        let naming: Vec<PathBuf> = files
            .filter(|file| !file.ends_with("hooks/libtorch/src/version.rs"))
            .filter(|file| {
                let text = fs::read_to_string(file).unwrap();
                // Files that only tests read may contain any version.
                text.split("#[cfg(test)]\nmod tests {").next().unwrap().contains(VERSION)
            })
            .collect();
        assert!(naming.is_empty(), "take it from ssdtrain_libtorch::VERSION: {naming:?}");
    }

    #[test]
    fn what_users_read_names_the_same_version() {
        for file in ["README.md", "Cargo.toml", "examples/outside/Cargo.toml"] {
            let text = fs::read_to_string(root().join(file)).unwrap();
            let after =
                |start| text.split(start).skip(1).map(|rest: &str| rest.trim_start_matches(['=', ' ']));
            let named: Vec<&str> = after("libtorch ")
                .chain(after("torch=="))
                .map(|rest| rest.split(|c: char| !c.is_ascii_digit() && c != '.').next().unwrap_or_default())
                .map(|version| version.trim_end_matches('.'))
                .filter(|version| !version.is_empty())
                .collect();
            assert!(!named.is_empty(), "{file} names no version of libtorch");
            let (major, _) = VERSION.rsplit_once('.').unwrap();
            assert!(named.iter().all(|version| [VERSION, major].contains(version)), "{file}: {named:?}");
        }
    }
}
