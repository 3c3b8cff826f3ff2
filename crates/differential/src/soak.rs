//! The endurance run: random programs in one process, on two threads with caches of their own, with disks and devices that fail now and then,
//! and a look at what the process holds.

use std::any::Any;
use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::Command;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ssdtrain_differential::{Lab, Op, Program, Programs, Slot, Verdict, said_by};
use ssdtrain_libtorch as torch;
use tch::{Device, Kind, TchError, Tensor};

use crate::batch::{begins, watch};

/// Programs of a run. All of them are run again and again, but for those that make something that holds itself: it stays for as long as
/// the process lives, with all that a cache keeps for it, and is not the cache's fault. Where autograd alone makes such a thing, the
/// program never runs with a cache; where only a segment does, the first turn shows it. So what stays is there from the first turn on.
const PROGRAMS: u64 = 1000;
/// By how many bytes more memory may be resident towards the end than before, since memory fragments.
const GROWTH: u64 = 32 << 20;

/// A run has so many turns at least.
const FEWEST: usize = 4;
/// What is counted where the settings make no cache.
const NO_CACHE: &str = "no-cache";
/// What is counted of transfers that could have been made to fail.
const TRANSFERS: &str = "transfers";
/// More threads than ever use a GPU at once.
const THREADS: usize = 16;
/// The setting that makes disks and devices fail.
const FAULTY: &str = "faulty";
/// The setting that has tensors on the first GPU.
const GPU: &str = "cuda";
/// The setting of a path through host memory of so many bytes to the disk, and so few that something goes on to the disk.
const STAGED: (&str, u64) = ("staged", 4 << 10);
/// A block whose branches run at once on threads of their own.
const PARALLEL: &str = "parallel";
/// What the CPU refuses with an error where arguments do not fit, and a GPU with an assertion, after which the process cannot use it any more.
const FATAL_ON_GPU: &[&str] = &["masked_scatter"];

/// What a process holds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Held {
    resident: u64,
    /// Bytes of the GPU that tensors have.
    device: u64,
    files: usize,
    threads: usize,
}

impl Held {
    fn now() -> Result<Held> {
        // What is free is not held, however much of it the allocators keep.
        torch::trim();
        let status = fs::read_to_string("/proc/self/status")?;
        let field = |name: &str| -> Option<u64> {
            status.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse().ok())
        };
        Ok(Held {
            resident: field("VmRSS:").context("no VmRSS in /proc/self/status")? << 10,
            device: torch::memory(Device::Cuda(0)).allocated,
            files: fs::read_dir("/proc/self/fd")?.count(),
            threads: field("Threads:").context("no Threads in /proc/self/status")? as usize,
        })
    }
}

/// The variable that tells the C library among how many arenas to spread a process's memory.
const ARENAS: &str = "MALLOC_ARENA_MAX";

/// Begins the process anew with one arena, unless the caller has chosen how many. What is free in the arena of one thread serves no other, so
/// with many of them a process grows for hours without holding more.
pub(crate) fn with_one_arena() -> Result<()> {
    if env::var_os(ARENAS).is_some() {
        return Ok(());
    }
    let this = env::current_exe().context("the path of this program")?;
    let error = Command::new(this).args(env::args_os().skip(1)).env(ARENAS, "1").exec();
    Err(error).context("this program cannot begin anew")
}

/// Runs programs for `time`, on the first GPU or on the CPU. Returns whether all bits were right and nothing was left over.
pub(crate) fn run(programs: &Programs, time: Duration, seed: u64, on_gpu: bool) -> Result<bool> {
    watch();
    let start = Instant::now();
    let mut drawn = drawn(programs, seed, PROGRAMS);
    if on_gpu {
        drawn.retain(|program| {
            !program.body.iter().any(|op| op.has(FATAL_ON_GPU)) && !has_overlapping_statistics(&program.body)
        });
        drawn.iter_mut().for_each(put_on_gpu);
        use_at_once()?;
    }
    let mut parts = Parts::new(drawn, on_gpu);
    let mut counts = Counts::new();
    let mut held = Vec::new();
    for turn in 0.. {
        let wrong = parts.turn(turn, &mut counts);
        if !wrong.is_empty() {
            println!("{}", wrong.join("\n"));
            return Ok(false);
        }
        held.push(Held::now()?);
        let Held { resident, device, files, threads } = held[held.len() - 1];
        let (seconds, resident) = (start.elapsed().as_secs(), resident >> 20);
        let of_gpu = if on_gpu { format!("{device} bytes of the GPU, ") } else { String::new() };
        println!("{seconds} s, {counts:?}, {resident} MiB, {of_gpu}{files} files, {threads} threads");
        if start.elapsed() >= time && held.len() >= FEWEST {
            break;
        }
    }
    let is_flat = is_flat(&held);
    if on_gpu && !is_flat {
        parts.name_those_that_grow(held.len() as u64);
    }
    Ok(is_flat)
}

/// How many programs had each verdict.
type Counts = BTreeMap<&'static str, u64>;

