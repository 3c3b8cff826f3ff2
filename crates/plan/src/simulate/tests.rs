use proptest::prelude::*;

use super::*;
use crate::{Leaving, Recompute};

const S: Duration = Duration::from_secs(1);

/// As many entries of 10 bytes, each 1 s of forward and 2 s of backward.
fn work(entries: usize) -> Workload {
    let entry = Entry { bytes: 10, forward: S, backward: 2 * S, ..Entry::default() };
    Workload { entries: vec![entry; entries], ..Workload::default() }
}

fn copies(bytes_per_s: f64) -> Machine {
    Machine { copy_out: bytes_per_s, copy_in: bytes_per_s, ..Machine::default() }
}

fn budget(bytes: u64) -> Limits {
    Limits { device_budget: bytes, backward_budget: bytes, ..Limits::default() }
}

#[test]
fn what_is_kept_costs_nothing_but_memory() {
    let told = work(4).simulate(&[], &copies(1.0), &budget(1));
    assert_eq!((told.step, told.forward_peak, told.backward_peak), (12 * S, 40, 40));
    assert_eq!(told.stall.total() + told.recomputed, Duration::ZERO);
}

#[test]
fn copies_as_fast_as_forward_hide_behind_it() {
    // Each is copied while the next is computed; two fit the budget.
    let told = work(4).simulate(&[Placement::Host; 4], &copies(10.0), &budget(20));
    assert_eq!((told.step, told.stall.total()), (12 * S, Duration::ZERO));
    assert_eq!((told.forward_peak, told.backward_peak), (30, 20));
    assert_eq!((told.copied_out, told.copied_in), (40, 20), "the last two are still there");
}

#[test]
fn a_budget_that_is_too_small_waits_for_the_copies() {
    // A copy takes two seconds. The second save waits for the first copy (3 s), the third for the second (5 s), the fourth for the
    // third (7 s), each a second after the save before it.
    let told = work(4).simulate(&[Placement::Host; 4], &copies(5.0), &budget(10));
    assert_eq!(told.stall.device_budget, 3 * S);
    // Only the fourth is there; each of the others is asked for when the one before it is done, and takes two seconds.
    assert_eq!((told.stall.load, told.step), (6 * S, 7 * S + 8 * S + 6 * S));
}

#[test]
fn loads_look_ahead_by_the_prefetch() {
    let all = [Placement::Host; 4];
    let limits = |prefetch| Limits { device_budget: 10, backward_budget: 20, prefetch, ..Limits::default() };
    // A load takes as long as the backward it hides behind.
    let ahead = work(4).simulate(&all, &copies(5.0), &limits(10)).stall.load;
    let late = work(4).simulate(&all, &copies(5.0), &limits(0)).stall.load;
    assert!(ahead < late && late == 6 * S, "{ahead:?} {late:?}");
}

#[test]
fn what_the_host_has_no_room_for_waits_for_the_disk() {
    let machine = Machine { host_pool: 10, disk_write: 5.0, disk_read: 5.0, ..Machine::default() };
    let told = work(3).simulate(&[Placement::Disk; 3], &machine, &budget(10));
    // The first is written from 1 s to 3 s; the second wants its room at 2 s, the third at 4 s, when the second is written to 5 s.
    assert_eq!(told.stall.host_pool, 2 * S);
    assert_eq!((told.host_peak, told.written), (10, 30));
    assert_eq!(told.read, 20, "the third is on the device, and the others have left the host");
}

#[test]
fn without_room_and_without_a_disk_it_stays() {
    let machine = Machine { host_pool: 20, ..Machine::default() };
    let told = work(4).simulate(&[Placement::Host; 4], &machine, &budget(10));
    assert_eq!((told.copied_out, told.backward_peak), (20, 20));
}

#[test]
fn what_is_computed_again_takes_its_time_and_no_memory_before() {
    let mut work = work(4);
    let recipe = |since| Some(Recompute { time: S, since });
    work.entries.iter_mut().enumerate().for_each(|(index, entry)| entry.recompute = recipe(index));
    let told = work.simulate(&[Placement::Recompute; 4], &copies(1.0), &Limits::default());
    assert_eq!((told.step, told.recomputed, told.peak()), (16 * S, 4 * S, 10));
}

#[test]
fn what_has_no_recipe_is_kept() {
    let told = work(2).simulate(&[Placement::Recompute; 2], &copies(1.0), &Limits::default());
    assert_eq!((told.step, told.peak()), (6 * S, 20));
}

