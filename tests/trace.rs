//! The trace shows what happened, when and where.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use common::{everything, leaf, randn, staged, staged_in_memory};
use serde_json::Value;
use ssdtrain::{
    ErrorKind, MIB, Offload, StallReport, StepReport, TensorCache, TensorCacheBuilder, write_traces,
};
use tch::{Kind, Tensor};

const LAYERS: usize = 12;

/// A chain of layers, each in a scope of its own, that save 1 MiB each.
fn chain(x: &Tensor) -> Tensor {
    let layer = |y: Tensor, index: usize| {
        let _block = ssdtrain::scope(&format!("block.{index}"));
        let _mlp = ssdtrain::scope("mlp");
        (y * 1.01).sin()
    };
    (0..LAYERS).fold(x * 1.0, layer).sum(Kind::Float)
}

/// Returns the report of the last step.
fn train(cache: &TensorCache, steps: usize) -> StepReport {
    let x = leaf(&randn(&[512, 512]));
    let mut last = StepReport::default();
    for _ in 0..steps {
        let step = cache.step();
        step.backward(&chain(&x)).unwrap();
        last = step.finish().unwrap();
    }
    last
}

/// One complete event.
#[derive(Clone, Debug)]
struct Span {
    pid: u64,
    line: String,
    category: String,
    name: String,
    from: f64,
    to: f64,
    args: Value,
}

struct Picture {
    file: Value,
    spans: Vec<Span>,
}