/// The programs of a run.
struct Parts {
    /// What two threads run at once.
    at_once: [Vec<Program>; 2],
    /// What draws random numbers runs alone: a segment is refused if another thread drew from its generator. So does, on a GPU, what
    /// threads record at once: a GPU has one queue for the backwards of all threads, and what else is in it decides the order of
    /// operations that were recorded at the same position of two threads, and with it the order in which gradients are added.
    alone: Vec<Program>,
}

impl Parts {
    fn new(programs: Vec<Program>, on_gpu: bool) -> Parts {
        let is_alone = |program: &Program| {
            program.is_ordered() || on_gpu && program.body.iter().any(|op| op.has(&[PARALLEL]))
        };
        let (alone, rest): (Vec<_>, Vec<_>) = programs.into_iter().partition(is_alone);
        // Programs in a row share a cache.
        let (one, other) = rest.split_at(rest.len() / 2);
        Parts { at_once: [one.to_vec(), other.to_vec()], alone }
    }

    /// Runs all of them. Returns what is wrong.
    fn turn(&mut self, turn: u64, counts: &mut Counts) -> Vec<String> {
        let mut wrong = at_once(&mut self.at_once, turn, counts);
        wrong.extend(told(|| all(&mut self.alone, turn, counts)));
        wrong
    }

    /// Runs them one after the other once more, and prints those after which tensors have more of the GPU than before.
    fn name_those_that_grow(&mut self, turn: u64) {
        let [one, other] = &mut self.at_once;
        for program in [one, other, &mut self.alone].into_iter().flatten() {
            let allocated = || torch::memory(Device::Cuda(0)).allocated;
            let before = allocated();
            let wrong = all(&mut vec![program.clone()], turn, &mut Counts::new());
            if allocated() > before {
                println!(
                    "{} bytes of the GPU more after\n{program}{}",
                    allocated() - before,
                    wrong.unwrap_or_default()
                );
            }
        }
    }
}

/// Runs each part on a thread of its own. Returns what is wrong.
fn at_once(parts: &mut [Vec<Program>; 2], turn: u64, counts: &mut Counts) -> Vec<String> {
    let done = thread::scope(|scope| {
        let threads = parts.each_mut().map(|part| {
            scope.spawn(move || {
                let mut counts = Counts::new();
                (told(|| all(part, turn, &mut counts)), counts)
            })
        });
        threads.map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
    });
    let add = |(wrong, of_part): (Option<String>, Counts)| {
        of_part.into_iter().for_each(|(name, count)| *counts.entry(name).or_default() += count);
        wrong
    };
    done.into_iter().filter_map(add).collect()
}

/// Programs of seeds in a row; half of their caches have disks and devices that fail.
fn drawn(programs: &Programs, seed: u64, count: u64) -> Vec<Program> {
    let with_faults = |seed| {
        begins();
        let mut program = programs.generate(seed);
        if seed / 10 % 2 == 0 {
            program.config.0.push((FAULTY, 0));
        }
        program
    };
    (seed..seed + count).map(with_faults).collect()
}

/// Whether a batch norm updates a mean and a variance that overlap: a GPU's threads do so at once, and who is last differs from run to run.
fn has_overlapping_statistics(body: &[Op]) -> bool {
    let view = |slot: &Slot| body.iter().find(|op| op.name == "narrow" && op.outputs.contains(slot));
    let overlap = |op: &Op| match op.inputs.get(3..).unwrap_or_default() {
        [mean, variance] => view(mean).zip(view(variance)).is_some_and(|(mean, variance)| {
            let apart = mean.numbers[1] - variance.numbers[1];
            mean.inputs == variance.inputs && apart.abs() < mean.numbers[2]
        }),
        _ => false,
    };
    body.iter().any(|op| op.name == "batch_norm" && overlap(op) || has_overlapping_statistics(&op.body))
}

/// Has a program's tensors on the GPU. Where transfers with the disk are to fail, they have to go there, and not to host memory.
fn put_on_gpu(program: &mut Program) {
    let config = &mut program.config;
    if config.0.contains(&(FAULTY, 0)) && config.spills() {
        config.0.push(STAGED);
    }
    config.0.push((GPU, 0));
}

