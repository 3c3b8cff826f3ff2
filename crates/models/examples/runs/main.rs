//! Whole runs of a large model on a GPU, step by step in turns without the cache and with it: lengths that change, threads, micro-batches,
//! frozen weights, budgets, and a device that is short of memory.
//!
//! `cargo run --release -p ssdtrain-models --example runs -- [--overhead SHARE] [--steps N] [--layers N] [--hidden N] [--context N]
//! [--pinned GIB] [--spill DIR] [--each] [--explain] [NAME]...`
//!
//! Both kinds of steps train the same weights, so this shows times and peaks; for bits, see the example `programs`. Without a GPU it runs a
//! tiny model, which shows only that it runs. `RUST_LOG=ssdtrain=info` logs what becomes of plans.

#[path = "../shared/logging.rs"]
mod logging;
mod lora;
mod programs;
mod report;

use std::collections::BTreeSet;
use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

use ssdtrain::plan::Goal;
use ssdtrain::{Auto, Step, StepReport, TensorCache};
use ssdtrain_libtorch as torch;
use tch::{Device, Kind, Tensor};

use programs::{HEAD, LEAST_CONTEXT, Program, Shape};
use report::Lap;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// The goal, where none is told.
const OVERHEAD: f64 = 0.02;
/// A step that keeps everything needs so many times the memory that is left for it, in the run `scarce`.
const SCARCE: f64 = 1.3;

/// The names of all runs, with what they show.
const RUNS: [(&str, &str); 10] = [
    ("fixed", "all steps alike"),
    ("random", "lengths drawn from an eighth of the context up to all of it"),
    ("in-turn", "eight lengths in turn"),
    ("alternating", "two lengths in turn"),
    ("threads", "two threads, half a batch each"),
    ("micro-batches", "AdamW, two micro-batches"),
    ("lora", "small matrices beside frozen ones"),
    ("budget", "a peak of half of the highest, all steps alike"),
    ("budget-random", "the same, lengths drawn"),
    ("scarce", "less memory than keeping everything needs"),
];

struct Arguments {
    overhead: f64,
    steps: usize,
    layers: i64,
    /// As the machine suggests, if it is not told.
    hidden: Option<i64>,
    context: Option<i64>,
    /// GiB of host memory that are pinned before the first step, instead of what steps ask for.
    pinned: Option<u64>,
    spill: PathBuf,
    /// Whether each step is printed.
    each: bool,
    /// Whether the last plan is explained.
    explain: bool,
    names: Vec<String>,
}

impl Arguments {
    fn read() -> Result<Arguments> {
        let mut read = Arguments {
            overhead: OVERHEAD,
            steps: 120,
            layers: 4,
            hidden: None,
            context: None,
            pinned: None,
            spill: std::env::temp_dir(),
            each: false,
            explain: false,
            names: Vec::new(),
        };
        let mut given = std::env::args().skip(1);
        while let Some(argument) = given.next() {
            let mut value = || given.next().ok_or_else(|| format!("{argument} needs a value"));
            match argument.as_str() {
                "--overhead" => read.overhead = number(&argument, &value()?)?,
                "--steps" => read.steps = number(&argument, &value()?)?,
                "--layers" => read.layers = number(&argument, &value()?)?,
                "--hidden" => read.hidden = Some(number(&argument, &value()?)?),
                "--context" => read.context = Some(number(&argument, &value()?)?),
                "--pinned" => read.pinned = Some(number(&argument, &value()?)?),
                "--each" => read.each = true,
                "--explain" => read.explain = true,
                "--spill" => read.spill = value()?.into(),
                name if RUNS.iter().any(|(known, _)| *known == name) => read.names.push(argument),
                _ => {
                    let known: Vec<String> =
                        RUNS.iter().map(|(name, what)| format!("  {name:<15}{what}")).collect();
                    return Err(format!(
                        "{argument} is neither --overhead, --steps, --layers, --hidden, --context, --pinned, --spill, --each, --explain nor a run:\n{}",
                        known.join("\n")
                    )
                    .into());
                }
            }
        }
        if read.hidden.is_some_and(|hidden| hidden < HEAD || hidden % HEAD != 0) {
            return Err(
                format!("--hidden: the width of the model is a multiple of {HEAD}, that of a head").into()
            );
        }
        if read.context.is_some_and(|context| context < LEAST_CONTEXT) {
            return Err(format!("--context: sequences have up to {LEAST_CONTEXT} tokens or more").into());
        }
        Ok(read)
    }
}

fn number<T: FromStr<Err: Display>>(argument: &str, value: &str) -> Result<T> {
    Ok(value.parse().map_err(|error| format!("{argument}: {error}"))?)
}

