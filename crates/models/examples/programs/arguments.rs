//! The command line.

use std::path::PathBuf;

use crate::program::Result;
use crate::race::Aim;

/// What `--help` prints.
pub(crate) const HELP: &str = "\
Trains small programs with and without the cache, side by side.

cargo run --release -p ssdtrain-models --example programs -- [OPTIONS] [NAME]...

  NAME              runs the programs whose names contain one of these; without any, all
  --steps N         iterations of each program (default 30)
  --overhead SHARE  goal: steps at most this share longer than without the cache (default 0.10)
  --budget SHARE    goal instead: a peak of at most this share of the highest without the cache
  --min-bytes N     storages with fewer bytes are not moved (default: the cache's own)
  --spill DIR       where activations go (default: the folder for temporary files)
  --each            prints each iteration: its times, and the reports of its steps
  --list            prints the names";

/// What to run.
pub(crate) struct Arguments {
    pub(crate) names: Vec<String>,
    pub(crate) steps: usize,
    pub(crate) aim: Aim,
    /// What has fewer bytes is not moved; `None` for the cache's default.
    pub(crate) min_bytes: Option<u64>,
    pub(crate) spill: PathBuf,
    /// Whether each iteration is printed.
    pub(crate) each: bool,
    pub(crate) is_list: bool,
    pub(crate) is_help: bool,
}

impl Arguments {
    /// Reads the command line.
    pub(crate) fn read() -> Result<Arguments> {
        let mut read = Arguments {
            names: Vec::new(),
            steps: 30,
            aim: Aim::Overhead(0.10),
            min_bytes: None,
            spill: std::env::temp_dir(),
            each: false,
            is_list: false,
            is_help: false,
        };
        let mut given = std::env::args().skip(1);
        while let Some(argument) = given.next() {
            let mut value = || given.next().ok_or_else(|| format!("{argument} needs a value; see --help"));
            let failed = |error: &dyn std::fmt::Display| format!("{argument}: {error}; see --help");
            match argument.as_str() {
                "--steps" => read.steps = value()?.parse().map_err(|error| failed(&error))?,
                "--overhead" => {
                    read.aim = Aim::Overhead(value()?.parse().map_err(|error| failed(&error))?);
                }
                "--budget" => read.aim = Aim::Budget(value()?.parse().map_err(|error| failed(&error))?),
                "--min-bytes" => {
                    read.min_bytes = Some(value()?.parse().map_err(|error| failed(&error))?);
                }
                "--spill" => read.spill = value()?.into(),
                "--each" => read.each = true,
                "--list" => read.is_list = true,
                "--help" | "-h" => read.is_help = true,
                option if option.starts_with('-') => {
                    return Err(format!("{option} is not an option; see --help").into());
                }
                name => read.names.push(name.to_owned()),
            }
        }
        Ok(read)
    }
}
