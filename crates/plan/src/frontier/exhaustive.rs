//! How far plans are from the best of all placements, in steps small enough to try them all.

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::*;
use crate::{Activation, Handling, Placement, Recompute, Role};

/// The number of steps, and of activations in each.
const CASES: usize = 30;
const ACTIVATIONS: usize = 5;

/// Steps of a few activations with extra needs, of which most can be recomputed from those before them.
fn case() -> impl Strategy<Value = (Workload, Machine)> {
    use Role::{Fleeting, Saved, Spare};
    let role = proptest::sample::select(vec![Saved, Saved, Saved, Spare, Fleeting]);
    let recipe = proptest::option::weighted(0.8, (1_u64..30, proptest::collection::vec(1_usize..4, 1..3)));
    let activation = (role, 100_u64..1000, 5_u64..50, recipe, 0_u64..200);
    let activations = proptest::collection::vec(activation, ACTIVATIONS);
    (activations, 3e3..6e4, 0_u64..500).prop_map(|(activations, rate, turn_extra)| {
        let activation = |(index, (role, bytes, millis, recipe, extra)): (usize, _)| Activation {
            role,
            bytes,
            forward: Duration::from_millis(millis),
            backward: Duration::from_millis(if role == Saved { 2 * millis } else { 0 }),
            forward_extra: extra,
            backward_extra: if role == Saved { 2 * extra } else { 0 },
            recompute: Option::map(recipe, |(time, before): (u64, Vec<usize>)| Recompute {
                time: Duration::from_millis(time),
                inputs: before.into_iter().filter_map(|before| index.checked_sub(before)).collect(),
            }),
            in_use_until: index + 1,
            in_use_with: 0,
            traffic: None,
        };
        let activations = activations.into_iter().enumerate().map(activation).collect();
        let [saves, operations] = [turn_extra % 8, turn_extra % 16].map(Duration::from_millis);
        let handling = Handling { saves, operations, each_move: saves / 8 };
        let work = Workload { activations, turn_extra, handling, ..Workload::default() };
        let exposed = if turn_extra % 2 == 0 { 0.0 } else { 1.0 };
        (work, Machine { copy_out: rate, copy_in: rate, exposed, ..Machine::default() })
    })
}

/// The predictions of all placements, each with many budgets.
fn all(work: &Workload, machine: &Machine) -> Vec<Prediction> {
    let places = [Placement::Keep, Placement::Host, Placement::Recompute];
    let whole = work.simulate(&[], machine, &Budgets::default()).peak();
    let budgets = (0..=4).flat_map(|device| (0..=4).map(move |backward| (device, backward)));
    let budgets: Vec<Budgets> = budgets
        .map(|(device, backward)| Budgets {
            device_budget: whole * device / 4,
            backward_budget: whole * backward / 4,
            ..Budgets::default()
        })
        .collect();
    let count = work.activations.len() as u32;
    let placements = (0..3_usize.pow(count)).map(|number| {
        (0..count).map(|digit| places[number / 3_usize.pow(digit) % 3]).collect::<Vec<Placement>>()
    });
    placements
        .flat_map(|placements| {
            let simulate = |budgets: &Budgets| work.simulate(&placements, machine, budgets);
            budgets.iter().map(simulate).collect::<Vec<_>>()
        })
        .collect()
}

#[test]
fn plans_are_close_to_the_best_placements() {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let (mut times, mut peaks) = (Vec::new(), Vec::new());
    for _ in 0..CASES {
        let (work, machine) = case().new_tree(&mut runner).unwrap().current();
        let frontier = Frontier::new(&work, &machine, Caps::default());
        let all = all(&work, &machine);
        let whole = work.simulate(&[], &machine, &Budgets::default()).peak();
        for share in [0.5, 0.65, 0.8] {
            let budget = (share * whole as f64) as u64;
            let within = all.iter().filter(|one| one.peak() <= budget).map(|one| one.step).min();
            let Some(best) = within else { continue };
            let found = frontier.plan(Goal::budget(budget)).map(|plan| plan.prediction.step);
            times.push(found.map_or(f64::INFINITY, |found| found.as_secs_f64() / best.as_secs_f64()));
        }
        for share in [0.02, 0.1, 0.3] {
            let longest = work.computed().mul_f64(1.0 + share);
            let best = all.iter().filter(|one| one.step <= longest).map(Prediction::peak).min().unwrap();
            let found = frontier.plan(Goal::overhead(share)).unwrap().prediction.peak();
            peaks.push(found as f64 / best as f64);
        }
    }
    times.sort_by(f64::total_cmp);
    peaks.sort_by(f64::total_cmp);
    let at = |all: &[f64], share: f64| all[(share * (all.len() - 1) as f64) as usize];
    for (name, all) in [("time", &times), ("peak", &peaks)] {
        let [median, most, max] = [0.5, 0.9, 1.0].map(|share| at(all, share));
        println!("{name}: median {median:.3}, nine of ten within {most:.3}, at most {max:.3} times the best");
        assert!(median < 1.02 && most < 1.1 && max < 1.5, "{name}: {all:?}");
    }
}
