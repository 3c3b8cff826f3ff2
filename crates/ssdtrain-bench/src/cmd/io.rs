//! `io`: what the disks can do, and how much of it the store gets.

use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::value_parser;
use serde::Serialize;
use ssdtrain::store::{Blob, Completion, IoBuf, Pin, Slot, Store, StoreConfig};

use crate::cache::{Backend, spill_directories};
use crate::memory::{Unpinned, buffers};
use crate::progress::Progress;
use crate::raw::{Mode, RawFiles, rounded};
use crate::stats::{Estimate, median, ratio_of_medians};
use crate::{defaults, size, table};

/// The store moves values of about this size: that of an activation of a middling model.
const VALUE_BYTES: u64 = 8 << 20;
/// More threads than this add nothing to a pool; the store has no more either.
const MAX_THREADS: usize = 16;
const SEED: u64 = 1;

/// Measure the raw speed of the disks, and that of the store beside it
///
/// The ceiling is a plain loop of O_DIRECT transfers of the same size, as many under way at once, over files that
/// were written before. Both move memory in huge pages. Ceiling and store take turns, pass by pass, in an order that changes from round to round.
/// Figures are medians over the rounds; the share has a 95 % interval (bootstrap over rounds).
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Directory to measure; repeat it to measure several disks at once. Without it: where train would spill to
    #[arg(long = "dir", value_name = "DIR")]
    dirs: Vec<PathBuf>,
    /// Bytes moved in each pass, rounded up to whole values
    #[arg(long, value_name = "SIZE", default_value = defaults::IO_SIZE, value_parser = size::parse_positive)]
    size: u64,
    /// Transfers under way at once
    #[arg(long, value_name = "N", default_value = defaults::QUEUE_DEPTH, value_parser = value_parser!(u32).range(1..=4096))]
    depth: u32,
    /// Bytes of each transfer, rounded up to a multiple of 4 KiB; at most 1GiB
    #[arg(long, value_name = "SIZE", default_value = defaults::IO_BYTES, value_parser = io_bytes)]
    io_bytes: u64,
    /// How bytes are moved; with "pool" the ceiling is measured with threads too
    #[arg(long, value_enum, default_value_t)]
    backend: Backend,
    /// Measured passes of each kind
    #[arg(long, value_name = "N", default_value = defaults::IO_ROUNDS, value_parser = value_parser!(u32).range(1..=10_000))]
    rounds: u32,
    /// Print one JSON object per mode, each on one line
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  ssdtrain-bench io
  ssdtrain-bench io --dir /mnt/nvme0 --dir /mnt/nvme1 --size 4GiB
  ssdtrain-bench io --depth 8 --io-bytes 256KiB --json

JSON: mode, raw_bytes_per_s, store_bytes_per_s, store_to_raw {median, low, high}, size, depth, io_bytes, raw_path,
io_path.";

pub(crate) fn run(args: &Args) -> Result<()> {
    let progress = Progress::new(args.json);
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

    let mut times = [const { Times { raw: Vec::new(), store: Vec::new() } }; Mode::ALL.len()];
    progress.start();
    for round in 0..args.rounds {
        progress.at(f64::from(round) / f64::from(args.rounds));
        for (mode, times) in Mode::ALL.into_iter().zip(&mut times) {
            bench.measure(mode, round.is_multiple_of(2), times)?;
        }
    }
    progress.clear();
    let rows: Vec<_> =
        Mode::ALL.into_iter().zip(&times).map(|(mode, times)| bench.row(args, mode, times)).collect();
    if args.json {
        return rows.iter().try_for_each(table::print_json);
    }
    println!("\n{}", render(&rows));
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

/// Both sides, with all their files written once.
struct Bench {
    directories: Vec<PathBuf>,
    bytes: u64,
    raw: RawFiles,
    store: Store,
    blobs: Vec<Arc<Blob>>,
    buffers: Vec<Arc<Slot>>,
}

impl Bench {
    fn prepare(args: &Args) -> Result<Bench> {
        let directories = spill_directories(&args.dirs)?;
        let depth = args.depth as usize;
        let value = VALUE_BYTES.max(args.io_bytes) / args.io_bytes * args.io_bytes;
        let bytes = rounded(args.size, value, directories.len() as u64)?;
        let config = StoreConfig {
            directories: directories.clone(),
            // What the values take, and room for the fit of each.
            cap_bytes: bytes.saturating_add(bytes / 4),
            backend: args.backend.kind(),
            queue_depth: depth,
            io_bytes: usize::try_from(args.io_bytes)?,
            ..StoreConfig::default()
        };
        let store = Store::open(config)?;
        let threads = store.path().backend() != "io_uring";
        let raw_depth = if threads { depth.min(MAX_THREADS) } else { depth };
        let io_bytes = usize::try_from(args.io_bytes)?;
        let pin: Arc<dyn Pin> = Arc::new(Unpinned);
        let raw = RawFiles::create(&directories, bytes, io_bytes, raw_depth, threads, &pin)?;
        let blobs: Result<Vec<_>, _> = (0..bytes / value).map(|_| store.reserve(value)).collect();
        // Enough values under way that the store never waits for the next one.
        let in_flight = (depth as u64 * args.io_bytes).div_ceil(value) + 2;
        let buffers = buffers(in_flight as usize, value as usize, &pin)?;
        let bench = Bench { directories, bytes, raw, store, blobs: blobs?, buffers };
        bench.store_pass(Mode::Write)?;
        Ok(bench)
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
                    let (buffer, outcome): (_, ssdtrain::Result<()>) = finished.recv()?;
                    outcome?;
                    buffer
                }
            };
            let (blob, memory, done) =
                (Arc::clone(blob), Arc::clone(&buffer) as Arc<dyn IoBuf>, done.clone());
            // The other end is there until all are done, unless one of them failed; that one is told.
            let ended: Completion = Box::new(move |outcome| drop(done.send((buffer, outcome))));
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
            // Of rates: the slower side has the longer time.
            store_to_raw: ratio_of_medians(&times.raw, &times.store, SEED),
            size: self.bytes,
            depth: args.depth,
            io_bytes: args.io_bytes,
            raw_path: self.raw.path(),
            io_path: self.store.path().to_string(),
        }
    }
}

fn io_bytes(text: &str) -> Result<u64, String> {
    let bytes = size::parse_positive(text)?.next_multiple_of(4096);
    if bytes > 1 << 30 { Err("give at most 1GiB".to_owned()) } else { Ok(bytes) }
}
