//! When steps may keep everything to be compared with planned ones.

use std::cell::Cell;

use super::super::super::decisions::Decision;
use super::super::super::kind::LARGER_STILL;
use super::*;

/// The profile of steps that keep the lanes to the host busy.
fn copying() -> StepProfile {
    profile_of_copies(50.0)
}

/// The numbers of those of the next `count` steps that keep everything. Steps vary by a twentieth.
fn kept(run: &mut Run, count: u64, times: f64) -> Vec<u64> {
    let varied = |number: u64| KEPT.mul_f64(1.0 + 0.05 * (number * 7 % 5) as f64 / 4.0);
    let is_kept = |run: &mut Run| {
        let is_kept = run.next_step() == NextStep::Baseline;
        let number = run.number + 1;
        run.step(varied(number), times);
        is_kept.then_some(number)
    };
    (0..count).filter_map(|_| is_kept(run)).collect()
}

#[test]
fn no_step_keeps_everything_after_the_first_ones() {
    let goal = Goal::overhead(0.1);
    for mut run in [Run::on_device(goal, copying()), Run::roomy(goal, profile(50.0))] {
        let all = kept(&mut run, 200, 1.13);
        assert!(!all.is_empty() && all.iter().all(|number| *number <= COMPARED), "{all:?}");
    }
}

#[test]
fn what_the_cache_takes_to_begin_a_step_counts_as_what_a_plan_takes() {
    let loosened = |overhead: Duration| {
        let mut run = Run::on_device(Goal::overhead(0.1), copying());
        while run.number < COMPARED {
            let is_kept = run.next_step() == NextStep::Baseline;
            let went = if is_kept { StepOutcome::Baseline } else { WHOLE };
            let wall = if is_kept { KEPT } else { KEPT.mul_f64(1.09) };
            run.ended(went, Observation { wall, overhead, ..Observation::default() });
        }
        run.report().loosened
    };
    assert_eq!(loosened(Duration::ZERO), 0);
    assert!(loosened(KEPT.mul_f64(0.04)) > 0);
}

#[test]
fn a_plan_made_after_them_is_loosened_if_all_its_steps_are_far_beyond_the_goal() {
    let mut run = Run::on_device(Goal::overhead(0.1), copying());
    kept(&mut run, COMPARED - 1, 1.13);
    // A disk that was not needed is no reason for another plan, so one is made by hand.
    run.auto.kinds[0].plans += 1;
    run.auto.kinds[0].weighing = None;
    run.auto.kinds[0].watch.planned();
    let loosened = run.report().loosened;
    kept(&mut run, 4, 1.12);
    assert_eq!(run.report().loosened, loosened);
    run.auto.kinds[0].watch.planned();
    kept(&mut run, 3, 1.4);
    assert_eq!(run.report().loosened, loosened + 1);
}

#[test]
fn a_plan_that_could_not_be_compared_is_judged_by_its_steps() {
    // Kernels are being made for as long as steps may keep everything, as where steps are short.
    let mut run = Run::on_device(Goal::overhead(0.05), copying());
    while run.number < COMPARED {
        let is_kept = run.next_step() == NextStep::Baseline;
        let wall = KEPT.mul_f64(if is_kept { 1.0 } else { 1.3 });
        let how = if is_kept { StepOutcome::Baseline } else { WHOLE };
        run.ended(how, Observation { wall, compiled: !is_kept, ..Observation::default() });
    }
    assert_eq!(run.report().loosened, 0);
    run.step(KEPT, 1.3);
    (0..3).for_each(|_| run.step(KEPT, 1.3));
    assert_eq!(run.report().loosened, 1, "{}", run.report());
}

