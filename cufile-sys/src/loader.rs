//! Finds the library at run time.
//!
//! Nothing is linked, so a program also runs where cuFile is missing. A loaded library is never unloaded: it has
//! threads and exit handlers.

use std::env;
use std::ffi::{CStr, CString, c_int, c_void};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::functions::Functions;
use crate::handle::Handle;

/// The environment variable that names a library to try before those of the system.
pub const VARIABLE: &str = "SSDTRAIN_CUFILE";

const SONAME: &str = "libcufile.so.0";

/// Where pip's wheels have the library, relative to the folder of torch's libraries.
const WHEELS: [&str; 2] = ["../../nvidia/cu13/lib", "../../nvidia/cufile/lib"];

/// Where the toolkit installs the library.
const TOOLKIT: [&str; 2] = ["/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib"];

/// A loaded cuFile. Clones refer to the same library.
#[derive(Clone)]
pub struct Library(Arc<Loaded>);

struct Loaded {
    functions: Functions,
    owners: Mutex<Owners>,
}

/// Who keeps the driver open.
#[derive(Default)]
pub(crate) struct Owners {
    pub(crate) count: usize,
    /// The first owner opened it, so the last one closes it.
    pub(crate) ours: bool,
}

/// Whether the CUDA driver can be loaded: without it, some releases of cuFile never return from opening their own.
pub fn has_cuda_driver() -> bool {
    // SAFETY: the name is a C string.
    let driver = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY) };
    if driver.is_null() {
        return false;
    }
    // SAFETY: it was loaded above; anyone else who has loaded it keeps it.
    unsafe { libc::dlclose(driver) };
    true
}

/// Where to look for the library.
///
/// In this order: the path given, the one in `SSDTRAIN_CUFILE`, the dynamic linker's own `libcufile.so.0` and
/// `libcufile.so`, the wheels next to torch, the CUDA toolkit in `/usr/local/cuda`. The first one that loads is used.
#[derive(Clone, Debug, Default)]
pub struct Search {
    path: Option<PathBuf>,
    torch: Option<PathBuf>,
}

/// No library could be loaded.
#[derive(Clone, Debug)]
pub struct LoadError {
    tried: Vec<(PathBuf, String)>,
}

impl Search {
    /// Looks in the usual places.
    pub fn new() -> Search {
        Search::default()
    }

    /// Tries `path` first.
    pub fn path(mut self, path: impl Into<PathBuf>) -> Search {
        self.path = Some(path.into());
        self
    }

    /// Looks for pip's wheels next to `lib`, the folder of torch's libraries.
    pub fn beside(mut self, lib: impl Into<PathBuf>) -> Search {
        self.torch = Some(lib.into());
        self
    }

    /// What [`Search::load`] tries, in order: a path, or a name for the dynamic linker.
    pub fn candidates(&self) -> Vec<PathBuf> {
        let variable = env::var_os(VARIABLE).filter(|value| !value.is_empty());
        let mut all: Vec<PathBuf> = self.path.iter().cloned().collect();
        all.extend(variable.map(PathBuf::from));
        all.extend([PathBuf::from(SONAME), PathBuf::from("libcufile.so")]);
        if let Some(torch) = &self.torch {
            // Links are resolved first, because `..` is relative to the folder's real location.
            let torch = torch.canonicalize().unwrap_or_else(|_| torch.clone());
            all.extend(WHEELS.iter().map(|wheel| torch.join(wheel).join(SONAME)));
        }
        all.extend(TOOLKIT.iter().map(|folder| Path::new(folder).join(SONAME)));
        all
    }

    /// Loads the first library that works; the error lists what was tried and why each attempt failed.
    pub fn load(&self) -> Result<Library, LoadError> {
        first_of(self.candidates())
    }
}

impl Library {
    /// Loads the library at `path` and looks nowhere else.
    pub fn open(path: impl Into<PathBuf>) -> Result<Library, LoadError> {
        first_of(vec![path.into()])
    }

    /// The name that it was loaded by: a path, or a name that the dynamic linker found.
    pub fn path(&self) -> &Path {
        self.0.functions.path()
    }

    /// Its functions, for what the safe layer does not cover.
    pub fn functions(&self) -> &Functions {
        &self.0.functions
    }

    pub(crate) fn owners(&self) -> &Mutex<Owners> {
        &self.0.owners
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Library").field(&self.path()).finish()
    }
}

