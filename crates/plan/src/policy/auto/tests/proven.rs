//! Plans that were seen to keep their goal, and what takes their place.

use super::super::super::cost::{Cost, Weight};
use super::*;
use crate::Stall;

fn run() -> Run {
    Run::on_device(Goal::overhead(0.1), profile_of_copies(50.0))
}

/// Lets steps end until none is compared any more. Planned ones take `times` as long as others, and do not count before step `counted`.
/// The first two that keep everything are quicker than later ones.
fn compare(run: &mut Run, times: f64, counted: u64) {
    let mut kept = 0;
    while run.number < COMPARED {
        let is_kept = run.next_step() == NextStep::Baseline;
        kept += u64::from(is_kept);
        let quick = if is_kept && kept <= 2 { 0.9 } else { 1.0 };
        let wall = KEPT.mul_f64(if is_kept { quick } else { times });
        let compiled = run.number < counted && !is_kept;
        let how = if is_kept { StepOutcome::Baseline } else { WHOLE };
        run.ended(how, Observation { wall, compiled, ..Observation::default() });
    }
}

/// Steps of a plan that takes what its goal allows, though there seemed to be less time at first.
fn settled() -> Run {
    let mut run = run();
    for number in 0..60 {
        run.step(KEPT.mul_f64(if number < 2 { 0.9 } else { 1.0 }), 1.092);
    }
    run
}

/// What changes nothing makes no other plan.
fn revise(run: &mut Run) {
    let objective = run.auto.objective;
    run.auto.kinds.revise(&objective, Decision::Daily);
}

#[test]
fn a_plan_that_was_seen_to_keep_its_goal_is_the_one_for_it_whenever_it_is_made_anew() {
    let mut run = settled();
    let before = run.report();
    revise(&mut run);
    assert_eq!(run.report(), before);
}

#[test]
fn a_plan_that_was_seen_to_keep_its_goal_is_followed_again_after_memory_was_short() {
    let mut run = settled();
    let peak = run.report().prediction.peak();
    run.next_step();
    let wall = KEPT.mul_f64(1.092);
    run.ended(WHOLE, Observation { wall, peak: 10 * MB, pressed: 1, ..Observation::default() });
    (0..100).for_each(|_| run.step(KEPT, 1.092));
    assert_eq!(run.report().prediction.peak(), peak, "{}", run.report());
}

#[test]
fn a_plan_that_leaves_time_stays_where_no_other_could_be_compared() {
    for times in [1.03, 1.085, 1.09] {
        let mut run = run();
        compare(&mut run, times, 14);
        let before = run.report();
        (0..30).for_each(|_| run.step(KEPT, times));
        let after = run.report();
        assert_eq!((after.plans, after.tightened), (before.plans, 0), "{times}: {before}\n{after}");
    }
}

#[test]
fn a_tightened_plan_that_could_not_be_compared_is_given_up_whatever_comes_between() {
    for is_revised in [false, true] {
        let mut run = run();
        let mut proven = run.report();
        while run.report().tightened == 0 && run.number < COMPARED {
            proven = run.report();
            run.step(KEPT, 1.03);
        }
        let tightened = run.report();
        assert!(tightened.tightened == 1 && tightened.prediction.peak() < proven.prediction.peak());
        if is_revised {
            revise(&mut run);
        }
        // Kernels are being made for as long as steps may keep everything.
        compare(&mut run, 1.15, COMPARED);
        (0..5).for_each(|_| run.step(KEPT, 1.03));
        let after = run.report();
        assert_eq!(after.prediction.peak(), proven.prediction.peak(), "{is_revised}: {after}");
        assert_eq!((after.plans, after.loosened), (tightened.plans + 1, 0), "{is_revised}: {after}");
    }
}

#[test]
fn what_a_slower_clock_takes_is_not_taken_for_what_moving_costs() {
    let mut planned = run().auto.kinds[0].planned.clone();
    let extra = planned.extra();
    let slower = Some([0.2 * extra, 0.0]);
    let weight =
        Weight { kept: None, extra, error: 0.0, slower, deviation: 0.001, apart: 0.001, is_by_others: false };
    let (cost, _) = Cost::first(0.2, 0.0).weighed(extra, 0.0, 0.1, weight);
    planned.corrections.cost = Some(cost);
    let kept = planned.kept_step();
    let wall = kept.mul_f64(1.0 + planned.fixed() + cost.expected(extra));
    let moving = planned.machine.moving;
    planned.loosen(cost, planned.measured(1.097, 0.003, wall, kept));
    assert!((planned.machine.moving / moving - 1.0).abs() < 1e-6, "{moving:e} {:e}", planned.machine.moving);
}

#[test]
fn what_waits_for_memory_counts_apart_where_pointwise_operations_tell_how_fast_it_is() {
    let mut profile = profile_of_copies(50.0);
    for tells in [false, true] {
        if tells {
            let one = &mut profile.work.activations[0];
            one.traffic = Some(one.bytes);
            one.recompute = Some(Recompute { time: MS, inputs: vec![] });
        }
        let mut run = Run::on_device(Goal::overhead(0.1), profile.clone());
        (0..5).for_each(|_| run.step(KEPT, 1.05));
        let planned = &mut run.auto.kinds[0].planned;
        let (kept, idle) = (planned.profile.work.computed(), planned.idle());
        assert_eq!(idle.is_some(), tells);
        planned.plan.prediction.memory_bound = kept / 50;
        planned.plan.prediction.stall = Stall { load: kept / 100, ..Stall::default() };
        assert!(planned.idle().is_none_or(|idle| (idle - 0.03).abs() < 1e-6), "{:?}", planned.idle());
        let weighing = run.auto.kinds[0].weighing.as_ref().unwrap();
        assert_eq!(weighing.idle, idle);
    }
}

/// Steps on a processor of which no two have the same size, and too few of each kind count for a result. Those that keep everything take
/// what goes with their size, and planned ones `times` as long.
fn unlike(times: f64) -> Run {
    let mut run = Run::roomy(aiming_at(0.1), profile(50.0));
    loop {
        let size = 0.8 + 0.017 * run.number as f64;
        let compiled = (6..14).contains(&run.number);
        let is_kept = run.next_step() == NextStep::Baseline || run.auto.kinds[0].planned.keeps_all();
        if run.number >= COMPARED && run.auto.kinds[0].weighing.is_none() {
            return run;
        }
        let wall = KEPT.mul_f64(if is_kept { size } else { size * times });
        run.number += 1;
        let followed = Some(Followed::new(0, Adherence::Part).of_size(size));
        let observed = Observation { step: run.number, wall, compiled, followed, ..Observation::default() };
        run.auto.end(&run.plan.clone(), observed);
    }
}

#[test]
fn a_plan_that_clearly_takes_too_long_is_loosened_though_there_were_too_few_steps_for_a_result() {
    let loosened = |times: f64| {
        let run = unlike(times);
        let Kind { planned, weighing, .. } = &run.auto.kinds[0];
        assert!(weighing.is_none(), "{times}");
        planned.corrections.loosened > 0
    };
    assert_eq!([1.05, 1.11, 1.6].map(loosened), [false, false, true]);
}
