//! cuFile below a pool of threads, each of which waits for one transfer. Bytes move directly between memory and the
//! spill files on machines with GPUDirect Storage, and through cuFile's own host memory on others.

use std::any::Any;
use std::fmt;
use std::io;
use std::sync::Arc;

use super::pool::{SystemCalls, Transport};
use super::private_folder::private_folder;
use super::registered::Registered;
use super::{BackendInfo, CuFileMode, Direction, Op};
use crate::config::StoreConfig;
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::Gpu;
use crate::open::Name;
use crate::region::{Disk, Place, Region, RegionInfo};
use crate::spill_file::SpillFile;
use cufile_sys::sys::{CUFileStringConfigParameter_t as Text, CUfileDriverStatusFlags_t as Status};
use cufile_sys::{Cause, Driver, File, Library, Search, has_cuda_driver};

/// cuFile's driver, and the GPU whose memory it reaches.
pub(crate) struct CuFile {
    driver: Driver,
    /// The mode to expect, from what the driver reports beforehand.
    expected: CuFileMode,
    /// What cuFile had counted in this process before this was opened.
    before: Option<Moved>,
    /// The GPU whose memory transfers access; `None` if they access host memory only.
    gpu: Option<Arc<dyn Gpu>>,
    /// Registrations of GPU memory; `None` where they are of no use.
    memory: Option<Registered>,
}

/// A spill file that is registered with cuFile.
pub(super) struct CuFileRegion {
    registered: File,
    pub(super) file: Arc<SpillFile>,
}

/// Transfers counted by cuFile, by the way they took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Moved {
    by_host: u64,
    by_module: u64,
    by_peer: u64,
}

impl CuFile {
    /// Opens the driver, from the configured library or the one that is found, for the memory of a GPU or of the
    /// host.
    pub(crate) fn open(config: &StoreConfig) -> Result<CuFile> {
        let refused = |error: &dyn fmt::Display| {
            Error::new(ErrorKind::Unmet, format!("cuFile was asked for and cannot be used: {error}"))
        };
        let library = match &config.cufile {
            Some(path) => Library::open(path),
            None if config.gpu.is_none() && !has_cuda_driver() => {
                return Err(refused(&"there is no CUDA driver (libcuda.so)"));
            }
            None => config.cufile_beside.iter().fold(Search::new(), Search::beside).load(),
        };
        let library = library.map_err(|error| refused(&error))?;
        keep_log_away(&library);
        let open = || CuFile::over(Driver::open(&library)?, config.gpu.clone());
        let opened = within(config.gpu.as_deref(), open).map_err(|error| refused(&error))?;
        opened.map_err(|error| refused(&error))
    }

    /// Uses a driver that is already open.
    pub(super) fn over(driver: Driver, gpu: Option<Arc<dyn Gpu>>) -> Result<CuFile, cufile_sys::Error> {
        let properties = driver.properties()?;
        let expected = if properties.nvfs.major_version > 0 {
            CuFileMode::NvidiaFs
        } else if properties.supports(Status::CU_FILE_NVME_P2P_SUPPORTED) {
            CuFileMode::PciP2pDma
        } else {
            CuFileMode::Compatibility
        };
        // Some releases count what was really done.
        if let Err(error) = driver.start_statistics(3) {
            tracing::debug!(%error, "cuFile does not count its transfers");
        }
        let before = Moved::by(&driver);
        // Transfers through host memory gain nothing from it, and a registration then costs milliseconds and host
        // memory.
        let direct = gpu.as_ref().filter(|_| expected != CuFileMode::Compatibility);
        let memory = direct.map(|gpu| Registered::with(&driver, &**gpu));
        Ok(CuFile { driver, expected, before, gpu, memory })
    }

    /// How bytes were moved since this was opened, if this release counts transfers and there were any. Transfers of
    /// others in the process count too.
    fn observed_mode(&self) -> Option<CuFileMode> {
        let (now, before) = (Moved::by(&self.driver)?, self.before?);
        if now.by_host > before.by_host {
            Some(CuFileMode::Compatibility)
        } else if now.by_module > before.by_module {
            Some(CuFileMode::NvidiaFs)
        } else {
            (now.by_peer > before.by_peer).then_some(CuFileMode::PciP2pDma)
        }
    }
}

