//! What is told through `tracing` is what docs/watching.md lists.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::sync::{Arc, LazyLock};

use common::chain;
use common::{everything, leaf, randn};
use parking_lot::Mutex;
use ssdtrain::plan::Goal;
use ssdtrain::store::{Direction, Fault, Faulty, Pool, Store, StoreConfig};
use ssdtrain::{Auto, BackendKind, MIB, Offload, TensorCache, remat};
use tch::Kind;
use tracing::field::Field;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// The targets whose events can be relied on.
const TARGETS: [&str; 3] = ["ssdtrain::step", "ssdtrain::plan", "ssdtrain::transfer"];

/// An event or, with its name as the message, a span.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Told {
    target: String,
    level: String,
    message: String,
    fields: BTreeSet<String>,
}

/// What was told so far, and what each field was last.
#[derive(Default)]
struct Heard {
    told: BTreeSet<Told>,
    values: BTreeMap<(String, String), String>,
    warnings: Vec<String>,
}

#[derive(Clone, Default)]
struct Listener(Arc<Mutex<Heard>>);

fn told(metadata: &Metadata<'_>, message: &str) -> Told {
    let fields = metadata.fields().iter().map(|field| field.name().to_owned());
    Told {
        target: metadata.target().to_owned(),
        level: metadata.level().as_str().to_lowercase(),
        message: message.to_owned(),
        fields: fields.filter(|name| name != "message").collect(),
    }
}

impl Subscriber for Listener {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        self.0.lock().told.insert(told(span.metadata(), span.metadata().name()));
        Id::from_u64(1)
    }

    fn event(&self, event: &Event<'_>) {
        let mut values = BTreeMap::new();
        event.record(&mut |field: &Field, value: &dyn Debug| {
            values.insert(field.name().to_owned(), format!("{value:?}"));
        });
        let message = values.remove("message").unwrap_or_default();
        let mut heard = self.0.lock();
        if *event.metadata().level() <= tracing::Level::WARN {
            heard.warnings.push(message.clone());
        }
        heard.told.insert(told(event.metadata(), &message));
        heard.values.extend(values.into_iter().map(|(name, value)| ((message.clone(), name), value)));
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Hears all threads.
static LISTENER: LazyLock<Listener> = LazyLock::new(|| {
    let listener = Listener::default();
    tracing::subscriber::set_global_default(listener.clone()).unwrap();
    listener
});

/// The rows of the table of events.
fn documented() -> BTreeSet<Told> {
    let rows = include_str!("../docs/watching.md")
        .lines()
        .filter(|line| TARGETS.iter().any(|target| line.starts_with(&format!("| `{target}`"))));
    rows.map(|row| {
        let cells: Vec<_> = row.split('|').map(|cell| cell.trim().replace('`', "")).collect();
        let fields = cells[4].split(", ").map(str::to_owned).collect();
        let [target, level, message] = [1, 2, 3].map(|cell| cells[cell].clone());
        Told { target, level, message, fields }
    })
    .collect()
}

/// A stack whose peak is to be half of what it saves, and part of which is cheap to compute again.
fn plans() {
    let policy = Auto::new(Goal::budget(5 * MIB));
    let cache = everything().disk_cap(4 * MIB).policy(policy).build().unwrap();
    let weights: Vec<_> = (0..8).map(|_| randn(&[256, 256]) / 16.0).collect();
    let x = randn(&[512, 256]);
    for _ in 0..40 {
        let weights: Vec<_> = weights.iter().map(leaf).collect();
        let step = cache.step();
        let gelu = |y: &tch::Tensor| remat(&[y], |y| y[0].f_gelu("tanh")).unwrap();
        let stack = weights.iter().fold(x.shallow_clone(), |y, weight| gelu(&y.matmul(weight)));
        step.backward(&stack.square().mean(Kind::Float)).unwrap();
        step.finish().unwrap();
        if cache.is_settled() {
            return;
        }
    }
    panic!("the plan does not settle");
}

/// A cache whose disk fails when it is told to.
fn failing() -> (Arc<Faulty>, TensorCache) {
    let backend = Arc::new(Faulty::new(Arc::new(Pool::new(2).unwrap())));
    let config = StoreConfig { backend: BackendKind::Memory, ..StoreConfig::default() };
    let store = Store::open_with(config, Arc::clone(&backend) as _).unwrap();
    let builder = everything().policy(Offload::default().device_budget(MIB));
    (backend, TensorCache::with_store(builder, store).unwrap())
}

#[test]
fn each_documented_event_is_told_with_its_fields_and_nothing_else_under_these_targets() {
    tch::set_num_threads(1);
    let heard = &LISTENER.0;
    plans();
    let (disk, cache) = failing();
    let x = chain::input();
    chain::step(&cache, &x);
    disk.inject(Direction::Write, Fault::Errno(libc::EIO), 0, 1);
    chain::step(&cache, &x);
    disk.inject(Direction::Read, Fault::Errno(libc::EIO), 0, u64::MAX);
    let step = cache.step();
    let loss = chain::chain(&x);
    step.flush();
    step.backward(&loss).unwrap_err();
    drop(step);

    let heard = heard.lock();
    let of_ours = |told: &&Told| TARGETS.contains(&told.target.as_str());
    let told: BTreeSet<Told> = heard.told.iter().filter(of_ours).cloned().collect();
    let span = Told {
        target: "ssdtrain::step".to_owned(),
        level: "debug".to_owned(),
        message: "step".to_owned(),
        fields: ["step".to_owned()].into(),
    };
    let mut expected = documented();
    expected.insert(span);
    assert_eq!(told, expected);

    let value = |message: &str, field: &str| {
        heard
            .values
            .get(&(message.to_owned(), field.to_owned()))
            .unwrap_or_else(|| panic!("{message}: {field}"))
    };
    let change = value("the plan has changed", "change");
    assert!(["made", "loosened", "tightened", "corrected"].contains(&change.as_str()), "{change}");
    assert!(value("the plan has settled", "peak_bytes").parse::<u64>().unwrap() > 0);
    let error = value("a load failed", "error");
    assert!(error.contains("Input/output error"), "{error}");
}

#[test]
fn a_warning_of_every_step_is_told_once_whatever_its_figures() {
    let listener = Listener::default();
    let dispatch = tracing::Dispatch::new(listener.clone());
    tracing::dispatcher::with_default(&dispatch, || {
        let (disk, cache) = failing();
        let x = chain::input();
        for failures in 1..=3 {
            disk.inject(Direction::Write, Fault::Errno(libc::EIO), 0, failures);
            let report = chain::step(&cache, &x);
            assert!(report.warnings.iter().any(|warning| warning.contains("stores failed")), "{report}");
        }
    });
    let warnings = &listener.0.lock().warnings;
    assert_eq!(
        warnings.iter().filter(|warning| warning.contains("stores failed")).count(),
        1,
        "{warnings:?}"
    );
}

/// Fields that mean the same are called the same: what is counted in bytes or seconds says so.
#[test]
fn names_of_fields_are_consistent() {
    for told in documented() {
        for field in told.fields {
            assert!(field.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{field}");
            assert!(!["wall", "stall", "peak", "ms", "err"].contains(&field.as_str()), "{field} has no unit");
        }
    }
}
