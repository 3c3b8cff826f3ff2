//! The work of a child process: one program after the other, with a line before and after each.

use std::io::Write;
use std::process;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ssdtrain_differential::{Lab, Programs, Verdict, check, shrink};

/// A program takes milliseconds.
const LONGEST: Duration = Duration::from_secs(60);

/// When the first program began, and how many milliseconds later the current one.
static FIRST: OnceLock<Instant> = OnceLock::new();
static BEGUN: AtomicU64 = AtomicU64::new(0);

/// Runs `count` programs, starting with seed `first`.
pub(crate) fn run(programs: &Programs, first: u64, count: u64, shrinking: Duration) {
    watch();
    let mut lab: Option<Lab> = None;
    for seed in first..first + count {
        begins();
        say(&format!("begin {seed}"));
        let program = programs.generate(seed);
        if !lab.as_ref().is_some_and(|lab| lab.fits(&program)) {
            lab = Lab::new(&program.config).ok();
        }
        let verdict = match &lab {
            Some(lab) => lab.check(&program),
            None => Verdict::NoCache(String::new()),
        };
        let Verdict::Differs(how) = verdict else {
            say(&format!("end {seed} {}", verdict.name()));
            continue;
        };
        say(&format!("wrong {seed}"));
        // What it holds may be what was wrong.
        lab = None;
        let until = Instant::now() + shrinking;
        let kind = kind(&how);
        let smaller = shrink(&program, |candidate| {
            begins();
            Instant::now() < until && (0..2).any(|_| is_of_kind(&check(candidate), kind))
        });
        begins();
        let found = (0..20).map(|_| check(&smaller)).find(Verdict::is_wrong);
        let how = found.map_or_else(
            || format!("{how}\nnot every time, or not with a new cache"),
            |verdict| verdict.to_string(),
        );
        let lines: Vec<String> =
            format!("{how}\n{smaller}").lines().map(|line| format!("| {line}")).collect();
        say(&lines.join("\n"));
        say(&format!("end {seed} wrong"));
    }
}

/// A rough description of what went wrong: its first words.
fn kind(how: &str) -> &str {
    const KINDS: [&str; 5] = ["differs", "panic", "are held", "an error that plain", "the cache has none"];
    KINDS.iter().find(|kind| how.contains(**kind)).copied().unwrap_or("")
}

fn is_of_kind(verdict: &Verdict, kind: &str) -> bool {
    matches!(verdict, Verdict::Differs(how) if how.contains(kind))
}

/// A program begins.
pub(crate) fn begins() {
    let first = FIRST.get_or_init(Instant::now);
    BEGUN.store(first.elapsed().as_millis() as u64, Ordering::Relaxed);
}

/// Ends the process if a program takes too long.
pub(crate) fn watch() {
    let start = *FIRST.get_or_init(Instant::now);
    let look = move || {
        loop {
            thread::sleep(Duration::from_millis(500));
            let begun = Duration::from_millis(BEGUN.load(Ordering::Relaxed));
            if start.elapsed().saturating_sub(begun) > LONGEST {
                say("hang");
                process::abort();
            }
        }
    };
    if let Err(error) = thread::Builder::new().name("watchdog".to_owned()).spawn(look) {
        eprintln!("no watchdog: {error}");
    }
}

/// Prints a line and flushes it before anything else happens.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // Without a reader there is nobody to tell.
    drop(writeln!(out, "{line}").and_then(|()| out.flush()));
}
