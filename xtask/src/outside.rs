//! Builds and runs the program in `examples/outside` the way someone would who has only read the README.

use std::env;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::libtorch;
use crate::process::{cargo, root, run};

/// How its manifest refers to this checkout.
const HERE: &str = "path = \"../..\"";

/// Copies the program out of reach of this workspace's own configuration, and runs it there.
pub(crate) fn check() -> Result<()> {
    let folder = env::temp_dir().join(format!("ssdtrain-outside-{}", std::process::id()));
    let outcome = copy(&folder).and_then(|()| {
        // What has been compiled already need not be compiled again.
        let mut program = cargo(["run"]);
        program.env("LIBTORCH", libtorch::location()).env("CARGO_TARGET_DIR", root().join("target"));
        run(program.current_dir(&folder))
    });
    fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    outcome
}

/// The program in a folder of its own, with the path of this checkout and the versions that are locked here.
fn copy(folder: &Path) -> Result<()> {
    let program = root().join("examples/outside");
    fs::create_dir_all(folder.join("src")).with_context(|| format!("cannot make {}", folder.display()))?;
    for file in ["build.rs", "src/main.rs"] {
        copy_file(&program.join(file), &folder.join(file))?;
    }
    copy_file(&root().join("Cargo.lock"), &folder.join("Cargo.lock"))?;
    let manifest = program.join("Cargo.toml");
    let text =
        fs::read_to_string(&manifest).with_context(|| format!("cannot read {}", manifest.display()))?;
    ensure!(text.contains(HERE), "{} does not say `{HERE}`", manifest.display());
    let text = text.replace(HERE, &format!("path = {:?}", root()));
    fs::write(folder.join("Cargo.toml"), text)
        .with_context(|| format!("cannot write in {}", folder.display()))
}

fn copy_file(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}
