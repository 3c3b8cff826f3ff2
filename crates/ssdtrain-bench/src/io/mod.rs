//! `io`: what the disks can do, how much of that the store achieves, and what the path to a GPU can do.

mod ceilings;
mod memory;
mod raw;
mod raw_gpu;

use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::{Arg, value_parser};
use serde::Serialize;
use ssdtrain::{PathRates, PathTrial, TensorCache, TensorCacheBuilder};
use ssdtrain_store::{Blob, Completion, IoBuf, Pin, Slot, Store, StoreConfig};
use tch::Device;

use self::ceilings::{Ceilings, Load, Rates, render as render_ceilings};
use self::memory::{Unpinned, buffers};
use self::raw::{Mode, RawFiles, rounded};
use crate::common::gpu::Gpu;
use crate::common::model_device::{ensure_there, parse_device};
use crate::common::progress::Progress;
use crate::common::spill::SpillArgs;
use crate::common::stats::{Estimate, median, ratio_of_medians};
use crate::common::table::OutputArgs;
use crate::common::{defaults, size, table};

/// The store moves values of about this size: that of an activation in a medium-sized model.
const VALUE_BYTES: u64 = 8 << 20;
/// More threads than this add nothing to a pool; the store has no more either.
const MAX_THREADS: usize = 16;
const SEED: u64 = 1;

/// Measure the raw speed of the disks, and that of the store beside it
///
/// The ceiling is a plain loop of O_DIRECT transfers of the same size, as many under way at once, over files that
/// were written before. Both move memory in huge pages. Ceiling and store take turns, pass by pass, in an order that changes from round to round.
/// Figures are medians over the rounds; the share has a 95 % interval (bootstrap over rounds).
///
/// With a GPU, all of that moves memory pinned for it, and copies between it and such memory are measured too: one
/// way, both ways, and while the disks write and read. So are both ways between GPU and disk: straight by cuFile, and through pinned
/// host memory.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, mut_arg("spill_dirs", as_dir))]
#[command(mut_arg("backend", |arg| arg.help("How bytes are moved; with \"pool\" the ceiling is measured with threads too")))]
pub(crate) struct Args {
    #[command(flatten)]
    spill: SpillArgs,
    /// Bytes moved in each pass, rounded up to whole values
    #[arg(long, value_name = "SIZE", default_value = defaults::IO_SIZE, value_parser = size::parse_positive)]
    size: u64,
    /// Transfers under way at once
    #[arg(long, value_name = "N", default_value = defaults::QUEUE_DEPTH, value_parser = value_parser!(u32).range(1..=4096))]
    depth: u32,
    /// Bytes of each transfer, rounded up to a multiple of 4 KiB; at most 1GiB
    #[arg(long, value_name = "SIZE", default_value = defaults::IO_BYTES, value_parser = io_bytes)]
    io_bytes: u64,
    /// GPU whose copies are measured too: cuda (the first one) or cuda:N. cpu: none
    #[arg(long, value_name = "DEVICE", default_value = "cpu", value_parser = parse_device)]
    device: Device,
    /// Bytes copied each way in each pass
    #[arg(long, value_name = "SIZE", default_value = defaults::COPY_SIZE, value_parser = size::parse_positive)]
    copy_size: u64,
    /// Bytes of each copy
    #[arg(long, value_name = "SIZE", default_value = defaults::COPY_BYTES, value_parser = size::parse_positive)]
    copy_bytes: u64,
    /// Copies under way at once, each way
    #[arg(long, value_name = "N", default_value = defaults::COPY_DEPTH, value_parser = value_parser!(u32).range(1..=64))]
    copy_depth: u32,
    /// Measured passes of each kind
    #[arg(long, value_name = "N", default_value = defaults::IO_ROUNDS, value_parser = value_parser!(u32).range(1..=10_000))]
    rounds: u32,
    #[command(flatten)]
    output: OutputArgs,
}

const EXAMPLES: &str = "\
Examples:
  ssdtrain-bench io
  ssdtrain-bench io --dir /mnt/nvme0 --dir /mnt/nvme1 --size 4GiB
  ssdtrain-bench io --depth 8 --io-bytes 256KiB --json
  ssdtrain-bench io --device cuda --dir /mnt/nvme0 --size 2GiB

