//! Steps of another kind or size than was planned.

use super::*;

#[test]
fn whether_a_device_waits_for_its_program_is_not_told_by_other_kinds_of_steps() {
    let mut run = Run::on_device(Goal::overhead(0.05), profile_of_copies(50.0));
    while run.number <= COMPARED {
        let next = run.next_step();
        let wall = if next == NextStep::Baseline { KEPT } else { KEPT.mul_f64(1.02) };
        run.ended(WHOLE, Observation { wall, is_told: true, ..Observation::default() });
    }
    assert!(run.auto.kinds[0].planned.waits());
    let other = StepProfile { saves: profile_of(3 * MB, 50.0).saves, ..profile_of_copies(50.0) };
    let objective = Objective { compares: false, ..run.auto.objective };
    run.auto.kinds.profiled(&objective, run.number, other);
    assert!(!run.auto.kinds[0].planned.waits());
}

#[test]
fn steps_that_stay_another_kind_are_profiled_and_planned() {
    let mut run = Run::planned(Goal::overhead(0.02), profile(400.0));
    run.ended(LOST, Observation::default());
    assert!(matches!(run.next_step(), NextStep::OffloadAll { profiled: true, .. }));
    run.ended(StepOutcome::Profiled(Some(Box::new(profile_of(2 * MB, 400.0)))), Observation::default());
    assert_eq!(run.report().plans, 2);
}

#[test]
fn steps_of_a_late_profile_move_what_they_can_though_recording_takes_longer_than_the_goal_allows() {
    // A device that waits for its program, whose plans were compared before.
    let mut run = Run::on_device(Goal::overhead(0.05), profile_of_copies(50.0));
    (0..30).for_each(|_| run.step(KEPT.mul_f64(0.7), 1.03));
    assert!(!run.report().keeps_all() && run.next_step() == NextStep::Follow { headroom: Headroom::Free });
    run.ended(LOST, Observation::default());
    let mut larger = StepProfile { rates: profile_of_copies(50.0).rates, ..profile_of(4 * MB, 50.0) };
    larger.work.activations[1].recompute = Some(Recompute { time: MS, inputs: vec![0] });
    larger.work.handling = Handling { saves: MS, operations: KEPT.mul_f64(0.06), ..Handling::default() };
    run.next_step();
    assert!(run.plan.profiled);
    run.ended(StepOutcome::Profiled(Some(Box::new(larger))), Observation::default());
    let report = run.report();
    assert!(!report.keeps_all() && report.prediction.recomputed == Duration::ZERO, "{report}");
    assert!(report.step <= report.kept_step.mul_f64(1.05), "{report}");
}

/// Up to which size steps of the first kind keep everything.
fn whole_up_to(run: &mut Run) -> f64 {
    run.next_step();
    let Saves::Scheduled { courses, .. } = &run.plan.saves else { panic!("{:?}", run.plan) };
    courses[0].whole_up_to
}

/// A run whose plan is followed, and has taken what it may.
fn followed(goal: Goal) -> Run {
    let mut run = Run::on_device(goal, profile_of_copies(50.0));
    for _ in 0..40 {
        let is_kept = run.next_step() == NextStep::Baseline;
        let Saves::Scheduled { courses, .. } = &run.plan.saves else { panic!("{:?}", run.plan) };
        assert!(run.number >= COMPARED || courses[0].whole_up_to == 0.0, "steps of all sizes are compared");
        let (times, peak) = if is_kept { (1.0, LAYERS * MB) } else { (1.05, run.report().prediction.peak()) };
        run.ended(WHOLE, Observation { wall: KEPT.mul_f64(times), peak, ..Observation::default() });
    }
    assert!(!run.report().keeps_all());
    run
}

fn step_of_size(run: &mut Run, size: f64, stayed_whole: bool, observed: Observation) {
    run.next_step();
    run.number += 1;
    let how = if size > 1.0 { Adherence::Larger } else { Adherence::Part };
    let followed = Followed { stayed_whole, ..Followed::new(0, how).of_size(size) };
    end(run, followed, observed);
}

/// The step that was begun has ended.
fn end(run: &mut Run, followed: Followed, observed: Observation) {
    let observed = Observation { step: run.number, followed: Some(followed), ..observed };
    run.auto.end(&run.plan.clone(), observed);
}

