//! Builds and controls the stand-in for libcufile. Tests of other packages include this file by `#[path]`; they need
//! `libc`, `tempfile` and a C compiler.

use std::env;
use std::ffi::{CString, c_char, c_int, c_long, c_void};
use std::fs;
use std::mem;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::NonNull;
use std::sync::OnceLock;

use cufile_sys::{Driver, Library};
use tempfile::TempDir;

/// A copy of the stand-in, with a state of its own.
pub(crate) struct StandIn {
    folder: TempDir,
    address: NonNull<c_void>,
}

// SAFETY: the dynamic linker and the controls may be called from any thread.
unsafe impl Send for StandIn {}
// SAFETY: as above.
unsafe impl Sync for StandIn {}

impl StandIn {
    /// A stand-in that has every function.
    pub(crate) fn new() -> StandIn {
        static WHOLE: OnceLock<Vec<u8>> = OnceLock::new();
        StandIn::of(WHOLE.get_or_init(|| compile(&[])))
    }

    /// One that lacks these functions.
    pub(crate) fn without(functions: &[&str]) -> StandIn {
        StandIn::of(&compile(functions))
    }

    fn of(library: &[u8]) -> StandIn {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libcufile.so.0");
        fs::write(&path, library).unwrap();
        let name = CString::new(path.as_os_str().as_bytes()).unwrap();
        // SAFETY: the name is a C string; the library's initialiser reads the environment.
        let address = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
        let address = NonNull::new(address).expect("the stand-in does not load");
        StandIn { folder, address }
    }

    /// Where it is.
    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join("libcufile.so.0")
    }

    /// It, loaded.
    pub(crate) fn open(&self) -> Library {
        Library::open(self.path()).unwrap()
    }

    /// Its driver, open.
    pub(crate) fn driver(&self) -> Driver {
        Driver::open(&self.open()).unwrap()
    }

    /// Makes calls of `function` fail with this status; 0 ends that.
    pub(crate) fn fail(&self, function: &str, status: i32) {
        self.fail_with(function, status, 0);
    }

    /// As `fail`, with CUDA's code for 5011, or with `errno` for the status -1.
    pub(crate) fn fail_with(&self, function: &str, status: i32, detail: i32) {
        let function = CString::new(function).unwrap();
        // SAFETY: the function has this type.
        let fail: extern "C" fn(*const c_char, c_int, c_int) = unsafe { self.control(c"stand_in_fail") };
        fail(function.as_ptr(), status, detail);
    }

    /// Transfers at most so many bytes at a time.
    pub(crate) fn shorten(&self, bytes: usize) {
        // SAFETY: the function has this type.
        let shorten: extern "C" fn(usize) = unsafe { self.control(c"stand_in_shorten") };
        shorten(bytes);
    }

    /// Holds the transfers that come.
    pub(crate) fn hold(&self) {
        // SAFETY: the function has this type.
        let hold: extern "C" fn() = unsafe { self.control(c"stand_in_hold") };
        hold();
    }

    /// Runs what is held, and holds no more.
    pub(crate) fn release(&self) {
        // SAFETY: the function has this type.
        let release: extern "C" fn() = unsafe { self.control(c"stand_in_release") };
        release();
    }

    /// Sleeps until so many transfers are held.
    pub(crate) fn wait_held(&self, count: i64) {
        // SAFETY: the function has this type.
        let wait: extern "C" fn(c_long) = unsafe { self.control(c"stand_in_wait_held") };
        wait(count);
    }

    /// Closes the driver under whoever has it open.
    pub(crate) fn close(&self) {
        // SAFETY: the function has this type.
        let close: extern "C" fn() = unsafe { self.control(c"stand_in_close") };
        close();
    }

    /// Makes it say that it is of this version: 1150 is 1.15.
    pub(crate) fn set_version(&self, version: i32) {
        // SAFETY: the function has this type.
        let set: extern "C" fn(c_int) = unsafe { self.control(c"stand_in_version") };
        set(version);
    }

    /// How many there are of "users", "files", "buffers", "held" or "misuse", or how often the
    /// function of this name was called.
    pub(crate) fn count(&self, what: &str) -> i64 {
        let what = CString::new(what).unwrap();
        // SAFETY: the function has this type.
        let count: extern "C" fn(*const c_char) -> c_long = unsafe { self.control(c"stand_in_count") };
        count(what.as_ptr())
    }

    /// Whatever was registered is not any more, the driver is closed, and nothing was used in a wrong way.
    pub(crate) fn assert_nothing_is_left(&self) {
        for what in ["users", "files", "buffers", "held", "misuse"] {
            assert_eq!(self.count(what), 0, "{what}");
        }
    }

    /// The control function of this name.
    ///
    /// # Safety
    ///
    /// `F` is its type.
    unsafe fn control<F: Copy>(&self, name: &std::ffi::CStr) -> F {
        // SAFETY: the library is never unloaded, and the name is a C string.
        let address = unsafe { libc::dlsym(self.address.as_ptr(), name.as_ptr()) };
        assert!(!address.is_null(), "the stand-in has no {}", name.to_string_lossy());
        assert_eq!(size_of::<F>(), size_of_val(&address));
        // SAFETY: the caller vouches for the type.
        unsafe { mem::transmute_copy(&address) }
    }
}

/// The library without the functions `left_out`.
fn compile(left_out: &[&str]) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let (source, library) = (folder.path().join("cufile.c"), folder.path().join("libcufile.so.0"));
    fs::write(&source, include_str!("cufile.c")).unwrap();
    cc(left_out.iter().map(|name| format!("-D{name}=left_out_{name}")), &source, &library);
    fs::read(&library).unwrap()
}

fn cc(defines: impl Iterator<Item = String>, source: &Path, library: &Path) {
    let compiler = env::var_os("CC").unwrap_or_else(|| "cc".into());
    let mut command = Command::new(&compiler);
    command.args(["-shared", "-fPIC", "-pthread", "-o"]).arg(library).args(defines).arg(source);
    let output = command.output().expect("the tests need a C compiler: install one, or set CC to it");
    assert!(output.status.success(), "{command:?}:\n{}", String::from_utf8_lossy(&output.stderr));
}
