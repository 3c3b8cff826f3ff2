//! Tests that set limits of their process.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use std::env;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::process::{self, Command};

/// What the process of a test knows its test by.
const TEST: &str = "LIMITED_TEST";
/// Nobody has this number, nor those that follow it.
const USERS: u32 = 700_000_000;

/// Runs the calling test again in a process of its own, whose user is bound by limits. Returns whether this is that process.
pub(crate) fn is_alone(test: &str) -> bool {
    if env::var_os(TEST).is_some_and(|alone| alone == test) {
        return match become_nobody() {
            Ok(()) => true,
            Err(error) => {
                eprintln!("skipped: this process cannot become another user's: {error}");
                false
            }
        };
    }
    let mut child = Command::new(env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture", "--test-threads", "1"]).env(TEST, test);
    let output = child.output().unwrap();
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    print!("{out}");
    eprint!("{err}");
    assert!(output.status.success(), "{}: {out}\n{err}", output.status);
    false
}

/// Limits of threads and of locked memory do not bind root, and those of threads count all processes of a user.
fn become_nobody() -> io::Result<()> {
    // SAFETY: the call has no arguments and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        return Ok(());
    }
    let user = USERS + process::id();
    // SAFETY: plain system calls; that of the C library changes the users of all threads.
    if unsafe { libc::setresgid(user, user, user) } != 0 || unsafe { libc::setresuid(user, user, user) } != 0
    {
        return Err(io::Error::last_os_error());
    }
    // Files in `/proc/self` are root's otherwise.
    // SAFETY: a plain system call.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0) };
    Ok(())
}

/// Sets a limit of this process, which can be raised again. Returns what it was.
pub(crate) fn limit(resource: libc::__rlimit_resource_t, most: u64) -> u64 {
    let mut limits = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limits` has room for the answer.
    assert_eq!(unsafe { libc::getrlimit(resource, &raw mut limits) }, 0);
    let before = std::mem::replace(&mut limits.rlim_cur, most.min(limits.rlim_max));
    // SAFETY: `limits` is what the call reads.
    assert_eq!(unsafe { libc::setrlimit(resource, &raw const limits) }, 0);
    before
}

/// The number of the next file that this process opens.
pub(crate) fn next_file() -> u64 {
    File::open("/").unwrap().as_raw_fd() as u64
}

pub(crate) fn open_files() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}