#[test]
fn steps_keep_everything_where_the_largest_needs_as_much_even_as_planned() {
    let mut run = followed(Goal::overhead(0.1));
    let kept = LAYERS * MB;
    // Plans before this one had a higher peak, and count for a time.
    let [planned, highest] = [run.report().prediction.peak(), run.auto.kinds[0].highest(run.number)];
    assert!(planned <= highest && highest < kept / 2, "{planned} {highest}");
    let share = |peak: u64| peak as f64 / kept as f64;
    assert!((whole_up_to(&mut run) - share(highest)).abs() < 0.01);
    // One that kept everything had a higher peak than its size lets expect.
    step_of_size(
        &mut run,
        0.1,
        true,
        Observation { peak: highest / 2, wall: KEPT, ..Observation::default() },
    );
    assert!(whole_up_to(&mut run) < share(highest) - 0.01);
    let peak = planned * 13 / 10;
    step_of_size(
        &mut run,
        1.3,
        false,
        Observation { wall: KEPT.mul_f64(1.3), peak, ..Observation::default() },
    );
    assert_eq!(run.auto.kinds[0].highest(run.number), highest.max(peak));
    // One that has a higher peak than it should have is no measure.
    step_of_size(&mut run, 0.9, false, Observation { wall: KEPT, peak: kept, ..Observation::default() });
    assert_eq!(run.auto.kinds[0].highest(run.number), highest.max(peak));
}

#[test]
fn small_ones_go_as_planned_where_more_may_be_open_than_their_first_storages_tell_or_a_peak_is_the_goal() {
    let half = Followed::new(0, Adherence::Part).of_size(0.5);
    let whole_up_to_after = |followed_by: Followed| {
        let mut run = followed(Goal::overhead(0.1));
        assert!(whole_up_to(&mut run) > 0.0);
        run.number += 1;
        let wall = KEPT.mul_f64(followed_by.micro_batches);
        let observed =
            Observation { step: run.number, followed: Some(followed_by), wall, ..Observation::default() };
        run.auto.end(&run.plan.clone(), observed);
        run.next_step();
        if run.plan.profiled {
            run.ended(StepOutcome::Profiled(None), Observation::default());
        }
        whole_up_to(&mut run)
    };
    assert!(whole_up_to_after(half) > 0.0);
    assert_eq!(whole_up_to_after(Followed { outgrew: true, ..half }), 0.0);
    assert_eq!(whole_up_to_after(Followed { how: Adherence::Altered, ..half }), 0.0);
    assert_eq!(whole_up_to_after(Followed { one_by_one: false, ..half }), 0.0, "more may be open");
    // Until it has not been so for long.
    let mut run = followed(Goal::overhead(0.1));
    let altered = Followed { how: Adherence::Altered, ..half };
    end(&mut run, altered, Observation { wall: KEPT, ..Observation::default() });
    let number = run.number;
    let whole = |run: &mut Run, later: u64| {
        let highest = 2 * LAYERS * MB;
        run.auto.kinds[0].whole_up_to(&run.auto.objective, number + later, highest) > 0.0
    };
    assert!(!whole(&mut run, 512) && whole(&mut run, 513));
    let unequal = Followed { size: 1.0, micro_batches: 2.0, at_once: 1.2, how: Adherence::Larger, ..half };
    assert!(whole_up_to_after(unequal) > 0.0, "one after the other");
    let both = Goal { peak: Some(LAYERS * MB), ..Goal::overhead(0.1) };
    assert_eq!(whole_up_to(&mut followed(both)), 0.0);
}

/// How high steps may be that keep everything because they are small.
fn highest_whole(run: &mut Run) -> u64 {
    (whole_up_to(run) * (LAYERS * MB) as f64) as u64
}

