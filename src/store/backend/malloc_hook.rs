//! The malloc hook, where it is preloaded into this process (`hooks/malloc`): it registers GPU memory by itself.

use std::ffi::{c_int, c_void};

/// `ssdtrain_malloc_hook_find` of `hooks/malloc/include/ssdtrain_malloc_hook.h`.
type Find = unsafe extern "C" fn(address: *const c_void, bytes: usize, start: *mut *mut c_void) -> c_int;

/// What the preloaded library tells.
pub(super) struct MallocHook(Find);

impl MallocHook {
    /// None where it is not preloaded, or off.
    pub(super) fn find() -> Option<MallocHook> {
        // SAFETY: the name is a C string.
        let symbol = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"ssdtrain_malloc_hook_find".as_ptr()) };
        if symbol.is_null() {
            return None;
        }
        // SAFETY: under this name is a function of this type, as the header declares it; a preloaded library is never unloaded.
        let hook = MallocHook(unsafe { std::mem::transmute::<*mut c_void, Find>(symbol) });
        hook.ask(0, 0).0.then_some(hook)
    }

    /// The first address of the registered segment that these bytes are in.
    pub(super) fn segment_of(&self, address: usize, bytes: usize) -> Option<usize> {
        self.ask(address, bytes).1
    }

    /// Whether the hook is on, and the segment.
    fn ask(&self, address: usize, bytes: usize) -> (bool, Option<usize>) {
        let mut start = std::ptr::null_mut();
        // SAFETY: `start` is a place for the result; the address is only looked up.
        let found = unsafe { (self.0)(address as *const c_void, bytes, &raw mut start) };
        (found >= 0, (found > 0).then(|| start.addr()))
    }
}
