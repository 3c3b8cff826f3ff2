//! Trains, compares and measures with ssdtrain from the command line.

mod cache;
mod ceilings;
mod cmd;
mod data;
mod defaults;
mod failure;
mod float;
mod gpu;
mod horizon;
mod interrupt;
mod learner;
mod memory;
mod optimizer;
mod placement;
mod plot;
mod progress;
mod project;
mod raw;
mod raw_gpu;
mod rok;
mod shape;
mod side;
mod size;
mod stats;
mod strategy;
mod table;
mod task;
mod window;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::filter::LevelFilter;

/// Train GPTs whose activations live on NVMe SSDs, and measure what that costs.
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

RUST_LOG=info (or debug) shows more of what the library says; its warnings are always shown.";

#[derive(Debug, Subcommand)]
enum Command {
    Train(cmd::train::Args),
    Compare(cmd::compare::Args),
    Rok(cmd::rok::Args),
    Plan(cmd::plan::Args),
    Plot(cmd::plot::Args),
    Io(cmd::io::Args),
    Project(cmd::project::Args),
    Doctor(cmd::doctor::Args),
}

fn main() -> ExitCode {
    failure::reported(|| {
        let cli = Cli::parse();
        show_warnings();
        match cli.command {
            Command::Train(args) => cmd::train::run(args),
            Command::Compare(args) => cmd::compare::run(&args),
            Command::Rok(args) => cmd::rok::run(&args),
            Command::Plan(args) => cmd::plan::run(&args),
            Command::Plot(args) => cmd::plot::run(&args),
            Command::Io(args) => cmd::io::run(&args),
            Command::Project(args) => cmd::project::run(&args),
            Command::Doctor(args) => cmd::doctor::run(&args),
        }
    })
}

/// Shows on stderr what the library warns of.
fn show_warnings() {
    let level = std::env::var("RUST_LOG").ok().and_then(|level| level.parse().ok());
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_max_level(level.unwrap_or(LevelFilter::WARN))
        .with_target(false)
        .without_time()
        .init();
}
