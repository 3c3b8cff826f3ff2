//! The trace file: JSON that Chrome's trace viewer and Perfetto read.

use std::fmt::{self, Write as _};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::time::Instant;

use ssdtrain_store::Direction;

use super::rows::{Extent, arrange};
use super::{Counter, Log, Name, Trace, TraceEvent, Track};
use crate::device::Lane;
use crate::error::{Error, ErrorKind, Result};
use crate::telemetry::{Scopes, StallCause};

/// One cache in the file, with a name for people. Viewers call it a process.
pub(crate) struct Process<'a> {
    pub(crate) name: &'a str,
    pub(crate) trace: &'a Trace,
    pub(crate) scopes: &'a Scopes,
}

/// What is written for one cache: everything whose times are known.
struct Picture {
    tracks: Vec<Lines>,
    samples: Vec<(Counter, Instant, u64)>,
    dropped: u64,
    /// Spans that the device has failed to time, or that were recorded in the meantime.
    untimed: usize,
}

/// The spans of one track.
struct Lines {
    track: Track,
    title: String,
    spans: Vec<(Name, Instant, Instant, Option<u64>)>,
}

/// Writes what the caches have recorded so far, on one time line.
pub(crate) fn write(path: &Path, processes: &[Process<'_>]) -> Result<()> {
    let pictures: Vec<_> = processes.iter().map(|process| Picture::of(process.trace)).collect();
    for (process, picture) in processes.iter().zip(&pictures) {
        if picture.dropped > 0 {
            tracing::warn!(
                dropped = picture.dropped,
                trace = process.name,
                "a trace has only its latest events: earlier ones were dropped"
            );
        }
    }
    let written = File::create(path).and_then(|file| {
        let mut out = BufWriter::new(file);
        write_to(&mut out, processes, &pictures)?;
        out.flush()
    });
    written.map_err(|error| {
        Error::io(ErrorKind::Io, format!("the trace {} cannot be written", path.display()), error)
    })
}

fn write_to(out: &mut impl Write, processes: &[Process<'_>], pictures: &[Picture]) -> io::Result<()> {
    let start = pictures.iter().filter_map(Picture::start).min().unwrap_or_else(Instant::now);
    let mut list = List { out, pid: 0, start, separator: "" };
    write!(list.out, "{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
    for (process, picture) in processes.iter().zip(pictures) {
        list.pid += 1;
        list.process(process, picture)?;
    }
    write!(list.out, "\n],\"otherData\":{{")?;
    for (index, (process, picture)) in processes.iter().zip(pictures).enumerate() {
        let (comma, name) = (if index > 0 { "," } else { "" }, Text(process.name));
        let Picture { dropped, untimed, .. } = picture;
        write!(list.out, "{comma}{name}:{{\"dropped_events\":{dropped},\"untimed_events\":{untimed}}}")?;
    }
    writeln!(list.out, "}}}}")
}

/// The list of events written so far.
struct List<'a, W> {
    out: &'a mut W,
    pid: u64,
    start: Instant,
    separator: &'static str,
}

impl<W: Write> List<'_, W> {
    fn process(&mut self, process: &Process<'_>, picture: &Picture) -> io::Result<()> {
        self.name("process_name", 0, process.name)?;
        // Line numbers are unique across processes, and in the order in which viewers show the lines.
        let mut tid = 1_000 * self.pid;
        for Lines { track, title, spans } in &picture.tracks {
            let mut extents: Vec<Extent> =
                spans.iter().map(|&(_, from, to, _)| (self.nanos(from), self.nanos(to))).collect();
            let rows = arrange(&mut extents, track.nests());
            let lines = rows.iter().max().map_or(0, |last| last + 1);
            for row in 0..lines {
                let number = if row > 0 { format!(" {}", row + 1) } else { String::new() };
                self.name("thread_name", tid + row as u64, &format!("{title}{number}"))?;
            }
            for ((&(name, _, _, bytes), extent), row) in spans.iter().zip(extents).zip(rows) {
                let scope = &name.scope(process.scopes);
                self.span(*track, name, scope, bytes, extent, tid + row as u64)?;
            }
            tid += lines as u64;
        }
        for &(counter, at, bytes) in &picture.samples {
            let (name, ts) = (Text(counter.title()), Micros(self.nanos(at)));
            self.event(format_args!(
                "\"ph\":\"C\",\"name\":{name},\"ts\":{ts},\"args\":{{\"bytes\":{bytes}}}"
            ))?;
        }
        Ok(())
    }

    fn span(
        &mut self,
        track: Track,
        name: Name,
        scope: &str,
        bytes: Option<u64>,
        (from, to): Extent,
        tid: u64,
    ) -> io::Result<()> {
        let shown = name.title(scope);
        let mut args = String::new();
        if !scope.is_empty() {
            _ = write!(args, "\"scope\":{}", Text(scope));
        }
        if let Some(bytes) = bytes {
            let comma = if args.is_empty() { "" } else { "," };
            _ = write!(args, "{comma}\"bytes\":{bytes}");
            if to > from {
                _ = write!(args, ",\"GB/s\":{:.3}", bytes as f64 / (to - from) as f64);
            }
        }
        let (category, shown) = (name.category(track), Text(&shown));
        let (ts, dur) = (Micros(from), Micros(to - from));
        self.event(format_args!(
            "\"ph\":\"X\",\"cat\":\"{category}\",\"name\":{shown},\"tid\":{tid},\"ts\":{ts},\"dur\":{dur},\"args\":{{{args}}}"
        ))
    }

    /// Names a process or a line.
    fn name(&mut self, what: &str, tid: u64, name: &str) -> io::Result<()> {
        let name = Text(name);
        self.event(format_args!(
            "\"ph\":\"M\",\"name\":\"{what}\",\"tid\":{tid},\"args\":{{\"name\":{name}}}"
        ))?;
        if what == "thread_name" {
            let order = format_args!("\"ph\":\"M\",\"name\":\"thread_sort_index\",\"tid\":{tid}");
            self.event(format_args!("{order},\"args\":{{\"sort_index\":{tid}}}"))?;
        }
        Ok(())
    }

    fn event(&mut self, fields: fmt::Arguments<'_>) -> io::Result<()> {
        let separator = std::mem::replace(&mut self.separator, ",");
        write!(self.out, "{separator}\n{{\"pid\":{},{fields}}}", self.pid)
    }

    fn nanos(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.start).as_nanos()).unwrap_or(u64::MAX)
    }
}

