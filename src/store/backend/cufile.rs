//! cuFile below a pool of threads, each of which waits for one transfer: straight between memory and the spill files where the machine
//! has GPUDirect Storage, through host memory of cuFile's own where it has not.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::Arc;

use cufile_sys::sys::{CUFileStringConfigParameter_t as Text, CUfileDriverStatusFlags_t as Status};
use cufile_sys::{Cause, Driver, File, Library, Search, VARIABLE};
use parking_lot::Mutex;
use ssdtrain_libtorch::library_folder;

use super::pool::Transport;
use super::{CuFileMode, Direction, Op};
use crate::device::{Context, has_cuda};
use crate::error::{Error, ErrorKind, Result};
use crate::store::file::SpillFile;

/// cuFile's driver, and the files that are registered with it.
pub(crate) struct CuFile {
    driver: Driver,
    /// How bytes go, as far as the driver tells beforehand.
    expected: CuFileMode,
    /// That of the GPU whose memory transfers reach; none if they reach the host's only.
    context: Option<Context>,
    /// By their addresses, which are theirs for as long as they are in here.
    files: Mutex<HashMap<usize, File>>,
}

impl CuFile {
    /// Finds cuFile and opens its driver, for the memory of this GPU or for the host's.
    pub(crate) fn open(gpu: Option<usize>) -> Result<CuFile> {
        let refused = |error: &dyn fmt::Display| {
            Error::new(ErrorKind::Unmet, format!("cuFile was asked for and cannot be used: {error}"))
        };
        let context = gpu.map(Context::open).transpose()?;
        context.iter().try_for_each(Context::enter)?;
        // Without CUDA's driver some releases never come back from opening theirs; whoever names a library vouches for it.
        if context.is_none() && !has_cuda() && std::env::var_os(VARIABLE).is_none() {
            return Err(refused(&"there is no CUDA driver (libcuda.so)"));
        }
        let search = Search::new();
        let search = match library_folder() {
            Some(folder) => search.beside(folder),
            None => search,
        };
        let library = search.load().map_err(|error| refused(&error))?;
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
        Ok(CuFile { driver, expected, context, files: Mutex::default() })
    }

    /// How bytes went so far, if this release tells and there were any.
    fn seen(&self) -> Option<CuFileMode> {
        let statistics = self.driver.statistics_of_gpus().ok()?;
        let gpus = statistics.per_gpu_stats.iter().take(statistics.num_gpus as usize);
        let (mut by_host, mut by_module, mut by_peer) = (0, 0, 0);
        for gpu in gpus {
            by_host += gpu.n_posix_reads + gpu.n_posix_writes;
            by_module += gpu.n_nvfs_reads + gpu.n_nvfs_writes;
            by_peer += gpu.n_p2p_reads + gpu.n_p2p_writes;
        }
        if by_host > 0 {
            return Some(CuFileMode::Compatibility);
        }
        let direct = if by_module > 0 { CuFileMode::NvidiaFs } else { CuFileMode::PciP2pDma };
        (by_module + by_peer > 0).then_some(direct)
    }

    fn file(&self, file: &Arc<SpillFile>) -> Result<File, cufile_sys::Error> {
        let mut files = self.files.lock();
        let key = Arc::as_ptr(file).addr();
        if let Some(known) = files.get(&key) {
            return Ok(known.clone());
        }
        let registered = self.driver.register_file(Arc::clone(file))?;
        files.insert(key, registered.clone());
        Ok(registered)
    }
}

impl Transport for CuFile {
    fn transfer(&self, op: &Op) -> io::Result<usize> {
        self.context.iter().try_for_each(Context::enter).map_err(io::Error::other)?;
        let (file, ptr, len) = (self.file(op.file()).map_err(told)?, op.ptr(), op.len());
        match op.direction() {
            // SAFETY: `op` owns `len` bytes at `ptr`, and its holder lets nobody else touch them meanwhile; the context is current.
            Direction::Read => unsafe { file.read(ptr.cast(), len, op.offset(), 0) },
            // SAFETY: as above, and nobody writes them meanwhile.
            Direction::Write => unsafe { file.write(ptr.cast(), len, op.offset(), 0) },
        }
        .map_err(told)
    }

    fn name(&self) -> &'static str {
        "cuFile"
    }

    fn cufile(&self) -> Option<CuFileMode> {
        Some(self.seen().unwrap_or(self.expected))
    }
}

/// cuFile writes its log into the current folder unless it is told otherwise.
fn keep_log_away(library: &Library) {
    let told = std::env::var_os("CUFILE_LOGFILE_PATH").is_some()
        || library.parameter_string(Text::CUFILE_PARAM_LOG_DIR).is_ok_and(|folder| !folder.is_empty());
    if told {
        return;
    }
    let folder = std::env::temp_dir();
    if let Err(error) = library.set_parameter_string(Text::CUFILE_PARAM_LOG_DIR, &folder.to_string_lossy()) {
        tracing::debug!(%error, "cuFile's log stays in the current folder");
    }
}

/// The error that stores know: the system's number if there is one.
fn told(error: cufile_sys::Error) -> io::Error {
    match error.cause() {
        Cause::Os(number) => io::Error::from_raw_os_error(*number),
        _ => io::Error::other(error),
    }
}
