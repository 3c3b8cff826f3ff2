//! Plans on a CPU, which have to do with the memory that is free.

use super::*;
use crate::policy::fitting::LOOKED;

/// A step that takes what is planned. Returns the planned peak.
fn follow(run: &mut Run) -> u64 {
    assert!(matches!(run.next_step(), NextStep::Follow { .. }));
    let observed = run.usual();
    run.ended(WHOLE, observed);
    run.report().prediction.peak()
}

/// The same, or one that keeps everything.
fn step(run: &mut Run) {
    let report = run.report();
    run.step(KEPT, report.step.as_secs_f64() / report.kept_step.as_secs_f64());
}

#[test]
fn steps_without_a_plan_take_half_of_the_free_memory_at_most() {
    for (free, most) in [(100 * MB, 50 * MB), (u64::MAX, UNPLANNED_BYTES)] {
        let mut run = Run { free, ..Run::begin(Goal::overhead(0.02)) };
        let next = run.next_step();
        assert!(
            matches!(next, NextStep::OffloadAll { budgets, .. } if budgets.device_budget == most),
            "{next:?}"
        );
    }
}

#[test]
fn plans_have_to_do_with_the_memory_that_is_free_where_nothing_tells_that_it_is_short() {
    let mut run = Run { free: 8 * MB, ..Run::begin(Goal::overhead(0.02)) };
    run.begun(profile(20.0));
    assert!(follow(&mut run) <= 7 * MB, "{}", run.report());
    // The same later, and until there is more again.
    let mut run = Run::planned(Goal::overhead(0.02), profile(20.0));
    let usual = follow(&mut run);
    assert!(usual > 10 * MB, "{}", run.report());
    run.free = 8 * MB;
    let peaks: Vec<u64> = (0..LOOKED).map(|_| follow(&mut run)).collect();
    assert!(peaks[0] == usual && peaks[LOOKED as usize - 1] <= 7 * MB, "{peaks:?}");
    run.free = TOO_LITTLE;
    assert_eq!((0..LOOKED).map(|_| follow(&mut run)).last(), Some(usual));
    // A device tells when it has none.
    let mut run = Run { free: 8 * MB, release: Release::InStreamOrder, ..Run::begin(Goal::overhead(0.02)) };
    run.begun(profile_of_copies(20.0));
    assert!(follow(&mut run) > 10 * MB, "{}", run.report());
}

/// Each look finds a little more, for which there is no other plan. All the same there may be less the next time.
#[test]
fn it_is_looked_as_often_where_plans_fit_though_others_would_be_the_same() {
    let mut run = Run { free: 8 * MB, ..Run::begin(Goal::overhead(0.02)) };
    run.begun(profile(20.0));
    for _ in 0..1024 / LOOKED {
        run.free += 1;
        for _ in 0..LOOKED {
            follow(&mut run);
        }
    }
    run.free = 5 * MB;
    let peaks: Vec<u64> = (0..LOOKED).map(|_| follow(&mut run)).collect();
    assert!(peaks[LOOKED as usize - 1] <= 9 * MB / 2, "{peaks:?}");
}

/// Plans that fit are no reason to make the others anew each time, and these no reason to look at the memory more rarely.
#[test]
fn one_of_several_plans_that_cannot_fit_is_not_made_again_and_again() {
    let mut run = Run::roomy(aiming_at(0.1), profile(50.0));
    (0..30).for_each(|_| step(&mut run));
    let mut other = profile_of(3 * MB, 50.0);
    other.work.turn_extra = 40 * MB;
    (other.saves[0].0.bytes, other.work.activations[0].bytes) = (MB / 2, MB / 2);
    run.next_step();
    while !run.plan.profiled {
        run.ended(LOST, Observation { wall: KEPT, ..Observation::default() });
        run.next_step();
    }
    run.ended(StepOutcome::Profiled(Some(Box::new(other))), Observation::default());
    assert_eq!(run.auto.kinds.len(), 2);
    run.free = 30 * MB;
    let go = |run: &mut Run, steps: u64| {
        (0..steps).for_each(|_| {
            run.free += 100;
            run.next_step();
            let observed = run.usual();
            run.ended(WHOLE, observed);
        });
        let kinds = &run.auto.kinds;
        let place = kinds.iter().position(|kind| kind.largest_peak() > 30 * MB).unwrap();
        let schedules = [place, 1 - place].map(|place| Arc::clone(&kinds[place].planned.schedule));
        (schedules, kinds[1 - place].largest_peak())
    };
    let (before, _) = go(&mut run, 200);
    let (after, _) = go(&mut run, 2000);
    assert!(before.iter().zip(&after).all(|(before, after)| Arc::ptr_eq(before, after)), "planned again");
    run.free = 6 * MB;
    let (_, peak) = go(&mut run, LOOKED + 1);
    assert!(peak <= 6 * MB, "{peak}");
}

