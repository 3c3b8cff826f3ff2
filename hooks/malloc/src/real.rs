//! The CUDA functions that the hook intercepts or calls, looked up at their first call.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The result of a call whose real function is not in this process: `cudaErrorSharedObjectSymbolNotFound`, and the
/// driver's code with the same meaning.
pub(crate) const NOT_FOUND: c_int = 302;

/// A CUDA library, by the name that its files begin with.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Library {
    /// The runtime.
    Runtime,
    /// The driver.
    Driver,
}

/// A real function, with C type `F`.
#[derive(Debug)]
pub(crate) struct Real<F> {
    name: &'static CStr,
    from: Library,
    address: AtomicPtr<c_void>,
    signature: PhantomData<F>,
}

impl<F: Copy> Real<F> {
    /// The function with this name, not looked up yet.
    ///
    /// # Safety
    /// `F` is the type of a pointer to it.
    pub(crate) const unsafe fn new(name: &'static CStr, library: Library) -> Real<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        Real { name, from: library, address: AtomicPtr::new(std::ptr::null_mut()), signature: PhantomData }
    }

    /// The function, or `None` while its library is not loaded.
    pub(crate) fn get(&self) -> Option<F> {
        let mut address = self.address.load(Ordering::Relaxed);
        if address.is_null() {
            address = find(self.name, self.from);
            if address.is_null() {
                return None;
            }
            self.address.store(address, Ordering::Relaxed);
        }
        // SAFETY: `new`'s promise; `F` is as large as an address and this one is not null.
        Some(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&address) })
    }

    /// CUDA itself gave the function's address to a program; `ours` is what the program gets in its place.
    pub(crate) fn replaced(&self, address: *mut c_void, ours: *mut c_void) -> *mut c_void {
        if address != ours {
            // An address that is already known serves as well.
            let known = std::ptr::null_mut();
            let _ = self.address.compare_exchange(known, address, Ordering::Relaxed, Ordering::Relaxed);
        }
        ours
    }
}

fn find(name: &CStr, library: Library) -> *mut c_void {
    // SAFETY: the name is a C string.
    let next = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    if !next.is_null() {
        return next;
    }
    // A library that was loaded with `dlopen` and is not global is not found by RTLD_NEXT. Python loads its modules
    // that way.
    let Some(path) = path_of(library) else { return std::ptr::null_mut() };
    // SAFETY: the path is a C string; nothing is loaded that is not loaded already.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return handle;
    }
    // The handle stays open, so that the function keeps its address.
    // SAFETY: handle and name are valid.
    unsafe { libc::dlsym(handle, name.as_ptr()) }
}

struct Search {
    wanted: Library,
    found: Option<CString>,
}

/// The path of a library that is loaded in this process.
fn path_of(library: Library) -> Option<CString> {
    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _size: usize, search: *mut c_void) -> c_int {
        // SAFETY: the loader hands out a valid record.
        let name: *const c_char = unsafe { (*info).dlpi_name };
        if name.is_null() {
            return 0;
        }
        // SAFETY: the loader's names are C strings.
        let path = unsafe { CStr::from_ptr(name) };
        // SAFETY: `path_of` passes its own `Search`, and waits.
        let search = unsafe { &mut *search.cast::<Search>() };
        if search.wanted.is_file(path) {
            search.found = Some(path.to_owned());
            return 1;
        }
        0
    }

    let mut search = Search { wanted: library, found: None };
    // SAFETY: `visit` takes what the loader gives it and the search, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.found
}

impl Library {
    /// Whether this process has loaded it.
    pub(crate) fn is_loaded(self) -> bool {
        path_of(self).is_some()
    }

    fn is_file(self, path: &CStr) -> bool {
        let prefix: &[u8] = match self {
            Library::Runtime => b"libcudart.so",
            Library::Driver => b"libcuda.so",
        };
        path.to_bytes().rsplit(|byte| *byte == b'/').next().is_some_and(|file| file.starts_with(prefix))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_known_by_its_file() {
        assert!(Library::Runtime.is_file(c"/opt/cuda/lib64/libcudart.so.13"));
        assert!(Library::Driver.is_file(c"libcuda.so.1"));
        assert!(!Library::Driver.is_file(c"/usr/lib/libcudart.so.13"));
        assert!(!Library::Runtime.is_file(c"/opt/libcudart.so.13/libother.so"));
    }

    #[test]
    fn a_function_of_a_library_that_is_not_there_is_none() {
        // SAFETY: it is not called.
        let real = unsafe { Real::<extern "C" fn()>::new(c"no_such_function_anywhere", Library::Runtime) };
        assert!(real.get().is_none());
    }

    #[test]
    fn a_function_further_on_is_found() {
        // SAFETY: that is how C declares it.
        let real = unsafe { Real::<unsafe extern "C" fn() -> c_int>::new(c"getpid", Library::Runtime) };
        let getpid = real.get().unwrap();
        // SAFETY: a plain system call.
        assert_eq!(unsafe { getpid() }, std::process::id() as c_int);
    }
}
