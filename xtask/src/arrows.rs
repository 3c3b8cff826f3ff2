//! The dependency arrows of the workspace: plan, store, cufile-sys, hooks <- ssdtrain <- models, metrics <- ssdtrain-bench, and
//! lean libraries.

use std::collections::BTreeSet;

use anyhow::{Result, bail};

use crate::process::{self, cargo};

/// Each package of the workspace, and the workspace packages that it may depend on.
const ARROWS: &[(&str, &[&str])] = &[
    ("xtask", &[]),
    ("ssdtrain-libtorch", &[]),
    ("ssdtrain-cufile-sys", &[]),
    ("ssdtrain-malloc-hook", &["ssdtrain-cufile-sys"]),
    ("ssdtrain-plan", &[]),
    ("ssdtrain-store", &["ssdtrain-cufile-sys"]),
    ("ssdtrain", &["ssdtrain-plan", "ssdtrain-store", "ssdtrain-libtorch", "ssdtrain-cufile-sys"]),
    (
        "ssdtrain-models",
        &["ssdtrain", "ssdtrain-plan", "ssdtrain-store", "ssdtrain-libtorch", "ssdtrain-cufile-sys"],
    ),
    (
        "ssdtrain-metrics",
        &["ssdtrain", "ssdtrain-plan", "ssdtrain-store", "ssdtrain-libtorch", "ssdtrain-cufile-sys"],
    ),
    (
        "ssdtrain-differential",
        &["ssdtrain", "ssdtrain-plan", "ssdtrain-store", "ssdtrain-libtorch", "ssdtrain-cufile-sys"],
    ),
    (
        "ssdtrain-bench",
        &[
            "ssdtrain-models",
            "ssdtrain-metrics",
            "ssdtrain",
            "ssdtrain-plan",
            "ssdtrain-store",
            "ssdtrain-libtorch",
            "ssdtrain-cufile-sys",
        ],
    ),
];

/// Packages that others build on. None of the `APPLICATION_CRATES` may be in their dependency trees.
const LIBRARIES: &[&str] = &[
    "ssdtrain-plan",
    "ssdtrain-store",
    "ssdtrain-libtorch",
    "ssdtrain-cufile-sys",
    "ssdtrain-malloc-hook",
    "ssdtrain",
    "ssdtrain-metrics",
    "ssdtrain-models",
];

/// Crates for command lines, pictures, benchmarks and tests.
const APPLICATION_CRATES: &[&str] = &[
    "clap",
    "comfy-table",
    "criterion",
    "ctrlc",
    "indicatif",
    "plotters",
    "proptest",
    "tabled",
    "tracing-subscriber",
];

/// The most external crates that ssdtrain may add to those of tch. Raise it only deliberately.
const MOST_CRATES_BESIDE_TCH: usize = 21;

/// Checks all of the above against what cargo resolves, without building anything.
pub(crate) fn check() -> Result<()> {
    let mut wrong = Vec::new();
    for (package, allowed) in ARROWS {
        let tree = tree(package)?;
        wrong.extend(
            ARROWS
                .iter()
                .map(|(other, _)| *other)
                .filter(|other| other != package && tree.contains(*other) && !allowed.contains(other))
                .map(|other| format!("{package} must not depend on {other}")),
        );
        if LIBRARIES.contains(package) {
            wrong.extend(
                APPLICATION_CRATES
                    .iter()
                    .filter(|name| tree.contains(**name))
                    .map(|name| format!("{package} is a library and must not depend on {name}")),
            );
        }
    }
    let is_ours = |name: &&String| ARROWS.iter().any(|(package, _)| package == name);
    let beside_tch = tree("ssdtrain")?.difference(&tree("tch")?).filter(|name| !is_ours(name)).count();
    println!(
        "ssdtrain adds {beside_tch} crates of others to those of tch (at most {MOST_CRATES_BESIDE_TCH})"
    );
    if beside_tch > MOST_CRATES_BESIDE_TCH {
        wrong.push(format!(
            "ssdtrain adds {beside_tch} crates of others to those of tch: more than {MOST_CRATES_BESIDE_TCH}"
        ));
    }
    if !wrong.is_empty() {
        bail!("dependencies point the wrong way:\n  {}", wrong.join("\n  "));
    }
    Ok(())
}

/// The names of `package` and of everything that it is linked with.
fn tree(package: &str) -> Result<BTreeSet<String>> {
    let mut command =
        cargo(["tree", "--edges", "normal", "--prefix", "none", "--format", "{p}", "--package"]);
    let text = process::output(command.arg(package))?;
    Ok(text.lines().filter_map(|line| line.split_whitespace().next()).map(String::from).collect())
}
