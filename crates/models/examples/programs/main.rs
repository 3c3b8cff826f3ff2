//! Does [`Auto`](ssdtrain::Auto) settle, and keep its promise, in anyone's training? Small training programs of many kinds, written as for
//! plain tch, each run with the cache and without, side by side in one process.
//!
//! `cargo run --release -p ssdtrain-models --example programs -- [OPTIONS] [NAME]...`; `--help` tells the options.
//!
//! Nothing in the programs is marked for the cache. Both copies of a program begin with the same weights and draw the same random
//! numbers, so their weights and gradients must have the same bits after each iteration. The exit status is 1 if they have not.
//! `RUST_LOG=ssdtrain::plan=info` logs what becomes of plans.

mod arguments;
mod generative;
mod images;
mod language;
mod layers;
#[path = "../shared/logging.rs"]
mod logging;
mod loops;
mod perceptrons;
mod program;
mod race;
mod recurrent;
mod table;
mod threads;

use std::process::ExitCode;

use arguments::Arguments;
use program::{Named, Result};

/// All programs, by family.
const FAMILIES: [&[Named]; 7] = [
    perceptrons::PROGRAMS,
    images::PROGRAMS,
    recurrent::PROGRAMS,
    generative::PROGRAMS,
    language::PROGRAMS,
    loops::PROGRAMS,
    threads::PROGRAMS,
];

fn main() -> Result<ExitCode> {
    let arguments = Arguments::read()?;
    logging::start()?;
    let is_wanted = |name: &str| {
        arguments.names.is_empty() || arguments.names.iter().any(|part| name.contains(part.as_str()))
    };
    let programs: Vec<Named> =
        FAMILIES.into_iter().flatten().copied().filter(|(name, _)| is_wanted(name)).collect();
    if arguments.is_help {
        println!("{}", arguments::HELP);
        return Ok(ExitCode::SUCCESS);
    }
    if arguments.is_list {
        programs.iter().for_each(|(name, _)| println!("{name}"));
        return Ok(ExitCode::SUCCESS);
    }
    // Before the first tensor, so that both copies are computed and counted alike.
    ssdtrain_libtorch::install_cpu_allocator();
    ssdtrain::resolve_math_kernels()?;
    table::head(arguments.aim, arguments.steps);
    let mut outcomes = Vec::new();
    for (name, make) in programs {
        let outcome = race::race(make, &arguments)?;
        table::row(name, &outcome);
        outcomes.push(outcome);
    }
    table::foot(&outcomes);
    let is_right = outcomes.iter().all(|outcome| outcome.differs.is_none() && outcome.failure.is_none());
    Ok(if is_right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
