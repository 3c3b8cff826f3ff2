//! The command line: which commands there are, and how one is run.

use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::common::failure;
use crate::{compare, doctor, io, plan, plot, project, rok, train};

/// Train language models whose activations live on NVMe SSDs, and measure what that costs.
#[derive(Debug, Parser)]
#[command(name = "ssdtrain-bench", version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Start here:
  ssdtrain-bench doctor               which path bytes will take here, and why not a better one
  ssdtrain-bench train                three minutes of training on the Rust sources cargo has downloaded
  ssdtrain-bench compare --check      offload beside keep, step by step, to the bit
  ssdtrain-bench rok --plot rok.svg   what each strategy takes of memory and gives in speed, over batch sizes

Exit codes: 0 if all that was asked for is done, 1 after an error, 2 for arguments that cannot be used. 128 and the number of the signal that
ended it, such as 130 after Ctrl-C and 143 after kill, whatever was saved before: train --resume goes on from there, and rok from what it has
measured. These two, compare and plan finish the step under way; a second signal ends them at once.

RUST_LOG=info (or debug, or levels of targets: ssdtrain::plan=debug) shows more of what the library says, beside its warnings.";

#[derive(Debug, Subcommand)]
enum Command {
    Train(train::Args),
    Compare(compare::Args),
    Rok(rok::Args),
    Plan(plan::Args),
    Plot(plot::Args),
    Io(io::Args),
    Project(project::Args),
    Doctor(doctor::Args),
}

/// Carries out what the process's arguments ask for, and reports any error in one line.
pub fn main() -> ExitCode {
    failure::reported(|| {
        let cli = Cli::try_parse().unwrap_or_else(|error| named(error).exit());
        show_warnings();
        match cli.command {
            Command::Train(args) => train::run(args),
            Command::Compare(args) => compare::run(&args),
            Command::Rok(args) => rok::run(&args),
            Command::Plan(args) => plan::run(&args),
            Command::Plot(args) => plot::run(&args),
            Command::Io(args) => io::run(&args),
            Command::Project(args) => project::run(&args),
            Command::Doctor(args) => doctor::run(&args),
        }
    })
}

/// The same error, except that it names arguments that are no text: clap only says that there are some.
fn named(error: clap::Error) -> clap::Error {
    if error.kind() != ErrorKind::InvalidUtf8 {
        return error;
    }
    let strange: Vec<_> = std::env::args_os()
        .filter(|argument| argument.to_str().is_none())
        .map(|argument| format!("{argument:?}"))
        .collect();
    Cli::command().error(ErrorKind::InvalidUtf8, format!("{} is not valid UTF-8", strange.join(", ")))
}

/// Prints the library's warnings to stderr, and what `RUST_LOG` asks for besides.
fn show_warnings() {
    let asked = std::env::var_os("RUST_LOG").map(|asked| asked.to_string_lossy().into_owned());
    let asked = asked.filter(|asked| !asked.is_empty());
    let shown = asked.as_deref().map_or_else(|| Ok(Targets::new()), str::parse::<Targets>);
    let (shown, refused) = match shown {
        Ok(shown) => (shown, None),
        Err(error) => (Targets::new(), Some(error)),
    };
    let level = shown.default_level().unwrap_or(LevelFilter::WARN);
    let printed = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        // A message that cannot be written would else be reported where it cannot be either, by a panic.
        .log_internal_errors(false)
        // Else what is printed hangs on the features that others of one build ask of the crate.
        .with_ansi(false)
        .with_target(false)
        .without_time();
    tracing_subscriber::registry().with(printed.with_filter(shown.with_default(level))).init();
    if let Some(error) = refused {
        let asked = asked.unwrap_or_default();
        tracing::warn!(
            "RUST_LOG={asked} is ignored ({error}): give a level, such as debug, or levels of targets, such as ssdtrain::plan=debug"
        );
    }
}
