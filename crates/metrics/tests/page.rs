//! The page is in the format, says what the reports of the steps say, and is what the documentation lists.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;

use std::collections::BTreeSet;

use common::{Page, cache, step};
use ssdtrain::plan::Tally;
use ssdtrain::{BackendKind, Keep, MIB, StepReport, TensorCache};
use ssdtrain_metrics::{FAMILIES, Kind, text};

fn page(cache: &TensorCache) -> Page {
    Page::read(&text(&[("a", &cache.metrics())]))
}

#[test]
fn names_end_with_their_units_and_counters_with_total() {
    let mut names = BTreeSet::new();
    for family in FAMILIES {
        let name = family.name;
        assert!(names.insert(name), "{name} occurs twice");
        assert!(name.starts_with("ssdtrain_") && !name.contains("__"), "{name}");
        assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{name}");
        assert_eq!(name.ends_with("_total"), family.kind == Kind::Counter, "{name}");
        let says = |word: &str| family.help.to_lowercase().contains(word);
        let unit = name.trim_end_matches("_total");
        for (word, end) in [("bytes", "_bytes"), ("time", "_seconds")] {
            assert!(
                !unit.ends_with(end)
                    || says(word)
                    || says("peak")
                    || says("memory")
                    || says("space")
                    || says("the same"),
                "{name}: {}",
                family.help
            );
        }
        for other in ["_ms", "_mib", "_milliseconds", "_count"] {
            assert!(!unit.ends_with(other), "{name}");
        }
        assert!(!family.help.ends_with('.') && !family.help.contains(['\n', '\\']), "{name}");
    }
}

#[test]
fn the_whole_page_is_in_the_format_and_counters_only_grow() {
    let cache = cache();
    let mut before = page(&cache);
    for _ in 0..4 {
        step(&cache);
        let now = page(&cache);
        for (place, value) in &before.figures {
            let kind = &now.kinds[place.split('{').next().unwrap()];
            assert!(kind == "gauge" || now.figures[place] >= *value, "{place} fell");
        }
        before = now;
    }
    assert!(before.of("a", "disk_bytes_total", ",direction=\"write\"") > 0.0);
    for (name, kind) in &before.kinds {
        let family = FAMILIES.iter().find(|family| family.name == name).unwrap();
        assert_eq!((&family.kind.to_string(), family.help), (kind, before.helps[name].as_str()));
    }
}

#[test]
fn figures_are_those_of_the_reports() {
    let cache = cache();
    let reports: Vec<StepReport> = (0..3).map(|_| step(&cache)).collect();
    let page = page(&cache);
    let of = |name: &str, label: &str| page.of("a", name, label);
    let sum = |field: fn(&StepReport) -> Tally| {
        let tallies = reports.iter().map(field);
        tallies.fold((0.0, 0.0), |(count, bytes), tally| {
            (count + tally.count as f64, bytes + tally.bytes as f64)
        })
    };
    for (storages, bytes, field) in [
        ("saved_storages", "saved_bytes", (|report| report.saved) as fn(&StepReport) -> Tally),
        ("offloaded_storages", "offloaded_bytes", |report| report.offloaded),
        ("cancelled_storages", "cancelled_bytes", |report| report.cancelled),
        ("discarded_storages", "discarded_bytes", |report| report.discarded),
        ("forwarded_storages", "forwarded_bytes", |report| report.forwarded),
        ("loaded_storages", "loaded_bytes", |report| report.loaded),
        ("load_misses", "load_miss_bytes", |report| report.load_misses),
        ("deduplicated_storages", "deduplicated_bytes", |report| report.deduplicated),
        ("pressed_storages", "pressed_bytes", |report| report.pressed),
    ] {
        assert_eq!(
            (of(&format!("{storages}_total"), ""), of(&format!("{bytes}_total"), "")),
            sum(field),
            "{storages}"
        );
    }
    assert!(of("offloaded_bytes_total", "") >= MIB as f64);
    assert_eq!(of("kept_bytes_total", ",reason=\"policy\""), sum(|report| report.kept.policy).1);
    assert_eq!(of("steps_total", ",planning=\"unplanned\""), 3.0);
    let near =
        |name: &str, label: &str, seconds: f64| assert!((of(name, label) - seconds).abs() < 1e-6, "{name}");
    let seconds = |time: fn(&StepReport) -> f64| reports.iter().map(time).sum::<f64>();
    near("step_seconds_total", "", seconds(|report| report.wall.as_secs_f64()));
    near("stall_seconds_total", ",cause=\"load\"", seconds(|report| report.stall.load.as_secs_f64()));
    near(
        "stall_seconds_total",
        ",cause=\"device_budget\"",
        seconds(|report| report.stall.device_budget.as_secs_f64()),
    );
    let last = reports.last().unwrap();
    near("last_step_seconds", "", last.wall.as_secs_f64());
    assert_eq!(of("last_step", ""), 3.0);
    assert_eq!(of("last_step_activation_peak_bytes", ""), last.act_peak_bytes as f64);
    let stats = cache.store_stats().unwrap();
    assert_eq!(of("disk_bytes_total", ",direction=\"read\""), stats.bytes_read as f64);
    assert_eq!(of("spill_file_bytes", ""), stats.file_bytes as f64);
    assert_eq!(
        (of("spill_file_limit_bytes", ""), of("activation_bytes", ",tier=\"disk\"")),
        ((1 << 30) as f64, 0.0)
    );
    assert_eq!(of("activation_bytes", ",tier=\"device\""), 0.0, "no graph is left");
}

