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
fn a_peak_of_theirs_beyond_the_goal_lowers_them_and_the_plan() {
    let mut run = lacking(Goal::budget(BUDGET), recomputable());
    let (_, _, before) = next(&mut run);
    let schedule = |run: &Run| match &run.plan.saves {
        Saves::Scheduled { courses, .. } => Arc::clone(&courses[0].schedule),
        _ => panic!("it has no plan"),
    };
    let (planned, interim) = (run.auto.kinds[0].planned.peak(), schedule(&run));
    run.ended(WHOLE, Observation { pinned: true, peak: BUDGET + 2 * MB, ..Observation::default() });
    let (is_interim, moved, after) = next(&mut run);
    assert!(is_interim && moved == 0 && after > before, "{before} and {after} computed again");
    assert!(run.auto.kinds[0].planned.peak() < planned && schedule(&run) != interim);
}

#[test]
fn what_planned_steps_have_shown_of_their_peaks_is_not_forgotten_for_theirs() {
    let mut run = lacking(Goal::budget(BUDGET), recomputable());
    run.provided = true;
    next(&mut run);
    run.ended(WHOLE, Observation { peak: BUDGET + 2 * MB, ..Observation::default() });
    let unforeseen = |run: &Run| run.auto.kinds[0].planned.corrections.unforeseen.bytes();
    let known = unforeseen(&run);
    run.provided = false;
    for _ in 0..40 {
        assert!(next(&mut run).0);
        run.ended(WHOLE, Observation { pinned: true, peak: MB, ..Observation::default() });
    }
    assert!(known > 0 && unforeseen(&run) == known);
}

#[test]
fn steps_follow_their_plan_while_memory_is_pinned_for_larger_ones() {
    let is_interim = |run: &mut Run, pinned: u64| {
        run.plan = run.auto.begin(&Outset {
            step: run.number + 1,
            resources: Resources { host_pool: u64::MAX, disk: 0, release: Release::InStreamOrder },
            today: Today::default(),
            free: &|| u64::MAX,
            provide: &|bytes| bytes <= pinned,
            scope: &|_| ScopeId::default(),
        });
        matches!(&run.plan.saves, Saves::Scheduled { courses, .. } if courses[0].is_interim)
    };
    let mut run = lacking(Goal::budget(BUDGET), recomputable());
    let needed = run.auto.kinds[0].planned.plan.prediction.host_peak;
    assert!(is_interim(&mut run, needed / 2));
    // From a smaller one on, more is wanted.
    run.ended(PART, Observation { pinned: true, peak: MB, ..Observation::default() });
    assert!(!is_interim(&mut run, needed) && !is_interim(&mut run, needed * 19 / 20));
    assert!(is_interim(&mut run, needed * 17 / 20));
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