impl Picture {
    fn of(trace: &Trace) -> Picture {
        trace.block();
        let log = trace.log.lock();
        let mut picture =
            Picture { tracks: Vec::new(), samples: Vec::new(), dropped: log.dropped, untimed: 0 };
        for event in &log.events {
            match event {
                TraceEvent::Sample { counter, at, bytes } => picture.samples.push((*counter, *at, *bytes)),
                TraceEvent::Span(span) => match (span.from.host(), span.to.host()) {
                    // The copy had ended when the queue came to wait for it.
                    (Some(from), Some(to)) if matches!(span.name, Name::Stall(_)) && to <= from => {}
                    (Some(from), Some(to)) => {
                        let to = to.max(from);
                        picture.lines(&log, span.track).spans.push((span.name, from, to, span.bytes));
                    }
                    _ => picture.untimed += 1,
                },
            }
        }
        drop(log);
        picture.tracks.sort_by_key(|lines| lines.track.order());
        picture
    }

    fn lines(&mut self, log: &Log, track: Track) -> &mut Lines {
        let known = self.tracks.iter().position(|lines| lines.track == track);
        let index = known.unwrap_or_else(|| {
            self.tracks.push(Lines { track, title: track.title(log), spans: Vec::new() });
            self.tracks.len() - 1
        });
        &mut self.tracks[index]
    }

