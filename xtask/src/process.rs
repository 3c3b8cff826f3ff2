//! Starting other programs from the root of the workspace.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// The root of the workspace.
pub(crate) fn root() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here)
}

/// The cargo that runs this program, with `arguments`.
pub(crate) fn cargo<const N: usize>(arguments: [&str; N]) -> Command {
    let program = env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    command(program, arguments)
}

/// `program` with `arguments`, in the root of the workspace.
pub(crate) fn command<const N: usize>(program: impl AsRef<OsStr>, arguments: [&str; N]) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root()).args(arguments);
    command
}

/// Runs `command` to its end; anything but success is an error that names it.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start `{}`", line(command)))?;
    if !status.success() {
        bail!("`{}` failed ({status})", line(command));
    }
    Ok(())
}

/// Runs `command` and returns what it wrote to standard output; standard error passes through.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start `{}`", line(command)))?;
    if !output.status.success() {
        bail!("`{}` failed ({})", line(command), output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("`{}` wrote something not UTF-8", line(command)))
}

/// Whether `command` can be started and succeeds. Its output is not shown.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// Replaces this process by `command`. Returns only if that fails.
pub(crate) fn replace(command: &mut Command) -> Result<()> {
    let error = command.exec();
    Err(error).with_context(|| format!("cannot start `{}`", line(command)))
}

/// `command` as a person would type it.
fn line(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let mut line = program.file_name().unwrap_or(program.as_os_str()).display().to_string();
    for argument in command.get_args() {
        line.push_str(&format!(" {}", argument.display()));
    }
    line
}