fn main() -> Result<()> {
    let arguments = Arguments::read()?;
    logging::start()?;
    torch::install_cpu_allocator();
    let device = ssdtrain::load_cuda().map_or(Device::Cpu, |()| Device::cuda_if_available());
    let mut shape = Shape::of(device, arguments.layers);
    shape.hidden = arguments.hidden.unwrap_or(shape.hidden);
    shape.context = arguments.context.unwrap_or(shape.context);
    println!("on {device:?}, {shape}");
    report::head();
    for (name, _) in RUNS {
        if arguments.names.is_empty() || arguments.names.iter().any(|wanted| wanted == name) {
            run(name, &shape, &arguments)?;
        }
    }
    Ok(())
}

/// One of the runs, and its row of the table.
fn run(name: &str, shape: &Shape, arguments: &Arguments) -> Result<()> {
    let mut program = Program::new(name, shape)?;
    let overhead = Goal::overhead(arguments.overhead);
    let (goal, rest) = match name {
        "budget" | "budget-random" => (Goal::budget(program.highest_peak()? / 2), None),
        "scarce" => (overhead, Some(take_the_rest(&mut program)?)),
        _ => (overhead, None),
    };
    let builder = TensorCache::builder()
        .device(shape.device)
        .spill_to(&arguments.spill)
        .policy(Auto::new(goal))
        .parameters(&program.weights);
    let builder = match arguments.pinned {
        Some(gib) => builder.host_pool(gib.saturating_mul(1 << 30)),
        None => builder,
    };
    let cache = builder.build()?;
    let mut laps = Vec::new();
    // What libraries prepare for a length at its first time is neither kind's.
    let mut prepared = BTreeSet::new();
    for number in 0..arguments.steps {
        if rest.is_none() && prepared.insert(program.length(number)) {
            program.step(number, None)?;
        }
        let plain = match rest {
            None => program.step(number, None)?,
            Some(_) => Taken::default(),
        };
        let cached = program.step(number, Some(&cache))?;
        let lap = Lap { plain, cached };
        if arguments.each {
            report::step(number, program.length(number), &lap);
        }
        laps.push(lap);
    }
    report::row(name, &laps, goal);
    if arguments.explain
        && let Some(plan) = laps.iter().rev().find_map(|lap| lap.cached.report.as_ref()?.plan.as_ref())
    {
        println!("\n{plan}");
    }
    Ok(())
}

/// Takes so much of the device's memory that a step that keeps everything does not fit into the rest.
fn take_the_rest(program: &mut Program) -> Result<Option<Tensor>> {
    let needed = program.highest_peak()?;
    let Device::Cuda(index) = program.shape.device else { return Ok(None) };
    let left = (needed as f64 / SCARCE) as u64;
    let free = torch::CudaDevice::new(index).and_then(torch::CudaDevice::free).map_err(|error| error.0)?;
    let taken = free.saturating_sub(left) as i64;
    Ok(Some(Tensor::f_zeros([taken], (Kind::Uint8, program.shape.device))?))
}

/// What a step took.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    time: Duration,
    /// Until each of its parts was handed to the GPU: forward and backward, what the cache does at the end, the optimizer's step.
    handed_over: [Duration; 3],
    peak: u64,
    report: Option<StepReport>,
}

impl Program {
    fn step(&mut self, number: usize, cache: Option<&TensorCache>) -> Result<Taken> {
        let device = self.shape.device;
        self.clear();
        wait_for(device);
        torch::reset_peak(device);
        let before = torch::memory(device).allocated;
        let start = Instant::now();
        let step = cache.map(TensorCache::step);
        self.compute(number, step.as_ref())?;
        let computed = start.elapsed();
        let report = step.map(Step::finish).transpose()?;
        let finished = start.elapsed();
        // A profiled step resets the peak as it goes, so its report tells.
        let seen = torch::memory(device).peak.saturating_sub(before);
        self.update()?;
        let handed_over = [computed, finished, start.elapsed()];
        wait_for(device);
        let peak = report.as_ref().map_or(seen, |report| report.act_peak_bytes);
        Ok(Taken { time: start.elapsed(), handed_over, peak, report })
    }

    /// The highest peak of steps without the cache.
    fn highest_peak(&mut self) -> Result<u64> {
        let mut highest = 0;
        for number in 0..4 {
            highest = highest.max(self.step_of_length(number, self.shape.context)?.peak);
        }
        Ok(highest)
    }

    fn step_of_length(&mut self, number: usize, length: i64) -> Result<Taken> {
        let lengths = std::mem::replace(&mut self.lengths, vec![length]);
        let taken = self.step(number, None);
        self.lengths = lengths;
        taken
    }
}

fn wait_for(device: Device) {
    if let Device::Cuda(index) = device {
        tch::Cuda::synchronize(index as i64);
    }
}