    fn start(&self) -> Option<Instant> {
        let spans = self.tracks.iter().flat_map(|lines| &lines.spans).map(|&(_, from, ..)| from);
        spans.chain(self.samples.iter().map(|&(_, at, _)| at)).min()
    }
}

impl Track {
    fn title(self, log: &Log) -> String {
        match self {
            Track::Thread(number) => {
                let name = log.threads.iter().find(|(known, _)| *known == number);
                format!("thread {}", name.map_or("without a name", |(_, name)| name))
            }
            Track::Device(Lane::Compute) => "device: compute".to_owned(),
            Track::Device(Lane::Out) => "device: copies out".to_owned(),
            Track::Device(Lane::In) => "device: copies in".to_owned(),
            Track::Disk(Direction::Write) => "disk: writes".to_owned(),
            Track::Disk(Direction::Read) => "disk: reads".to_owned(),
        }
    }

    fn order(self) -> u8 {
        match self {
            Track::Thread(_) => 0,
            Track::Device(Lane::Compute) => 1,
            Track::Device(Lane::Out) => 2,
            Track::Device(Lane::In) => 3,
            Track::Disk(Direction::Write) => 4,
            Track::Disk(Direction::Read) => 5,
        }
    }

    /// Whether spans may contain each other.
    fn nests(self) -> bool {
        matches!(self, Track::Thread(_) | Track::Device(Lane::Compute))
    }
}

impl Name {
    /// The path of its scope, if it has one.
    fn scope(self, scopes: &Scopes) -> String {
        match self {
            Name::Scope(scope) | Name::Moved(scope, _) => scopes.name(scope),
            Name::Step(_) | Name::Backward | Name::Wait(_) | Name::Stall(_) => String::new(),
        }
    }

    fn title(self, scope: &str) -> String {
        match self {
            Name::Step(number) => format!("step {number}"),
            Name::Backward => "backward".to_owned(),
            // Viewers add up scopes of the same name, so this is the last part; the path is an argument.
            Name::Scope(_) => scope.rsplit('/').next().unwrap_or(scope).to_owned(),
            Name::Wait(what) => what.to_owned(),
            Name::Stall(StallCause::DeviceBudget) => "stall: device budget".to_owned(),
            Name::Stall(StallCause::HostPool) => "stall: host pool".to_owned(),
            Name::Stall(StallCause::Load) => "stall: load".to_owned(),
            Name::Stall(StallCause::CopyIn) => "stall: copy in".to_owned(),
            Name::Stall(StallCause::Memory) => "stall: memory".to_owned(),
            Name::Moved(_, failed) => {
                let scope = if scope.is_empty() { "outside scopes" } else { scope };
                if failed { format!("failed: {scope}") } else { scope.to_owned() }
            }
        }
    }

    fn category(self, track: Track) -> &'static str {
        match (self, track) {
            (Name::Step(_) | Name::Backward, _) => "step",
            (Name::Scope(_), _) => "scope",
            (Name::Wait(_), _) => "wait",
            (Name::Stall(_), _) => "stall",
            (Name::Moved(..), Track::Disk(Direction::Write)) => "disk write",
            (Name::Moved(..), Track::Disk(Direction::Read)) => "disk read",
            (Name::Moved(..), Track::Device(Lane::In)) => "copy in",
            (Name::Moved(..), _) => "copy out",
        }
    }
}

impl Counter {
    fn title(self) -> &'static str {
        match self {
            Counter::Device => "device bytes held by the cache",
            Counter::HostPool => "host pool bytes in use",
        }
    }
}

/// Nanoseconds, written as microseconds.
struct Micros(u64);

impl fmt::Display for Micros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:03}", self.0 / 1_000, self.0 % 1_000)
    }
}

/// A JSON string.
struct Text<'a>(&'a str);

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('"')?;
        for c in self.0.chars() {
            match c {
                '"' | '\\' => write!(f, "\\{c}")?,
                c if c.is_control() => write!(f, "\\u{:04x}", u32::from(c))?,
                c => f.write_char(c)?,
            }
        }
        f.write_char('"')
    }
}
