use proptest::prelude::*;

use super::*;
use crate::{Handling, Recompute, Release, Role};

const S: Duration = Duration::from_secs(1);

/// A step with this many activations of 10 bytes, each with 1 s of forward and 2 s of backward.
fn work(activations: usize) -> Workload {
    let activation = Activation { bytes: 10, forward: S, backward: 2 * S, ..Activation::default() };
    Workload { activations: vec![activation; activations], ..Workload::default() }
}

fn copies(bytes_per_s: f64) -> Machine {
    Machine { copy_out: bytes_per_s, copy_in: bytes_per_s, ..Machine::default() }
}

fn budget(bytes: u64) -> Budgets {
    Budgets { device_budget: bytes, backward_budget: bytes, ..Budgets::default() }
}

#[test]
fn what_is_kept_costs_nothing_but_memory() {
    let prediction = work(4).simulate(&[], &copies(1.0), &budget(1));
    assert_eq!((prediction.step, prediction.forward_peak, prediction.backward_peak), (12 * S, 40, 40));
    assert_eq!(prediction.stall.total() + prediction.recomputed, Duration::ZERO);
}

#[test]
fn copies_as_fast_as_forward_hide_behind_it() {
    // Each is copied while the next one is computed; two fit into the budget.
    let prediction = work(4).simulate(&[Placement::Host; 4], &copies(10.0), &budget(20));
    assert_eq!((prediction.step, prediction.stall.total()), (12 * S, Duration::ZERO));
    assert_eq!((prediction.forward_peak, prediction.backward_peak), (30, 20));
    assert_eq!((prediction.copied_out, prediction.copied_in), (40, 20), "the last two are still there");
}

#[test]
fn a_budget_that_is_too_small_waits_for_the_copies() {
    // A copy takes two seconds. The second save waits for the first copy (3 s), the third for the second (5 s), the fourth for the
    // third (7 s), each a second after the save before it.
    let prediction = work(4).simulate(&[Placement::Host; 4], &copies(5.0), &budget(10));
    assert_eq!(prediction.stall.device_budget, 3 * S);
    // Only the fourth is still on the device. Each of the others is asked for when the one before it is done, and
    // takes two seconds.
    assert_eq!((prediction.stall.load, prediction.step), (6 * S, 7 * S + 8 * S + 6 * S));
}

#[test]
fn loads_look_ahead_by_the_prefetch() {
    let all = [Placement::Host; 4];
    let budgets =
        |prefetch| Budgets { device_budget: 10, backward_budget: 20, prefetch, ..Budgets::default() };
    // A load takes as long as the backward computation that it overlaps with.
    let ahead = work(4).simulate(&all, &copies(5.0), &budgets(10)).stall.load;
    let late = work(4).simulate(&all, &copies(5.0), &budgets(0)).stall.load;
    assert!(ahead < late && late == 6 * S, "{ahead:?} {late:?}");
}

#[test]
fn what_the_host_has_no_room_for_waits_for_the_disk() {
    let machine = Machine { host_pool: 10, disk_write: 5.0, disk_read: 5.0, ..Machine::default() };
    let prediction = work(3).simulate(&[Placement::Disk; 3], &machine, &budget(10));
    // The first is written from 1 s to 3 s. The second needs its room at 2 s. The third needs room at 4 s, when the
    // second is being written until 5 s.
    assert_eq!(prediction.stall.host_pool, 2 * S);
    assert_eq!((prediction.host_peak, prediction.written), (10, 30));
    assert_eq!(prediction.read, 20, "the third is on the device, and the others have left the host");
}

#[test]
fn without_room_and_without_a_disk_it_stays() {
    let machine = Machine { host_pool: 20, ..Machine::default() };
    let prediction = work(4).simulate(&[Placement::Host; 4], &machine, &budget(10));
    assert_eq!((prediction.copied_out, prediction.backward_peak), (20, 20));
}

#[test]
fn what_is_computed_again_takes_its_time_and_no_memory_before() {
    let mut work = work(4);
    let recompute = Recompute { time: S, inputs: Vec::new() };
    work.activations.iter_mut().for_each(|activation| activation.recompute = Some(recompute.clone()));
    let prediction = work.simulate(&[Placement::Recompute; 4], &copies(1.0), &Budgets::default());
    assert_eq!((prediction.step, prediction.recomputed, prediction.peak()), (16 * S, 4 * S, 10));
}