impl Moved {
    /// What cuFile has counted so far, if this release does.
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

impl CuFile {
    /// Moves the operation's bytes. The GPU's context must be current.
    fn moved(&self, op: &Op) -> io::Result<usize> {
        let (file, len) = (&op.region::<CuFileRegion>()?.registered, op.len());
        let offset = self.memory.as_ref().map_or(0, |memory| memory.offset(op.ptr().addr(), len));
        let base = op.ptr().wrapping_sub(offset);
        match op.direction() {
            // SAFETY: `op` owns its bytes, which are the `len` bytes at `base` plus `offset`, and its holder lets
            // nobody else touch them meanwhile; if `base` is registered, they are within the segment. The context is
            // current.
            Direction::Read => unsafe { file.read(base.cast(), len, op.offset(), offset) },
            // SAFETY: as above, and nobody writes them meanwhile.
            Direction::Write => unsafe { file.write(base.cast(), len, op.offset(), offset) },
        }
        .map_err(io_error)
    }
}

/// Runs `work` with the GPU's context current, if there is a GPU.
fn within<T>(gpu: Option<&dyn Gpu>, work: impl FnOnce() -> T) -> Result<T, String> {
    let Some(gpu) = gpu else { return Ok(work()) };
    let (mut work, mut done) = (Some(work), None);
    gpu.within(&mut || done = work.take().map(|work| work()))?;
    done.ok_or_else(|| "internal error: the GPU ran nothing".to_owned())
}

impl Transport for CuFile {
    /// cuFile reopens a file by its name, so the name is removed only afterwards. If the owner of a directory above moved one
    /// meanwhile, cuFile may have opened another file.
    fn open(&self, place: Place<'_>, cap_bytes: u64) -> Result<Arc<dyn Region>> {
        let (file, name) = SpillFile::create_named(place, cap_bytes)?;
        let file = Arc::new(file);
        let registered = self.driver.register_file(Arc::clone(&file)).map_err(|error| {
            let message = format!("the {} cannot be reached by cuFile", file.describe().name);
            Error::io(ErrorKind::Unmet, message, io_error(error))
        })?;
        if name.as_ref().is_some_and(|name| !file.is_at(name)) {
            let message = format!(
                "the {} was moved away or replaced while cuFile opened it; name a directory that nobody else can move",
                file.describe().name
            );
            return Err(Error::new(ErrorKind::Directory, message));
        }
        name.map_or(Ok(()), Name::remove).map_err(|error| {
            let message = format!("the {} keeps its name", file.describe().name);
            Error::io(ErrorKind::Directory, message, error)
        })?;
        Ok(Arc::new(CuFileRegion { registered, file }))
    }

    fn transfer(&self, op: &Op) -> io::Result<usize> {
        // When transfers move GPU memory, only the last bytes of storages are in host memory.
        if self.gpu.is_some() && op.is_on_host() {
            return SystemCalls::transfer(op, &op.region::<CuFileRegion>()?.file);
        }
        within(self.gpu.as_deref(), || self.moved(op)).map_err(io::Error::other)?
    }

    fn describe(&self) -> BackendInfo {
        let cufile = Some(self.observed_mode().unwrap_or(self.expected));
        let registered = self.memory.as_ref().map(Registered::to_string);
        BackendInfo { cufile, registered, ..BackendInfo::named("cuFile") }
    }
}

impl Region for CuFileRegion {
    fn grow(&self, from: u64, to: u64) -> io::Result<()> {
        self.file.grow(from, to)
    }

    fn describe(&self) -> RegionInfo {
        self.file.describe()
    }

    fn disk(&self) -> Option<Disk> {
        self.file.disk()
    }

    fn backing(&self) -> &dyn Any {
        self
    }
}

/// cuFile writes its log into the current folder unless it is configured otherwise. The log's name is predictable, so
/// where others may write they could place a link under that name for cuFile to follow.
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

/// The error as stores know it: with the operating system's number if there is one.
fn io_error(error: cufile_sys::Error) -> io::Error {
    match error.cause() {
        Cause::Os(number) => io::Error::from_raw_os_error(*number),
        _ => io::Error::other(error),
    }
}