JSON, for each mode: mode, raw_bytes_per_s, store_bytes_per_s, store_to_raw {median, low, high}, size, depth, io_bytes, raw_path,
io_path.
With --device cuda then, for each load (copy_out, copy_in, copy_both, all): load, out_bytes_per_s (device to host),
in_bytes_per_s (host to device), write_bytes_per_s, read_bytes_per_s (null where not in use), device, copy_size,
copy_bytes, copy_depth, size, depth, io_bytes, raw_path. Under \"all\" the disks write and read in turn. Then for each way
between GPU and disk (direct, staged), both directions at once: path, by, bytes_per_s (or null), refused (why, or null), device.";

/// Renames the argument of the spill directories to `--dir`, with a help text for this command.
fn as_dir(arg: Arg) -> Arg {
    arg.long("dir").alias("spill-dir").help(
        "Directory to measure; repeat it to measure several disks at once. Without it: where train would spill to",
    )
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let progress = Progress::new(args.output.json);
    let mut bench = Bench::prepare(args)?;
    progress.line(&format!(
        "{} per pass in transfers of {}, {} under way at once, {} rounds",
        size::format(bench.bytes),
        size::format(args.io_bytes),
        args.depth,
        args.rounds
    ));
    let names: Vec<_> = bench.directories.iter().map(|directory| directory.display().to_string()).collect();
    progress.line(&format!("directories: {}", names.join(", ")));
    progress.line(&format!("ceiling through {}; store through {}", bench.raw.path(), bench.store.path()));
    if bench.ceilings.is_some() {
        progress.line(&format!(
            "{}: {} per pass each way in copies of {}, {} under way at once",
            device_name(args.device),
            size::format(args.copy_size),
            size::format(args.copy_bytes),
            args.copy_depth
        ));
    }

    let mut times = [const { Times { raw: Vec::new(), store: Vec::new() } }; Mode::ALL.len()];
    progress.start();
    for round in 0..args.rounds {
        progress.at(f64::from(round) / f64::from(args.rounds));
        for (mode, times) in Mode::ALL.into_iter().zip(&mut times) {
            bench.measure(mode, round.is_multiple_of(2), times)?;
        }
        if let Some(ceilings) = &mut bench.ceilings {
            ceilings.measure(&mut bench.raw)?;
        }
    }
    progress.clear();
    let paths = match args.device {
        Device::Cuda(_) => Some(bench.try_paths(args)?),
        _ => None,
    };
    let rows: Vec<_> =
        Mode::ALL.into_iter().zip(&times).map(|(mode, times)| bench.row(args, mode, times)).collect();
    if args.output.json {
        rows.iter().try_for_each(table::print_json)?;
        let loads = bench.ceilings.iter().flat_map(Ceilings::rates);
        loads
            .map(|(load, rates)| bench.load(args, load, rates))
            .try_for_each(|row| table::print_json(&row))?;
        return paths
            .iter()
            .flat_map(|paths| path_rows(args, paths))
            .try_for_each(|row| table::print_json(&row));
    }
    println!("\n{}", render(&rows));
    if let Some(ceilings) = &bench.ceilings {
        let disks = Mode::ALL.into_iter().zip(&times);
        let disks: Vec<_> = disks
            .map(|(mode, times)| (mode, Rates::of_disks(&bench.raw, mode, median(&times.raw))))
            .collect();
        println!("\n{}", render_ceilings(ceilings.rates(), &disks));
    }
    if let Some(paths) = &paths {
        println!("\n{}", render_paths(&path_rows(args, paths)));
    }
    Ok(())
}

/// Seconds of each pass.
struct Times {
    raw: Vec<f64>,
    store: Vec<f64>,
}

#[derive(Serialize)]
struct Row {
    mode: Mode,
    raw_bytes_per_s: f64,
    store_bytes_per_s: f64,
    store_to_raw: Estimate,
    size: u64,
    depth: u32,
    io_bytes: u64,
    raw_path: String,
    io_path: String,
}

/// What the path to a GPU carried under a load.
#[derive(Serialize)]
struct LoadRow {
    load: Load,
    #[serde(flatten)]
    rates: Rates,
    device: String,
    copy_size: u64,
    copy_bytes: u64,
    copy_depth: u32,
    size: u64,
    depth: u32,
    io_bytes: u64,
    raw_path: String,
}

