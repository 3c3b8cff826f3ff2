//! Steps of a budget while the host memory that their plan needs is provided.

use super::*;

const BUDGET: u64 = 12 * MB;

/// Copies are so fast that a plan with host memory computes nothing again.
fn recomputable() -> StepProfile {
    let mut profile = profile_of_copies(1000.0);
    for entry in &mut profile.work.activations {
        entry.recompute = Some(Recompute { time: 5 * MS, inputs: Vec::new() });
    }
    profile
}

fn lacking(goal: Goal, profile: StepProfile) -> Run {
    let mut run =
        Run { free: u64::MAX, release: Release::InStreamOrder, provided: false, ..Run::begin(goal) };
    run.begun(profile);
    run
}

/// Whether the next step is one for the meantime, and how many storages it moves and computes again.
fn next(run: &mut Run) -> (bool, usize, usize) {
    run.next_step();
    let Saves::Scheduled { courses, .. } = &run.plan.saves else { panic!("{:?} has no plan", run.plan) };
    let count =
        |placement: Placement| courses[0].schedule.saves().filter(|save| save.placement == placement).count();
    (courses[0].is_interim, count(Placement::Host) + count(Placement::Disk), count(Placement::Recompute))
}

#[test]
fn they_move_nothing_and_say_nothing_of_the_plan() {
    let mut run = lacking(Goal::budget(BUDGET), recomputable());
    let before = run.auto.kinds[0].planned.schedule.clone();
    for _ in 0..12 {
        let (is_interim, moved, recomputed) = next(&mut run);
        assert!(is_interim && moved == 0 && recomputed > 0, "{moved} moved, {recomputed} computed again");
        let seen = Observation { wall: 5 * KEPT, pinned: true, peak: BUDGET, ..Observation::default() };
        run.ended(WHOLE, seen);
        assert!(!run.auto.is_settled());
    }
    run.provided = true;
    let (is_interim, moved, recomputed) = next(&mut run);
    assert!(!is_interim && moved > 0 && recomputed == 0, "{moved} moved, {recomputed} computed again");
    assert_eq!((run.auto.kinds.plans(), &run.auto.kinds[0].planned.schedule), (1, &before));
}

#[test]
fn a_peak_of_theirs_beyond_the_goal_lowers_the_plan() {
    let mut run = lacking(Goal::budget(BUDGET), recomputable());
    next(&mut run);
    let planned = run.auto.kinds[0].planned.peak();
    run.ended(WHOLE, Observation { pinned: true, peak: BUDGET + MB, ..Observation::default() });
    let (is_interim, moved, _) = next(&mut run);
    assert!(is_interim && moved == 0);
    assert!(run.auto.kinds[0].planned.peak() < planned);
}

#[test]
fn they_follow_the_plan_where_the_goal_is_out_of_reach_without_moving_or_is_a_time() {
    let mut run = lacking(Goal::budget(BUDGET), profile_of_copies(1000.0));
    let (is_interim, moved, _) = next(&mut run);
    assert!(!is_interim && moved > 0);
    let goal = Goal { peak: Some(BUDGET), ..Goal::overhead(0.5) };
    let (is_interim, ..) = next(&mut lacking(goal, recomputable()));
    assert!(!is_interim);
}