/// Has as many threads at once use the GPU as ever will: libtorch keeps what each of them has to multiply with, 32 MiB of the GPU's memory
/// among it, and gives it to later threads.
fn use_at_once() -> Result<(), TchError> {
    let all_use_it = Barrier::new(THREADS);
    let multiply = || {
        let x = Tensor::f_ones([8, 8], (Kind::Float, Device::Cuda(0)));
        let product = x.and_then(|x| x.f_addmm(&x, &x));
        all_use_it.wait();
        product.map(drop)
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(multiply)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

/// What a run finds wrong, panics of its own included, which nobody has printed.
fn told(run: impl FnOnce() -> Option<String>) -> Option<String> {
    let panic = |panic: Box<dyn Any + Send>| Some(format!("a panic between programs: {}", said_by(&*panic)));
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(panic)
}

/// Runs all programs, each with a cache for several of them, and removes those that leave something behind. Returns what is wrong.
fn all(programs: &mut Vec<Program>, turn: u64, counts: &mut Counts) -> Option<String> {
    let (mut lab, mut wrong): (Option<Lab>, _) = (None, None);
    programs.retain_mut(|program| {
        if wrong.is_some() {
            return true;
        }
        begins();
        program.config.0.iter_mut().filter(|(name, _)| *name == FAULTY).for_each(|(_, value)| *value = turn);
        if !lab.as_ref().is_some_and(|lab| lab.fits(program)) {
            lab = Lab::new(&program.config).map(Lab::to_last).ok();
        }
        let Some(lab) = &lab else {
            *counts.entry(NO_CACHE).or_default() += 1;
            return false;
        };
        let before = lab.transfers();
        let verdict = lab.check(program);
        *counts.entry(TRANSFERS).or_default() += lab.transfers() - before;
        if verdict.is_wrong() {
            wrong = Some(format!("{verdict}\n{program}"));
        } else if verdict == Verdict::Varies {
            println!("{verdict}\n{program}");
        }
        *counts.entry(verdict.name()).or_default() += 1;
        verdict != Verdict::HoldsItself
    });
    wrong
}

/// Whether the last half of the run held no more than the second quarter.
fn is_flat(held: &[Held]) -> bool {
    let quarter = held.len() / 4;
    let most = |of: fn(&Held) -> u64, part: &[Held]| part.iter().map(of).max().unwrap_or_default();
    let grown = |of: fn(&Held) -> u64, by: u64| {
        most(of, &held[2 * quarter..]) > most(of, &held[quarter..2 * quarter]) + by
    };
    let found = [
        ("memory", grown(|held| held.resident, GROWTH)),
        ("memory of the GPU", grown(|held| held.device, 0)),
        ("open files", grown(|held| held.files as u64, 0)),
        ("threads", grown(|held| held.threads as u64, 0)),
    ];
    for (what, _) in found.iter().filter(|(_, has_grown)| *has_grown) {
        println!("{what}: more towards the end than before");
    }
    found.iter().all(|(_, has_grown)| !has_grown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_grows_is_told_from_what_is_there_from_the_start() {
        let steady = Held { resident: 100 << 20, device: 0, files: 10, threads: 4 };
        let run = |last: Held| [vec![steady; 6], vec![last; 2]].concat();
        assert!(is_flat(&run(steady)));
        assert!(!is_flat(&run(Held { resident: 200 << 20, ..steady })));
        assert!(!is_flat(&run(Held { device: 512, ..steady })));
        assert!(!is_flat(&run(Held { files: 11, ..steady })));
        assert!(!is_flat(&run(Held { threads: 5, ..steady })));
        let first = Held { resident: 300 << 20, files: 20, threads: 9, ..steady };
        assert!(is_flat(&[vec![first; 2], vec![steady; 6]].concat()));
    }

    #[test]
    fn a_panic_between_programs_is_told() {
        assert_eq!(told(|| None), None);
        assert_eq!(told(|| panic!("no memory")), Some("a panic between programs: no memory".to_owned()));
    }

    #[test]
    fn statistics_overlap_where_their_views_do() {
        let overlap = |start: usize| {
            let text = format!(
                "cache\nseed 1\n%0 = leaf 1 2 2\n%1 = leaf 1 2\n%2 = constant 1 4\nstep 0 {{\n  %3 = narrow %2 0 0 2\n  \
                 %4 = narrow %2 0 {start} 2\n  %5 = batch_norm %0 %1 %1 %3 %4 1\n}}\n"
            );
            has_overlapping_statistics(&text.parse::<Program>().unwrap().body)
        };
        assert_eq!([0, 1, 2].map(overlap), [true, true, false]);
    }

    #[test]
    fn what_holds_itself_within_a_function_is_seen() {
        let text = "cache keep\nseed 1\n%0 = parameter 1 32\nstep 0 {\n  %1 = remat %0 {\n    %2 = gelu %0\n    \
                    %3 = layer_norm %2 %0 %0\n    add_ %2 %3\n  }\n}\n";
        let mut counts = Counts::new();
        let mut programs = vec![text.parse().unwrap()];
        assert_eq!(all(&mut programs, 0, &mut counts), None);
        assert_eq!((programs, counts.get("holds-itself")), (vec![], Some(&1)));
    }

    #[test]
    fn a_short_run_has_right_bits_whatever_fails() {
        let mut parts = Parts::new(drawn(&Programs::default(), 8_000, 200), false);
        let mut counts = Counts::new();
        for turn in 0..2 {
            assert_eq!(parts.turn(turn, &mut counts), Vec::<String>::new());
        }
        assert!(parts.at_once.iter().chain([&parts.alone]).all(|part| part.len() > 20));
        assert!(
            ["fails-io", "fails-device", "agrees"].iter().all(|name| counts.contains_key(name)),
            "{counts:?}"
        );
    }
}