/// A path between a GPU and the disks: bytes per second in each direction, and in both at once, combined.
#[derive(Serialize)]
struct PathRow {
    path: &'static str,
    by: String,
    write_bytes_per_s: Option<f64>,
    read_bytes_per_s: Option<f64>,
    both_bytes_per_s: Option<f64>,
    refused: Option<String>,
    device: String,
}

fn path_rows(args: &Args, paths: &PathTrial) -> [PathRow; 2] {
    let device = device_name(args.device);
    let (direct, by) = match &paths.direct {
        Ok((mode, rates)) => (Ok(*rates), format!("cuFile, {mode}")),
        Err(reason) => (Err(reason), "cuFile".to_owned()),
    };
    let row = |path, by, rates: Result<PathRates, &String>| PathRow {
        path,
        by,
        write_bytes_per_s: rates.ok().map(|rates| rates.write),
        read_bytes_per_s: rates.ok().map(|rates| rates.read),
        both_bytes_per_s: rates.ok().map(|rates| rates.both),
        refused: rates.err().cloned(),
        device: device.clone(),
    };
    let staged = paths.staged.as_ref().copied();
    [row("direct", by, direct), row("staged", "pinned host memory".to_owned(), staged)]
}

fn render_paths(rows: &[PathRow]) -> String {
    let shown = |rate: Option<f64>| {
        rate.map_or_else(|| "-".to_owned(), |rate| format!("{}/s", size::format(rate as u64)))
    };
    let table = table::render(
        ["GPU to disk and back", "by", "write", "read", "both at once"],
        rows.iter().map(|row| {
            let rates = [row.write_bytes_per_s, row.read_bytes_per_s, row.both_bytes_per_s].map(shown);
            let [write, read, both] = rates;
            [row.path.to_owned(), row.by.clone(), write, read, both]
        }),
    );
    let refused = rows.iter().filter_map(|row| Some(format!("\n{}: {}\n", row.path, row.refused.as_ref()?)));
    table + &refused.collect::<String>()
}

fn render(rows: &[Row]) -> String {
    let rate = |bytes_per_s: f64| format!("{}/s", size::format(bytes_per_s as u64));
    table::render(
        ["", "ceiling", "store", "store / ceiling (95 %)"],
        rows.iter().map(|row| {
            let Estimate { median, low, high } = row.store_to_raw;
            [
                row.mode.name().to_owned(),
                rate(row.raw_bytes_per_s),
                rate(row.store_bytes_per_s),
                format!("{:.1} % ({:.1}-{:.1})", 100.0 * median, 100.0 * low, 100.0 * high),
            ]
        }),
    )
}

/// Both sides, with all their files written once, and the way to a GPU if there is one to measure.
struct Bench {
    directories: Vec<PathBuf>,
    bytes: u64,
    raw: RawFiles,
    store: Store,
    blobs: Vec<Arc<Blob>>,
    buffers: Vec<Arc<Slot>>,
    ceilings: Option<Ceilings>,
}

impl Bench {
    fn prepare(args: &Args) -> Result<Bench> {
        ensure_there(args.device)?;
        let directories = args.spill.directories()?;
        let depth = args.depth as usize;
        let value = VALUE_BYTES.max(args.io_bytes) / args.io_bytes * args.io_bytes;
        let bytes = rounded(args.size, value, directories.len() as u64)?;
        let config = StoreConfig {
            directories: directories.clone(),
            // What the values take, plus slack so that each of them fits.
            cap_bytes: bytes.saturating_add(bytes / 4),
            backend: args.spill.backend(),
            encrypt: args.spill.encrypt(),
            queue_depth: depth,
            io_bytes: usize::try_from(args.io_bytes)?,
            ..StoreConfig::default()
        };
        let store = Store::open(config)?;
        let threads = store.path().backend() != "io_uring";
        let raw_depth = if threads { depth.min(MAX_THREADS) } else { depth };
        let io_bytes = usize::try_from(args.io_bytes)?;
        let gpu = match args.device {
            Device::Cuda(index) => Some(Arc::new(Gpu::open(index)?)),
            _ => None,
        };
        let pin: Arc<dyn Pin> = match &gpu {
            Some(gpu) => Arc::<Gpu>::clone(gpu),
            None => Arc::new(Unpinned),
        };
        let raw = RawFiles::create(&directories, bytes, io_bytes, raw_depth, threads, &pin)?;
        let blobs: Result<Vec<_>, _> = (0..bytes / value).map(|_| store.reserve(value)).collect();
        // Enough values in flight that the store never has to wait for the next one.
        let in_flight = (depth as u64 * args.io_bytes).div_ceil(value) + 2;
        let buffers = buffers(in_flight as usize, value as usize, &pin)?;
        let ceilings = gpu
            .map(|gpu| Ceilings::create(&gpu, args.copy_size, args.copy_bytes, args.copy_depth as usize))
            .transpose()?;
        let bench = Bench { directories, bytes, raw, store, blobs: blobs?, buffers, ceilings };
        bench.store_pass(Mode::Write)?;
        Ok(bench)
    }

