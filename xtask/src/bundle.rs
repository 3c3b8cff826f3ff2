//! `cargo x bundle`: the release binaries in one folder, to copy to another machine.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::libtorch;
use crate::process::{self, cargo, command, root};

pub(crate) fn run(arguments: &[OsString]) -> Result<()> {
    let folder = match arguments {
        [] => root().join("bundle"),
        [folder] => PathBuf::from(folder),
        [_, extra, ..] => bail!("one folder at most, but got `{}` too", extra.display()),
    };
    libtorch::ensure()?;
    let mut build = cargo(["build", "--release", "--package", "ssdtrain-bench"]);
    let binaries = executables(&process::output(build.arg("--message-format=json-render-diagnostics"))?);
    if binaries.is_empty() {
        bail!("cargo built no binary");
    }
    fs::create_dir_all(&folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
    for binary in &binaries {
        strip_into(&folder, binary)?;
    }
    let name = folder.file_name().unwrap_or(folder.as_os_str()).display().to_string();
    println!(
        "
Copy {} to a machine with libtorch {} (`python3 -m pip install torch=={}`), then run there:

  export LD_LIBRARY_PATH=$(python3 -c 'import torch, os; print(os.path.dirname(torch.__file__) + \"/lib\")')
  ./{name}/ssdtrain-bench --help",
        folder.display(),
        libtorch::VERSION,
        libtorch::VERSION,
    );
    Ok(())
}

/// The paths of the executables in cargo's JSON messages.
fn executables(messages: &str) -> Vec<PathBuf> {
    const KEY: &str = "\"executable\":\"";
    messages
        .lines()
        .filter_map(|message| message.split_once(KEY))
        .filter_map(|(_, rest)| rest.split_once('"'))
        .map(|(path, _)| PathBuf::from(path))
        .collect()
}

fn strip_into(folder: &Path, binary: &Path) -> Result<()> {
    let name = binary.file_name().context("cargo named an executable without a file name")?;
    let target = folder.join(name);
    process::run(command("strip", ["-o"]).arg(&target).arg(binary))?;
    let size = fs::metadata(&target).with_context(|| format!("cannot read {}", target.display()))?.len();
    println!("{} ({:.1} MB)", target.display(), size as f64 / 1e6);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_messages_with_an_executable_count() {
        let messages = r#"{"reason":"compiler-artifact","executable":null}
{"reason":"compiler-artifact","filenames":["/t/a"],"executable":"/t/a b","fresh":true}
{"reason":"build-finished","success":true}"#;
        assert_eq!(executables(messages), [PathBuf::from("/t/a b")]);
    }
}
