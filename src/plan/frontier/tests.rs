use proptest::prelude::*;

use super::*;
use crate::plan::{Entry, Recompute};

const MS: Duration = Duration::from_millis(1);

/// Layers of 100 bytes that cost something to compute again and 100 bytes that cost little.
fn layers(count: usize) -> Workload {
    let entry = |recompute: Option<Recompute>| Entry {
        bytes: 100,
        forward: 10 * MS,
        backward: 20 * MS,
        recompute,
        ..Entry::default()
    };
    let recipe = |since| Some(Recompute { time: MS, since });
    let entries = (0..count).flat_map(|layer| [entry(None), entry(recipe(2 * layer))]).collect();
    Workload { entries, turn: MS, rest: MS, turn_extra: 0 }
}

fn copies(bytes_per_s: f64) -> Machine {
    Machine { copy_out: bytes_per_s, copy_in: bytes_per_s, ..Machine::default() }
}

fn count(plan: &Plan, placement: Placement) -> usize {
    plan.placements.iter().filter(|found| **found == placement).count()
}

#[test]
fn what_fits_is_kept() {
    let (work, machine) = (layers(8), copies(1e9));
    let plan = Frontier::new(&work, &machine, Caps::default()).plan(Goal::budget(1600)).unwrap();
    assert_eq!((count(&plan, Placement::Keep), plan.prediction.peak()), (16, 1600));
}

#[test]
fn copies_come_before_computing_again_where_they_are_free() {
    let (work, machine) = (layers(8), copies(1e9));
    let plan = Frontier::new(&work, &machine, Caps::default()).plan(Goal::budget(600)).unwrap();
    assert_eq!((count(&plan, Placement::Recompute), plan.prediction.step), (0, work.computed()));
    assert!(plan.prediction.peak() <= 600 && count(&plan, Placement::Host) > 0);
}

#[test]
fn computing_again_comes_first_where_copies_are_slow() {
    let (work, machine) = (layers(8), copies(100.0));
    let plan = Frontier::new(&work, &machine, Caps::default()).plan(Goal::budget(900)).unwrap();
    assert_eq!((count(&plan, Placement::Recompute), count(&plan, Placement::Host)), (8, 0));
    assert_eq!(plan.prediction.step, work.computed() + 8 * MS);
}

#[test]
fn an_overhead_buys_the_lowest_peak_there_is_for_it() {
    let (work, machine) = (layers(8), copies(4e3));
    let frontier = Frontier::new(&work, &machine, Caps::default());
    let peak = |share| frontier.plan(Goal::overhead(share)).unwrap().prediction.peak();
    let peaks = [0.0, 0.02, 1.0].map(peak);
    assert!(peaks.is_sorted_by(|more, less| more > less), "{peaks:?}");
}

#[test]
fn what_is_gone_before_most_is_needed_stays() {
    // A layer's gradient is half as large as what backward lets go of there, so the peak is where backward begins, and most is needed
    // beside the storages where it ends.
    let entry = |index: u64| Entry {
        bytes: 100,
        forward: 10 * MS,
        backward: 20 * MS,
        backward_extra: 50 * (8 - index),
        ..Entry::default()
    };
    let work = Workload { entries: (0..8).map(entry).collect(), ..Workload::default() };
    let machine = copies(1e4);
    assert_eq!(work.simulate(&[], &machine, &Limits::default()).peak(), 850);
    let frontier = Frontier::new(&work, &machine, Caps::default());
    for (budget, moves) in [(750, 1), (650, 2)] {
        let plan = frontier.plan(Goal::budget(budget)).unwrap();
        assert_eq!((count(&plan, Placement::Host), plan.prediction.peak()), (moves, budget));
        assert_eq!(plan.prediction.step, work.computed());
    }
}

#[test]
fn what_exceeds_the_host_goes_to_the_disk_oldest_first() {
    let (work, machine) = (layers(8), Machine { host_pool: 500, ..copies(1e9) });
    let plan =
        Frontier::new(&work, &machine, Caps::default()).plan(Goal { peak: Some(400), step: None }).unwrap();
    let last_on_disk = plan.placements.iter().rposition(|placement| *placement == Placement::Disk).unwrap();
    let first_in_host = plan.placements.iter().position(|placement| *placement == Placement::Host).unwrap();
    assert!(last_on_disk < first_in_host, "{plan:?}");
}

