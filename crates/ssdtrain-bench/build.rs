//! Links the path of libtorch into the program and its tests, and tells the program the commit that it is built from.

#[path = "../../build.rs"]
mod link_path;

use std::path::Path;
use std::process::Command;

fn main() {
    link_path::main();
    println!("cargo::rustc-env=SSDTRAIN_COMMIT={}", commit().as_deref().unwrap_or("unknown"));
    // Commits and checkouts are written there.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|log| Path::new(log).exists()) {
        println!("cargo::rerun-if-changed={log}");
    }
}

/// The commit, if these sources are in a repository of their own.
fn commit() -> Option<String> {
    let is_own = git(&["rev-parse", "--show-prefix"])? == "crates/ssdtrain-bench/";
    git(&["rev-parse", "--short=12", "HEAD"]).filter(|_| is_own)
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