#[test]
fn what_it_is_computed_from_comes_back_first() {
    let mut work = work(2);
    work.entries[1].recompute = Some(Recompute { time: S, since: 0 });
    let limits = Limits { prefetch: 0, ..budget(5) };
    let told = work.simulate(&[Placement::Host, Placement::Recompute], &copies(5.0), &limits);
    // Forward ends at 2 s. It is copied until 3 s and leaves, and is back at 5 s.
    assert_eq!((told.stall.total(), told.recomputed, told.backward_peak), (3 * S, S, 20));
}

#[test]
fn what_leaves_when_stored_needs_no_budget() {
    let machine =
        Machine { disk_write: 10.0, disk_read: 10.0, leaving: Leaving::WhenStored, ..Machine::default() };
    let limits = Limits { prefetch: 10, ..Limits::default() };
    let told = work(8).simulate(&[Placement::Disk; 8], &machine, &limits);
    assert_eq!((told.forward_peak, told.stall.total()), (20, Duration::ZERO));
    assert_eq!((told.copied_out, told.host_peak, told.written), (0, 0, 80));
}

#[test]
fn a_budget_waits_for_the_disk_where_storages_leave_when_stored() {
    let machine = Machine { disk_write: 5.0, leaving: Leaving::WhenStored, ..Machine::default() };
    let told = work(4).simulate(&[Placement::Disk; 4], &machine, &budget(10));
    assert_eq!(told.stall.device_budget, 3 * S);
}

#[test]
fn what_goes_straight_to_the_disk_leaves_as_late_as_it_may() {
    let machine =
        Machine { disk_write: 5.0, disk_read: 10.0, leaving: Leaving::OnceWritten, ..Machine::default() };
    // A write takes two seconds, a load as long as half of the backward that it hides behind.
    let told = work(3).simulate(&[Placement::Disk; 3], &machine, &budget(20));
    // The third save, at 3 s, is when the first has to leave, and it has just been written.
    assert_eq!((told.forward_peak, told.stall.device_budget), (30, Duration::ZERO));
    let told = work(3).simulate(&[Placement::Disk; 3], &machine, &budget(10));
    // The second save waits for the first write (3 s), the third, at 4 s, for the second (5 s).
    assert_eq!((told.forward_peak, told.stall.device_budget), (20, 2 * S));
    assert_eq!((told.copied_out, told.host_peak), (0, 0));
}

#[test]
fn what_the_turn_needs_counts() {
    let work = Workload { turn_extra: 100, ..work(3) };
    let told = work.simulate(&[], &Machine::default(), &Limits::default());
    assert_eq!(told.peak(), 130);
}

#[test]
fn what_the_program_still_holds_counts_wherever_it_is() {
    let mut work = work(3);
    work.entries[0].recompute = Some(Recompute { time: S, since: 0 });
    let peak = |work: &Workload| {
        work.simulate(&[Placement::Recompute], &copies(1.0), &Limits::default()).forward_peak
    };
    assert_eq!(peak(&work), 20);
    work.entries[0].in_use_until = 1;
    assert_eq!(peak(&work), 20);
    work.entries[0].in_use_until = 2;
    assert_eq!(peak(&work), 30);
}

#[test]
fn what_the_program_holds_when_backward_asks_stays_wherever_it_is_placed() {
    let mut work = work(2);
    work.entries[0].in_use_until = usize::MAX;
    let told = |placements: [Placement; 2]| work.simulate(&placements, &copies(1.0), &budget(0));
    assert_eq!(told([Placement::Host; 2]), told([Placement::Keep, Placement::Host]));
}

#[test]
fn what_backward_still_uses_leaves_no_room() {
    let mut work = work(3);
    // The first is copied out from 1 s to 2 s, and may come back once the third has left.
    let told = |work: &Workload| work.simulate(&[Placement::Host], &copies(10.0), &budget(20));
    let alone = told(&work);
    work.entries[2].in_use_with = 1;
    let along = told(&work);
    assert_eq!((alone.backward_peak, alone.stall.load), (20, Duration::ZERO));
    assert_eq!((along.backward_peak, along.stall.load), (20, S), "only when asked for");
}

#[test]
fn what_else_is_needed_counts_where_it_is_needed() {
    let mut work = work(3);
    work.entries[0].forward_extra = 100;
    work.entries[2].backward_extra = 50;
    let told = work.simulate(&[], &Machine::default(), &Limits::default());
    assert_eq!((told.forward_peak, told.backward_peak), (110, 80));
}

fn entry() -> impl Strategy<Value = Entry> {
    let millis = |most: u64| (0..most).prop_map(Duration::from_millis);
    (1_u64..1000, millis(50), millis(100), prop::option::of((millis(30), 0_usize..40)), 0_usize..3).prop_map(
        |(bytes, forward, backward, recompute, in_use_with)| Entry {
            bytes,
            forward,
            backward,
            recompute: recompute.map(|(time, since)| Recompute { time, since }),
            in_use_with,
            ..Entry::default()
        },
    )
}

