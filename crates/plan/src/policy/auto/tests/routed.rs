//! Programs whose parts vary in size by themselves.

use super::*;

/// A step that saves so many kilobytes at one point of the program after the other.
fn profile_of_parts(kilobytes: [u64; 5]) -> StepProfile {
    let entry = |kilobytes: u64| Activation {
        bytes: 1000 * kilobytes,
        forward: 10 * MS,
        backward: 20 * MS,
        ..Activation::default()
    };
    let save = |(entry, kilobytes): (usize, u64)| {
        let position = Position { strand: 0, index: 2 * entry as u64 };
        let save = Save { entry: entry as u64, bytes: 1000 * kilobytes, scope: ScopeId::default(), position };
        (save, entry)
    };
    StepProfile {
        work: Workload { activations: kilobytes.map(entry).to_vec(), ..Workload::default() },
        saves: kilobytes.into_iter().enumerate().map(save).collect(),
        ..profile(50.0)
    }
}

#[test]
fn steps_that_divide_the_same_among_their_parts_are_of_one_kind() {
    let mut run = Run::roomy(Goal::overhead(0.1), profile_of_parts([400, 100, 300, 200, 400]));
    let objective = run.auto.objective;
    let kinds = &mut run.auto.kinds;
    for (number, parts) in (3..).zip([[400, 200, 100, 300, 400], [400, 300, 200, 100, 400]]) {
        kinds.profiled(&objective, number, profile_of_parts(parts));
        assert_eq!((kinds.len(), kinds[0].planned.profile.saves[1].0.bytes), (1, 100_000), "{parts:?}");
        kinds.revise(&objective, Decision::Daily);
        let other = profile_of_parts(parts);
        let other = other.schedule(&[Placement::Keep; 5]);
        assert!(kinds[0].planned.schedule.covers(&other, true), "as before it was planned anew");
    }
    let larger = profile_of_parts([400, 300, 400, 200, 400]);
    let bytes = larger.saved_bytes();
    kinds.profiled(&objective, 5, larger);
    assert_eq!((kinds.len(), kinds[0].planned.saved_bytes), (1, bytes), "the larger one serves both");
    kinds.profiled(&objective, 6, profile_of_parts([800, 600, 800, 400, 800]));
    assert_eq!((kinds.len(), &kinds[0].planned.profile.varying), (1, &vec![1, 2, 3]));
}

#[test]
fn with_a_limit_of_the_peak_parts_are_no_larger_in_all_than_planned() {
    let mut run = Run::planned(Goal::budget(900_000), profile_of_parts([400, 100, 300, 200, 400]));
    let objective = run.auto.objective;
    for (parts, kinds) in [([400, 200, 100, 300, 400], 1), ([350, 300, 150, 250, 350], 2)] {
        run.auto.kinds.profiled(&objective, 3, profile_of_parts(parts));
        assert_eq!(run.auto.kinds.len(), kinds, "{parts:?}");
    }
}

#[test]
fn nothing_is_known_of_points_where_none_was_recorded() {
    let mut one = profile_of_parts([400, 100, 300, 200, 400]);
    let mut other = profile_of_parts([400, 200, 100, 300, 400]);
    assert_eq!(one.varying_beside(&other), Some(vec![1, 2, 3]));
    for profile in [&mut one, &mut other] {
        profile.saves.iter_mut().for_each(|(save, _)| save.position = Position::default());
    }
    assert_eq!(one.varying_beside(&other), None);
}

#[test]
fn steps_of_other_points_are_of_another_kind() {
    let mut run = Run::roomy(Goal::overhead(0.1), profile_of_parts([400, 100, 300, 200, 400]));
    let objective = run.auto.objective;
    let mut other = profile_of_parts([400, 200, 100, 300, 400]);
    other.saves.iter_mut().for_each(|(save, _)| save.position.index *= 2);
    run.auto.kinds.profiled(&objective, 3, other);
    assert_eq!(run.auto.kinds.len(), 2);
}