#[test]
fn steps_that_keep_everything_are_held_to_the_memory_that_plans_are_held_to() {
    // On a device, an allocation found none.
    let mut run = followed(Goal::overhead(0.1));
    let peak = run.report().prediction.peak();
    let as_planned = |run: &mut Run, pressed: u64| {
        let peak = run.report().prediction.peak();
        run.next_step();
        run.ended(WHOLE, Observation { wall: KEPT.mul_f64(1.05), peak, pressed, ..Observation::default() });
    };
    as_planned(&mut run, peak / 5);
    assert_eq!(run.auto.kinds[0].highest(run.number), 0, "no step has had the peak of the new plan");
    (0..10).for_each(|_| as_planned(&mut run, 0));
    let (highest, room) = (highest_whole(&mut run), run.auto.objective.room);
    assert!(0 < highest && highest <= room, "{highest} {room}");
    run.auto.objective.room = highest / 2;
    assert!(highest_whole(&mut run) <= highest / 2);

    // On a CPU, less is free.
    let mut run = Run::roomy(aiming_at(0.1), profile(50.0));
    let go = |run: &mut Run, steps: u32| {
        for _ in 0..steps {
            let is_kept = run.next_step() == NextStep::Baseline;
            let (times, peak) =
                if is_kept { (1.0, LAYERS * MB) } else { (1.05, run.report().prediction.peak()) };
            run.ended(WHOLE, Observation { wall: KEPT.mul_f64(times), peak, ..Observation::default() });
        }
    };
    go(&mut run, 70);
    assert!(highest_whole(&mut run) > 0);
    run.free = run.report().prediction.peak() * 8 / 10;
    go(&mut run, 100);
    let (highest, free) = (highest_whole(&mut run), run.auto.objective.free);
    assert!(0 < highest && highest <= free, "{highest} {free}");
}

#[test]
fn unequal_micro_batches_that_are_too_high_as_a_whole_are_noticed() {
    let mut run = followed(Goal::overhead(0.1));
    let before = whole_up_to(&mut run);
    let at_once = 0.9 * before;
    let unequal = Followed {
        how: Adherence::Part,
        size: 0.8 * at_once,
        micro_batches: 1.6 * at_once,
        at_once,
        stayed_whole: true,
        ..Followed::new(0, Adherence::Part)
    };
    let peak = 2 * run.auto.kinds[0].highest(run.number);
    run.number += 1;
    end(&mut run, unequal, Observation { peak, wall: KEPT / 4, ..Observation::default() });
    let after = whole_up_to(&mut run);
    assert!((0.45 * at_once..0.55 * at_once).contains(&after), "{after} {before}");
}

#[test]
fn steps_that_became_slow_are_judged_however_many_small_ones_keep_everything() {
    for small in [1, 3, 7, 15, 63, 100] {
        let mut run = Run::roomy(aiming_at(0.1), profile(50.0));
        let (mut slow, mut whole) = (0, 0);
        for number in 0..200 * (small + 1) {
            let is_large = number < 40 || number % (small + 1) == 0;
            let is_kept = run.next_step() == NextStep::Baseline || run.auto.kinds[0].planned.keeps_all();
            if run.plan.profiled {
                run.ended(StepOutcome::Profiled(None), Observation::default());
                continue;
            }
            let times = match is_kept {
                true => 1.0,
                false if number < 100 => 1.05,
                false => 1.8,
            };
            slow += u32::from(is_large && times > 1.5);
            let peak = if is_kept { LAYERS * MB } else { run.report().prediction.peak() };
            let observed = Observation { wall: KEPT.mul_f64(times), peak, ..Observation::default() };
            if is_large {
                run.ended(WHOLE, observed);
                continue;
            }
            let Saves::Scheduled { courses, .. } = &run.plan.saves else { panic!("{:?}", run.plan) };
            let stayed_whole = courses[0].whole_up_to >= 0.25;
            whole += u32::from(stayed_whole);
            let times = if stayed_whole { 1.0 } else { times };
            let part = Followed { stayed_whole, ..Followed::new(0, Adherence::Part).of_size(0.25) };
            run.number += 1;
            let wall = KEPT.mul_f64(0.25 * times);
            end(&mut run, part, Observation { wall, peak: peak / 4, ..Observation::default() });
        }
        assert!(
            slow < 20 && whole > 0,
            "{slow} with {small} small ones between, of which {whole} kept everything"
        );
    }
}

#[test]
fn steps_of_which_nothing_moves_say_nothing_of_a_plan() {
    for compared in [true, false] {
        let goal = Goal::overhead(0.1);
        let mut run = match compared {
            true => Run::on_device(goal, profile_of_copies(50.0)),
            false => followed(goal),
        };
        let before = run.report();
        for _ in 0..700 {
            let slow = Observation { wall: KEPT / 2, peak: LAYERS * MB / 4, ..Observation::default() };
            match run.next_step() {
                NextStep::Baseline => step_of_size(&mut run, 1.0, false, Observation { wall: KEPT, ..slow }),
                _ => step_of_size(&mut run, 0.25, true, slow),
            }
        }
        let after = run.report();
        assert_eq!((after.tightened, after.loosened), (before.tightened, before.loosened), "{after}");
        assert!(after.kept_step <= before.kept_step.max(KEPT.mul_f64(1.1)), "{after}");
        run.next_step();
        assert!(!run.plan.timed && run.auto.is_settled(), "{compared}");
        assert_eq!(whole_up_to(&mut run), 0.0, "none has had a higher peak for long");
    }
}

