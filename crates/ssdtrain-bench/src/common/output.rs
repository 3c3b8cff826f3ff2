//! Lines that are printed. A line that cannot be printed asks the run to stop instead of ending the process.

use std::io::{self, ErrorKind, Write};

use super::interrupt;

/// Prints a line on stdout.
pub(crate) fn print(line: &str) {
    write(&mut io::stdout(), "stdout", line);
}

/// Prints a line on stderr.
pub(crate) fn print_on_stderr(line: &str) {
    write(&mut io::stderr(), "stderr", line);
}

fn write(stream: &mut impl Write, name: &str, line: &str) {
    let Err(error) = writeln!(stream, "{line}") else { return };
    // The reader has gone, such as `tee` after Ctrl-C, or the terminal. Of anything else, such as a full disk, people have to be told.
    let is_usual = error.kind() == ErrorKind::BrokenPipe || error.raw_os_error() == Some(libc::EIO);
    if !is_usual && !interrupt::is_unheard() {
        writeln!(io::stderr(), "cannot print to {name}: {error}").ok();
    }
    interrupt::stop_unheard();
}
