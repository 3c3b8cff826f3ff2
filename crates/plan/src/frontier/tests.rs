use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::*;
use crate::{Activation, Handling, Placement, Recompute, Release, Role};

const MS: Duration = Duration::from_millis(1);

/// Layers of 100 bytes without a recipe and 100 bytes that are cheap to recompute.
fn layers(count: usize) -> Workload {
    let activation = |recompute: Option<Recompute>| Activation {
        bytes: 100,
        forward: 10 * MS,
        backward: 20 * MS,
        recompute,
        ..Activation::default()
    };
    let recipe = |input| Some(Recompute { time: MS, inputs: vec![input] });
    let activations =
        (0..count).flat_map(|layer| [activation(None), activation(recipe(2 * layer))]).collect();
    Workload { activations, turn: MS, rest: MS, ..Workload::default() }
}

fn copies(bytes_per_s: f64) -> Machine {
    Machine { copy_out: bytes_per_s, copy_in: bytes_per_s, ..Machine::default() }
}

fn count(plan: &Plan, placement: Placement) -> usize {
    plan.placements.iter().filter(|found| **found == placement).count()
}

/// Blocks that compute four saved activations of 100 bytes one from the other, from a spare input of 50 bytes that
/// only a long product computes.
fn blocks(count: usize) -> Workload {
    let mut activations: Vec<Activation> = Vec::new();
    let mut add = |role: Role, bytes: u64, time: Duration, inputs: Vec<usize>| {
        let backward = if role == Role::Saved { 20 * MS } else { Duration::ZERO };
        let recompute = Some(Recompute { time, inputs });
        let forward = 10 * MS;
        activations.push(Activation { role, bytes, forward, backward, recompute, ..Activation::default() });
        activations.len() - 1
    };
    let mut input = add(Role::Spare, 50, 10 * MS, Vec::new());
    for _ in 0..count {
        let last = (0..4).fold(input, |last, _| add(Role::Saved, 100, MS, vec![last]));
        input = add(Role::Spare, 50, 10 * MS, vec![input, last]);
    }
    Workload { activations, turn: MS, rest: MS, ..Workload::default() }
}

#[test]
fn an_input_is_saved_in_place_of_what_is_computed_from_it() {
    let (work, machine) = (blocks(8), copies(1.0));
    let plan = Frontier::new(&work, &machine, Caps::default()).plan(Goal::budget(900)).unwrap();
    assert_eq!((count(&plan, Placement::Host), plan.prediction.stall.total()), (0, Duration::ZERO));
    let inputs = work.activations.iter().zip(&plan.placements).filter(|(one, _)| one.role == Role::Spare);
    assert!(inputs.filter(|(_, placement)| **placement == Placement::Keep).count() > 2, "{plan:?}");
}

#[test]
fn plans_are_no_worse_than_blocks_that_are_recomputed_from_inputs_that_are_moved() {
    let work = blocks(8);
    let placements: Vec<Placement> = work
        .activations
        .iter()
        .map(|one| if one.role == Role::Spare { Placement::Host } else { Placement::Recompute })
        .collect();
    for rate in [1e3, 1e4, 1e5] {
        let machine = copies(rate);
        for backward_budget in [0, 50, 400] {
            let budgets = Budgets { device_budget: 100, backward_budget, ..Budgets::default() };
            let segments = work.simulate(&placements, &machine, &budgets);
            let frontier = Frontier::new(&work, &machine, Caps::default());
            assert!(frontier.lowest().prediction.peak() <= segments.peak(), "{rate}");
            let plan = frontier.plan(Goal::budget(segments.peak())).unwrap();
            assert!(plan.prediction.step <= segments.step, "{rate} {:?} {segments:?}", plan.prediction);
        }
    }
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
    assert_eq!((count(&plan, Placement::Recompute), count(&plan, Placement::Host)), (7, 0));
    assert_eq!(plan.prediction.step, work.computed() + 7 * MS);
}