#[test]
fn between_profiles_that_come_to_nothing_the_last_plan_is_tried() {
    let mut run = Run::planned(Goal::overhead(0.02), profile(400.0));
    let mut profiled = 0;
    for number in 3..=200 {
        match run.next_step() {
            NextStep::OffloadAll { .. } => {
                profiled += 1;
                run.ended(
                    StepOutcome::Profiled(Some(Box::new(profile_of(MB + number, 400.0)))),
                    Observation::default(),
                );
            }
            NextStep::Follow { headroom, .. } => {
                assert_eq!(headroom, Headroom::Free);
                run.ended(LOST, Observation::default());
            }
            next_step => panic!("{next_step:?}"),
        }
    }
    assert_eq!(profiled, 7, "of 198");
}

#[test]
fn a_plan_of_larger_steps_serves_those_in_turn_with_them() {
    let mut run = Run::planned(Goal::overhead(0.02), profile(400.0));
    let before = run.report();
    for _ in 0..50 {
        let usual = run.usual();
        assert!(matches!(run.next_step(), NextStep::Follow { .. }));
        run.ended(WHOLE, usual.clone());
        assert!(matches!(run.next_step(), NextStep::Follow { .. }));
        run.ended(PART, Observation { wall: usual.wall / 2, stall: usual.stall / 2, ..usual });
    }
    assert_eq!(run.report(), before);
    // A profile of a smaller one changes nothing either.
    run.ended(LOST, Observation::default());
    run.ended(StepOutcome::Profiled(Some(Box::new(profile_of(MB / 2, 400.0)))), Observation::default());
    assert_eq!(run.report(), before);
}

#[test]
fn steps_of_up_to_twice_the_size_follow_the_plan_for_a_time() {
    let profiled = |goal: Goal, size: f64| {
        let mut run = followed(goal);
        step_of_size(
            &mut run,
            size,
            false,
            Observation { wall: KEPT.mul_f64(size), ..Observation::default() },
        );
        run.next_step();
        run.plan.profiled
    };
    let time = Goal::overhead(0.1);
    assert_eq!([1.5, 1.9, 2.1].map(|size| profiled(time, size)), [false, false, true]);
}

#[test]
fn steps_that_stay_smaller_are_planned_anew() {
    let mut run = Run::planned(Goal::budget(12 * MB), profile(400.0));
    let profiled = (1..40).find(|_| {
        let usual = run.usual();
        run.ended(PART, Observation { wall: usual.wall / 2, stall: usual.stall / 2, ..usual });
        matches!(run.next_step(), NextStep::OffloadAll { profiled: true, .. })
    });
    assert_eq!(profiled, Some(20));
    run.ended(StepOutcome::Profiled(Some(Box::new(profile_of(MB / 2, 400.0)))), Observation::default());
    assert!(run.report().keeps_all(), "{}", run.report());
}

#[test]
fn steps_of_other_sizes_are_judged_by_what_they_take_for_as_much() {
    for (went, size) in [(Adherence::Whole(2), 2), (Adherence::Part, 1)] {
        let mut run = Run::planned(Goal::overhead(0.02), profile(400.0));
        let (usual, before) = (run.usual(), run.report());
        for _ in 0..3 {
            let wall = usual.wall * size / if went == Adherence::Part { 2 } else { 1 };
            let stall = usual.stall * size / if went == Adherence::Part { 2 } else { 1 };
            run.next_step();
            run.ended(StepOutcome::Planned(went), Observation { wall, stall, ..usual.clone() });
        }
        assert!(run.auto.kinds[0].weighing.is_some() || run.auto.is_settled(), "{went:?}");
        assert_eq!(run.report(), before, "{went:?}");
    }
}