#[test]
fn a_plan_that_could_not_be_compared_takes_less_where_steps_fit_with_everything_kept() {
    let beyond = |run: &mut Run| {
        let plan = run.report();
        plan.prediction.step.as_secs_f64() / plan.kept_step.as_secs_f64() - 1.0
    };
    let until_compared = |mut run: Run, fits: bool| {
        while run.number < COMPARED {
            let is_kept = run.next_step() == NextStep::Baseline;
            assert!(fits || !is_kept);
            let how = if is_kept { StepOutcome::Baseline } else { WHOLE };
            run.ended(how, Observation { wall: KEPT, compiled: !is_kept, ..Observation::default() });
        }
        let before = beyond(&mut run);
        run.next_step();
        (before, beyond(&mut run), run.auto.decisions())
    };
    let goal = Goal::overhead(0.05);
    let (before, after, decisions) = until_compared(Run::on_device(goal, copying()), true);
    assert!((0.2..0.8).contains(&(after / before)), "{before} {after}");
    assert!(decisions.contains(&Decision::Unproven), "{decisions:?}");
    // One that has to move something has no other choice.
    let (before, after, _) = until_compared(Run { free: 5 * MB, ..Run::on_device(goal, copying()) }, false);
    assert_eq!(before, after);
}

#[test]
fn steps_of_other_sizes_are_no_reason_for_a_plan_that_takes_more() {
    let tightened = |size: fn(u64) -> f64| {
        let mut run = Run::on_device(Goal::overhead(0.1), copying());
        while run.number < COMPARED {
            let size = size(run.number);
            run.step_of(|_| size, KEPT, 1.01);
        }
        let plan = run.report();
        (plan.tightened, run.auto.kinds[0].planned.corrections.cost.is_some())
    };
    assert_eq!(tightened(|number| 0.5 + (number as f64 * 0.618).fract()), (0, true));
    assert!(tightened(|_| 1.0).0 > 0);
}

#[test]
fn a_step_that_was_to_keep_everything_and_moved_something_shows_nothing() {
    let compared = |moved: u64| {
        let mut run = Run::on_device(Goal::overhead(0.1), copying());
        for _ in 0..12 {
            let is_kept = run.next_step() == NextStep::Baseline;
            let how = if is_kept { StepOutcome::Baseline } else { WHOLE };
            let moved = if is_kept { moved } else { 7 };
            run.ended(how, Observation { wall: KEPT / 2, moved, ..Observation::default() });
        }
        run.report().baseline
    };
    assert_eq!((compared(0), compared(1)), (Baseline::Measured, Baseline::Profile));
}

#[test]
fn a_comparison_ends_if_no_step_keeps_everything_that_was_to() {
    let mut run = Run::on_device(Goal::overhead(0.1), copying());
    kept(&mut run, 100, 1.05);
    // Steps become strange, so they are compared whenever that is.
    let mut compared = 0;
    for _ in 0..200 {
        let is_kept = run.next_step() == NextStep::Baseline;
        compared += u64::from(is_kept);
        let how = if is_kept { StepOutcome::Baseline } else { WHOLE };
        run.ended(how, Observation { wall: KEPT.mul_f64(1.7), moved: 7, ..Observation::default() });
    }
    assert_eq!(compared, 8, "{}", run.report());
}

#[test]
fn a_goal_is_in_reach_though_memory_became_short_before_a_plan_was_compared() {
    for (goal, free) in [(0.2, 12), (0.4, 10), (0.8, 5)] {
        let mut run = Run::roomy(Goal::overhead(goal), profile(50.0));
        (0..2).for_each(|_| run.step(KEPT, 1.0));
        run.free = free * MB;
        (0..40).for_each(|_| run.step(KEPT, 1.0));
        let plan = run.report();
        assert!(plan.in_reach && plan.prediction.peak() <= free * MB, "{plan}");
    }
}

#[test]
fn a_plan_that_takes_more_needs_four_steps_of_each_kind_though_the_clock_is_known() {
    let mut run = Run::on_device(Goal::overhead(0.1), copying());
    let mut counts = [0; 2];
    while run.report().tightened == 0 && run.number < COMPARED {
        let is_kept = run.next_step() == NextStep::Baseline;
        counts[usize::from(is_kept)] += 1;
        let faster = 1.0 + 0.02 * (run.number % 3) as f64;
        let wall = KEPT.mul_f64(if is_kept { 1.0 } else { 1.03 } * faster.powf(-0.8));
        let how = if is_kept { StepOutcome::Baseline } else { WHOLE };
        run.ended(how, Observation { wall, clock: Some(1.4e9 * faster), ..Observation::default() });
    }
    // Two of each do not count.
    assert_eq!(counts, [6, 6], "{}", run.report());
}

