//! Reports say what a step had to do with a plan, and warn where steps are never planned or spilling frees no memory.
#![allow(clippy::unwrap_used, reason = "what cannot be set up has failed")]

mod common;

use common::{everything, leaf, randn};
use ssdtrain::plan::Goal;
use ssdtrain::{Auto, Keep, MIB, Planning, StepReport, TensorCache, scope};
use tch::Kind;

/// A step that saves something for each of `layers` layers.
fn step(cache: &TensorCache, layers: usize) -> StepReport {
    let (x, step) = (leaf(&randn(&[256, 256])), cache.step());
    let y = (0..layers).fold(x.shallow_clone(), |y, layer| {
        let _scope = scope(&format!("layer.{layer}"));
        y.sin()
    });
    step.backward(&y.sum(Kind::Float)).unwrap();
    step.finish().unwrap()
}

#[test]
fn each_step_says_what_it_had_to_do_with_a_plan() {
    let cache = everything().policy(Auto::new(Goal::budget(MIB))).build().unwrap();
    let reports: Vec<_> = [4, 4, 4, 5].into_iter().map(|layers| step(&cache, layers)).collect();
    let planning: Vec<_> = reports.iter().filter_map(|report| report.planning).collect();
    assert_eq!(planning, [Planning::Early, Planning::Profiled, Planning::Followed, Planning::Left]);
    for (report, said) in reports.iter().zip([
        "; not planned yet",
        "; profiled",
        "; plan 1 (against the baseline of its profile)",
        "; not planned: it saved something else than was planned",
    ]) {
        assert!(report.to_string().lines().next().unwrap().ends_with(said), "{report}");
    }
    let saved = serde_json::to_value(&reports[2]).unwrap();
    assert_eq!(saved["planning"], "followed");
    assert_eq!((&saved["plan"]["plans"], &saved["plan"]["baseline"]), (&1.into(), &"profile".into()));
}

#[test]
fn policies_that_do_not_plan_say_nothing_of_plans() {
    let report = step(&everything().policy(Keep).build().unwrap(), 2);
    assert!(report.planning.is_none() && !report.to_string().contains("plan"), "{report}");
}

#[test]
fn steps_that_are_never_planned_are_warned_of_from_the_twentieth_on() {
    let cache = everything().policy(Auto::new(Goal::budget(MIB))).build().unwrap();
    // Each has a layer more than any before it, except that the last ones are alike.
    let told: Vec<_> = (1..=22).chain([22; 20]).map(|layers| step(&cache, layers)).collect();
    let warning = |report: &StepReport| {
        report.warnings.iter().find(|warning| warning.contains("for 20 steps or more")).cloned()
    };
    let warned: Vec<_> =
        told.iter().filter(|report| warning(report).is_some()).map(|report| report.step).collect();
    assert_eq!(warned[..3], [20, 21, 22]);
    let first = warning(&told[19]).unwrap();
    assert!(first.contains("in layer.") && first.contains("256.0 KiB"), "{first}");
    assert_eq!(warning(&told[21]).as_ref(), Some(&first), "so that it is logged once");
    let last = told.last().unwrap();
    assert_eq!((last.planning, warning(last)), (Some(Planning::Followed), None));
}

#[test]
fn a_spill_directory_in_memory_is_warned_of() {
    let Ok(directory) = tempfile::tempdir_in("/dev/shm") else {
        return eprintln!("skipped: there is no /dev/shm here");
    };
    let spilling = TensorCache::builder().min_bytes(0).spill_to(directory.path());
    let report = step(&spilling.clone().build().unwrap(), 2);
    let warnings = report.warnings.join("\n");
    assert!(
        warnings.contains("is in memory (tmpfs)")
            && warnings.contains(&directory.path().display().to_string()),
        "{report}"
    );
    let report = step(&spilling.policy(Keep).build().unwrap(), 2);
    assert!(report.warnings.is_empty(), "nothing goes there: {report}");
}
