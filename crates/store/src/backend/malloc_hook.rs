//! The malloc hook (`hooks/malloc`), if it is preloaded into this process: it registers GPU memory by itself.

use std::ffi::{c_int, c_void};

/// `ssdtrain_malloc_hook_find` of `hooks/malloc/include/ssdtrain_malloc_hook.h`.
type Find = unsafe extern "C" fn(address: *const c_void, bytes: usize, start: *mut *mut c_void) -> c_int;

/// The lookup function of the preloaded library.
pub(super) struct MallocHook(Find);

impl MallocHook {
    /// `None` if the library is not preloaded, or is off.
    pub(super) fn find() -> Option<MallocHook> {
        // SAFETY: the name is a C string.
        let symbol = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"ssdtrain_malloc_hook_find".as_ptr()) };
        if symbol.is_null() {
            return None;
        }
        // SAFETY: the symbol is a function of this type, as the header declares it; a preloaded library is never
        // unloaded.
        let hook = MallocHook(unsafe { std::mem::transmute::<*mut c_void, Find>(symbol) });
        hook.ask(0, 0).0.then_some(hook)
    }

    /// The start address of the registered segment that contains these bytes.
    pub(super) fn segment_of(&self, address: usize, bytes: usize) -> Option<usize> {
        self.ask(address, bytes).1
    }

    /// Whether the hook is on, and the start of the segment.
    fn ask(&self, address: usize, bytes: usize) -> (bool, Option<usize>) {
        let mut start = std::ptr::null_mut();
        // SAFETY: `start` is a place for the result; the address is only looked up.
        let found = unsafe { (self.0)(address as *const c_void, bytes, &raw mut start) };
        (found >= 0, (found > 0).then(|| start.addr()))
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::process::Command;

    use super::*;

    /// A stand-in for the preloaded library: the 4096 bytes at 8192 are registered, and it is off while the address asked for is 1.
    const HOOK: &str = "
        #include <stddef.h>
        int ssdtrain_malloc_hook_find(const void *address, size_t bytes, void **start) {
            size_t first = (size_t)address;
            if (first == 1) return -1;
            if (first < 8192 || first + bytes > 12288) return 0;
            *start = (void *)8192;
            return 1;
        }";

    #[test]
    fn a_preloaded_hook_is_found_and_asked() {
        assert!(MallocHook::find().is_none(), "it is not there yet");
        let folder = tempfile::tempdir().unwrap();
        let [source, library] = ["hook.c", "libhook.so"].map(|name| folder.path().join(name));
        std::fs::write(&source, HOOK).unwrap();
        let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status();
        assert!(built.unwrap().success());
        let path = CString::new(library.to_str().unwrap()).unwrap();
        // SAFETY: the path is a C string, and the library has no initialisers.
        let loaded = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        assert!(!loaded.is_null());
        let hook = MallocHook::find().expect("it is there and on");
        assert_eq!([8192, 12_287].map(|at| hook.segment_of(at, 1)), [Some(8192); 2]);
        assert_eq!([hook.segment_of(8191, 2), hook.segment_of(12_287, 2)], [None, None]);
        assert_eq!(hook.ask(1, 1), (false, None), "off");
    }
}