#[test]
fn steps_of_any_size_that_wait_for_their_launches_are_judged_by_those_of_their_size() {
    // Each takes as long whatever its size, and a plan takes 30 % longer.
    let mut run = Run::on_device(Goal::overhead(0.05), copying());
    let mut number = 0_u32;
    for _ in 0..200 {
        number += 1;
        let size = 0.5 + f64::from(number * 7 % 11) / 20.0;
        run.step_of(|_| size, KEPT.div_f64(size), 1.3);
    }
    assert!(run.report().keeps_all(), "{}", run.report());
}

#[test]
fn steps_that_become_strange_are_compared_whenever_that_is() {
    let mut run = Run::on_device(Goal::overhead(0.1), copying());
    kept(&mut run, 100, 1.05);
    assert!(!kept(&mut run, 40, 1.6).is_empty());
}

#[test]
fn a_later_profile_counts_on_what_steps_of_other_profiles_have_shown() {
    let mut run = Run::on_device(Goal::overhead(0.1), copying());
    // Steps take nine tenths of what the profile says, and a plan costs more than planned.
    for _ in 0..30 {
        run.step(KEPT.mul_f64(0.9), 1.15);
    }
    let before = run.report();
    let larger = StepProfile { rates: copying().rates, ..profile_of(2 * MB, 50.0) };
    let unaware = Run::on_device(Goal::overhead(0.1), larger.clone()).report();
    while run.next_step() == NextStep::Unseen {
        run.ended(StepOutcome::Unplanned, Observation::default());
    }
    run.ended(LOST, Observation::default());
    assert_eq!(run.next_step(), NextStep::Keep { headroom: Headroom::Free });
    assert!(run.plan.profiled);
    run.ended(StepOutcome::Profiled(Some(Box::new(larger))), Observation::default());
    assert!(matches!(run.next_step(), NextStep::Follow { .. }), "it keeps nothing for comparison");
    let after = run.report();
    assert_eq!(after.baseline, Baseline::Profile);
    assert_eq!(after.kept_step, before.kept_step, "as quick beside its profile as the others");
    let beyond = |plan: &PlanReport| plan.prediction.step.as_secs_f64() / plan.kept_step.as_secs_f64() - 1.0;
    assert!(beyond(&after) < 0.9 * beyond(&unaware), "{after}\n{unaware}");
}

#[test]
fn a_device_looks_at_steps_that_keep_what_fits_and_a_disk_at_steps_in_which_everything_moves() {
    let looks = |goal: Goal, release: Release| {
        let mut run = Run { release, free: u64::MAX, ..Run::begin(goal) };
        let first = run.next_step();
        run.ended(StepOutcome::Unplanned, Observation::default());
        let second = run.next_step();
        assert!(run.plan.profiled);
        [first, second].map(|step| matches!(step, NextStep::Keep { headroom: Headroom::Free }))
    };
    let (time, peak) = (Goal::overhead(0.02), Goal::budget(20 * MB));
    assert_eq!(looks(time, Release::InStreamOrder), [true; 2]);
    // What a step has besides is not known yet.
    assert_eq!(looks(peak, Release::InStreamOrder), [false; 2]);
    assert_eq!(looks(time, Release::OnceWritten), [false; 2]);
    assert_eq!(looks(time, Release::WhenStored), [false; 2]);
}

#[test]
fn steps_keep_everything_until_there_is_the_host_memory_that_the_plan_needs() {
    let mut run = Run { provided: false, ..Run::on_device(Goal::overhead(0.1), copying()) };
    let before = run.report();
    for _ in 0..12 {
        assert_eq!(run.next_step(), NextStep::Baseline);
        run.ended(
            StepOutcome::Baseline,
            Observation { wall: 3 * KEPT, pinned: true, ..Observation::default() },
        );
    }
    assert_eq!(run.report(), before, "steps during which memory is pinned say nothing");
    run.provided = true;
    assert_eq!(kept(&mut run, 4, 1.05), [15, 16]);
}

#[test]
fn late_steps_follow_their_plan_while_the_host_memory_that_it_needs_is_provided_again() {
    let mut run = Run::on_device(Goal::overhead(0.1), copying());
    kept(&mut run, COMPARED, 1.05);
    run.provided = false;
    assert!(kept(&mut run, 10, 1.05).is_empty());
}