#[test]
fn a_goal_out_of_reach_is_told_with_what_is_in_reach() {
    let (work, machine) = (layers(2), copies(1e9));
    let refused = Frontier::new(&work, &machine, Caps::default()).plan(Goal::budget(50)).unwrap_err();
    assert!((100..400).contains(&refused.peak), "{refused:?}");
    assert!(refused.to_string().contains("lowest activation peak"), "{refused}");
}

#[test]
fn no_efficient_point_beats_another() {
    let (work, machine) = (layers(8), copies(5e3));
    let points = Frontier::new(&work, &machine, Caps::default()).efficient();
    assert!(points.len() > 2);
    assert!(points.windows(2).all(|pair| pair[0].peak() < pair[1].peak() && pair[0].step > pair[1].step));
}

#[test]
fn nothing_saved_is_nothing_to_plan() {
    let (work, machine) = (Workload::default(), Machine::default());
    let plan = Frontier::new(&work, &machine, Caps::default()).plan(Goal::budget(0)).unwrap();
    assert!(plan.placements.is_empty());
}

fn workload() -> impl Strategy<Value = Workload> {
    let millis = |most: u64| (0..most).prop_map(Duration::from_millis);
    let recompute = prop::option::of(millis(30));
    let entry = (1_u64..1000, millis(50), millis(100), recompute, 0_u64..500, 0_u64..500);
    (prop::collection::vec(entry, 1..25), 0_u64..500).prop_map(|(entries, turn_extra)| {
        let entry =
            |(index, (bytes, forward, backward, recompute, forward_extra, backward_extra)): (usize, _)| {
                let recompute =
                    Option::map(recompute, |time| Recompute { time, since: index.saturating_sub(2) });
                Entry {
                    bytes,
                    forward,
                    backward,
                    forward_extra,
                    backward_extra,
                    recompute,
                    in_use_until: if bytes % 8 == 0 { usize::MAX } else { index + 1 },
                }
            };
        let entries = entries.into_iter().enumerate().map(entry).collect();
        Workload { entries, turn: MS, rest: MS, turn_extra }
    })
}

fn machine() -> impl Strategy<Value = Machine> {
    let speed = || 1e3..1e6;
    (speed(), speed(), speed(), speed(), 0_u64..20_000).prop_map(
        |(copy_out, copy_in, disk_write, disk_read, host_pool)| Machine {
            copy_out,
            copy_in,
            disk_write,
            disk_read,
            host_pool,
            ..Machine::default()
        },
    )
}

proptest! {
    #[test]
    fn more_budget_never_predicts_a_slower_step(work in workload(), machine in machine(), less: u16, more: u16) {
        let frontier = Frontier::new(&work, &machine, Caps::default());
        let step = |budget: u64| frontier.plan(Goal::budget(budget)).map(|plan| plan.prediction.step);
        if let Ok(tight) = step(less.into()) {
            prop_assert!(step(u64::from(less) + u64::from(more)).unwrap() <= tight);
        }
    }

    #[test]
    fn no_plan_breaks_its_goal_or_a_cap(
        work in workload(), machine in machine(), budget in 0_u64..20_000, share in 0.0..1.0, disk in 0_u64..5000, written in 0_u64..5000
    ) {
        let caps = Caps { disk, written };
        let frontier = Frontier::new(&work, &machine, caps);
        for goal in [Goal::budget(budget), Goal::overhead(share), Goal { peak: Some(budget), step: Some(1.0 + share) }] {
            let Ok(plan) = frontier.plan(goal) else { continue };
            let bytes = |placement| -> u64 {
                let chosen = work.entries.iter().zip(&plan.placements).filter(|(_, found)| **found == placement);
                chosen.map(|(entry, _)| entry.bytes).sum()
            };
            let told = work.simulate(&plan.placements, &machine, &plan.limits);
            prop_assert_eq!(told, plan.prediction);
            prop_assert!(told.peak() <= goal.peak.unwrap_or(u64::MAX));
            let longest = goal.step.map_or(f64::INFINITY, |times| times * work.computed().as_secs_f64());
            prop_assert!(told.step.as_secs_f64() <= longest);
            prop_assert!(bytes(Placement::Disk) <= disk.min(written) && told.written <= written);
            prop_assert!(bytes(Placement::Host) <= machine.host_pool);
        }
    }
}
