//! What is told of plans as they come and go.

use super::*;
use crate::policy::Decided;

/// What a run has decided so far, in order. Each plan that was made is told of once.
fn decided(run: &mut Run) -> Vec<Decision> {
    let decisions = run.auto.decisions();
    let plans = decisions.iter().filter(|decision| decision.what() != Decided::Withdrawn).count();
    assert_eq!(plans as u64, run.report().plans, "{decisions:?}");
    assert_eq!(run.auto.decisions(), [], "they are told once");
    decisions
}

#[test]
fn a_plan_is_made_and_corrected_for_a_reason() {
    let mut run = Run::planned(Goal::overhead(0.02), profile(20.0));
    run.steps(2, |usual| Observation { written: Some(400e6), read: Some(400e6), ..usual });
    assert_eq!(decided(&mut run), [Decision::Profiled, Decision::DiskRate]);
    let mut run = Run::planned(Goal::overhead(0.02), profile(400.0));
    run.steps(1, |usual| Observation { peak: 10 * MB, pressed: 2 * MB, ..usual });
    assert_eq!(decided(&mut run), [Decision::Profiled, Decision::Memory]);
}

#[test]
fn steps_that_take_longer_than_the_goal_loosen_a_plan_and_quick_ones_tighten_it() {
    let mut run = Run::roomy(aiming_at(0.02), profile(400.0));
    (0..30).for_each(|_| run.step(KEPT, 1.2));
    let slow = decided(&mut run);
    assert!(slow.contains(&Decision::Slow) && !slow.contains(&Decision::Quick), "{slow:?}");
    let quick = decided(&mut run_of_plans_that_cost(0.5));
    assert!(quick.contains(&Decision::Quick) && !quick.contains(&Decision::Slow), "{quick:?}");
}

#[test]
fn a_plan_that_is_given_up_is_withdrawn() {
    let mut run = Run::planned(Goal::overhead(0.02), profile(400.0));
    for layers in 2..=5 {
        run.ended(LOST, Observation::default());
        run.next_step();
        // Neither covers the other.
        let other = profile_of(layers * MB + layers, 400.0);
        let saves = other.saves.iter().take(20 - layers as usize).copied().collect();
        let other = StepProfile { saves, ..other };
        let objective = run.auto.objective;
        run.auto.kinds.profiled(&objective, run.number, other);
    }
    let decisions = run.auto.decisions();
    let last = decisions.last().map(|decision| decision.what());
    assert!(decisions.contains(&Decision::Crowded) && last == Some(Decided::Made), "{decisions:?}");
    assert_eq!(run.auto.kinds.len(), 4);
}