#[test]
fn where_not_all_fits_the_step_that_is_profiled_moves_no_more_than_it_must() {
    let mut run = Run { release: Release::InStreamOrder, free: 10 * MB, ..Run::begin(Goal::overhead(0.02)) };
    assert_eq!(run.next_step(), NextStep::Keep { headroom: Headroom::Free });
    let plan = run.plan.clone();
    run.number += 1;
    run.auto.end(&plan, Observation { step: 1, moved: 3, ..Observation::default() });
    assert_eq!((run.next_step(), run.plan.profiled), (NextStep::Keep { headroom: Headroom::Free }, true));
}

#[test]
fn where_steps_vary_in_size_there_is_host_memory_for_larger_ones() {
    let asked = |run: &mut Run| {
        let asked = Cell::new(0);
        let resources = Resources { host_pool: u64::MAX, disk: 0, release: Release::InStreamOrder };
        run.auto.begin(&Outset {
            step: run.number + 1,
            resources,
            today: Today::default(),
            free: &|| u64::MAX,
            provide: &|bytes| {
                asked.set(bytes);
                true
            },
            scope: &|_| ScopeId::default(),
        });
        asked.get()
    };
    let mut run = Run::on_device(Goal::overhead(0.1), copying());
    let needed = run.report().prediction.host_peak;
    assert_eq!(asked(&mut run), needed);
    run.next_step();
    let observed = Observation { wall: KEPT, behind: KEPT / 10, ..Observation::default() };
    run.ended(StepOutcome::Planned(Adherence::Whole(16)), observed.clone());
    assert_eq!(asked(&mut run), needed, "micro-batches follow each other");
    run.next_step();
    run.ended(PART, observed);
    assert_eq!(asked(&mut run), (LARGER_STILL * needed as f64) as u64);
}

/// A step that nobody waits for takes as long as launching it does, whatever its size.
#[test]
fn launches_of_steps_of_other_sizes_say_nothing_of_their_times() {
    let mut run = Run::on_device(Goal::overhead(0.1), copying());
    kept(&mut run, COMPARED + 10, 1.05);
    let launched = |_| Observation { wall: KEPT / 20, launched: true, ..Observation::default() };
    let is_kept = |run: &mut Run, how: Adherence| {
        let next = run.next_step();
        run.ended(StepOutcome::Planned(how), launched(()));
        next == NextStep::Baseline
    };
    assert!(!(0..100).any(|_| is_kept(&mut run, Adherence::Part)));
}

#[test]
fn planned_steps_that_are_quicker_than_what_keeps_everything_show_that_it_was_slow_by_chance() {
    let mut run = Run::on_device(Goal::overhead(0.1), copying());
    while run.number < 20 {
        run.step(KEPT.mul_f64(1.2), 1.08);
    }
    let slow = run.report();
    assert_eq!((slow.kept_step, slow.baseline), (KEPT.mul_f64(1.2), Baseline::Measured), "{slow}");
    (0..40).for_each(|_| run.step(KEPT, 1.08));
    let after = run.report();
    assert!(after.kept_step < KEPT.mul_f64(1.08), "no more than what planned steps take: {after}");
}

#[test]
fn a_plan_whose_steps_become_longer_than_the_goal_allows_is_loosened_after_all_comparisons_too() {
    let mut run = Run::on_device(Goal::overhead(0.1), copying());
    while run.number < 20 {
        run.step(KEPT, 1.09);
    }
    let before = run.report();
    (0..30).for_each(|_| run.step(KEPT, 1.2));
    let after = run.report();
    assert!(after.loosened > before.loosened, "{before}\n{after}");
    assert!(after.keeps_all() || after.prediction.peak() > before.prediction.peak(), "{before}\n{after}");
}

