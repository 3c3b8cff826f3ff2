//! cuFile below a pool of threads, each of which waits for one transfer: straight between memory and the spill files where the machine
//! has GPUDirect Storage, through host memory of cuFile's own where it has not.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::path::Path;

use cufile_sys::sys::{CUFileStringConfigParameter_t as Text, CUfileDriverStatusFlags_t as Status};
use cufile_sys::{Cause, Driver, File, Library, Search};
use parking_lot::RwLock;
use ssdtrain_libtorch::library_folder;

use super::pool::{SystemCalls, Transport};
use super::private_folder::private_folder;
use super::registered::Registered;
use super::{CuFileMode, Direction, Op};
use crate::device::{Context, has_cuda};
use crate::error::{Error, ErrorKind, Result};

/// cuFile's driver, and the files that are registered with it.
pub(crate) struct CuFile {
    driver: Driver,
    /// How bytes go, as far as the driver tells beforehand.
    expected: CuFileMode,
    /// What this process had moved before.
    before: Option<Moved>,
    /// That of the GPU whose memory transfers reach; none if they reach the host's only.
    context: Option<Context>,
    /// None where that is of no use.
    memory: Option<Registered>,
    /// By their descriptors' numbers, which are theirs for as long as the store is open.
    files: RwLock<HashMap<RawFd, File>>,
}

/// Transfers that cuFile has counted, by the way they went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Moved {
    by_host: u64,
    by_module: u64,
    by_peer: u64,
}

impl CuFile {
    /// Opens the driver of `library`, or of the one that is found, for the memory of this GPU or for the host's.
    pub(crate) fn open(library: Option<&Path>, gpu: Option<usize>) -> Result<CuFile> {
        let refused = |error: &dyn fmt::Display| {
            Error::new(ErrorKind::Unmet, format!("cuFile was asked for and cannot be used: {error}"))
        };
        let context = gpu.map(Context::open).transpose()?;
        let _current = context.as_ref().map(Context::enter).transpose()?;
        let library = match library {
            Some(path) => Library::open(path),
            // Without CUDA's driver some releases never come back from opening theirs.
            None if context.is_none() && !has_cuda() => {
                return Err(refused(&"there is no CUDA driver (libcuda.so)"));
            }
            None => library_folder().into_iter().fold(Search::new(), Search::beside).load(),
        };
        let library = library.map_err(|error| refused(&error))?;
        keep_log_away(&library);
        let driver = Driver::open(&library).map_err(|error| refused(&error))?;
        CuFile::over(driver, context).map_err(|error| refused(&error))
    }

    /// Over a driver that is open.
    pub(super) fn over(driver: Driver, context: Option<Context>) -> Result<CuFile, cufile_sys::Error> {
        let properties = driver.properties()?;
        let expected = if properties.nvfs.major_version > 0 {
            CuFileMode::NvidiaFs
        } else if properties.supports(Status::CU_FILE_NVME_P2P_SUPPORTED) {
            CuFileMode::PciP2pDma
        } else {
            CuFileMode::Compatibility
        };
        // What was really done is told by releases that count it.
        if let Err(error) = driver.start_statistics(3) {
            tracing::debug!(%error, "cuFile does not count its transfers");
        }
        let before = Moved::by(&driver);
        // What goes through host memory gains nothing, and a registration then costs milliseconds and host memory.
        let goes_directly = expected != CuFileMode::Compatibility && context.is_some();
        let memory = goes_directly.then(|| Registered::with(&driver));
        Ok(CuFile { driver, expected, before, context, memory, files: RwLock::default() })
    }

    /// How bytes went since this was opened, if this release tells and there were any. Others in the process count, too.
    fn seen(&self) -> Option<CuFileMode> {
        let (now, before) = (Moved::by(&self.driver)?, self.before?);
        if now.by_host > before.by_host {
            Some(CuFileMode::Compatibility)
        } else if now.by_module > before.by_module {
            Some(CuFileMode::NvidiaFs)
        } else {
            (now.by_peer > before.by_peer).then_some(CuFileMode::PciP2pDma)
        }
    }

    fn file(&self, fd: BorrowedFd<'_>) -> io::Result<File> {
        let files = self.files.read();
        files.get(&fd.as_raw_fd()).cloned().ok_or_else(|| io::Error::other("cuFile was not told of the file"))
    }
}

impl Moved {
    /// What cuFile has counted so far, if this release tells.
    fn by(driver: &Driver) -> Option<Moved> {
        let statistics = driver.statistics_of_gpus().ok()?;
        let gpus = statistics.per_gpu_stats.iter().take(statistics.num_gpus as usize);
        Some(gpus.fold(Moved::default(), |moved, gpu| Moved {
            by_host: moved.by_host + gpu.n_posix_reads + gpu.n_posix_writes,
            by_module: moved.by_module + gpu.n_nvfs_reads + gpu.n_nvfs_writes,
            by_peer: moved.by_peer + gpu.n_p2p_reads + gpu.n_p2p_writes,
        }))
    }
}

impl Transport for CuFile {
    fn transfer(&self, op: &Op) -> io::Result<usize> {
        // Beside a GPU's memory only the last bytes of storages are the host's.
        if self.context.is_some() && op.is_on_host() {
            return SystemCalls.transfer(op);
        }
        let _current = self.context.as_ref().map(Context::enter).transpose().map_err(io::Error::other)?;
        let (file, len) = (self.file(op.fd())?, op.len());
        let offset = self.memory.as_ref().map_or(0, |memory| memory.offset(op.ptr().addr(), len));
        let base = op.ptr().wrapping_sub(offset);
        match op.direction() {
            // SAFETY: `op` owns its bytes, which are `len` at `base` and `offset`, and its holder lets nobody else touch them meanwhile; if
            // `base` is registered, they are within the segment. The context is current.
            Direction::Read => unsafe { file.read(base.cast(), len, op.offset(), offset) },
            // SAFETY: as above, and nobody writes them meanwhile.
            Direction::Write => unsafe { file.write(base.cast(), len, op.offset(), offset) },
        }
        .map_err(told)
    }

    fn adopt(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        let registered = self.driver.register_file(file.try_clone_to_owned()?).map_err(told)?;
        self.files.write().insert(file.as_raw_fd(), registered);
        Ok(())
    }

    fn name(&self) -> &'static str {
        "cuFile"
    }

    fn cufile(&self) -> Option<CuFileMode> {
        Some(self.seen().unwrap_or(self.expected))
    }

    fn registered(&self) -> Option<String> {
        self.memory.as_ref().map(Registered::to_string)
    }
}

/// cuFile writes its log into the current folder unless it is told otherwise. Its name can be foreseen, so where others may write they
/// could have it follow a link.
fn keep_log_away(library: &Library) {
    let told = std::env::var_os("CUFILE_LOGFILE_PATH").is_some()
        || library.parameter_string(Text::CUFILE_PARAM_LOG_DIR).is_ok_and(|folder| !folder.is_empty());
    if told {
        return;
    }
    let outcome = private_folder().map_err(|error| error.to_string()).and_then(|folder| {
        let set = library.set_parameter_string(Text::CUFILE_PARAM_LOG_DIR, &folder.to_string_lossy());
        set.map_err(|error| error.to_string())
    });
    if let Err(error) = outcome {
        tracing::debug!(error, "cuFile's log stays in the current folder");
    }
}

/// The error that stores know: the system's number if there is one.
fn told(error: cufile_sys::Error) -> io::Error {
    match error.cause() {
        Cause::Os(number) => io::Error::from_raw_os_error(*number),
        _ => io::Error::other(error),
    }
}