impl LoadError {
    /// What was tried, and why each attempt failed.
    pub fn tried(&self) -> &[(PathBuf, String)] {
        &self.tried
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "cuFile cannot be loaded; install it (it comes with the CUDA toolkit, and as the wheel nvidia-cufile) or \
             set {VARIABLE} to its {SONAME}. Tried:"
        )?;
        for (path, reason) in &self.tried {
            write!(f, "\n  {}: {reason}", path.display())?;
        }
        Ok(())
    }
}

impl std::error::Error for LoadError {}

fn first_of(candidates: Vec<PathBuf>) -> Result<Library, LoadError> {
    let mut tried = Vec::new();
    for path in candidates {
        match load(path.as_os_str().as_bytes(), dlopen) {
            Ok(address) => {
                let functions = Functions::new(Handle::new(address, path));
                return Ok(Library(Arc::new(Loaded { functions, owners: Mutex::default() })));
            }
            Err(reason) => tried.push((path, reason)),
        }
    }
    Err(LoadError { tried })
}

/// Loads `name` with `open`. Some builds need librt without declaring it; librt is then loaded globally, and `name`
/// is tried again.
fn load<T>(name: &[u8], open: impl Fn(&CStr, c_int) -> Result<T, String>) -> Result<T, String> {
    let name = CString::new(name).map_err(|_| "the path has a zero byte".to_owned())?;
    let flags = libc::RTLD_LAZY | libc::RTLD_LOCAL;
    match open(&name, flags) {
        Err(reason) if reason.contains("undefined symbol: shm_open") => {
            open(c"librt.so.1", libc::RTLD_LAZY | libc::RTLD_GLOBAL)?;
            open(&name, flags)
        }
        outcome => outcome,
    }
}

fn dlopen(name: &CStr, flags: c_int) -> Result<NonNull<c_void>, String> {
    // SAFETY: the name is a C string. What the library's initialisers do is the vendor's responsibility; they touch
    // nothing of ours.
    let address = unsafe { libc::dlopen(name.as_ptr(), flags) };
    NonNull::new(address).ok_or_else(|| {
        // SAFETY: reads the message of the call that just failed on this thread.
        let message = unsafe { libc::dlerror() };
        if message.is_null() {
            return "the dynamic linker does not say why".to_owned();
        }
        // SAFETY: dlerror returned a C string that lives until the next call of its family on this thread.
        unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned()
    })
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// Loads `libx.so` with an opener that refuses it with `reason` until librt has been opened; returns what was
    /// opened.
    fn opened(reason: &str) -> (Result<(), String>, Vec<String>) {
        let calls = RefCell::new(Vec::new());
        let outcome = load(b"libx.so", |name, flags| {
            let scope = if flags & libc::RTLD_GLOBAL == 0 { "local" } else { "global" };
            calls.borrow_mut().push(format!("{} {scope}", name.to_string_lossy()));
            let ready = calls.borrow().iter().any(|call| call == "librt.so.1 global");
            if ready { Ok(()) } else { Err(reason.to_owned()) }
        });
        (outcome, calls.into_inner())
    }

    #[test]
    fn a_library_that_lacks_shm_open_is_tried_again_after_librt() {
        let (outcome, calls) = opened("libx.so: undefined symbol: shm_open");
        assert_eq!(outcome, Ok(()));
        assert_eq!(calls, ["libx.so local", "librt.so.1 global", "libx.so local"]);
    }

    #[test]
    fn no_other_failure_loads_librt() {
        let (outcome, calls) = opened("libx.so: undefined symbol: shm_unlink_all");
        assert_eq!(outcome.unwrap_err(), "libx.so: undefined symbol: shm_unlink_all");
        assert_eq!(calls, ["libx.so local"]);
    }

    #[test]
    fn a_path_with_a_zero_byte_is_an_error() {
        assert!(load(b"lib\0x", dlopen).is_err());
    }

    #[test]
    fn the_error_lists_every_path_and_why_it_failed() {
        let folder = tempfile::tempdir().unwrap();
        let (missing, text) = (folder.path().join("missing.so"), folder.path().join("text.so"));
        std::fs::write(&text, "no library").unwrap();
        let error = first_of(vec![missing.clone(), text.clone()]).unwrap_err();
        assert_eq!(error.tried().len(), 2);
        assert!(error.tried()[0].1.contains("No such file"), "{error}");
        assert!(error.tried()[1].1.contains("too short") || error.tried()[1].1.contains("ELF"), "{error}");
        let message = error.to_string();
        for part in [missing.to_str().unwrap(), text.to_str().unwrap(), VARIABLE, "nvidia-cufile"] {
            assert!(message.contains(part), "{message}");
        }
    }
}