/// Where launching takes long, operations that run again take several times what they take of the device.
#[test]
fn a_plan_that_takes_several_times_what_is_planned_comes_within_its_goal() {
    for factor in [2.5, 4.0] {
        let mut run = Run::on_device(Goal::overhead(0.05), copying());
        for _ in 0..40 {
            let planned = run.report().step.as_secs_f64() / run.report().kept_step.as_secs_f64() - 1.0;
            run.step(KEPT, 1.0 + factor * planned);
        }
        let report = run.report();
        let takes = factor * (report.step.as_secs_f64() / report.kept_step.as_secs_f64() - 1.0);
        // Two steps of each kind tell it to half a percent of a step.
        assert!(takes <= 0.05 + 0.005 && !report.keeps_all(), "{factor}: {report}");
        assert!(report.loosened <= 2, "{factor}: {report}");
    }
}

#[test]
fn no_plan_is_settled_before_it_was_followed() {
    for times in [1.13, 1.2, 1.5] {
        let mut run = Run::on_device(Goal::overhead(0.1), copying());
        let mut changed = 0;
        for _ in 0..60 {
            let before = run.report().plans;
            kept(&mut run, 1, times);
            let has_changed = run.report().plans != before;
            changed += u64::from(has_changed);
            assert!(!(has_changed && run.auto.is_settled()), "{times}: {}", run.report());
        }
        assert!(changed > 0 && run.auto.is_settled(), "{times}");
    }
}

#[test]
fn a_goal_of_nothing_does_not_keep_what_does_not_fit() {
    let mut run = Run { free: 10 * MB, ..Run::begin(Goal::overhead(0.0)) };
    run.begun(profile(100.0));
    run.steps(3, |usual| Observation { wall: usual.wall + 6 * MS, stall: usual.stall + 6 * MS, ..usual });
    assert!(!run.report().keeps_all(), "{}", run.report());
}

#[test]
fn steps_that_become_longer_are_not_averaged_with_those_before() {
    let mut run = Run::on_device(Goal::overhead(0.05), copying());
    let first = run.report().prediction.peak();
    let mut since = None;
    for n in 0..6000_u64 {
        let is_low = run.report().prediction.peak() <= first;
        run.step(KEPT, if n >= 200 && is_low { 1.25 } else { 1.04 });
        if since.is_none() && run.report().loosened > 0 {
            since = Some(n - 200);
        }
    }
    assert!(since.is_some_and(|since| since < 200), "{since:?}");
}

#[test]
fn a_size_that_no_step_kept_everything_of_is_judged_and_not_timed_for_ever() {
    let mut run = Run::on_device(Goal::overhead(0.05), copying());
    let mut timed = 0;
    for n in 0..4000_u64 {
        let (size, times) = if n < 22 { (1.0, 1.04) } else { (1.3, 1.4) };
        run.step_of(|_| size, KEPT, times);
        timed += u32::from(run.auto.kinds[0].settles());
    }
    assert!(timed < 200 && run.report().loosened > 0, "{timed}: {}", run.report());
}

#[test]
fn other_kinds_of_steps_have_plans_though_one_keeps_everything() {
    let other = || StepProfile {
        rates: Rates { out: Some(4e9), back: Some(4e9), ..Rates::default() },
        ..profile_of(2 * MB, 50.0)
    };
    assert!(!Run::on_device(Goal::overhead(0.0005), other()).report().keeps_all());
    let mut run = Run::on_device(Goal::overhead(0.05), copying());
    (0..100).for_each(|_| run.step(KEPT / 2, 1.2));
    run.next_step();
    run.ended(LOST, Observation::default());
    while {
        run.next_step();
        !run.plan.profiled
    } {
        run.ended(LOST, Observation::default());
    }
    run.free = 30 * MB;
    run.ended(StepOutcome::Profiled(Some(Box::new(other()))), Observation::default());
    (0..3000).for_each(|_| run.step(KEPT, 1.0));
    assert!(!run.report().keeps_all(), "{}", run.report());
}

#[test]
fn a_machine_that_becomes_slower_does_not_end_planning() {
    let mut run = Run::on_device(Goal::overhead(0.02), copying());
    for number in 0..3000 {
        let kept = if number >= 22 { KEPT.mul_f64(1.05) } else { KEPT };
        let over = run.report().step.as_secs_f64() / run.report().kept_step.as_secs_f64();
        run.step(kept, over.min(1.02));
    }
    assert!(!run.report().keeps_all(), "{}", run.report());
}

