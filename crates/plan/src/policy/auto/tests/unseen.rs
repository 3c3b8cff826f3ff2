//! Steps that go as without a cache, and which of them are looked at.

use super::*;

/// A run whose plan keeps everything, and has settled.
fn keeping_for_good() -> Run {
    let mut run =
        Run { free: 4 * LAYERS * MB, ..Run::on_device(Goal::overhead(0.0), profile_of_copies(50.0)) };
    (0..100).for_each(|_| run.step(KEPT, 1.0));
    run
}

/// A step that goes like this if it is looked at. Returns whether it is.
fn is_seen(run: &mut Run, went: StepOutcome) -> bool {
    let is_unseen = run.next_step() == NextStep::Unseen;
    let observed = Observation { wall: KEPT, ..Observation::default() };
    run.ended(if is_unseen { StepOutcome::Unplanned } else { went }, observed);
    !is_unseen
}

#[test]
fn of_steps_of_several_kinds_in_turn_each_is_soon_looked_at() {
    for kinds in [2, 3, 4, 8, 16] {
        for kind in 0..kinds {
            let mut run = keeping_for_good();
            let seen = (0..2 * 17 * kinds).find(|number| is_seen(&mut run, WHOLE) && number % kinds == kind);
            assert!(seen.is_some(), "{kind} of {kinds}");
        }
    }
}

#[test]
fn after_one_that_did_not_end_steps_are_looked_at_for_a_while() {
    let mut run = keeping_for_good();
    let is_unseen = (0..64).any(|_| {
        let is_unseen = run.next_step() == NextStep::Unseen;
        if !is_unseen {
            run.ended(WHOLE, Observation { wall: KEPT, ..Observation::default() });
        }
        is_unseen
    });
    assert!(is_unseen);
    // It finds no memory, and nor does the next one.
    for _ in 0..2 {
        run.number += 1;
        assert!(run.next_step() != NextStep::Unseen);
    }
    for number in 0..63 {
        run.ended(WHOLE, Observation { wall: KEPT, ..Observation::default() });
        assert!(run.next_step() != NextStep::Unseen, "{number}");
    }
    run.ended(WHOLE, Observation { wall: KEPT, ..Observation::default() });
    assert_eq!(run.next_step(), NextStep::Unseen);
}

#[test]
fn steps_are_looked_at_while_some_save_something_else() {
    let mut run = keeping_for_good();
    assert!((0..64).any(|_| is_seen(&mut run, LOST)));
    // No profile of them shows anything.
    for number in 0..1000 {
        assert!(run.next_step() != NextStep::Unseen, "{number}");
        let went = match run.plan.profiled {
            true => StepOutcome::Profiled(None),
            false if number % 40 == 0 => LOST,
            false => WHOLE,
        };
        run.ended(went, Observation { wall: KEPT, ..Observation::default() });
    }
    let mut after = (0..200).filter(|_| !is_seen(&mut run, WHOLE));
    assert!(after.next().is_some(), "they have not come for long");
}

#[test]
fn a_plan_that_is_made_after_steps_that_went_unseen_knows_what_these_took() {
    for slower in [1.1, 1.4] {
        let most = 1 << 50;
        let mut run = Run::begin(Goal::overhead(0.1));
        run = Run { auto: run.auto.written_per_day(most), free: u64::MAX, ..run };
        run.begun(profile(50.0));
        (0..40).for_each(|_| run.step(KEPT, 1.04));
        assert!(!run.report().keeps_all());
        // The disks have taken what they may today, and meanwhile the machine becomes slower.
        run.today.written = most;
        (0..20).for_each(|_| run.step(KEPT, 1.04));
        (0..180).for_each(|_| run.step(KEPT.mul_f64(slower), 1.04));
        assert!(run.report().keeps_all() && run.report().kept_step > KEPT.mul_f64(1.09), "{}", run.report());
        run.today = Today { day: 1, ..Today::default() };
        (0..100).for_each(|_| run.step(KEPT.mul_f64(slower), 1.04));
        assert!(!run.report().keeps_all() && run.report().loosened == 0, "{}", run.report());
    }
}