#[test]
fn what_is_saved_shows_while_the_step_is_under_way() {
    let cache = cache();
    let x = tch::Tensor::ones([512, 512], (tch::Kind::Float, tch::Device::Cpu)).set_requires_grad(true);
    let step = cache.step();
    let loss = (0..4).fold(&x * 1.0, |y, _| (y * 1.01).sin()).sum(tch::Kind::Float);
    step.flush();
    let flushed = page(&cache);
    let stored = flushed.of("a", "activation_bytes", ",tier=\"disk\"");
    assert!(stored >= MIB as f64 && flushed.of("a", "offloaded_bytes_total", "") == stored, "{flushed:?}");
    assert_eq!(flushed.of("a", "steps_total", ",planning=\"unplanned\""), 0.0);
    step.backward(&loss).unwrap();
    drop((loss, step));
    let dropped = page(&cache);
    assert_eq!(dropped.of("a", "steps_dropped_total", ""), 1.0);
    assert_eq!(dropped.of("a", "loaded_bytes_total", ""), stored);
}

#[test]
fn two_caches_are_told_apart() {
    let (moves, keeps) = (cache(), TensorCache::builder().policy(Keep).min_bytes(0).build().unwrap());
    step(&moves);
    step(&keeps);
    step(&keeps);
    let page = Page::read(&text(&[("moves", &moves.metrics()), ("keeps", &keeps.metrics())]));
    let steps = |cache: &str| page.of(cache, "steps_total", ",planning=\"unplanned\"");
    assert_eq!((steps("moves"), steps("keeps")), (1.0, 2.0));
    assert!(page.figures.keys().all(|place| !(place.contains("disk") && place.contains("keeps"))));
    assert_eq!(page.of("keeps", "offloaded_bytes_total", ""), 0.0);
}

#[test]
fn a_host_pool_shows_what_it_has() {
    let builder = TensorCache::builder().backend(BackendKind::Memory).min_bytes(0).host_pool(16 * MIB);
    let cache = builder.simulated_device(std::time::Duration::ZERO).spill_to(std::env::temp_dir());
    let cache = cache.policy(ssdtrain::Offload::default().device_budget(0)).build().unwrap();
    step(&cache);
    let page = page(&cache);
    assert_eq!(page.of("a", "host_pool_bytes", ""), (16 * MIB) as f64);
    assert_eq!(page.of("a", "host_pool_limit_bytes", ""), (16 * MIB) as f64);
    assert!(page.figures.contains_key("ssdtrain_activation_bytes{cache=\"a\",tier=\"host\"}"));
}

/// The rows of the table of metrics in docs/watching.md: name, type and meaning.
fn documented() -> Vec<[String; 3]> {
    let text = include_str!("../../../docs/watching.md");
    let (_, table) = text.split_once("| metric | type | meaning |").unwrap();
    let rows = table.lines().filter_map(|line| line.strip_prefix("| `ssdtrain_"));
    rows.map(|row| {
        let cells: Vec<_> = row.trim_end_matches('|').split(" | ").map(str::trim).collect();
        let name = cells[0].trim_end_matches('`').split('{').next().unwrap();
        [format!("ssdtrain_{name}"), cells[1].to_owned(), cells[2].to_owned()]
    })
    .collect()
}

#[test]
fn the_documentation_lists_each_metric_with_its_type_and_meaning() {
    let there = FAMILIES.iter().map(|one| [one.name.to_owned(), one.kind.to_string(), one.help.to_owned()]);
    assert_eq!(documented(), there.collect::<Vec<_>>());
}
