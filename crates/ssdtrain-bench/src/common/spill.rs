//! Where spill files are placed, and how bytes get there.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::ValueEnum;
use serde::Serialize;
use ssdtrain::BackendKind;
use ssdtrain_store::{Store, StoreConfig};

/// Where runs are kept, and also spill files if the system's temporary directory does not support `O_DIRECT`.
pub(crate) const RUNS: &str = "runs";

/// The arguments that say where spill files go.
#[derive(Clone, Debug, Serialize, clap::Args)]
pub(crate) struct SpillArgs {
    /// Directory to spill to; repeat it with one per SSD and their speeds add up. Without it: the system's temporary
    /// directory, or ./runs where that one does not take O_DIRECT
    #[arg(long = "spill-dir", value_name = "DIR")]
    spill_dirs: Vec<PathBuf>,
    /// How bytes are moved
    #[arg(long, value_enum, default_value_t)]
    backend: Backend,
}

/// [`BackendKind`] on the command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Backend {
    /// io_uring, or threads where the kernel refuses it
    #[default]
    Auto,
    /// io_uring, or an error
    Uring,
    /// Threads that call pread and pwrite
    Pool,
    /// Threads that call cuFile, or an error
    Cufile,
    /// Memory instead of a disk: what a run costs without one
    Memory,
}

impl SpillArgs {
    /// How bytes are moved.
    pub(crate) fn backend(&self) -> BackendKind {
        self.backend.kind()
    }

    /// The directories given, or otherwise one that supports `O_DIRECT`, if there is any.
    pub(crate) fn directories(&self) -> Result<Vec<PathBuf>> {
        if !self.spill_dirs.is_empty() {
            return Ok(self.spill_dirs.clone());
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

    /// Where spill files are placed, in words.
    pub(crate) fn describe(&self) -> Result<String> {
        if self.backend == Backend::Memory {
            return Ok("memory instead of a disk".to_owned());
        }
        let names: Vec<_> =
            self.directories()?.iter().map(|directory| directory.display().to_string()).collect();
        Ok(names.join(", "))
    }
}

impl Backend {
    fn kind(self) -> BackendKind {
        match self {
            Backend::Auto => BackendKind::Auto,
            Backend::Uring => BackendKind::Uring,
            Backend::Pool => BackendKind::Pool,
            Backend::Cufile => BackendKind::CuFile,
            Backend::Memory => BackendKind::Memory,
        }
    }
}

fn takes_direct_io(directory: &Path) -> bool {
    Store::open(probe(directory)).is_ok_and(|store| store.path().is_direct())
}

/// The configuration of a store of one block, to find out what a directory supports.
pub(crate) fn probe(directory: &Path) -> StoreConfig {
    StoreConfig {
        directories: vec![directory.to_owned()],
        cap_bytes: 4096,
        backend: BackendKind::Pool,
        queue_depth: 1,
        ..StoreConfig::default()
    }
}
