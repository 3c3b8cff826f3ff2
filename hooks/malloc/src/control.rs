//! How the hook is turned on and read: from the environment when it is loaded, and from C at any time.
//!
//! The C declarations are in `include/ssdtrain_malloc_hook.h`.

use std::ffi::{c_int, c_void};
use std::io::Write as _;
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::book::Counts;
use crate::cufile::CuFile;
use crate::hook::Hook;
use crate::real::Library;

/// The hook of this process.
pub(crate) static HOOK: Hook<CuFile> = Hook::new(CuFile::new(leaving));

/// The process that reports when it ends: not its forks.
static REPORTER: AtomicU32 = AtomicU32::new(0);

/// How long a registration that is under way may hold up the end of the process. They take tens of milliseconds.
const LAST_CALL: Duration = Duration::from_secs(5);

/// What the hook has counted. In C `struct ssdtrain_malloc_hook_stats`; new fields are added at its end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// What the book has counted while the hook was on.
    pub counts: Counts,
    /// cuFile's last error, 5001 and more; -1 if `libcufile.so.0` or a function of it was not found, -2 if the thread that registers
    /// could not be started; 0 if there was none.
    pub last_error: i64,
}

/// Turns the hook on (1) or off (0). Returns what it was, or -1 if nothing could be done, as the call came from within cuFile, from
/// a fork, or when the process ends.
///
/// Memory that is live already is not registered when it is turned on. All registrations are undone when it is turned off.
#[unsafe(no_mangle)]
pub extern "C" fn ssdtrain_malloc_hook_enable(on: c_int) -> c_int {
    HOOK.turn(on != 0).map_or(-1, c_int::from)
}

/// Waits until every live segment is registered or was refused. Returns 0, or -1 at once while the hook is off or if the call came
/// from within cuFile.
///
/// Allocations do not wait for their registration, so this comes before counters are compared.
#[unsafe(no_mangle)]
pub extern "C" fn ssdtrain_malloc_hook_wait() -> c_int {
    if HOOK.wait() == Some(true) { 0 } else { -1 }
}

/// Writes what was counted so far into the first `size` bytes of `out`, as far as both sides know the fields.
///
/// # Safety
/// `out` is null or has `size` bytes that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ssdtrain_malloc_hook_stats(out: *mut Stats, size: usize) {
    if out.is_null() {
        return;
    }
    // A panic ends here; the caller then keeps the bytes it had.
    if let Ok(stats) = catch_unwind(stats) {
        let known = size.min(size_of::<Stats>());
        // SAFETY: both are at least that long: the caller's promise, and the type's size.
        unsafe { std::ptr::copy_nonoverlapping((&raw const stats).cast::<u8>(), out.cast::<u8>(), known) };
    }
}

/// Whether these bytes are all in one segment that is registered now: 1, and where that starts is written to `start`; 0 if they are not; -1
/// while the hook is off.
///
/// # Safety
/// `start` is a place for an address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ssdtrain_malloc_hook_find(
    address: *const c_void,
    bytes: usize,
    start: *mut *mut c_void,
) -> c_int {
    if !HOOK.is_on() {
        return -1;
    }
    // A panic ends here; the caller then moves the bytes as those of memory that is not registered.
    match catch_unwind(|| HOOK.registered(address.addr() as u64, bytes)) {
        Ok(Some(segment)) => {
            // SAFETY: the caller's promise.
            unsafe { start.write(segment.start as *mut c_void) };
            1
        }
        Ok(None) | Err(_) => 0,
    }
}

/// Prints one line of what was counted so far to standard error.
#[unsafe(no_mangle)]
pub extern "C" fn ssdtrain_malloc_hook_print() {
    let print = || {
        let Stats { counts, last_error } = stats();
        let Counts { allocations, frees, unknown_frees, registrations, deregistrations, refusals, .. } =
            counts;
        let Counts { live, live_bytes, registered, registered_bytes, .. } = counts;
        let line = format!(
            "ssdtrain-malloc-hook: {allocations} allocations, {frees} frees ({unknown_frees} of unknown memory besides), \
             {registrations} registrations, {deregistrations} deregistrations, {refusals} refused (last error {last_error}); \
             live: {live} segments, {live_bytes} bytes; \
             registered: {registered} segments, {registered_bytes} bytes\n"
        );
        // Nobody is there to be told if standard error is closed.
        drop(std::io::stderr().write_all(line.as_bytes()));
    };
    // As above.
    drop(catch_unwind(print));
}

fn stats() -> Stats {
    let (counts, last_error) = HOOK.counts();
    Stats { counts, last_error: last_error.into() }
}

/// Called by the loader before `main`.
#[used]
// SAFETY: the section holds functions that the loader calls once, and this is one.
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

extern "C" fn at_load() {
    // A panic ends here; the hook then stays off.
    drop(catch_unwind(|| {
        // SAFETY: the function is there as long as this library.
        unsafe { libc::pthread_atfork(None, None, Some(forked)) };
        let asked = |name: &str| std::env::var_os(name).is_some_and(|value| value == "1");
        if asked("SSDTRAIN_MALLOC_HOOK") {
            HOOK.turn(true);
        }
        if asked("SSDTRAIN_MALLOC_HOOK_REPORT") {
            REPORTER.store(std::process::id(), Ordering::Relaxed);
            // SAFETY: the function is there as long as this library, which the handler is bound to.
            unsafe { libc::atexit(report) };
        }
    }));
}

/// The process ends: cuFile and CUDA are about to be taken down.
extern "C" fn leaving() {
    HOOK.end(LAST_CALL);
}

/// A child cannot use CUDA, has not the thread that registers, and has its parent's registrations in its books: it must not undo them.
extern "C" fn forked() {
    HOOK.abandon();
}

/// Programs start others, shells for instance, which inherit the variables: those that do not use CUDA are silent.
extern "C" fn report() {
    let asked = REPORTER.load(Ordering::Relaxed) == std::process::id();
    if asked && (Library::Runtime.is_loaded() || Library::Driver.is_loaded()) {
        ssdtrain_malloc_hook_print();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_that_knows_fewer_fields_gets_those() {
        let told = |allocations, frees| Counts { allocations, frees, ..Counts::default() };
        let mut stats = Stats { counts: told(77, 77), last_error: 0 };
        // SAFETY: the value is longer than that.
        unsafe { ssdtrain_malloc_hook_stats(&raw mut stats, size_of::<u64>()) };
        assert_eq!(stats.counts, told(0, 77));
    }

    #[test]
    fn a_caller_that_knows_more_fields_keeps_its_own() {
        let counts = Counts { frees: 77, ..Counts::default() };
        let mut stats = [Stats { counts, last_error: 0 }; 2];
        // SAFETY: the array is that long.
        unsafe { ssdtrain_malloc_hook_stats(stats.as_mut_ptr(), size_of_val(&stats)) };
        assert_eq!(stats.map(|stats| stats.counts.frees), [0, 77]);
        // SAFETY: null is allowed.
        unsafe { ssdtrain_malloc_hook_stats(std::ptr::null_mut(), 8) };
    }
}