#[test]
fn what_takes_the_programs_own_time_is_left_where_the_goal_has_no_time_for_it() {
    let machine = Machine { exposed: 1.0, ..copies(4e3) };
    let plan = |saves: u32, operations: u32| {
        let [saves, operations] = [saves, operations].map(|millis| millis * MS);
        let handling = Handling { saves, operations, each_move: Duration::ZERO };
        let work = Workload { handling, ..layers(8) };
        let share = 3.0 * MS.as_secs_f64() / work.computed().as_secs_f64();
        let plan = Frontier::new(&work, &machine, Caps::default()).plan(Goal::overhead(share)).unwrap();
        [Placement::Recompute, Placement::Host].map(|placement| count(&plan, placement) > 0)
    };
    assert_eq!(plan(0, 1), [true, true]);
    assert_eq!(plan(1, 3), [false, true], "nothing is recorded");
    assert_eq!(plan(4, 0), [false, false], "all is kept");
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
fn what_the_program_holds_until_forward_ends_stays_if_copies_would_be_late() {
    let mut work = layers(8);
    for held in [0, 1] {
        work.activations[held].in_use_until = 15;
    }
    work.activations.iter_mut().for_each(|one| one.recompute = None);
    // A copy takes as long as five saves: three can leave before forward ends, whichever they are.
    let machine = copies(2e3);
    let plan = Frontier::new(&work, &machine, Caps::default()).plan(Goal::overhead(0.0)).unwrap();
    assert_eq!((&plan.placements[..2], plan.prediction.peak()), (&[Placement::Keep; 2][..], 1400));
}

#[test]
fn how_low_a_peak_can_be_does_not_depend_on_the_times_that_were_measured() {
    // A GPT whose layers are segments, from a profile that was taken beside other work.
    let work: Workload = serde_json::from_str(include_str!("segments.json")).unwrap();
    let machine = Machine { host_pool: 1 << 20, ..copies(3e9) };
    let lowest = |time: &dyn Fn(usize, &Activation) -> Duration| {
        let mut work = work.clone();
        for (index, one) in work.activations.iter_mut().enumerate() {
            let takes = time(index, one);
            one.recompute.iter_mut().for_each(|recompute| recompute.time = takes);
        }
        Frontier::new(&work, &machine, Caps { disk: 0, ..Caps::default() }).lowest().prediction.peak()
    };
    let as_bytes = |one: &Activation| Duration::from_nanos(one.bytes);
    let alike = lowest(&|_, one| as_bytes(one));
    let measured = |one: &Activation| one.recompute.as_ref().map_or(Duration::ZERO, |how| how.time);
    assert_eq!(lowest(&|_, one| measured(one)), alike);
    for seed in 0..8 {
        // From a tenth to ten times as long.
        let chance = |index: usize| {
            let mixed = (1000 * seed + index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (mixed >> 40) as f64 / f64::from(1 << 24)
        };
        let found = lowest(&|index, one| as_bytes(one).mul_f64(10_f64.powf(2.0 * chance(index) - 1.0)));
        assert!(found <= alike, "{seed}: {found} instead of {alike}");
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

/// The device holds a storage that is larger than the device budget until it is on the disk.
#[test]
fn a_slow_disk_and_a_storage_larger_than_the_device_budget_break_no_goal() {
    let large = Activation { bytes: 600, forward: MS, backward: MS, ..Activation::default() };
    let again =
        Activation { bytes: 100, recompute: Some(Recompute { time: MS, inputs: vec![0] }), ..large.clone() };
    let roomy = Activation { bytes: 100, forward_extra: 700, ..large.clone() };
    let work = Workload { activations: vec![large, again, roomy], turn: MS, rest: MS, ..Workload::default() };
    let machine = Machine { release: Release::WhenStored, disk_write: 1e9, disk_read: 1e9, ..copies(1e9) };
    let behind = Machine { disk_write: 1.0, ..machine };
    for budget in [800, 1000, 1200, 1400] {
        let Ok(plan) = Frontier::new(&work, &machine, Caps::default()).plan(Goal::budget(budget)) else {
            continue;
        };
        let peak = work.simulate(&plan.placements, &behind, &plan.budgets).peak();
        assert!(peak <= budget, "{peak} with a budget of {budget}: {plan:?}");
    }
}

/// What is recomputed after a spare waits for nothing, so that the spare is still there.
#[test]
fn a_slow_disk_and_a_spare_break_no_goal() {
    let again = |bytes| Activation {
        bytes,
        forward: 50 * MS,
        backward: 50 * MS,
        recompute: Some(Recompute { time: MS, inputs: vec![0] }),
        ..Activation::default()
    };
    let spare = Activation { role: Role::Spare, bytes: 600, forward: MS, ..Activation::default() };
    let roomy = Activation { forward_extra: 700, ..again(1000) };
    let activations = vec![spare, again(100), roomy, again(1000)];
    let work = Workload { activations, turn: MS, rest: MS, ..Workload::default() };
    let machine = Machine { release: Release::WhenStored, disk_write: 1e9, disk_read: 1e9, ..copies(1e9) };
    let behind = Machine { disk_write: 1.0, ..machine };
    for budget in [1700, 1750, 2000, 2300, 2400] {
        if let Ok(plan) = Frontier::new(&work, &machine, Caps::default()).plan(Goal::budget(budget)) {
            let peak = work.simulate(&plan.placements, &behind, &plan.budgets).peak();
            assert!(peak <= budget, "{peak} with a budget of {budget}: {plan:?}");
        }
    }
}

/// One that is passed while it is stored leaves, and comes back before older ones do.
#[test]
fn what_leaves_after_it_was_passed_breaks_no_goal() {
    let one = |bytes| Activation { bytes, forward: 10 * MS, backward: 20 * MS, ..Activation::default() };
    let last = Activation { in_use_with: 2, ..one(400) };
    let activations = vec![one(300), one(800), Activation { backward_extra: 184, ..one(900) }, one(47), last];
    let work = Workload { activations, turn: MS, rest: MS, turn_extra: 472, ..Workload::default() };
    let machine = Machine {
        release: Release::WhenStored,
        disk_write: 287194.0,
        disk_read: 469994.0,
        ..Machine::default()
    };
    let plan = Frontier::new(&work, &machine, Caps::default()).plan(Goal::budget(2304)).unwrap();
    for slower in [0.01, 0.1, 0.3, 1.0, 3.0] {
        let machine = Machine { disk_write: slower * machine.disk_write, ..machine };
        let peak = work.simulate(&plan.placements, &machine, &plan.budgets).peak();
        assert!(peak <= 2304, "{peak} where writing is {slower} times as fast: {plan:?}");
    }
}

/// Loads may be as far ahead as the budget lets them, whatever has left.
#[test]
fn what_leaves_for_a_disk_has_the_room_that_the_budget_leaves() {
    let one = Activation {
        bytes: 100,
        forward: 10 * MS,
        backward: 20 * MS,
        backward_extra: 300,
        ..Activation::default()
    };
    let work = Workload { activations: vec![one; 16], turn: MS, rest: MS, ..Workload::default() };
    // Reading takes longer than backward does, unless it begins early.
    let machine =
        Machine { release: Release::WhenStored, disk_write: 2e4, disk_read: 6e3, ..Machine::default() };
    for budget in [500, 600, 700] {
        let room = budget - 300;
        let budgets = Budgets { device_budget: room, backward_budget: room, ..Budgets::default() };
        let moved = work.simulate(&[Placement::Disk; 16], &machine, &budgets);
        assert!(moved.peak() <= budget);
        let plan = Frontier::new(&work, &machine, Caps::default()).plan(Goal::budget(budget)).unwrap();
        assert!(plan.prediction.step <= moved.step, "{budget}: {:?} {moved:?}", plan.prediction);
    }
}

fn workload() -> impl Strategy<Value = Workload> {
    use Role::{Fleeting, Saved, Spare};
    let millis = |most: u64| (0..most).prop_map(Duration::from_millis);
    let role = prop::sample::select(vec![Saved, Saved, Spare, Fleeting]);
    // How far before it its inputs are.
    let recompute = prop::option::of((millis(30), prop::collection::vec(1_usize..8, 0..3)));
    let activation = (role, 1_u64..1000, millis(50), millis(100), recompute, 0_u64..500, 0_u64..500);
    (prop::collection::vec(activation, 1..40), 0_u64..500).prop_map(|(activations, turn_extra)| {
        let count = activations.len();
        let activation = |(
            index,
            (role, bytes, forward, backward, recompute, forward_extra, backward_extra),
        ): (usize, _)| {
            // Neighbours may be saved in another order than they are computed in.
            let input = |before: usize| (index ^ 1).checked_sub(before).map(|input| input ^ 1);
            let recompute = Option::map(recompute, |(time, before): (_, Vec<usize>)| Recompute {
                time,
                inputs: before.into_iter().filter_map(input).filter(|input| *input < count).collect(),
            });
            Activation {
                role,
                bytes,
                forward,
                backward: if role == Saved { backward } else { Duration::ZERO },
                forward_extra,
                backward_extra: if role == Saved { backward_extra } else { 0 },
                recompute,
                in_use_until: if bytes % 8 == 0 { usize::MAX } else { index + (bytes / 8) as usize % 6 },
                in_use_with: bytes as usize % 3,
                traffic: (bytes % 3 > 0).then_some(3 * bytes),
            }
        };
        let activations = activations.into_iter().enumerate().map(activation).collect();
        Workload { activations, turn: MS, rest: MS, turn_extra, ..Workload::default() }
    })
}

/// Which tries no changes.
fn coarse<'a>(work: &'a Workload, machine: &'a Machine) -> Frontier<'a> {
    Frontier::with(work, machine, Caps::default(), Effort { trials: 0, ..Effort::of(work, machine) })
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

#[test]
fn plans_do_not_depend_on_how_many_threads_look_for_them() {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[8; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let mut refined = 0;
    for _ in 0..64 {
        let (work, machine) = (workload().new_tree(&mut runner).unwrap().current(), copies(1e4));
        let frontier = Frontier::new(&work, &machine, Caps::default());
        let coarse = coarse(&work, &machine);
        for goal in [0.02, 0.1, 0.3].map(Goal::overhead) {
            let bounds = goal.bounds(work.computed());
            let plan = frontier.lowest_along(0, goal, bounds, 5);
            assert_eq!(plan, frontier.lowest_along(0, goal, bounds, 1), "{goal:?}");
            refined += usize::from(plan != coarse.lowest_along(0, goal, bounds, 1));
        }
        for goal in [0.5, 0.7].map(|share| Goal::budget((share * frontier.kept as f64) as u64)) {
            let bounds = goal.bounds(work.computed());
            let plan = frontier.quickest_along(0, goal, bounds, 5);
            assert_eq!(plan, frontier.quickest_along(0, goal, bounds, 1), "{goal:?}");
        }
    }
    assert!(refined > 0, "no change was an improvement");
}

#[test]
fn changes_make_plans_for_a_budget_quicker() {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[9; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let mut quicker = 0;
    for _ in 0..64 {
        let (work, machine) = (workload().new_tree(&mut runner).unwrap().current(), copies(1e4));
        let frontier = Frontier::new(&work, &machine, Caps::default());
        for share in [0.5, 0.7] {
            let goal = Goal::budget((share * frontier.kept as f64) as u64);
            let step = |frontier: &Frontier<'_>| frontier.plan(goal).map(|plan| plan.prediction.step);
            let (changed, before) = (step(&frontier), step(&coarse(&work, &machine)));
            assert!(
                before.is_err() || changed.as_ref().unwrap() <= before.as_ref().unwrap(),
                "{changed:?} {before:?}"
            );
            quicker += usize::from(changed.ok() < before.ok());
        }
    }
    assert!(quicker > 4, "{quicker} of 128");
}

#[test]
fn time_that_leads_no_lower_is_not_spent() {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[9; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    for _ in 0..64 {
        let (work, machine) = (workload().new_tree(&mut runner).unwrap().current(), copies(1e4));
        let frontier = Frontier::new(&work, &machine, Caps::default());
        let plan = frontier.plan(Goal::overhead(5.0)).unwrap().prediction;
        let quickest = frontier.plan(Goal::budget(plan.peak())).unwrap().prediction;
        assert!(plan.step <= quickest.step, "{plan:?} {quickest:?}");
    }
}

#[test]
fn a_limit_of_the_peak_that_limits_nothing_makes_no_plan_for_a_time_higher() {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[21; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    for _ in 0..64 {
        let work = workload().new_tree(&mut runner).unwrap().current();
        let machine = machine().new_tree(&mut runner).unwrap().current();
        let machine = Machine { release: Release::WhenStored, ..machine };
        let frontier = Frontier::new(&work, &machine, Caps::default());
        for share in [0.02, 0.1, 0.3] {
            let plan = |peak| frontier.plan(Goal { peak, ..Goal::overhead(share) }).unwrap().prediction;
            let (free, limited) = (plan(None), plan(Some(100 * frontier.kept)));
            assert!(limited.peak() <= free.peak(), "{share}: {limited:?} {free:?}");
        }
    }
}

#[test]
fn a_goal_of_time_and_peak_is_in_reach_where_a_plan_has_both() {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[22; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    for _ in 0..64 {
        let (work, machine) = (workload().new_tree(&mut runner).unwrap().current(), copies(1e4));
        let frontier = Frontier::new(&work, &machine, Caps::default());
        for share in [0.1, 0.3, 1.0] {
            let plan = |peak| frontier.plan(Goal { peak, ..Goal::overhead(share) });
            // With a limit, nothing stays because the program holds it anyway.
            let peak = plan(Some(100 * frontier.kept)).unwrap().prediction.peak();
            assert!(plan(Some(peak)).is_ok_and(|plan| plan.prediction.peak() <= peak), "{share} {peak}");
        }
    }
}

/// Where several sequences competed until only one was followed to its end, one that began lower and ended higher could win.
#[test]
fn no_sequence_leads_lower_than_the_plan_for_a_time() {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    for _ in 0..64 {
        let work = workload().new_tree(&mut runner).unwrap().current();
        let machine = copies(1e5);
        let all = Frontier::new(&work, &machine, Caps::default());
        for goal in [0.02, 0.1, 0.3].map(Goal::overhead) {
            let lowest = all.plan(goal).unwrap().prediction.peak();
            for sequences in [&[Order::Newest][..], &[Order::Oldest], &[Order::FewestBytes]] {
                let effort = Effort { sequences, ..all.effort };
                let one = Frontier::with(&work, &machine, Caps::default(), effort);
                let alone = one.plan(goal).unwrap().prediction.peak();
                assert!(lowest <= alone, "{lowest} {alone} {goal:?} {sequences:?}");
            }
        }
    }
}

proptest! {
    #[test]
    fn no_disk_that_falls_behind_breaks_a_budget(
        work in workload(), machine in machine(), share in 0.0..1.0, write in -3.0..1.0, read in -1.0..1.0
    ) {
        let machine = Machine { release: Release::WhenStored, ..machine };
        let frontier = Frontier::new(&work, &machine, Caps::default());
        let (lowest, kept) = (frontier.lowest().prediction.peak(), frontier.kept);
        let budget = lowest + (share * kept.saturating_sub(lowest) as f64) as u64;
        if let Ok(plan) = frontier.plan(Goal::budget(budget)) {
            let times = |power: f64| 10_f64.powf(power);
            let (disk_write, disk_read) = (times(write) * machine.disk_write, times(read) * machine.disk_read);
            let behind = Machine { disk_write, disk_read, ..machine };
            let prediction = work.simulate(&plan.placements, &behind, &plan.budgets);
            prop_assert!(prediction.peak() <= budget, "{prediction:?} instead of {:?}", plan.prediction);
        }
    }

    /// Of the levels and their targets. Changes begin there, and end where they happen to.
    #[test]
    fn more_budget_never_predicts_a_slower_step_before_changes_are_tried(
        work in workload(), machine in machine(), less in 0_u64..10_000, more in 0_u64..5_000
    ) {
        let frontier = coarse(&work, &machine);
        let step = |budget: u64| frontier.plan(Goal::budget(budget)).map(|plan| plan.prediction.step);
        if let Ok(tight) = step(less) {
            prop_assert!(step(less + more).unwrap() <= tight);
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
                let chosen = work.activations.iter().zip(&plan.placements).filter(|(_, found)| **found == placement);
                chosen.map(|(activation, _)| activation.bytes).sum()
            };
            let prediction = work.simulate(&plan.placements, &machine, &plan.budgets);
            prop_assert_eq!(prediction, plan.prediction);
            prop_assert!(prediction.peak() <= goal.peak.unwrap_or(u64::MAX));
            let longest = goal.step.map_or(f64::INFINITY, |times| times * work.computed().as_secs_f64());
            prop_assert!(prediction.step.as_secs_f64() <= longest);
            prop_assert!(bytes(Placement::Disk) <= disk.min(written) && prediction.written <= written);
            prop_assert!(bytes(Placement::Host) <= machine.host_pool);
        }
    }
}