#[test]
fn steps_of_another_kind_keep_none_from_going_unseen_once_they_have_not_come_for_long() {
    let mut run =
        Run { free: 400 * LAYERS * MB, ..Run::on_device(Goal::overhead(0.0), profile_of_copies(50.0)) };
    (0..5).for_each(|_| run.step(KEPT, 1.0));
    let observed = || Observation { wall: KEPT, ..Observation::default() };
    run.next_step();
    run.ended(LOST, observed());
    run.next_step();
    let mut other = StepProfile { rates: profile_of_copies(50.0).rates, ..profile_of(2 * MB, 50.0) };
    (other.saves[0].0.bytes, other.work.activations[0].bytes) = (MB / 2, MB / 2);
    run.ended(StepOutcome::Profiled(Some(Box::new(other))), observed());
    // All are of the first kind from now on.
    let mut unseen = [0, 0];
    for number in 0..2000 {
        let is_unseen = run.next_step() == NextStep::Unseen;
        unseen[number / 1000] += u32::from(is_unseen);
        let place = run.auto.kinds.iter().position(|kind| kind.planned.kept_peak() == LAYERS * MB).unwrap();
        run.number += 1;
        let how = Adherence::Whole(1);
        let followed = Followed::new(place, how);
        let followed = Some(followed).filter(|_| !is_unseen);
        let observed = Observation { step: run.number, followed, ..observed() };
        run.auto.end(&run.plan.clone(), observed);
    }
    assert!(unseen[0] == 0 && unseen[1] > 900, "{unseen:?}");
}

/// A run whose steps recompute something, and then save something else, of which everything is kept.
fn recomputing_before(goal: Goal) -> Run {
    let mut recomputable = profile_of_copies(0.001);
    for entry in &mut recomputable.work.activations {
        entry.recompute = Some(Recompute { time: MS, inputs: Vec::new() });
    }
    let mut run = Run::on_device(goal, recomputable);
    (0..30).for_each(|_| run.step(KEPT, 1.0));
    let rates = profile_of_copies(0.001).rates;
    let mut others = StepProfile { rates, ..profile_of(3 * MB, 50.0) };
    (others.saves[0].0.bytes, others.work.activations[0].bytes) = (MB / 2, MB / 2);
    other_steps::change(&mut run, others);
    run.next_step();
    let recomputes = [0, 1].map(|kind| run.auto.kinds[kind].planned.schedule.recomputes());
    assert_eq!((recomputes, run.plan.unrecorded), ([false, true], false));
    run
}

#[test]
fn operations_are_recorded_while_steps_that_recompute_something_are_expected() {
    let mut run = recomputing_before(Goal::overhead(0.1));
    let unrecorded = |run: &mut Run, course: usize| {
        run.next_step();
        let unrecorded = run.plan.unrecorded;
        run.number += 1;
        let followed = Some(Followed::new(course, Adherence::Whole(1)));
        let observed = Observation { step: run.number, wall: KEPT, followed, ..Observation::default() };
        run.auto.end(&run.plan.clone(), observed);
        unrecorded
    };
    let is_last = |run: &mut Run| (0..100).take_while(|_| !unrecorded(run, 0)).count();
    assert!((1..=17).contains(&is_last(&mut run)));
    (0..50).for_each(|_| assert!(unrecorded(&mut run, 0)));
    // One comes all the same, and the next is awaited for twice as long.
    assert!(unrecorded(&mut run, 1));
    // The course of the others is the second one after it, and then the first again.
    assert!(!unrecorded(&mut run, 1));
    assert!(is_last(&mut run) > 100 / 2);
}

#[test]
fn what_a_step_takes_that_moved_what_it_was_to_recompute_says_nothing_of_its_plan() {
    let mut run = recomputing_before(Goal::overhead(0.1));
    let watched = |run: &mut Run, unrecorded: bool| {
        run.next_step();
        run.plan.unrecorded = unrecorded;
        run.number += 1;
        let followed = Some(Followed::new(1, Adherence::Whole(1)));
        let observed = Observation { step: run.number, wall: 9 * KEPT, followed, ..Observation::default() };
        run.auto.end(&run.plan.clone(), observed);
        run.auto.kinds.rotate_left(1);
        format!("{:?}", run.auto.kinds[1].watch)
    };
    let before = format!("{:?}", run.auto.kinds[1].watch);
    assert_eq!(watched(&mut run, true), before);
    assert_ne!(watched(&mut run, false), before);
}

#[test]
fn under_a_goal_for_the_peak_operations_are_recorded_whatever_is_expected() {
    let mut run = recomputing_before(Goal::budget(12 * MB));
    (0..100).for_each(|_| {
        run.step(KEPT, 1.0);
        assert!(!run.plan.unrecorded);
    });
}
