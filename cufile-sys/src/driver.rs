//! The driver: opened by its first owner, closed after its last.

use std::ffi::c_int;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::functions::Functions;
use crate::loader::Library;
use crate::result::{Error, Result, check};
use crate::sys::{CUfileDrvProps_t, CUfileOpError};

/// How many errors from drops are kept.
const MOST_ERRORS: usize = 64;

/// The open driver. Clones, files and buffers keep it open.
#[derive(Clone)]
pub struct Driver(Arc<Opened>);

struct Opened {
    cufile: Library,
    errors: Mutex<Vec<Error>>,
}

/// The version of a library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Its major number.
    pub major: u32,
    /// Its minor number.
    pub minor: u32,
}

impl Library {
    /// The library's version. The driver need not be open.
    pub fn version(&self) -> Result<Version> {
        let function = self.functions().version()?;
        let mut version = 0;
        // SAFETY: `version` is a place for the result.
        check("cuFileGetVersion", unsafe { function(&raw mut version) })?;
        let version = u32::try_from(version).unwrap_or(0);
        Ok(Version { major: version / 1000, minor: version % 1000 / 10 })
    }
}

impl Driver {
    /// Opens the driver. Owners in this process that loaded the same [`Library`] share it. If someone else has it
    /// open, it is used, and it is left open in the end.
    ///
    /// cuFile reads `cufile.json` here, and may write `cufile.log` into the current folder. Make sure first that the
    /// CUDA driver is present: without it cuFile 1.15 returns an error, but 1.20 never returns.
    pub fn open(library: &Library) -> Result<Driver> {
        let mut owners = library.owners().lock();
        if owners.count == 0 {
            // Looked up now, because the last owner will need it.
            library.functions().driver_close()?;
            let function = library.functions().driver_open()?;
            // SAFETY: it has no arguments.
            let outcome = unsafe { function() };
            owners.ours = outcome.err != CUfileOpError::CU_FILE_DRIVER_ALREADY_OPEN;
            if owners.ours {
                check("cuFileDriverOpen", outcome)?;
            }
        }
        owners.count += 1;
        drop(owners);
        Ok(Driver(Arc::new(Opened { cufile: library.clone(), errors: Mutex::default() })))
    }

    /// The library that this driver belongs to.
    pub fn cufile(&self) -> &Library {
        &self.0.cufile
    }

    /// The properties that the driver reports.
    pub fn properties(&self) -> Result<CUfileDrvProps_t> {
        let function = self.functions().driver_properties()?;
        let mut properties = CUfileDrvProps_t::default();
        // SAFETY: `properties` is a place for the result.
        check("cuFileDriverGetProperties", unsafe { function(&raw mut properties) })?;
        Ok(properties)
    }

    /// Turns polling for the completion of transfers of at most `most` KiB on or off.
    pub fn set_poll_mode(&self, poll: bool, most: usize) -> Result<()> {
        let function = self.functions().set_poll_mode()?;
        // SAFETY: the arguments are numbers.
        check("cuFileDriverSetPollMode", unsafe { function(poll, most) })
    }

    /// Sets the largest single transfer, in KiB.
    pub fn set_max_direct_io(&self, kib: usize) -> Result<()> {
        let function = self.functions().set_max_direct_io_size()?;
        // SAFETY: the argument is a number.
        check("cuFileDriverSetMaxDirectIOSize", unsafe { function(kib) })
    }

    /// Sets the GPU memory per device for bounce buffers, in KiB.
    pub fn set_max_cache(&self, kib: usize) -> Result<()> {
        let function = self.functions().set_max_cache_size()?;
        // SAFETY: the argument is a number.
        check("cuFileDriverSetMaxCacheSize", unsafe { function(kib) })
    }

    /// Sets the GPU memory that can be registered, in KiB.
    pub fn set_max_pinned(&self, kib: usize) -> Result<()> {
        let function = self.functions().set_max_pinned_mem_size()?;
        // SAFETY: the argument is a number.
        check("cuFileDriverSetMaxPinnedMemSize", unsafe { function(kib) })
    }

    /// The size of a GPU's BAR1, in KiB.
    pub fn bar_size(&self, gpu: u32) -> Result<usize> {
        const NAME: &str = "cuFileGetBARSizeInKB";
        let function = self.functions().bar_size()?;
        let gpu =
            c_int::try_from(gpu).map_err(|_| Error::argument(NAME, format!("there is no GPU {gpu}")))?;
        let mut size = 0;
        // SAFETY: `size` is a place for the result.
        check(NAME, unsafe { function(gpu, &raw mut size) })?;
        Ok(size)
    }

    /// The number of users of the driver in this process, by the library's own count.
    pub fn use_count(&self) -> Result<i64> {
        let function = self.functions().use_count()?;
        // SAFETY: it has no arguments.
        Ok(unsafe { function() })
    }

    /// The errors from drops of this driver's buffers since the last call, which a drop cannot return. If there are
    /// more than 64, the first ones are kept.
    pub fn take_errors(&self) -> Vec<Error> {
        std::mem::take(&mut *self.0.errors.lock())
    }

    pub(crate) fn functions(&self) -> &Functions {
        self.0.cufile.functions()
    }

    /// Keeps the error from a drop, if there was one.
    pub(crate) fn keep_error(&self, outcome: Result<()>) {
        let mut errors = self.0.errors.lock();
        if let Err(error) = outcome
            && errors.len() < MOST_ERRORS
        {
            errors.push(error);
        }
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Driver").field(&self.0.cufile).finish()
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let mut owners = self.cufile.owners().lock();
        owners.count -= 1;
        if owners.count > 0 || !owners.ours {
            return;
        }
        if let Ok(function) = self.cufile.functions().driver_close() {
            // Nobody is left to report the result to, and nothing of ours depends on it.
            // SAFETY: whatever was registered with the driver held it, and has been dropped.
            _ = unsafe { function() };
        }
    }
}