fn placement() -> impl Strategy<Value = Placement> {
    use Placement::{Disk, Host, Keep, Recompute};
    prop::sample::select(vec![Keep, Host, Disk, Recompute])
}

fn case() -> impl Strategy<Value = (Workload, Vec<Placement>)> {
    prop::collection::vec((entry(), placement()), 1..40).prop_map(|pairs| {
        let (entries, placements) = pairs.into_iter().unzip();
        let [turn, rest] = [7, 3].map(Duration::from_millis);
        (Workload { entries, turn, rest, ..Workload::default() }, placements)
    })
}

fn machine() -> impl Strategy<Value = Machine> {
    let speed = || 1e3..1e6;
    let leaving =
        prop::sample::select(vec![Leaving::InStreamOrder, Leaving::WhenStored, Leaving::OnceWritten]);
    (speed(), speed(), speed(), speed(), 0_u64..20_000, leaving).prop_map(
        |(copy_out, copy_in, disk_write, disk_read, host_pool, leaving)| Machine {
            copy_out,
            copy_in,
            disk_write,
            disk_read,
            host_pool,
            leaving,
        },
    )
}

fn limits() -> impl Strategy<Value = Limits> {
    (1_u64..20_000, 1_u64..20_000, 0_u64..5_000, 0_u64..5_000).prop_map(
        |(device_budget, backward_budget, prefetch, read_ahead)| Limits {
            device_budget,
            backward_budget,
            prefetch,
            read_ahead,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn time_is_computed_or_waited((work, placements) in case(), machine in machine(), limits in limits()) {
        let told = work.simulate(&placements, &machine, &limits);
        let sum = work.computed() + told.recomputed + told.stall.total();
        prop_assert!(told.step.abs_diff(sum) < Duration::from_micros(1), "{told:?}");
    }

    #[test]
    fn bounds_tell_what_the_whole_step_would(
        (work, placements) in case(), machine in machine(), limits in limits(), peak in 0.8..1.2, step in 0.9..1.1
    ) {
        let told = work.simulate(&placements, &machine, &limits);
        let within = |peak: f64, step: f64| {
            let (peak, step) = ((peak * told.peak() as f64) as u64, step * told.step.as_secs_f64());
            let bounds = Bounds { peak, step, ..Bounds::NONE };
            run_within(&bounds, &work, &placements, &machine, &limits)
        };
        prop_assert_eq!(within(1.0, 1.0), Some(told));
        prop_assert_eq!(within(peak, step), (peak >= 1.0 && step >= 1.0).then_some(told));
    }

    #[test]
    fn bytes_come_back_as_often_as_they_leave((work, placements) in case(), machine in machine(), limits in limits()) {
        let told = work.simulate(&placements, &machine, &limits);
        let moved = |wanted: &[Placement]| -> u64 {
            let chosen = work.entries.iter().zip(&placements).filter(|(_, placement)| wanted.contains(placement));
            chosen.map(|(entry, _)| entry.bytes).sum()
        };
        prop_assert!(told.copied_out <= moved(&[Placement::Host, Placement::Disk]));
        prop_assert!(told.copied_in <= told.copied_out && told.read <= told.written);
        let below = match machine.leaving {
            Leaving::InStreamOrder => moved(&[Placement::Disk]),
            Leaving::WhenStored | Leaving::OnceWritten => moved(&[Placement::Host, Placement::Disk]),
        };
        prop_assert!(told.written <= below);
    }

    #[test]
    fn the_host_keeps_to_its_pool((work, placements) in case(), machine in machine(), limits in limits()) {
        let told = work.simulate(&placements, &machine, &limits);
        let largest = work.entries.iter().map(|entry| entry.bytes).max().unwrap_or(0);
        prop_assert!(told.host_peak <= machine.host_pool.max(largest));
    }

    #[test]
    fn a_budget_is_kept_where_all_can_leave((work, _) in case(), mut machine in machine(), limits in limits()) {
        machine.host_pool = u64::MAX;
        let all = vec![Placement::Host; work.entries.len()];
        let told = work.simulate(&all, &machine, &limits);
        let largest = work.entries.iter().map(|entry| entry.bytes).max().unwrap_or(0);
        prop_assert!(told.forward_peak <= limits.device_budget.max(largest) + largest);
        // One that was still being written when loads looked ahead past it is loaded when it is asked for, whatever the budget.
        let budget = limits.backward_budget.max(4 * largest).max(limits.device_budget);
        prop_assert!(told.backward_peak <= budget + largest);
    }
}
