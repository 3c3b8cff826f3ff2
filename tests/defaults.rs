//! What a builder does about settings that were not given, and about impossible ones.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod common;

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::chain::{ZeroGrad, expected, input, step};
use common::{assert_same_bits, everything, grads, leaf, randn, staged_in_memory};
use ssdtrain::plan::Goal;
use ssdtrain::{Auto, ErrorKind, MIB, Offload, StepReport, TensorCache, TensorCacheBuilder};
use tch::Kind;

/// The report of the second step, whose gradient is checked.
fn second(builder: TensorCacheBuilder) -> StepReport {
    let cache = builder.build().unwrap();
    let x = input();
    step(&cache, &x);
    x.zero_grad_if_any();
    let report = step(&cache, &x);
    assert_same_bits("the gradient", &expected(), &grads(&[x]));
    report
}

#[test]
fn offloading_from_a_gpu_without_a_budget_moves_what_it_can_and_says_what_that_costs() {
    let report = second(staged_in_memory().policy(Offload::default().prefetch(2 * MIB)));
    assert!(report.offloaded.bytes >= 20 * MIB, "{report}");
    assert!(report.warnings.join("\n").contains("device_budget"), "{report}");
    for report in [
        second(staged_in_memory().policy(Offload::default().prefetch(2 * MIB).device_budget(4 * MIB))),
        second(staged_in_memory().policy(Offload::default().prefetch(2 * MIB).backward_budget(4 * MIB))),
    ] {
        assert!(report.offloaded.bytes > 0 && report.warnings.is_empty(), "{report}");
    }
}

#[test]
fn a_policy_that_moves_nothing_says_so() {
    let report = second(staged_in_memory().policy(Offload::default().device_budget(64 * MIB)));
    assert_eq!(report.offloaded.bytes, 0, "{report}");
    assert!(report.warnings.join("\n").contains("nothing was moved"), "{report}");
}

#[test]
fn a_budget_for_backward_is_no_larger_than_that_for_all() {
    let peak = |policy: Offload| second(staged_in_memory().policy(policy)).act_peak_bytes;
    let policy = || Offload::default().device_budget(4 * MIB).prefetch(16 * MIB);
    assert_eq!(peak(policy().backward_budget(32 * MIB)), peak(policy()));
}

#[test]
fn settings_out_of_range_are_told_by_their_own_names() {
    for (builder, name) in
        [(everything().disk_cap(0), "disk_cap(0)"), (everything().processes(0), "processes(0)")]
    {
        let error = builder.build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().starts_with(name), "{error}");
    }
}

#[test]
fn a_plan_is_the_default_and_what_it_lacks_on_the_cpu_is_named() {
    let told = format!("{:?}", TensorCache::builder());
    assert!(told.contains(&format!("{:?}", Auto::new(Goal::overhead(0.02)))), "{told}");
    let error = TensorCache::builder().build().unwrap_err();
    for part in ["spill_to(directory)", "policy(Keep)"] {
        assert!(error.to_string().contains(part), "{error}");
    }
}

/// Counts the warnings.
struct Warnings(Arc<AtomicUsize>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }

    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut |field: &tracing::field::Field, value: &dyn Debug| {
            let is_it = field.name() == "message" && format!("{value:?}").contains("let _ = cache.step()");
            self.0.fetch_add(usize::from(is_it), Ordering::Relaxed);
        });
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn a_step_that_no_one_holds_is_warned_of_once() {
    let told = Arc::new(AtomicUsize::new(0));
    tracing::subscriber::with_default(Warnings(Arc::clone(&told)), || {
        let cache = everything().build().unwrap();
        let x = leaf(&randn(&[64, 64]));
        let begin = |held: bool| {
            let step = held.then(|| cache.step());
            if !held {
                drop(cache.step());
            }
            drop(x.sin().sum(Kind::Float));
            drop(step);
        };
        begin(true);
        cache.step().finish().unwrap();
        assert_eq!(told.load(Ordering::Relaxed), 0);
        begin(false);
        begin(false);
        assert_eq!(told.load(Ordering::Relaxed), 1);
    });
}
