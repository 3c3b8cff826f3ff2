//! Every failure becomes one line of plain text, never a backtrace.

use std::any::Any;
use std::io::{self, Write};
use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;

use anyhow::Result;

use super::interrupt::{self, Interrupted};

/// Runs the program's body; an error or a panic is reported in one line on stderr and makes the exit code 1. Work that a signal stopped
/// is reported likewise, and makes it 128 and the signal's number.
pub(crate) fn reported(body: impl FnOnce() -> Result<()>) -> ExitCode {
    // If the reader goes away, such as `head`, the program ends quietly, as any other does. Commands that save what they have done
    // change that when they begin to listen for signals.
    // SAFETY: no other thread runs yet, and the default action needs no handler.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    // The hook reports panics on every thread; what it has reported needs no second line.
    panic::set_hook(Box::new(|panic| tell(&format!("error: {}", panic_line(panic.payload())))));
    match panic::catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) if interrupt::is_unheard() => interrupt::unheard_code(),
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) => match error.downcast_ref::<Interrupted>() {
            Some(interrupted) => {
                tell(&error_line(&error));
                interrupted.exit_code()
            }
            None => {
                tell(&format!("error: {}", error_line(&error)));
                ExitCode::FAILURE
            }
        },
        Err(_) => ExitCode::FAILURE,
    }
}

/// Writes a line to stderr. If nobody is left to read it, the exit code still tells.
fn tell(line: &str) {
    writeln!(io::stderr(), "{line}").ok();
}

/// Whether the device or the host ran out of memory. libtorch and CUDA say so only in their messages.
pub(crate) fn is_out_of_memory(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| cause.to_string().contains("out of memory"))
}

/// The innermost cause, in one line.
pub(crate) fn root_line(error: &anyhow::Error) -> String {
    first_line(&error.root_cause().to_string()).to_owned()
}

/// The error and its causes, without what an outer message already says.
fn error_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = first_line(&cause.to_string()).to_owned();
        if line.is_empty() {
            line = text;
        } else if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
    }
    line
}

/// The message of a panic. `tch` panics with the debug form of libtorch's message.
fn panic_line(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or_default();
    match text.split_once("Torch(\"") {
        Some((_, message)) => format!("libtorch: {}", first_line(message)),
        None => format!("internal error, please report it: {}", first_line(text)),
    }
}

/// libtorch appends its C++ call stack; `\n` is a line break in the debug form of a text.
fn first_line(text: &str) -> &str {
    let line = text.lines().next().unwrap_or_default();
    line.split("\\n").next().unwrap_or_default().trim_end()
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn causes_follow_their_error_unless_it_names_them() {
        let error = anyhow!("disk full").context("cannot write x: disk full").context("checkpoint");
        assert_eq!(error_line(&error), "checkpoint: cannot write x: disk full");
    }

    #[test]
    fn a_lack_of_memory_is_told_from_other_errors() {
        let error =
            anyhow!("CUDA out of memory. Tried to allocate 2 GiB.\nException raised").context("under keep");
        assert!(is_out_of_memory(&error) && !is_out_of_memory(&anyhow!("disk full")));
        assert_eq!(root_line(&error), "CUDA out of memory. Tried to allocate 2 GiB.");
    }

    #[test]
    fn call_stacks_are_left_out() {
        assert_eq!(error_line(&anyhow!("shapes differ\nException raised from f")), "shapes differ");
        let panic =
            "called `Result::unwrap()` on an `Err` value: Torch(\"shapes differ\\nException raised\")";
        assert_eq!(panic_line(&panic.to_owned()), "libtorch: shapes differ");
        assert_eq!(panic_line(&"oh"), "internal error, please report it: oh");
    }
}
