//! Selects the backend.

use std::io;
use std::sync::Arc;

use serde::Serialize;

use super::{Backend, CuFile, Pool, Throttled, Uring};
use crate::config::StoreConfig;
use crate::error::{Error, ErrorKind, Result};
use crate::limits;

/// More threads than this add nothing to a pool.
const MAX_POOL_THREADS: usize = 16;
/// With more threads than this per file, cuFile gets slower again: docs/gds.md, "In a run".
const CUFILE_THREADS_PER_FILE: usize = 8;

/// How a store moves its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum BackendKind {
    /// io_uring, or the thread pool where the kernel refuses io_uring.
    #[default]
    Auto,
    /// io_uring, or an error.
    Uring,
    /// Threads that call `pread` and `pwrite`.
    Pool,
    /// Threads that call cuFile, the library behind GPUDirect Storage, or an error where it cannot be used.
    CuFile,
    /// Anonymous files in memory instead of spill files: for tests, and to measure the cost of a run without a disk.
    Memory,
}

/// A backend, and why it is not a faster one.
type Started = (Arc<dyn Backend>, Option<String>);

impl BackendKind {
    /// All of them.
    pub const ALL: [BackendKind; 5] =
        [BackendKind::Auto, BackendKind::Uring, BackendKind::Pool, BackendKind::CuFile, BackendKind::Memory];

    /// Its name on a command line.
    pub fn name(self) -> &'static str {
        match self {
            BackendKind::Auto => "auto",
            BackendKind::Uring => "uring",
            BackendKind::Pool => "pool",
            BackendKind::CuFile => "cufile",
            BackendKind::Memory => "memory",
        }
    }

    /// What it is, in a few words for people.
    pub fn summary(self) -> &'static str {
        match self {
            BackendKind::Auto => "io_uring, or threads where the kernel refuses it",
            BackendKind::Uring => "io_uring, or an error",
            BackendKind::Pool => "Threads that call pread and pwrite",
            BackendKind::CuFile => "Threads that call cuFile, or an error",
            BackendKind::Memory => "Memory instead of a disk: what a run costs without one",
        }
    }

    /// Starts the backend that was asked for, or the one that the kernel allows, with the limit on its speed.
    pub(crate) fn start(self, config: &StoreConfig) -> Result<Started> {
        let (backend, note) = self.start_unlimited(config)?;
        let Some(limit) = config.max_bytes_per_s else { return Ok((backend, note)) };
        let throttled = Throttled::new(backend, limit)
            .map_err(|error| limits::no_thread("the thread that paces transfers", error))?;
        Ok((Arc::new(throttled), note))
    }

    /// Whether its regions are in memory, whatever directories are configured.
    pub(crate) fn is_in_memory(self) -> bool {
        self == BackendKind::Memory
    }

    fn start_unlimited(self, config: &StoreConfig) -> Result<Started> {
        let threads = config.queue_depth.min(MAX_POOL_THREADS);
        match self {
            BackendKind::Memory => started(Pool::new(1)),
            BackendKind::Pool => started(Pool::new(threads)),
            BackendKind::CuFile => {
                let threads = config.queue_depth.min(CUFILE_THREADS_PER_FILE * config.files());
                started(Pool::over(Box::new(CuFile::open(config)?), threads))
            }
            BackendKind::Auto | BackendKind::Uring => match Uring::new(config.queue_depth) {
                Ok(uring) => Ok((Arc::new(uring), None)),
                Err(error) if self == BackendKind::Uring => {
                    let advice = limits::on_rings(&error).unwrap_or("allow it");
                    let message = format!(
                        "io_uring was asked for and is refused; {advice}, or let the backend be chosen"
                    );
                    Err(Error::io(ErrorKind::Unmet, message, error))
                }
                Err(error) => {
                    let (pool, _) = started(Pool::new(threads))?;
                    let advice =
                        limits::on_rings(&error).map_or_else(String::new, |advice| format!("; {advice}"));
                    Ok((pool, Some(format!("io_uring refused: {error}{advice}"))))
                }
            },
        }
    }
}

fn started(pool: io::Result<Pool>) -> Result<Started> {
    match pool {
        Ok(pool) => Ok((Arc::new(pool), None)),
        Err(error) => Err(limits::no_thread("the I/O threads", error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_a_name_of_its_own() {
        let names: std::collections::HashSet<_> = BackendKind::ALL.map(BackendKind::name).into();
        assert_eq!(names.len(), BackendKind::ALL.len());
    }
}
