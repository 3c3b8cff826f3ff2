//! NVIDIA's cuFile library: whether it can be found, and its version. Nothing of it is opened or set up.

use std::ffi::{CStr, CString, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};

/// The name by which programs load it.
const NAME: &str = "libcufile.so.0";
/// Where installations keep it, seen from the folder of libtorch: beside it, and in wheels of CUDA 13 and 12.
const BESIDE_LIBTORCH: [&str; 3] = ["", "../../nvidia/cu13/lib", "../../nvidia/cufile/lib"];
/// Where NVIDIA's installers put it if the loader is not told.
const INSTALLED: &str = "/usr/local/cuda/lib64";

/// The library, as it was found.
#[derive(Clone, Debug)]
pub(super) struct Library {
    /// The file, or the name by which the loader found it.
    pub(super) path: PathBuf,
    /// Such as `1.15`; libraries before 1.7 do not tell.
    pub(super) version: Option<String>,
}

/// What its functions return: its own code and the driver's.
#[repr(C)]
struct Status {
    code: c_int,
    _driver: c_int,
}

/// Finds the library as a program would, and asks its version. `libtorch` is the folder of libtorch.
///
/// The error is the loader's. See `cuFileGetVersion` in NVIDIA's cuFile API reference.
pub(super) fn find(libtorch: Option<&Path>) -> Result<Library, String> {
    let beside = libtorch.into_iter().flat_map(|lib| BESIDE_LIBTORCH.map(|place| lib.join(place).join(NAME)));
    let installed = Path::new(INSTALLED).join(NAME);
    let files = beside.chain([installed]).filter(|file| file.exists());
    let mut refusal = None;
    for name in std::iter::once(PathBuf::from(NAME)).chain(files) {
        match load(&name) {
            Ok(handle) => {
                let path = loaded_from().unwrap_or(name);
                return Ok(Library { path, version: version(handle) });
            }
            // A file that is there and cannot be loaded says more than a name that is not.
            Err(error) => refusal = Some(error),
        }
    }
    Err(refusal.unwrap_or_else(|| format!("{NAME} is not there")))
}

/// Loads a library for as long as the program runs; the error is the loader's.
fn load(name: &Path) -> Result<*mut c_void, String> {
    let text = CString::new(name.as_os_str().as_encoded_bytes()).map_err(|error| error.to_string())?;
    // SAFETY: `text` is a C string that lives through the call. Loading cuFile runs only its constructors, which set up nothing
    // outside it; it is never unloaded.
    let handle = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // SAFETY: a plain call; the text it returns is this thread's until the next call of the loader.
    let error = unsafe { libc::dlerror() };
    if error.is_null() {
        return Err(format!("{} cannot be loaded", name.display()));
    }
    // SAFETY: not null, so it is a C string, and it is copied before anything else is asked of the loader.
    Err(unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned())
}

/// The version that a loaded library tells, if it can.
fn version(handle: *mut c_void) -> Option<String> {
    // SAFETY: the loader gave the handle, and the name is a C string.
    let symbol = unsafe { libc::dlsym(handle, c"cuFileGetVersion".as_ptr()) };
    if symbol.is_null() {
        return None;
    }
    // SAFETY: NVIDIA documents the function as taking an `int *` and returning two ints by value.
    let get =
        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_int) -> Status>(symbol) };
    let mut number = 0;
    // SAFETY: the library stays loaded, and `number` is a valid place for the result.
    let status = unsafe { get(&raw mut number) };
    // 1000 for the major and 10 for the minor version.
    (status.code == 0).then(|| format!("{}.{}", number / 1000, number % 1000 / 10))
}

/// The file that the loader took.
fn loaded_from() -> Option<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    paths.map(PathBuf::from).find(|path| {
        path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"libcufile.so"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_no_library_is_named_and_does_no_harm() {
        if find(None).is_ok() {
            return eprintln!("skipped: the library is installed here");
        }
        let lib = tempfile::tempdir().unwrap();
        fs::write(lib.path().join(NAME), "not a library").unwrap();
        let error = find(Some(lib.path())).unwrap_err();
        assert!(error.contains(&lib.path().display().to_string()), "{error}");
    }
}
