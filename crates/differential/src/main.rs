//! Runs random programs with and without the cache until the time is over, and prints those that disagree in their
//! smallest form.

mod batch;
mod parent;
mod soak;

use std::io::Read;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Error, Result, ensure};
use clap::{Args, Parser, Subcommand, ValueEnum};
use ssdtrain_differential::{Program, Programs, check};
use ssdtrain_libtorch as torch;
use tch::{Cuda, Device};

#[derive(Parser)]
#[command(version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run random programs in child processes until the time is over
    Run {
        /// How long
        #[arg(long, default_value_t = 1.0)]
        minutes: f64,
        /// The seed of the first program; the others follow it
        #[arg(long, default_value_t = 0)]
        seed: u64,
        /// Child processes at once
        #[arg(long, default_value_t = 2)]
        jobs: usize,
        /// Stop at so many programs that fail
        #[arg(long, default_value_t = 20)]
        failures: usize,
        #[command(flatten)]
        theme: Theme,
    },
    /// Run random programs in this process until the time is over, some of them over a disk that fails now and then, and look at
    /// what the process holds
    Soak {
        /// How long
        #[arg(long, default_value_t = 60.0)]
        minutes: f64,
        /// The seed of the first program; the others follow it
        #[arg(long, default_value_t = 0)]
        seed: u64,
        /// Where the tensors are
        #[arg(long, value_enum, default_value_t)]
        device: On,
        #[command(flatten)]
        theme: Theme,
    },
    /// Print the program of a seed
    Show {
        /// The seed
        seed: u64,
        #[command(flatten)]
        theme: Theme,
    },
    /// Run one program, a file or standard input, and say what became of it
    Check {
        /// The program as `run` and `show` print it
        file: Option<PathBuf>,
        /// How often
        #[arg(long, default_value_t = 1)]
        times: usize,
    },
    /// What a child process of `run` does
    #[command(hide = true)]
    Batch {
        first: u64,
        count: u64,
        /// Seconds for making a program smaller
        shrink: f64,
        #[command(flatten)]
        theme: Theme,
    },
}

/// Where tensors are.
#[derive(Clone, Copy, Debug, Default, PartialEq, ValueEnum)]
enum On {
    #[default]
    Cpu,
    /// On the first GPU, without operations that end the process if their arguments do not fit
    Cuda,
}

#[derive(Args)]
struct Theme {
    /// An operation that all programs do often
    #[arg(long, value_name = "OPERATION")]
    with: Option<String>,
}

fn main() -> ExitCode {
    // A panic is a verdict here, and is not printed.
    std::panic::set_hook(Box::new(|_| ()));
    match run(Arguments::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Run { minutes, seed, jobs, failures, theme } => {
            let programs = Programs::new(theme.with.as_deref())?;
            let time = Duration::from_secs_f64(minutes * 60.0);
            let failed = parent::run(&programs, time, seed, jobs, failures)?;
            Ok(ExitCode::from(u8::from(failed > 0)))
        }
        Command::Soak { minutes, seed, device, theme } => {
            soak::with_one_arena()?;
            let programs = Programs::new(theme.with.as_deref())?;
            let on_gpu = device == On::Cuda;
            if on_gpu {
                prepare_gpu()?;
            }
            let is_sound = soak::run(&programs, Duration::from_secs_f64(minutes * 60.0), seed, on_gpu)?;
            Ok(ExitCode::from(u8::from(!is_sound)))
        }
        Command::Show { seed, theme } => {
            print!("{}", Programs::new(theme.with.as_deref())?.generate(seed));
            Ok(ExitCode::SUCCESS)
        }
        Command::Check { file, times } => {
            let program = read(file)?;
            if program.config.device() != Device::Cpu {
                prepare_gpu()?;
            }
            batch::watch();
            let verdicts: Vec<_> = (0..times).map(|_| check(&program)).collect();
            let wrong = verdicts.iter().find(|verdict| verdict.is_wrong());
            let verdict = wrong.or_else(|| verdicts.first()).context("not once")?;
            println!("{verdict}");
            Ok(ExitCode::from(u8::from(verdict.is_wrong())))
        }
        Command::Batch { first, count, shrink, theme } => {
            let programs = Programs::new(theme.with.as_deref())?;
            batch::run(&programs, first, count, Duration::from_secs_f64(shrink));
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Has libtorch use the GPU, with kernels that give the same bits each time.
fn prepare_gpu() -> Result<()> {
    let loaded = ssdtrain::load_cuda().map_err(Error::msg);
    loaded.context(
        "tensors cannot be on a GPU: LD_LIBRARY_PATH has to name the folder of a libtorch with CUDA",
    )?;
    ensure!(Cuda::is_available(), "tensors cannot be on a GPU: libtorch finds none that it can use");
    torch::make_deterministic().map_err(|error| Error::msg(error.to_string()))
}

fn read(file: Option<PathBuf>) -> Result<Program> {
    let text = match file {
        Some(file) => std::fs::read_to_string(&file).with_context(|| file.display().to_string())?,
        None => {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text)?;
            text
        }
    };
    text.parse()
}
