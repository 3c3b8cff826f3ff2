//! The long run: batches of programs in child processes, so that a program that crashes its process is known by its
//! seed.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ssdtrain_differential::{Program, Programs, shrink};

const BATCH: u64 = 100;
const SHRINKING: &str = "20";

/// What a child, or the thread that reads from it, reports.
enum News {
    Verdict(String),
    Failure { seed: u64, text: String },
}

/// Runs programs from `seed` on for `time`, or until enough of them fail; returns how many did.
pub(crate) fn run(
    programs: &Programs,
    time: Duration,
    seed: u64,
    jobs: usize,
    failures: usize,
) -> Result<usize> {
    let start = Instant::now();
    let next = AtomicU64::new(seed);
    let failed = AtomicUsize::new(0);
    let (sender, receiver) = mpsc::channel();
    let goes_on = || start.elapsed() < time && failed.load(Ordering::Relaxed) < failures;
    thread::scope(|scope| {
        for _ in 0..jobs {
            let sender = sender.clone();
            let (next, goes_on) = (&next, &goes_on);
            scope.spawn(move || {
                while goes_on() {
                    let first = next.fetch_add(BATCH, Ordering::Relaxed);
                    if let Err(error) = batch(programs, first, first + BATCH, &sender, goes_on) {
                        eprintln!("batch from {first}: {error:#}");
                        return;
                    }
                }
            });
        }
        drop(sender);
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        for news in receiver {
            match news {
                News::Verdict(name) => *counts.entry(name).or_default() += 1,
                News::Failure { seed, text } => {
                    failed.fetch_add(1, Ordering::Relaxed);
                    println!("seed {seed}:\n{text}");
                }
            }
        }
        println!("{} s from seed {seed}, {counts:?}", start.elapsed().as_secs());
    });
    Ok(failed.into_inner())
}

/// Runs the seeds from `first` up to but not including `end`, in as many processes as necessary.
fn batch(
    programs: &Programs,
    mut first: u64,
    end: u64,
    news: &mpsc::Sender<News>,
    goes_on: &dyn Fn() -> bool,
) -> Result<()> {
    while first < end && goes_on() {
        let program = std::env::current_exe()?;
        let (from, count) = (first.to_string(), (end - first).to_string());
        let mut child = Command::new(program)
            .args(["batch", &from, &count, SHRINKING])
            .args(theme(programs))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot run a child process")?;
        let out = child.stdout.take().context("a child without an output")?;
        let mut under_way = None;
        let mut hangs = false;
        let mut text = String::new();
        for line in BufReader::new(out).lines() {
            let line = line?;
            let mut words = line.splitn(3, ' ');
            let (what, seed) = (words.next(), words.next().and_then(|seed| seed.parse().ok()));
            match (what, seed) {
                (Some("begin"), Some(seed)) => {
                    under_way = Some(seed);
                    first = seed;
                }
                (Some("|"), _) => text.push_str(&format!("{}\n", &line[2..])),
                (Some("hang"), _) => hangs = true,
                (Some("end"), Some(seed)) => {
                    under_way = None;
                    first = seed + 1;
                    let name = words.next().unwrap_or_default().to_owned();
                    if name == "wrong" {
                        // The receiver outlives this.
                        drop(news.send(News::Failure { seed, text: std::mem::take(&mut text) }));
                    }
                    drop(news.send(News::Verdict(name)));
                    if !goes_on() {
                        // The rest of the batch is not wanted.
                        child.kill()?;
                        break;
                    }
                }
                _ => {}
            }
        }
        let status = child.wait()?;
        if let Some(seed) = under_way.filter(|_| !status.success()) {
            let Some(program) = show(programs, seed) else {
                // It happens without the cache too.
                drop(news.send(News::Verdict("unmade".to_owned())));
                first = seed + 1;
                continue;
            };
            let (name, how, program) = if hangs {
                // Every run while shrinking it would take a minute.
                ("hangs", "does not end".to_owned(), program)
            } else {
                ("dies", format!("ends its process: {status}"), shrink(&program, dies))
            };
            drop(news.send(News::Failure { seed, text: format!("{how}\n{program}") }));
            drop(news.send(News::Verdict(name.to_owned())));
            first = seed + 1;
        }
    }
    Ok(())
}

/// The arguments that make a child generate such programs.
fn theme(programs: &Programs) -> impl Iterator<Item = &'static str> {
    programs.often().into_iter().flat_map(|name| ["--with", name])
}

/// The program of `seed`, if another process survives generating it.
fn show(programs: &Programs, seed: u64) -> Option<Program> {
    let mut command = Command::new(std::env::current_exe().ok()?);
    let output = command.args(["show", &seed.to_string()]).args(theme(programs)).output().ok()?;
    String::from_utf8(output.stdout).ok()?.parse().ok().filter(|_| output.status.success())
}

/// Whether `program` crashes a process of its own.
fn dies(program: &Program) -> bool {
    let check = || -> Result<bool> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["check", "--times", "3"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        child.stdin.take().context("no input")?.write_all(program.to_string().as_bytes())?;
        // 0 is right, 1 is wrong, 2 could not be read; anything else means that the process crashed.
        Ok(child.wait()?.code().is_none_or(|code| code > 2))
    };
    check().unwrap_or(false)
}
