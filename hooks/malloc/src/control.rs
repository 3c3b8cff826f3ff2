//! How the hook is turned on and its counters are read: from the environment when it is loaded, and from C at any
//! time.
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

/// The process that prints a report when it ends; forks of it do not.
static REPORTER: AtomicU32 = AtomicU32::new(0);

/// How long a registration in progress may delay the end of the process. Registrations take tens of milliseconds.
const LAST_CALL: Duration = Duration::from_secs(5);

/// The hook's counters. In C this is `struct ssdtrain_malloc_hook_stats`; new fields are added at its end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// The book's counts while the hook was on.
    pub counts: Counts,
    /// cuFile's last error, 5001 or higher; -1 if `libcufile.so.0` or one of its functions was not found, -2 if the
    /// registering thread could not be started; 0 if there was no error.
    pub last_error: i64,
}

/// Turns the hook on (1) or off (0). Returns its previous state, or -1 if nothing could be done because the call came
/// from within cuFile, from a fork, or while the process was ending.
///
/// Memory that is already live is not registered when the hook is turned on. All registrations are undone when it is
/// turned off.
#[unsafe(no_mangle)]
pub extern "C" fn ssdtrain_malloc_hook_enable(on: c_int) -> c_int {
    HOOK.turn(on != 0).map_or(-1, c_int::from)
}

/// Waits until every live segment has been registered or refused. Returns 0, or -1 at once if the hook is off or the
/// call came from within cuFile.
///
/// Allocations do not wait for their registration, so call this before comparing counters.
#[unsafe(no_mangle)]
pub extern "C" fn ssdtrain_malloc_hook_wait() -> c_int {
    if HOOK.wait() == Some(true) { 0 } else { -1 }
}

/// Writes the counts so far into the first `size` bytes of `out`, limited to the fields that both sides know.
///
/// # Safety
/// `out` is null or has `size` bytes that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ssdtrain_malloc_hook_stats(out: *mut Stats, size: usize) {
    if out.is_null() {
        return;
    }
    // A panic stops here; the caller then keeps the bytes it had.
    if let Ok(stats) = catch_unwind(stats) {
        let known = size.min(size_of::<Stats>());
        // SAFETY: both are at least that long: the caller's promise, and the type's size.
        unsafe { std::ptr::copy_nonoverlapping((&raw const stats).cast::<u8>(), out.cast::<u8>(), known) };
    }
}

/// Whether these bytes are all in one segment that is registered now. Returns 1 and writes the start of the segment
/// to `start`; 0 if they are not; -1 while the hook is off.
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
    // A panic stops here; the caller then treats the memory as not registered.
    match catch_unwind(|| HOOK.registered(address.addr() as u64, bytes)) {
        Ok(Some(segment)) => {
            // SAFETY: the caller's promise.
            unsafe { start.write(segment.start as *mut c_void) };
            1
        }
        Ok(None) | Err(_) => 0,
    }
}

/// Prints the counts so far to standard error, in one line.
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
        // If standard error is closed, there is nobody to tell.
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
    // A panic stops here; the hook then stays off.
    drop(catch_unwind(|| {
        // SAFETY: the function exists as long as this library.
        unsafe { libc::pthread_atfork(None, None, Some(forked)) };
        let asked = |name: &str| std::env::var_os(name).is_some_and(|value| value == "1");
        if asked("SSDTRAIN_MALLOC_HOOK") {
            HOOK.turn(true);
        }
        if asked("SSDTRAIN_MALLOC_HOOK_REPORT") {
            REPORTER.store(std::process::id(), Ordering::Relaxed);
            // SAFETY: the function exists as long as this library, which the handler is bound to.
            unsafe { libc::atexit(report) };
        }
    }));
}

/// The process is ending: cuFile and CUDA are about to be shut down.
extern "C" fn leaving() {
    HOOK.end(LAST_CALL);
}

/// A child cannot use CUDA, does not have the registering thread, and has its parent's registrations in its book: it
/// must not undo them.
extern "C" fn forked() {
    HOOK.abandon();
}

/// Programs start others, such as shells, which inherit the variables. Those that do not use CUDA print nothing.
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