    /// Both paths between a GPU and the disks, tested the way a cache that may choose tests them.
    fn try_paths(&self, args: &Args) -> Result<PathTrial> {
        let builder = TensorCache::builder().device(args.device).queue_depth(args.depth as usize);
        let builder = builder.encrypt(args.spill.encrypt());
        let spill = |builder: TensorCacheBuilder, directory: &PathBuf| builder.spill_to(directory);
        Ok(self.directories.iter().fold(builder, spill).host_pool(0).try_paths()?)
    }

    fn measure(&mut self, mode: Mode, raw_first: bool, times: &mut Times) -> Result<()> {
        for raw in [raw_first, !raw_first] {
            if raw {
                times.raw.push(self.raw.pass(mode)?.as_secs_f64());
            } else {
                times.store.push(self.store_pass(mode)?.as_secs_f64());
            }
        }
        Ok(())
    }

    /// Writes or reads every value once, and returns how long it took.
    fn store_pass(&self, mode: Mode) -> Result<Duration> {
        let (done, finished) = mpsc::channel();
        let mut free = self.buffers.clone();
        let start = Instant::now();
        for (index, blob) in self.blobs.iter().enumerate() {
            let buffer = match free.pop() {
                Some(buffer) => buffer,
                None => {
                    let (buffer, outcome): (_, ssdtrain_store::Result<()>) = finished.recv()?;
                    outcome?;
                    buffer
                }
            };
            let (blob, memory, done) =
                (Arc::clone(blob), Arc::clone(&buffer) as Arc<dyn IoBuf>, done.clone());
            // The receiver exists until all are done, unless one of them has failed; that one is reported.
            let ended = Completion::new(move |outcome| drop(done.send((buffer, outcome))));
            if mode.writes(index as u64) {
                self.store.write(blob, memory, ended);
            } else {
                self.store.read(blob, memory, ended);
            }
        }
        drop(done);
        finished.into_iter().try_for_each(|(_, outcome)| outcome)?;
        Ok(start.elapsed())
    }

    fn row(&self, args: &Args, mode: Mode, times: &Times) -> Row {
        let rate = |seconds: &[f64]| self.bytes as f64 / median(seconds);
        Row {
            mode,
            raw_bytes_per_s: rate(&times.raw),
            store_bytes_per_s: rate(&times.store),
            // A ratio of rates: the slower side has the longer time.
            store_to_raw: ratio_of_medians(&times.raw, &times.store, SEED),
            size: self.bytes,
            depth: args.depth,
            io_bytes: args.io_bytes,
            raw_path: self.raw.path(),
            io_path: self.store.path().to_string(),
        }
    }

    fn load(&self, args: &Args, load: Load, rates: Rates) -> LoadRow {
        LoadRow {
            load,
            rates,
            device: device_name(args.device),
            copy_size: args.copy_size,
            copy_bytes: args.copy_bytes,
            copy_depth: args.copy_depth,
            size: self.bytes,
            depth: args.depth,
            io_bytes: args.io_bytes,
            raw_path: self.raw.path(),
        }
    }
}

fn device_name(device: Device) -> String {
    match device {
        Device::Cuda(index) => format!("cuda:{index}"),
        _ => "cpu".to_owned(),
    }
}

fn io_bytes(text: &str) -> Result<u64, String> {
    let bytes = size::parse_positive(text)?.next_multiple_of(4096);
    if bytes > 1 << 30 { Err("give at most 1GiB".to_owned()) } else { Ok(bytes) }
}
