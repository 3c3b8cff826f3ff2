//! The cache, as the command line describes it.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{ValueEnum, value_parser};
use ssdtrain::store::{Store, StoreConfig};
use ssdtrain::{BackendKind, Policy, TensorCache};
use tch::nn::VarStore;

use crate::{defaults, size};

/// Where runs are kept, and spill files where the system's temporary directory does not take `O_DIRECT`.
pub(crate) const RUNS: &str = "runs";

/// The arguments that describe a cache.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Cache")]
pub(crate) struct CacheArgs {
    /// Directory to spill to; repeat it with one per SSD and their speeds add up. Without it: the system's temporary
    /// directory, or ./runs where that one does not take O_DIRECT
    #[arg(long = "spill-dir", value_name = "DIR")]
    spill_dirs: Vec<PathBuf>,
    /// Storages smaller than this stay in memory
    #[arg(long, value_name = "SIZE", default_value = defaults::MIN_BYTES, value_parser = size::parse)]
    min_bytes: u64,
    /// Activation bytes the cache may have in memory, or "none" for no limit; saving more waits for the disk
    #[arg(long, value_name = "SIZE", default_value = defaults::DEVICE_BUDGET, value_parser = size::parse_limit)]
    device_budget: u64,
    /// Bytes loaded ahead of what backward has asked for
    #[arg(long, value_name = "SIZE", default_value = defaults::PREFETCH, value_parser = size::parse)]
    prefetch: u64,
    /// Keep in memory what the last N scopes save (each attention, MLP and the head is one): backward begins with them
    #[arg(long, value_name = "N", default_value = defaults::KEEP_LAST, value_parser = value_parser!(u32).range(0..=1 << 16))]
    keep_last: u32,
    /// Most bytes on disk; what does not fit stays in memory
    #[arg(long, value_name = "SIZE", default_value = defaults::DISK_CAP, value_parser = size::parse_positive)]
    disk_cap: u64,
    /// How bytes are moved
    #[arg(long, value_enum, default_value_t)]
    backend: Backend,
    /// Transfers under way at once
    #[arg(long, value_name = "N", default_value = defaults::QUEUE_DEPTH, value_parser = value_parser!(u32).range(1..=4096))]
    queue_depth: u32,
    /// Take a checksum of everything stored and compare it on load
    #[arg(long)]
    verify: bool,
}

/// [`BackendKind`] on the command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Backend {
    /// io_uring, or threads where the kernel refuses it
    #[default]
    Auto,
    /// io_uring, or an error
    Uring,
    /// Threads that call pread and pwrite
    Pool,
    /// Memory instead of a disk: what a run costs without one
    Memory,
}

impl CacheArgs {
    /// Opens a cache that leaves the parameters in `vs` alone.
    pub(crate) fn open(&self, policy: Policy, vs: &VarStore) -> Result<TensorCache> {
        let mut builder = TensorCache::builder()
            .policy(policy)
            .parameters(vs)
            .min_bytes(self.min_bytes)
            .device_budget(self.device_budget)
            .prefetch(self.prefetch)
            .keep_last(self.keep_last as usize)
            .disk_cap(self.disk_cap)
            .backend(self.backend.kind())
            .queue_depth(self.queue_depth as usize)
            .verify(self.verify);
        if policy == Policy::Offload {
            for directory in spill_directories(&self.spill_dirs)? {
                builder = builder.spill_to(directory);
            }
        }
        Ok(builder.build()?)
    }

    /// Where spill files go, for people.
    pub(crate) fn describe(&self) -> Result<String> {
        if self.backend == Backend::Memory {
            return Ok("memory instead of a disk".to_owned());
        }
        let directories = spill_directories(&self.spill_dirs)?;
        let names: Vec<_> = directories.iter().map(|directory| directory.display().to_string()).collect();
        Ok(names.join(", "))
    }
}

impl Backend {
    pub(crate) fn kind(self) -> BackendKind {
        match self {
            Backend::Auto => BackendKind::Auto,
            Backend::Uring => BackendKind::Uring,
            Backend::Pool => BackendKind::Pool,
            Backend::Memory => BackendKind::Memory,
        }
    }
}

/// The directories given, or else one that takes `O_DIRECT` if there is any.
pub(crate) fn spill_directories(given: &[PathBuf]) -> Result<Vec<PathBuf>> {
    if !given.is_empty() {
        return Ok(given.to_vec());
    }
    let temporary = env::temp_dir();
    if takes_direct_io(&temporary) {
        return Ok(vec![temporary]);
    }
    fs::create_dir_all(RUNS).with_context(|| {
        format!(
            "{} does not take O_DIRECT, and ./{RUNS} cannot be made; give --spill-dir",
            temporary.display()
        )
    })?;
    Ok(vec![RUNS.into()])
}

fn takes_direct_io(directory: &Path) -> bool {
    Store::open(probe(directory)).is_ok_and(|store| store.path().is_direct())
}

/// A store of one block, to see what a directory can do.
pub(crate) fn probe(directory: &Path) -> StoreConfig {
    StoreConfig {
        directories: vec![directory.to_owned()],
        cap_bytes: 4096,
        backend: BackendKind::Pool,
        queue_depth: 1,
        ..StoreConfig::default()
    }
}