#[test]
fn steps_of_about_the_planned_size_tell_what_one_of_it_takes() {
    for (size, told) in [(0.8, 0.8), (0.4, 0.8), (0.2, 1.0), (2.5, 0.8)] {
        let mut run = Run::roomy(Goal::overhead(0.1), profile(50.0));
        (0..4).for_each(|_| run.step_of(|_| size, KEPT.mul_f64(0.8), 1.0));
        let report = run.report();
        assert!(report.kept_step.abs_diff(KEPT.mul_f64(told)) < MS, "{size}: {report}");
    }
}

#[test]
fn what_does_not_go_with_the_size_loosens_no_plan_that_costs_nothing() {
    // Steps of another size than the profiled one, which take more or less than it for as much, whatever they keep.
    for (size, times) in [(0.8, 1.25), (0.9, 0.8), (1.3, 0.8)] {
        let mut run = Run::roomy(aiming_at(0.1), profile(50.0));
        (0..100).for_each(|_| run.step_of(|_| size, KEPT.mul_f64(times), 1.0));
        let report = run.report();
        assert!(report.loosened == 0 && !report.keeps_all(), "{size}: {report}");
        // That they take longer tells nothing of a step of the planned size.
        let told = KEPT.mul_f64(f64::min(times, 1.0));
        assert!(report.kept_step.abs_diff(told) < MS, "{size}: {report}");
        assert_eq!(report.baseline == Baseline::Measured, times < 1.0, "{size}: {report}");
    }
}

#[test]
fn what_steps_of_the_planned_size_have_told_stays_whatever_others_take() {
    let mut run = Run::roomy(Goal::overhead(0.1), profile(50.0));
    for number in 0..18 {
        let size = if number < 2 { 1.0 } else { 0.5 };
        run.step_of(|_| size, KEPT.mul_f64(0.9 * size), 1.02);
    }
    let report = run.report();
    assert!(report.kept_step.abs_diff(KEPT.mul_f64(0.9)) < MS, "{report}");
}

#[test]
fn a_size_that_no_step_kept_everything_of_is_not_judged_by_others_far_from_it() {
    let mut run = Run::roomy(Goal::overhead(0.1), profile(50.0));
    // Steps take as the square of their size, and those that keep everything are small.
    for number in 0..100 {
        let size = if number < 20 { 0.5 } else { 1.0 };
        run.step_of(|_| size, KEPT.mul_f64(size), 1.0);
    }
    let report = run.report();
    assert!(report.loosened == 0 && !report.keeps_all(), "{report}");
}

#[test]
fn a_plan_that_no_comparison_has_weighed_is_loosened_if_all_its_steps_are_far_beyond_the_goal() {
    let mut run = Run::roomy(Goal::overhead(0.1), profile(50.0));
    // Those that keep everything are smaller than planned ones, so no comparison has a result.
    let size = |is_kept| if is_kept { 0.8 } else { 0.9 };
    (0..100).for_each(|_| run.step_of(size, KEPT.mul_f64(0.8), 1.3));
    let report = run.report();
    assert!(report.keeps_all() && report.kept_step.abs_diff(KEPT.mul_f64(0.8)) < KEPT / 50, "{report}");
}

#[test]
fn steps_that_show_nothing_keep_what_fits() {
    let mut run = Run::begin(Goal::overhead(0.02));
    let mut profiled = Vec::new();
    for number in 1..=40 {
        match run.next_step() {
            NextStep::OffloadAll { profiled: false, .. } => {
                run.ended(StepOutcome::Unplanned, Observation::default())
            }
            NextStep::OffloadAll { profiled: true, .. } => {
                profiled.push(number);
                run.ended(StepOutcome::Profiled(None), Observation::default());
            }
            NextStep::Keep { headroom: Headroom::Free } => {
                run.ended(StepOutcome::Unplanned, Observation::default());
            }
            next_step => panic!("{next_step:?}"),
        }
    }
    assert_eq!(profiled, [2, 3, 5, 9, 17, 33]);
}

#[test]
fn a_profile_that_no_step_is_compared_with_in_time_is_taken_as_that_of_other_steps_was() {
    let quick = KEPT.mul_f64(0.75);
    let mut run = Run::roomy(Goal::overhead(0.1), profile(50.0));
    (0..15).for_each(|_| run.step(quick, 1.0));
    run.next_step();
    run.ended(LOST, Observation { wall: KEPT, ..Observation::default() });
    assert!(matches!(run.next_step(), NextStep::OffloadAll { profiled: true, .. }));
    run.ended(StepOutcome::Profiled(Some(Box::new(profile_of(3 * MB, 50.0)))), Observation::default());
    assert_eq!((run.number, run.report().kept_step), (COMPARED - 1, KEPT), "it may yet be compared");
    (0..2).for_each(|_| run.step(quick, 1.0));
    assert!(run.report().kept_step.abs_diff(quick) < KEPT / 100, "{}", run.report());
}

