//! Whether plans are worth what they take.

use super::*;
use crate::policy::cost::{Cost, Weight};

/// Layers of which some can be computed again: their numbers, bytes, and times as shares of the step.
fn recomputing(layers: &[(usize, u64, f64)]) -> StepProfile {
    let mut profile = profile_of_copies(0.1);
    for &(layer, bytes, time) in layers {
        let recompute = Recompute { time: KEPT.mul_f64(time), inputs: vec![layer - 1] };
        profile.work.activations[layer].recompute = Some(recompute);
        profile.work.activations[layer].bytes = bytes;
        profile.saves[layer].0.bytes = bytes;
    }
    profile
}

#[test]
fn a_plan_that_saves_little_of_the_peak_is_worth_little_time() {
    // How many twentieths of the peak are saved where so many can be, each for so much of the step.
    let saved = |layers: usize, time: f64| {
        let layers: Vec<_> = (2..).step_by(2).take(layers).map(|layer| (layer, MB, time)).collect();
        let mut run = Run::on_device(Goal::overhead(0.1), recomputing(&layers));
        LAYERS - run.report().prediction.peak() / MB
    };
    assert_eq!([saved(1, 0.022), saved(1, 0.028)], [1, 0]);
    assert_eq!(saved(3, 0.03), 3, "more than a tenth of the peak is much");
}

#[test]
fn the_more_time_is_allowed_the_lower_the_peak() {
    // Most of the peak is what no plan moves.
    let saved = |goal: f64| {
        let mut profile = profile(50.0);
        for activation in &mut profile.work.activations {
            (activation.forward_extra, activation.backward_extra) = (120 * MB, 120 * MB);
        }
        (140 * MB - Run::roomy(Goal::overhead(goal), profile).report().prediction.peak()) / MB
    };
    let all = [0.02, 0.04, 0.06, 0.1, 0.15, 0.2, 0.3].map(saved);
    assert!(all.is_sorted() && all[6] > 0, "{all:?}");
}

#[test]
fn a_plan_is_not_worth_it_if_it_turns_out_to_take_too_much() {
    let mut run = Run::on_device(Goal::overhead(0.1), recomputing(&[(2, MB, 0.02)]));
    assert!(!run.report().keeps_all());
    (0..200).for_each(|_| run.step(KEPT, 1.09));
    assert!(run.report().keeps_all(), "a twentieth of the peak for a tenth of the time\n{}", run.report());
}

#[test]
fn a_plan_that_nothing_was_compared_with_is_worth_what_it_may_take() {
    let keeps_all = |time: f64| {
        let mut run = Run::on_device(Goal::overhead(0.1), recomputing(&[(2, MB, time)]));
        assert!(!run.report().keeps_all());
        let objective = run.auto.objective;
        run.auto.kinds[0].revise(&objective, Decision::Unproven, |planned| {
            planned.corrections.is_measured = true;
            planned.stays_unproven();
        });
        run.report().keeps_all()
    };
    assert_eq!([keeps_all(0.016), keeps_all(0.022)], [false, true]);
}

#[test]
fn a_plan_that_takes_less_than_planned_is_not_given_up_for_that() {
    let layers = [(2, 1_600_000, 0.035), (4, 200_000, 0.015)];
    let mut run = Run::on_device(Goal::overhead(0.04), recomputing(&layers));
    (0..60).for_each(|_| run.step(KEPT, 1.01));
    assert!(!run.report().keeps_all(), "{}", run.report());
}

#[test]
fn whatever_the_lowest_peak_takes_it_is_worth_it_where_time_has_no_limit_or_memory_has_one() {
    let layers: Vec<_> = (2..20).step_by(2).map(|layer| (layer, MB, 0.05)).collect();
    let mut profile = recomputing(&layers);
    profile.work.activations[19].forward_extra = 200 * MB;
    let peak = |goal| Run::on_device(goal, profile.clone()).report().prediction.peak();
    let (lowest, kept) = (peak(Goal::budget(1)), peak(Goal::overhead(0.3)));
    assert_eq!(peak(Goal::overhead(f64::INFINITY)), lowest);
    assert!(kept > lowest + 8 * MB, "all of it is not worth so much");
    let within = kept - MB;
    assert!(
        peak(Goal { peak: Some(within), step: Some(1.3) }) <= within,
        "the time is not spent for nothing"
    );
}

#[test]
fn what_all_plans_take_is_not_multiplied_by_what_this_one_turned_out_to_take() {
    let mut profile = recomputing(&[(2, 800_000, 0.0025), (4, 800_000, 0.0025)]);
    profile.work.handling = Handling { saves: KEPT.mul_f64(0.015), ..Handling::default() };
    let run = Run::on_device(Goal::overhead(0.05), profile);
    let planned = &run.auto.kinds[0].planned;
    assert!(!planned.keeps_all());
    // What remains takes three times as long.
    let weight = Weight {
        kept: None,
        extra: 0.015,
        error: 0.0,
        slower: None,
        deviation: 0.0,
        apart: 0.0,
        is_by_others: false,
    };
    let cost = (0..4).fold(Cost::first(0.5, 0.0), |cost, _| cost.weighed(0.005, 0.0, 0.035, weight).0);
    let Planned { profile, machine, mut corrections, .. } = planned.clone();
    corrections.cost = Some(cost);
    assert!(!Planned::new(&run.auto.objective, profile, machine, corrections).keeps_all());
}
