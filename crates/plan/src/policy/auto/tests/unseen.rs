//! Steps that go as without a cache, and which of them are looked at.

use super::*;

/// A run whose plan keeps everything, and has settled.
fn keeping_for_good() -> Run {
    let mut run =
        Run { free: 2 * LAYERS * MB, ..Run::on_device(Goal::overhead(0.0), profile_of_copies(50.0)) };
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
            let seen = (0..17 * 18).find(|number| is_seen(&mut run, WHOLE) && number % kinds == kind);
            assert!(seen.is_some(), "{kind} of {kinds}");
        }
    }
}

#[test]
fn a_step_after_one_that_did_not_end_is_looked_at() {
    let mut run = keeping_for_good();
    while run.next_step() != NextStep::Unseen {
        run.ended(WHOLE, Observation { wall: KEPT, ..Observation::default() });
    }
    // It finds no memory, and nor does the next one.
    for _ in 0..2 {
        run.number += 1;
        assert!(run.next_step() != NextStep::Unseen);
    }
    run.ended(WHOLE, Observation { wall: KEPT, ..Observation::default() });
    assert_eq!(run.next_step(), NextStep::Unseen);
}

#[test]
fn steps_are_looked_at_while_some_save_something_else() {
    let mut run = keeping_for_good();
    while !is_seen(&mut run, LOST) {}
    // No profile of them shows anything.
    for number in 0..1000 {
        run.next_step();
        let went = match run.plan.profiled {
            true => StepOutcome::Profiled(None),
            false if number % 40 == 0 => LOST,
            false => WHOLE,
        };
        assert!(is_seen(&mut run, went), "{number}");
    }
    let mut after = (0..200).filter(|_| !is_seen(&mut run, WHOLE));
    assert!(after.next().is_some(), "they have not come for long");
}
