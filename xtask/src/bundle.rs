//! `cargo x bundle`: puts the release binaries and the GPU tests into one folder, to copy to another machine.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::process::{self, cargo, command, root};
use crate::version::VERSION;
use crate::{executables, gpu_test, libtorch};

pub(crate) fn run(arguments: &[OsString]) -> Result<()> {
    let folder = match arguments {
        [] => root().join("bundle"),
        [folder] => PathBuf::from(folder),
        [_, extra, ..] => bail!("one folder at most, but got `{}` too", extra.display()),
    };
    libtorch::ensure()?;
    let mut build = cargo(["build", "--release", "--package", "ssdtrain-bench"]);
    let binaries = executables::build(&mut build, "bin")?;
    if binaries.is_empty() {
        bail!("cargo built no binary");
    }
    fs::create_dir_all(&folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
    for binary in &binaries {
        let name = binary.file_name().context("cargo named an executable without a file name")?;
        strip_into(&folder.join(name), binary)?;
    }
    for (name, tests) in gpu_test::build()? {
        strip_into(&folder.join(name), &tests)?;
    }
    let name = folder.file_name().unwrap_or(folder.as_os_str()).display().to_string();
    println!(
        "
Copy {} to a machine with libtorch {} (`python3 -m pip install torch=={}`), then run there:

  export LD_LIBRARY_PATH=$(python3 -c 'import torch, os; print(os.path.dirname(torch.__file__) + \"/lib\")')
  ./{name}/ssdtrain-bench --help
  ./{name}/gpu-test --ignored
  ./{name}/gpu-faults --ignored
  compute-sanitizer --tool memcheck ./{name}/gpu-test --ignored small_",
        folder.display(),
        VERSION,
        VERSION,
    );
    Ok(())
}

fn strip_into(target: &Path, binary: &Path) -> Result<()> {
    process::run(command("strip", ["-o"]).arg(target).arg(binary))?;
    let size = fs::metadata(target).with_context(|| format!("cannot read {}", target.display()))?.len();
    println!("{} ({:.1} MB)", target.display(), size as f64 / 1e6);
    Ok(())
}