#[test]
fn with_a_goal_for_the_peak_what_is_not_planned_takes_half_of_the_free_memory_at_most_as_well() {
    let mut run = Run { free: 16 * MB, ..Run::begin(Goal::budget(1000 * MB)) };
    run.begun(profile(400.0));
    let next = run.next_step();
    assert!(
        matches!(next, NextStep::Follow { headroom: Headroom::Bytes(bytes) } if bytes <= 8 * MB),
        "{next:?}"
    );
}

#[test]
fn plans_are_not_blamed_for_what_steps_take_while_memory_is_short() {
    for noise in [0.0, 0.02] {
        let mut run = Run::roomy(aiming_at(0.02), profile(20.0));
        (0..100).for_each(|_| step(&mut run));
        let usual = run.report().prediction.peak();
        for number in 0..3000_usize {
            run.free = if number / 200 % 2 == 0 { 8 * MB } else { 1000 * MB };
            let report = run.report();
            let times = report.step.as_secs_f64() / report.kept_step.as_secs_f64();
            let slower = if report.in_reach { 1.0 } else { 1.0 + 10.0 * noise };
            run.step(KEPT.mul_f64([1.0, 1.0 + noise, 1.0 - noise][number % 3]), times * slower);
        }
        run.free = 1000 * MB;
        (0..2000).for_each(|_| step(&mut run));
        let report = run.report();
        assert!(!report.keeps_all() && report.prediction.peak() <= usual * 11 / 10, "{report}");
    }
}

#[test]
fn there_is_memory_for_the_largest_steps_that_were_seen() {
    for (free, goal, profile) in [
        (16 * MB, Goal::overhead(0.02), profile(20.0)),
        // Everything would be kept if all were as large as planned.
        (24 * MB, Goal::overhead(0.0), profile(1.0)),
    ] {
        let mut run = Run { free, ..Run::begin(goal) };
        run.begun(profile);
        for number in 0..300_u64 {
            run.step_of(|_| if number % 2 == 0 { 1.0 } else { 1.4 }, KEPT, 1.0);
        }
        let largest = run.auto.kinds[0].largest_peak();
        assert!(largest <= free, "{largest} of {free}");
    }
}

#[test]
fn plans_have_all_that_the_goal_needs_as_soon_as_it_is_free_again() {
    let mut run = Run::planned(aiming_at(0.02), profile(20.0));
    (0..70).for_each(|_| _ = follow(&mut run));
    let before = run.report();
    run.free = 19_800_000;
    (0..LOOKED).for_each(|_| _ = follow(&mut run));
    assert!(!run.report().in_reach);
    run.free = 24 * MB;
    (0..LOOKED).for_each(|_| _ = follow(&mut run));
    let after = run.report();
    assert!(after.in_reach && after.prediction.peak() == before.prediction.peak(), "{after}");
}

#[test]
fn memory_that_is_short_for_a_moment_costs_few_steps() {
    let mut run = Run::roomy(Goal::overhead(0.02), profile(20.0));
    let mut beyond = 0;
    for number in 0..130 {
        run.free = if number == 0 { 0 } else { u64::MAX };
        run.next_step();
        beyond += u32::from(!run.report().in_reach);
        step(&mut run);
    }
    assert!(beyond < 10, "{beyond}");
}

#[test]
fn memory_that_comes_and_goes_does_not_make_a_plan_each_time() {
    let mut run = Run::planned(Goal::overhead(0.02), profile(20.0));
    let mut seed = 1_u64;
    for _ in 0..200 * LOOKED {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        run.free = (7 + (seed >> 33) % 8) * MB;
        run.next_step();
        let observed = run.usual();
        run.ended(WHOLE, observed);
    }
    assert!(run.report().plans < 50, "{}", run.report());
}

#[test]
fn no_step_follows_a_plan_that_was_made_as_it_began_and_does_not_fit() {
    // Any plan takes a fifth longer, so everything is kept; another kind of steps takes that over.
    let mut run = Run::roomy(Goal::overhead(0.05), profile(50.0));
    (0..12).for_each(|_| run.step(KEPT / 2, 1.2));
    let lost = || Observation { wall: KEPT, ..Observation::default() };
    for _ in 0..10 {
        run.next_step();
        if run.plan.profiled {
            break;
        }
        run.ended(LOST, lost());
    }
    run.free = 30 * MB;
    let mut larger = profile_of(2 * MB, 400.0);
    (larger.saves[0].0.bytes, larger.work.activations[0].bytes) = (MB / 2, MB / 2);
    run.ended(StepOutcome::Profiled(Some(Box::new(larger))), Observation::default());
    for _ in 0..4 {
        run.next_step();
        let peak = run.auto.kinds[0].planned.peak();
        assert!(peak <= 27 * MB, "{peak} before step {}", run.number + 1);
        run.ended(WHOLE, lost());
    }
}