#[test]
fn what_has_no_recipe_is_kept() {
    let prediction = work(2).simulate(&[Placement::Recompute; 2], &copies(1.0), &Budgets::default());
    assert_eq!((prediction.step, prediction.peak()), (6 * S, 20));
}

#[test]
fn the_programs_thread_works_for_what_is_planned_as_far_as_that_shows() {
    let mut work = work(2);
    work.activations[0].recompute = Some(Recompute { time: S, inputs: Vec::new() });
    work.handling = Handling { saves: 2 * S, operations: 4 * S, each_move: S };
    let takes = |placements: &[Placement], exposed| {
        let machine = Machine { exposed, ..Machine::default() };
        work.simulate(placements, &machine, &budget(u64::MAX)).handled
    };
    let [keep, host, disk, again] = [Placement::Keep, Placement::Host, Placement::Disk, Placement::Recompute];
    for (placements, seconds) in
        [([keep, keep], 0), ([host, keep], 3), ([host, disk], 4), ([again, keep], 6), ([again, host], 7)]
    {
        assert_eq!(takes(&placements, 1.0), seconds * S, "{placements:?}");
        assert_eq!(takes(&placements, 0.5), seconds * S / 2);
        assert_eq!(takes(&placements, 0.0), Duration::ZERO);
    }
}

#[test]
fn what_it_is_computed_from_comes_back_first() {
    let mut work = work(2);
    work.activations[1].recompute = Some(Recompute { time: S, inputs: vec![0] });
    let budgets = Budgets { prefetch: 0, ..budget(5) };
    let prediction = work.simulate(&[Placement::Host, Placement::Recompute], &copies(5.0), &budgets);
    // Forward ends at 2 s. The input is copied until 3 s and leaves, and it is back at 5 s.
    assert_eq!((prediction.stall.total(), prediction.recomputed, prediction.backward_peak), (3 * S, S, 20));
}

#[test]
fn what_leaves_when_stored_needs_no_budget() {
    let machine =
        Machine { disk_write: 10.0, disk_read: 10.0, release: Release::WhenStored, ..Machine::default() };
    let budgets = Budgets { prefetch: 10, ..Budgets::default() };
    let prediction = work(8).simulate(&[Placement::Disk; 8], &machine, &budgets);
    assert_eq!((prediction.forward_peak, prediction.stall.total()), (20, Duration::ZERO));
    assert_eq!((prediction.copied_out, prediction.host_peak, prediction.written), (0, 0, 80));
}

#[test]
fn a_budget_waits_for_the_disk_where_storages_leave_when_stored() {
    let machine = Machine { disk_write: 5.0, release: Release::WhenStored, ..Machine::default() };
    let prediction = work(4).simulate(&[Placement::Disk; 4], &machine, &budget(10));
    assert_eq!(prediction.stall.device_budget, 3 * S);
}

#[test]
fn what_goes_straight_to_the_disk_leaves_as_late_as_it_may() {
    let machine =
        Machine { disk_write: 5.0, disk_read: 10.0, release: Release::OnceWritten, ..Machine::default() };
    // A write takes two seconds; a load takes half as long as the backward computation that it overlaps with.
    let prediction = work(3).simulate(&[Placement::Disk; 3], &machine, &budget(20));
    // The first storage has to leave at the third save, at 3 s, and by then it has just been written.
    assert_eq!((prediction.forward_peak, prediction.stall.device_budget), (30, Duration::ZERO));
    let prediction = work(3).simulate(&[Placement::Disk; 3], &machine, &budget(10));
    // The second save waits for the first write (3 s), the third, at 4 s, for the second (5 s).
    assert_eq!((prediction.forward_peak, prediction.stall.device_budget), (20, 2 * S));
    assert_eq!((prediction.copied_out, prediction.host_peak), (0, 0));
}

#[test]
fn what_the_turn_needs_counts() {
    let work = Workload { turn_extra: 100, ..work(3) };
    let prediction = work.simulate(&[], &Machine::default(), &Budgets::default());
    assert_eq!(prediction.peak(), 130);
}