#[test]
fn what_is_kept_for_comparison_may_leave_until_a_step_has_found_memory_for_it() {
    let in_graph = |run: &mut Run| {
        run.next_step();
        let Saves::Scheduled { courses, .. } = &run.plan.saves else { panic!("{:?}", run.plan) };
        (courses[0].is_baseline, courses[0].in_graph)
    };
    let mut run = Run::on_device(Goal::overhead(0.05), copying());
    assert_eq!(in_graph(&mut run), (true, 0), "nothing is known yet");
    let mut small = Run::on_device(Goal::overhead(0.05), copying());
    small.step_of(|_| 0.5, KEPT, 1.0);
    assert_eq!(
        in_graph(&mut small),
        (true, LAYERS * MB / 2 * 11 / 10),
        "no more than has found memory, and a little"
    );
    run.ended(StepOutcome::Baseline, Observation { wall: KEPT, ..Observation::default() });
    assert_eq!(in_graph(&mut run), (true, LAYERS * MB * 11 / 10));
}

#[test]
fn steps_that_keep_everything_for_good_go_unseen_but_for_one_of_seventeen() {
    let unseen = |run: &mut Run, count: u64| {
        let steps = (0..count).filter(|_| {
            run.step(KEPT, 1.0);
            run.plan.saves == Saves::Leave
        });
        steps.count()
    };
    let all = LAYERS * MB;
    let keeping = || Run { free: 4 * all, ..Run::on_device(Goal::overhead(0.0), copying()) };
    let mut run = keeping();
    assert_eq!(unseen(&mut run, COMPARED - 2), 0, "they may yet be compared");
    let seen = 64 - unseen(&mut run, 64);
    assert!((4..=10).contains(&seen), "{seen}: three in a row are timed now and then");
    run.free = 4 * all - 1;
    assert!(unseen(&mut run, 32) <= 1, "there is no longer room for one that is twice as large");
    let mut varied = keeping();
    varied.step_of(|_| 0.9, KEPT, 1.0);
    assert_eq!(unseen(&mut varied, 64), 0, "a larger one may come");
    let mut planned = Run::on_device(Goal::overhead(0.05), copying());
    assert_eq!(unseen(&mut planned, 64), 0);
}

#[test]
fn what_a_plan_keeps_for_good_stays_in_the_graph_where_memory_is_plentiful() {
    let in_graph = |run: &mut Run| {
        assert!(matches!(run.next_step(), NextStep::Follow { .. }));
        assert!(run.report().keeps_all(), "{}", run.report());
        let Saves::Scheduled { courses, .. } = &run.plan.saves else { panic!("{:?}", run.plan) };
        courses[0].in_graph > 0
    };
    let all = LAYERS * MB;
    let ended = Observation { wall: MS, peak: all, ..Observation::default() };
    let short = Observation { pressed: MB, peak: 2 * all, ..ended.clone() };
    let mut run = Run { free: 2 * all, ..Run::on_device(Goal::overhead(0.0), copying()) };
    assert!(!in_graph(&mut run), "no step has found memory for it yet");
    run.ended(WHOLE, ended.clone());
    assert!(in_graph(&mut run));
    run.free = 2 * all - 1;
    run.ended(WHOLE, ended.clone());
    assert!(in_graph(&mut run), "there was enough a moment ago");
    assert!(!in_graph(&mut run), "the step has not come to its end");
    run.free = 2 * all;
    run.ended(StepOutcome::Planned(Adherence::Whole(16)), Observation { wall: KEPT, ..ended.clone() });
    assert!(in_graph(&mut run), "micro-batches follow each other");
    for how in [WHOLE, LOST] {
        run.ended(WHOLE, Observation { wall: KEPT, ..ended.clone() });
        assert!(in_graph(&mut run));
        run.ended(how, short.clone());
        run.next_step();
        if run.plan.profiled {
            run.ended(StepOutcome::Profiled(None), ended.clone());
        }
        assert!(!in_graph(&mut run), "it had to leave");
    }
}

