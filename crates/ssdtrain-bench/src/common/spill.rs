//! Where spill files are placed, and how bytes get there.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
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
    #[arg(long, value_name = "BACKEND", value_parser = backends(), default_value = BackendKind::Auto.name())]
    backend: BackendKind,
    /// Encrypt what is written to disk, with a key that is only in memory. It does not go straight between a GPU and the disk then
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    encrypt: bool,
}

impl SpillArgs {
    /// How bytes are moved.
    pub(crate) fn backend(&self) -> BackendKind {
        self.backend
    }

    /// Whether what is written is encrypted.
    pub(crate) fn encrypt(&self) -> bool {
        self.encrypt
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
        if self.backend == BackendKind::Memory {
            return Ok("memory instead of a disk".to_owned());
        }
        let names: Vec<_> =
            self.directories()?.iter().map(|directory| directory.display().to_string()).collect();
        Ok(names.join(", "))
    }
}

/// A [`BackendKind`] by its name.
fn backends() -> impl TypedValueParser<Value = BackendKind> {
    let value = |kind: BackendKind| PossibleValue::new(kind.name()).help(kind.summary());
    PossibleValuesParser::new(BackendKind::ALL.map(value)).try_map(|name| {
        BackendKind::ALL.into_iter().find(|kind| kind.name() == name).context("no backend has this name")
    })
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