#[test]
fn what_the_program_still_holds_counts_wherever_it_is() {
    let mut work = work(3);
    work.activations[0].recompute = Some(Recompute { time: S, inputs: Vec::new() });
    let peak = |work: &Workload| {
        work.simulate(&[Placement::Recompute], &copies(1.0), &Budgets::default()).forward_peak
    };
    assert_eq!(peak(&work), 20);
    work.activations[0].in_use_until = 1;
    assert_eq!(peak(&work), 20);
    work.activations[0].in_use_until = 2;
    assert_eq!(peak(&work), 30);
}

#[test]
fn what_the_program_holds_when_backward_asks_stays_wherever_it_is_placed() {
    let mut work = work(2);
    work.activations[0].in_use_until = usize::MAX;
    let prediction = |placements: [Placement; 2]| work.simulate(&placements, &copies(1.0), &budget(0));
    assert_eq!(prediction([Placement::Host; 2]), prediction([Placement::Keep, Placement::Host]));
}

#[test]
fn what_backward_still_uses_leaves_no_room() {
    let mut work = work(3);
    // The first is copied out from 1 s to 2 s, and may come back once the third has left.
    let prediction = |work: &Workload| work.simulate(&[Placement::Host], &copies(10.0), &budget(20));
    let alone = prediction(&work);
    work.activations[2].in_use_with = 1;
    let along = prediction(&work);
    assert_eq!((alone.backward_peak, alone.stall.load), (20, Duration::ZERO));
    assert_eq!((along.backward_peak, along.stall.load), (20, S), "only when asked for");
}

#[test]
fn what_else_is_needed_counts_where_it_is_needed() {
    let mut work = work(3);
    work.activations[0].forward_extra = 100;
    work.activations[2].backward_extra = 50;
    let prediction = work.simulate(&[], &Machine::default(), &Budgets::default());
    assert_eq!((prediction.forward_peak, prediction.backward_peak), (110, 80));
}

fn activation() -> impl Strategy<Value = Activation> {
    let millis = |most: u64| (0..most).prop_map(Duration::from_millis);
    let role = prop::sample::select(vec![Role::Saved, Role::Saved, Role::Spare, Role::Fleeting]);
    let inputs = prop::collection::vec(0_usize..40, 0..3);
    (role, 1_u64..1000, millis(50), millis(100), prop::option::of((millis(30), inputs)), 0_usize..3).prop_map(
        |(role, bytes, forward, backward, recompute, in_use_with)| Activation {
            role,
            bytes,
            forward,
            backward: if role == Role::Saved { backward } else { Duration::ZERO },
            recompute: recompute.map(|(time, inputs)| Recompute { time, inputs }),
            in_use_with,
            ..Activation::default()
        },
    )
}

fn placement() -> impl Strategy<Value = Placement> {
    use Placement::{Disk, Host, Keep, Recompute};
    prop::sample::select(vec![Keep, Host, Disk, Recompute])
}

fn case() -> impl Strategy<Value = (Workload, Vec<Placement>)> {
    prop::collection::vec((activation(), placement()), 1..40).prop_map(|pairs| {
        let (mut activations, placements): (Vec<Activation>, _) = pairs.into_iter().unzip();
        // Neighbours may be saved in another order than they are computed in.
        for (index, activation) in activations.iter_mut().enumerate() {
            let inputs = activation.recompute.iter_mut().map(|recompute| &mut recompute.inputs);
            inputs.for_each(|inputs| inputs.retain(|input| input ^ 1 < index ^ 1));
        }
        let [turn, rest, saves, operations] = [7, 3, 5, 2].map(Duration::from_millis);
        let handling = Handling { saves, operations, each_move: saves / 10 };
        (Workload { activations, turn, rest, handling, ..Workload::default() }, placements)
    })
}