#[test]
fn the_programs_own_time_counts_where_a_device_waits_for_it() {
    let handling = Handling { saves: KEPT / 10, ..Handling::default() };
    let keeps_all = |kept: Duration| {
        let profile = copying();
        let profile = StepProfile { work: Workload { handling, ..profile.work }, ..profile };
        let mut run = Run::on_device(Goal::overhead(0.05), profile);
        (0..2).for_each(|_| run.step(kept, 1.0));
        run.report().keeps_all()
    };
    assert!(keeps_all(KEPT.mul_f64(0.7)), "the profiled step was longer because the device waited");
    assert!(!keeps_all(KEPT.mul_f64(0.95)));
}

#[test]
fn a_device_that_is_behind_its_program_at_the_end_does_not_wait_for_it() {
    let handling = Handling { saves: KEPT / 10, ..Handling::default() };
    let profile = StepProfile { work: Workload { handling, ..copying().work }, ..copying() };
    let mut run = Run::on_device(Goal::overhead(0.05), profile);
    let wall = KEPT.mul_f64(0.7);
    for _ in 0..2 {
        assert_eq!(run.next_step(), NextStep::Baseline);
        let behind = wall.mul_f64(0.03);
        run.ended(StepOutcome::Baseline, Observation { wall, behind, ..Observation::default() });
    }
    assert!(!run.report().keeps_all() && run.report().machine.exposed == 0.0, "{}", run.report());
}

#[test]
fn a_device_that_turns_out_to_be_behind_later_does_not_wait_either() {
    for late in [1, 2, 3, 6] {
        let handling = Handling { saves: KEPT.mul_f64(0.02), ..Handling::default() };
        let profile = StepProfile { work: Workload { handling, ..copying().work }, ..copying() };
        let mut run = Run::on_device(Goal::overhead(0.05), profile);
        let wall = KEPT.mul_f64(0.7);
        let mut kept = 0;
        while run.number < COMPARED {
            let is_kept = run.next_step() == NextStep::Baseline;
            kept += u32::from(is_kept);
            let behind = if is_kept && kept > late { wall / 10 } else { Duration::ZERO };
            let wall = if is_kept { wall } else { wall.mul_f64(1.04) };
            run.ended(WHOLE, Observation { wall, behind, is_told: true, ..Observation::default() });
        }
        let shown = run.report().machine.exposed;
        assert_eq!(shown, if kept > late { 0.0 } else { 1.0 }, "{late} of {kept}: {}", run.report());
        assert!(kept > late || late > 3, "{kept}");
    }
}

#[test]
fn how_much_a_device_waits_is_not_told_by_what_becomes_of_the_machine_later() {
    let handling = Handling { saves: KEPT.mul_f64(0.06), ..Handling::default() };
    let profile = StepProfile { work: Workload { handling, ..copying().work }, ..copying() };
    let mut run = Run::on_device(Goal::overhead(0.05), profile);
    let mut step = |kept: Duration| {
        let over = run.report().step.as_secs_f64() / run.report().kept_step.as_secs_f64();
        run.step(kept, over.min(1.02));
    };
    (0..30).for_each(|_| step(KEPT));
    (0..300).for_each(|_| step(KEPT.mul_f64(0.7)));
    assert!(!run.report().keeps_all(), "{}", run.report());
}

#[test]
fn what_the_profiled_steps_program_did_for_the_cache_is_not_taken_for_moving() {
    let handling = Handling { saves: KEPT / 10, ..Handling::default() };
    let profile = StepProfile { moved: 2 * LAYERS * MB, ..profile(40.0) };
    let profile = StepProfile { work: Workload { handling, ..profile.work }, ..profile };
    let mut run = Run::roomy(Goal::overhead(0.5), profile);
    (0..2).for_each(|_| run.step(KEPT.mul_f64(0.9), 1.0));
    assert_eq!(run.report().machine.moving, 0.0, "{}", run.report());
}

#[test]
fn times_beyond_all_measure_leave_what_is_known_a_number() {
    let mut run = Run::on_device(Goal::overhead(0.05), copying());
    (0..2).for_each(|_| run.step(Duration::ZERO, 1.0));
    (0..40).for_each(|_| run.step(Duration::from_secs(10), 1.0));
    let longer = run.auto.kinds[0].planned.corrections.longer;
    assert!(longer.is_finite(), "{longer}");
}