/// What was compared until now is over, and steps save these layers from now on.
pub(super) fn change(run: &mut Run, profile: StepProfile) {
    run.next_step();
    while !run.plan.profiled {
        run.ended(LOST, Observation { wall: KEPT, ..Observation::default() });
        run.next_step();
    }
    run.ended(StepOutcome::Profiled(Some(Box::new(profile))), Observation::default());
}

#[test]
fn larger_steps_are_taken_to_cost_what_those_did_that_they_replace() {
    // Any plan takes a fifth longer, on a device that waits for its program, until larger steps come for good.
    let mut run = Run::on_device(Goal::overhead(0.05), profile_of_copies(50.0));
    (0..30).for_each(|_| run.step(KEPT / 2, 1.2));
    assert!(run.report().keeps_all(), "{}", run.report());
    let saves = profile_of(3 * MB, 50.0);
    change(&mut run, StepProfile { rates: profile_of_copies(50.0).rates, ..saves });
    assert!(run.auto.kinds.len() == 1 && run.report().keeps_all(), "{}", run.report());
}

#[test]
fn what_others_have_shown_plans_to_cost_counts_though_two_steps_kept_everything() {
    let mut run = Run::roomy(aiming_at(0.1), profile(50.0));
    // Steps wait twice as long as is planned.
    let step = |run: &mut Run| {
        let waits = run.report().prediction.stall.total();
        run.step(KEPT, 1.0 + 2.0 * waits.as_secs_f64() / KEPT.as_secs_f64());
    };
    while run.number < 13 {
        step(&mut run);
    }
    let over = |run: &mut Run| run.report().step.as_secs_f64() / run.report().kept_step.as_secs_f64() - 1.0;
    let known = over(&mut run);
    assert!(run.report().loosened > 0 && known < 0.08, "{}", run.report());
    change(&mut run, profile_of(MB + MB / 10, 50.0));
    assert_eq!(run.number, 15);
    assert!(over(&mut run) > 0.09, "its own comparison may tell: {}", run.report());
    while run.number < COMPARED {
        step(&mut run);
    }
    run.next_step();
    let report = run.report();
    assert!(report.baseline == Baseline::Measured && over(&mut run) < known + 0.01, "{report}");
}

#[test]
fn kinds_without_a_comparison_take_the_time_of_others_of_their_size() {
    // Steps of a tenth more, whose profile took so many times as long as it should have.
    let late = |profiled: f64| {
        let mut run = Run::roomy(aiming_at(0.1), profile(50.0));
        while run.number < COMPARED {
            run.step(KEPT, 1.02);
        }
        let mut larger = profile_of(MB + MB / 10, 50.0);
        larger.work.pace(1.1 * profiled, 1.0);
        change(&mut run, larger);
        let report = run.report();
        (report.baseline, report.kept_step.as_secs_f64() / KEPT.as_secs_f64())
    };
    for profiled in [0.85, 1.0, 1.2] {
        let (baseline, kept) = late(profiled);
        assert!(
            baseline == Baseline::Others && (kept - 1.1).abs() < 0.01,
            "{profiled}: {baseline:?}, {kept}"
        );
    }
    let (baseline, kept) = late(1.5);
    assert!(baseline == Baseline::Profile && kept > 1.5, "another kind of step: {baseline:?}, {kept}");
}

#[test]
fn a_plan_of_a_file_whose_computing_took_no_time_takes_over_what_others_have_shown() {
    let mut run = Run::roomy(aiming_at(0.1), profile(50.0));
    (0..10).for_each(|_| run.step(KEPT, 1.02));
    let (shown, objective) = (run.auto.kinds[0].planned.shown(), run.auto.objective);
    let planned = &mut run.auto.kinds[0].planned;
    (planned.corrections.is_measured, planned.corrections.longer) = (false, -1.0);
    planned.takes_over(&objective, &shown);
    assert!(planned.corrections.longer.is_finite());
}