fn machine() -> impl Strategy<Value = Machine> {
    let speed = || 1e3..1e6;
    let release =
        prop::sample::select(vec![Release::InStreamOrder, Release::WhenStored, Release::OnceWritten]);
    let moving = prop_oneof![Just(0.0), 0.0..1e-4];
    let exposed = prop_oneof![Just(0.0), 0.0..=1.0];
    (speed(), speed(), speed(), speed(), 0_u64..20_000, release, moving, exposed).prop_map(
        |(copy_out, copy_in, disk_write, disk_read, host_pool, release, moving, exposed)| Machine {
            copy_out,
            copy_in,
            disk_write,
            disk_read,
            host_pool,
            release,
            moving,
            exposed,
        },
    )
}

fn budgets() -> impl Strategy<Value = Budgets> {
    (1_u64..20_000, 1_u64..20_000, 0_u64..5_000, 0_u64..5_000).prop_map(
        |(device_budget, backward_budget, prefetch, read_ahead)| Budgets {
            device_budget,
            backward_budget,
            prefetch,
            read_ahead,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 5 } else { 500 }))]

    #[test]
    fn time_is_computed_waited_or_taken_by_moves((work, placements) in case(), machine in machine(), budgets in budgets()) {
        let prediction = work.simulate(&placements, &machine, &budgets);
        let Prediction { recomputed, moving, handled, .. } = prediction;
        let sum = work.computed() + recomputed + prediction.stall.total() + moving + handled;
        prop_assert!(prediction.step.abs_diff(sum) < Duration::from_micros(1), "{prediction:?}");
    }

    #[test]
    fn bounds_tell_what_the_whole_step_would(
        (work, placements) in case(), machine in machine(), budgets in budgets(), peak in 0.8..1.2, step in 0.9..1.1
    ) {
        let prediction = work.simulate(&placements, &machine, &budgets);
        let within = |peak: f64, step: f64| {
            let (peak, step) = ((peak * prediction.peak() as f64) as u64, step * prediction.step.as_secs_f64());
            let bounds = Bounds { peak, step, ..Bounds::NONE };
            let reruns = Reruns::of(&work.activations, &Graph::new(&work.activations), &placements);
            run_within(&bounds, &work, &placements, &reruns, &machine, &budgets)
        };
        prop_assert_eq!(within(1.0, 1.0), Some(prediction));
        prop_assert_eq!(within(peak, step), (peak >= 1.0 && step >= 1.0).then_some(prediction));
    }

    #[test]
    fn bytes_come_back_as_often_as_they_leave((work, placements) in case(), machine in machine(), budgets in budgets()) {
        let prediction = work.simulate(&placements, &machine, &budgets);
        let moved = |wanted: &[Placement]| -> u64 {
            let chosen = work.activations.iter().zip(&placements).filter(|(_, placement)| wanted.contains(placement));
            chosen.map(|(activation, _)| activation.bytes).sum()
        };
        prop_assert!(prediction.copied_out <= moved(&[Placement::Host, Placement::Disk]));
        prop_assert!(prediction.copied_in <= prediction.copied_out && prediction.read <= prediction.written);
        let below = match machine.release {
            Release::InStreamOrder => moved(&[Placement::Disk]),
            Release::WhenStored | Release::OnceWritten => moved(&[Placement::Host, Placement::Disk]),
        };
        prop_assert!(prediction.written <= below);
    }

    #[test]
    fn the_host_keeps_to_its_pool((work, placements) in case(), machine in machine(), budgets in budgets()) {
        let prediction = work.simulate(&placements, &machine, &budgets);
        let largest = work.activations.iter().map(|activation| activation.bytes).max().unwrap_or(0);
        prop_assert!(prediction.host_peak <= machine.host_pool.max(largest));
    }

    #[test]
    fn a_budget_is_kept_where_all_can_leave((work, _) in case(), mut machine in machine(), budgets in budgets()) {
        machine.host_pool = u64::MAX;
        let all = vec![Placement::Host; work.activations.len()];
        let prediction = work.simulate(&all, &machine, &budgets);
        let largest = work.activations.iter().map(|activation| activation.bytes).max().unwrap_or(0);
        prop_assert!(prediction.forward_peak <= budgets.device_budget.max(largest) + largest);
        // A storage that was still being written when loads looked ahead past it is loaded when it is asked for,
        // whatever the budget.
        let budget = budgets.backward_budget.max(4 * largest).max(budgets.device_budget);
        prop_assert!(prediction.backward_peak <= budget + largest);
    }
}