impl Picture {
    fn read(path: &std::path::Path) -> Picture {
        let file: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let events = file["traceEvents"].as_array().unwrap();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let line = |event: &Value| (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
        let lines: BTreeMap<_, _> = events
            .iter()
            .filter(|event| event["name"] == "thread_name")
            .map(|event| (line(event), text(&event["args"]["name"])))
            .collect();
        let spans = events.iter().filter(|event| event["ph"] == "X").map(|event| {
            let from = event["ts"].as_f64().unwrap();
            Span {
                pid: line(event).0,
                line: lines[&line(event)].clone(),
                category: text(&event["cat"]),
                name: text(&event["name"]),
                from,
                to: from + event["dur"].as_f64().unwrap(),
                args: event["args"].clone(),
            }
        });
        let spans = spans.collect();
        Picture { file, spans }
    }

    fn of(cache: &TensorCache) -> Picture {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("trace.json");
        cache.write_trace(&path).unwrap();
        Picture::read(&path)
    }

    fn on(&self, line: &str) -> Vec<&Span> {
        self.spans.iter().filter(|span| span.line.starts_with(line)).collect()
    }

    fn of_category(&self, category: &str) -> Vec<&Span> {
        self.spans.iter().filter(|span| span.category == category).collect()
    }
}

/// A cache whose tensors go all the way: out, to the disk, and back.
fn tight() -> TensorCacheBuilder {
    staged().host_pool(4 * MIB).policy(Offload::default().device_budget(2 * MIB).prefetch(MIB)).trace(true)
}

#[test]
fn what_is_offloaded_is_seen_on_its_way_out_and_back() {
    let cache = tight().build().unwrap();
    train(&cache, 2);
    let picture = Picture::of(&cache);
    for (category, line) in [
        ("copy out", "device: copies out"),
        ("copy in", "device: copies in"),
        ("disk write", "disk: writes"),
        ("disk read", "disk: reads"),
    ] {
        let spans = picture.of_category(category);
        assert!(!spans.is_empty(), "no {category}");
        let block = spans.iter().find(|span| span.name.starts_with("block.")).unwrap();
        assert_eq!(block.args["bytes"], MIB, "{block:?}");
        assert!(block.name.ends_with("/mlp") && block.line.starts_with(line), "{block:?}");
    }
}

#[test]
fn tensors_of_the_cpu_go_straight_to_the_disk() {
    let cache = everything().trace(true).build().unwrap();
    train(&cache, 1);
    let picture = Picture::of(&cache);
    assert!(!picture.of_category("disk write").is_empty());
    assert!(picture.on("device").is_empty());
}

#[test]
fn bytes_moved_are_those_of_the_store() {
    let cache = tight().build().unwrap();
    train(&cache, 3);
    let picture = Picture::of(&cache);
    let stats = cache.store_stats().unwrap();
    let sum = |category: &str| -> u64 {
        picture.of_category(category).iter().map(|span| span.args["bytes"].as_u64().unwrap()).sum()
    };
    assert_eq!((sum("disk write"), sum("disk read")), (stats.bytes_written, stats.bytes_read));
}

#[test]
fn scopes_lie_within_their_step_on_the_thread_and_on_the_device() {
    let cache = tight().build().unwrap();
    train(&cache, 2);
    let picture = Picture::of(&cache);
    for line in ["thread", "device: compute"] {
        let spans = picture.on(line);
        let steps: Vec<_> = spans.iter().filter(|span| span.name.starts_with("step ")).collect();
        assert_eq!(
            steps.iter().map(|step| step.name.as_str()).collect::<Vec<_>>(),
            ["step 1", "step 2"],
            "{line}"
        );
        for step in steps {
            let within = |span: &&&Span| step.from <= span.from && span.to <= step.to;
            let scopes: Vec<_> =
                spans.iter().filter(|span| span.category == "scope").filter(within).collect();
            assert_eq!(scopes.len(), 2 * LAYERS, "{line}, {}", step.name);
            assert!(
                scopes.iter().any(|span| span.name == "mlp" && span.args["scope"] == "block.3/mlp"),
                "{line}"
            );
            assert_eq!(
                spans.iter().filter(|span| span.name == "backward").filter(within).count(),
                1,
                "{line}"
            );
        }
    }
}

#[test]
fn spans_end_after_they_begin_and_those_of_a_line_follow_or_contain_each_other() {
    let cache = tight().build().unwrap();
    train(&cache, 3);
    let picture = Picture::of(&cache);
    let lines: BTreeSet<_> = picture.spans.iter().map(|span| span.line.as_str()).collect();
    assert!(lines.len() >= 6, "{lines:?}");
    for line in lines {
        let spans: Vec<_> = picture.spans.iter().filter(|span| span.line == line).collect();
        let nests = line.starts_with("thread") || line.starts_with("device: compute");
        for (index, a) in spans.iter().enumerate() {
            assert!(a.from >= 0.0 && a.to >= a.from, "{a:?}");
            for b in &spans[index + 1..] {
                // Sums of microseconds in floating point.
                let before = |a: f64, b: f64| a <= b + 1e-3;
                let apart = before(a.to, b.from) || before(b.to, a.from);
                let within = (before(a.from, b.from) && before(b.to, a.to))
                    || (before(b.from, a.from) && before(a.to, b.to));
                assert!(apart || (nests && within), "{a:?}\n{b:?}");
            }
        }
    }
}

#[test]
fn copies_of_one_direction_never_run_at_once() {
    let cache = tight().build().unwrap();
    train(&cache, 3);
    let picture = Picture::of(&cache);
    for line in ["device: copies out", "device: copies in"] {
        assert!(picture.on(line).iter().all(|span| span.line == line), "a second row of {line}");
    }
}

/// Trains one step; the spans of each cause, and what the report says.
fn stalls(builder: TensorCacheBuilder) -> (BTreeMap<String, Vec<Span>>, StallReport) {
    let cache = builder.trace(true).build().unwrap();
    let report = train(&cache, 1).stall;
    let mut by_cause = BTreeMap::<_, Vec<_>>::new();
    for span in Picture::of(&cache).of_category("stall") {
        by_cause.entry(span.name.clone()).or_default().push(span.clone());
    }
    (by_cause, report)
}

#[test]
fn a_budget_that_is_too_small_shows_as_the_stalls_of_the_report() {
    // Copies that take longer than a layer does.
    let slow = staged().simulated_device(Duration::from_millis(30)).host_pool(64 * MIB);
    for (builder, causes) in [
        (slow, ["stall: device budget", "stall: copy in"].as_slice()),
        // Whether a store is over before the next save is up to the disk.
        (everything(), ["stall: load"].as_slice()),
    ] {
        let (spans, report) = stalls(builder.policy(Offload::default().device_budget(1).prefetch(0)));
        assert!(causes.iter().all(|cause| spans.contains_key(*cause)), "{spans:?}");
        for (cause, time) in [
            ("stall: device budget", report.device_budget),
            ("stall: host pool", report.host_pool),
            ("stall: load", report.load),
            ("stall: copy in", report.copy_in),
        ] {
            let spans = spans.get(cause).map_or(&[][..], Vec::as_slice);
            let sum: f64 = spans.iter().map(|span| span.to - span.from).sum();
            // What overlaps by less than a microsecond may be cut.
            assert!((sum - time.as_secs_f64() * 1e6).abs() <= spans.len() as f64, "{cause}: {sum}, {time:?}");
        }
    }
}

#[test]
fn a_budget_that_is_never_reached_shows_no_stalls() {
    assert_eq!(stalls(staged_in_memory()).0.len(), 0);
}

#[test]
fn levels_rise_and_return_to_nothing() {
    let cache = tight().build().unwrap();
    train(&cache, 2);
    let picture = Picture::of(&cache);
    let samples: Vec<_> =
        picture.file["traceEvents"].as_array().unwrap().iter().filter(|event| event["ph"] == "C").collect();
    let levels = |name: &str| -> Vec<u64> {
        let of_name = samples.iter().filter(|event| event["name"] == name);
        of_name.map(|event| event["args"]["bytes"].as_u64().unwrap()).collect()
    };
    let device = levels("device bytes held by the cache");
    assert!(*device.iter().max().unwrap() <= 2 * MIB, "{device:?}");
    assert_eq!(device.last(), Some(&0));
    assert!(levels("host pool bytes in use").contains(&(4 * MIB)));
}

#[test]
fn threads_that_take_part_have_lines_of_their_own() {
    let cache = everything().trace(true).build().unwrap();
    let step = cache.step();
    let handle = step.handle();
    let worker = std::thread::Builder::new().name("worker".to_owned());
    let work = move || {
        let _entered = handle.enter();
        drop(ssdtrain::scope("its own"));
    };
    worker.spawn(work).unwrap().join().unwrap();
    step.finish().unwrap();
    assert_eq!(
        Picture::of(&cache).on("thread worker").iter().map(|span| &span.name).collect::<Vec<_>>(),
        ["its own"]
    );
}

#[test]
fn names_that_json_must_escape_come_back_as_they_were() {
    let name = "a \"b\"\\c\n\u{1}\u{e4}";
    let cache = everything().trace(true).build().unwrap();
    let step = cache.step();
    drop(ssdtrain::scope(name));
    step.finish().unwrap();
    assert_eq!(Picture::of(&cache).of_category("scope")[0].name, name);
}

#[test]
fn several_caches_share_a_file_as_processes() {
    let caches = [everything().trace(true).build().unwrap(), tight().build().unwrap()];
    for cache in &caches {
        train(cache, 1);
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace.json");
    write_traces(&path, &[("disk", &caches[0]), ("staged", &caches[1])]).unwrap();
    let picture = Picture::read(&path);
    assert_eq!(picture.file["otherData"]["staged"]["dropped_events"], 0);
    let end =
        |pid| picture.spans.iter().filter(|span| span.pid == pid).map(|span| span.to).fold(0.0, f64::max);
    let start = |pid| {
        picture.spans.iter().filter(|span| span.pid == pid).map(|span| span.from).fold(f64::MAX, f64::min)
    };
    assert!(start(1) < end(1) && end(1) <= start(2), "the second trained after the first");
}

#[test]
fn a_step_under_way_does_not_keep_a_trace_from_being_written() {
    let cache = tight().build().unwrap();
    train(&cache, 1);
    let x = leaf(&randn(&[512, 512]));
    let step = cache.step();
    let loss = chain(&x);
    let picture = Picture::of(&cache);
    assert_eq!(picture.on("thread").iter().filter(|span| span.category == "scope").count(), 4 * LAYERS);
    step.backward(&loss).unwrap();
    step.finish().unwrap();
}

#[test]
fn nothing_is_recorded_unless_asked_for() {
    let cache = everything().build().unwrap();
    train(&cache, 1);
    let error = cache.write_trace("/nowhere/trace.json").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("trace(true)"), "{error}");
}

#[test]
fn a_file_that_cannot_be_written_is_named() {
    let cache = everything().trace(true).build().unwrap();
    let error = cache.write_trace("/nowhere/trace.json").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(error.to_string().contains("/nowhere/trace.json"), "{error}");
}