#[test]
fn of_what_others_have_shown_the_last_counts() {
    let mut run = Run::roomy(aiming_at(0.1), profile(50.0));
    (0..10).for_each(|_| run.step(KEPT, 1.0));
    let mut others = profile_of(3 * MB, 50.0);
    (others.saves[0].0.bytes, others.work.activations[0].bytes) = (MB / 2, MB / 2);
    change(&mut run, others);
    // Those before come again, and take less than was known.
    let before = run.auto.kinds[1].planned.kept_step();
    run.auto.kinds.rotate_left(1);
    run.auto.kinds[0].planned.keeps_in(before / 2);
    run.auto.kinds[0].weighing = None;
    while run.number <= COMPARED + 1 {
        run.next_step();
        let went = if run.plan.profiled { StepOutcome::Profiled(None) } else { LOST };
        run.ended(went, Observation::default());
    }
    let new = &run.auto.kinds[1].planned;
    assert!(new.kept_step().abs_diff(before / 2) < MS, "{:?}", new.kept_step());
}

#[test]
fn how_long_steps_take_to_launch_says_nothing_of_what_they_take() {
    // None of a kind that is this rare is timed to its end.
    for number in [2, 30] {
        let mut run = Run::on_device(Goal::overhead(0.05), profile_of_copies(50.0));
        while run.number < number {
            run.step(KEPT, 1.0);
        }
        let before = run.report().kept_step;
        run.auto.kinds[0].watch.planned();
        for _ in 0..40 {
            run.next_step();
            let how = if run.plan.saves == Saves::Move { StepOutcome::Unplanned } else { WHOLE };
            run.ended(how, Observation { wall: KEPT.mul_f64(0.4), launched: true, ..Observation::default() });
        }
        assert_eq!(run.report().kept_step, before, "{number}");
    }
}

#[test]
fn a_device_that_is_found_to_wait_for_its_program_shows_what_that_does() {
    let handling = Handling { saves: 5 * MS, ..Handling::default() };
    let mut profile = profile_of_copies(50.0);
    profile.work.handling = handling;
    let mut run = Run { free: 0, ..Run::on_device(Goal::overhead(0.05), profile) };
    run.next_step();
    assert_eq!(run.report().machine.exposed, 0.0);
    run.steps(3, |usual| Observation { wall: usual.wall.mul_f64(0.5), ..usual });
    assert_eq!(run.report().machine.exposed, 1.0, "{}", run.report());
}

#[test]
fn what_a_kinds_own_steps_have_shown_comes_before_what_others_have() {
    let mut run = Run::begin(Goal::budget(12 * MB));
    run.begun(profile(400.0));
    run.next_step();
    let other = |run: &mut Run, bytes: u64| {
        run.ended(LOST, Observation::default());
        while {
            run.next_step();
            !run.plan.profiled
        } {
            run.ended(LOST, Observation::default());
        }
        run.ended(StepOutcome::Profiled(Some(Box::new(profile_of(bytes, 400.0)))), Observation::default());
        run.next_step();
    };
    other(&mut run, 3 * MB);
    for _ in 0..30 {
        let usual = run.usual();
        run.ended(WHOLE, Observation { wall: KEPT / 2 + usual.stall, ..usual });
        run.next_step();
    }
    let kept = run.report().kept_step;
    assert!(kept < KEPT.mul_f64(0.6), "{kept:?}");
    other(&mut run, 7 * MB);
    assert!(run.report().kept_step.abs_diff(kept) < KEPT / 20, "{}", run.report());
}

#[test]
fn steps_of_many_sizes_that_become_quicker_are_as_quick_as_they_are() {
    for quick in [0.95, 0.85, 0.7] {
        let mut run = Run::roomy(Goal::overhead(0.1), profile(50.0));
        for number in 0..600_u64 {
            let next = run.next_step();
            // Sizes that come later are others than those that were compared.
            let (first, count, times) = if number < 40 { (1.0, 3, 1.0) } else { (1.1, 2, quick) };
            let size = first + 0.1 * (number % count) as f64;
            let wall = KEPT.mul_f64(size * times);
            run.number += 1;
            let followed =
                (next != NextStep::Unseen).then_some(Followed::new(0, Adherence::Part).of_size(size));
            let observed =
                Observation { step: run.number, wall, behind: wall / 10, followed, ..Observation::default() };
            run.auto.end(&run.plan.clone(), observed);
        }
        let known = run.report().kept_step.as_secs_f64() / KEPT.as_secs_f64();
        assert!((quick - 0.05..1.02).contains(&known), "{quick}: {known}");
    }
}
