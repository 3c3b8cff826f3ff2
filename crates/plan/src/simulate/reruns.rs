//! Tests of what is computed again: with what, when, and how long it stays.

use super::*;
use crate::{Recompute, Role};

const S: Duration = Duration::from_secs(1);

/// An activation of 10 bytes that takes a second wherever it is computed, from these.
fn from(inputs: &[usize]) -> Activation {
    let recompute = Some(Recompute { time: S, inputs: inputs.to_vec() });
    Activation { bytes: 10, forward: S, backward: S, recompute, ..Activation::default() }
}

fn unsaved(role: Role, inputs: &[usize]) -> Activation {
    Activation { role, backward: Duration::ZERO, ..from(inputs) }
}

/// Seconds of recomputation, and the peak of backward.
fn simulate(activations: &[Activation], placements: &[Placement]) -> (u64, u64) {
    let work = Workload { activations: activations.to_vec(), ..Workload::default() };
    let prediction = work.simulate(placements, &Machine::default(), &Budgets::default());
    (prediction.recomputed.as_secs(), prediction.backward_peak)
}

use Placement::{Host, Keep, Recompute as Again};

#[test]
fn a_chain_is_computed_once_and_stays_until_it_is_used() {
    let chain = [from(&[]), from(&[0]), from(&[1]), from(&[2])];
    assert_eq!(simulate(&chain, &[Keep, Again, Again, Again]), (3, 40));
    assert_eq!(simulate(&chain, &[Keep, Again, Keep, Again]), (2, 30));
    assert_eq!(simulate(&chain, &[Again; 4]), (4, 40), "all at once");
}

#[test]
fn what_one_pass_hands_from_operation_to_operation_is_neither_written_nor_read() {
    // By itself, each reads ten bytes and writes ten.
    let passing = |role, inputs: &[usize]| Activation { traffic: Some(20), ..unsaved(role, inputs) };
    let chain = |middle, last| {
        let activations =
            [from(&[]), passing(Role::Fleeting, &[0]), passing(middle, &[1]), passing(Role::Saved, &[last])];
        let placements = [Keep, Again, Again, Again];
        let work = Workload { activations: activations.to_vec(), ..Workload::default() };
        work.simulate(&placements, &Machine::default(), &Budgets::default()).recomputed.as_millis()
    };
    // The first one reads, the last one writes.
    assert_eq!(chain(Role::Fleeting, 2), 1000);
    // What is asked for later is written as well.
    assert_eq!(chain(Role::Saved, 2), 1500);
    // Two goes, each of two operations.
    assert_eq!(chain(Role::Saved, 1), 2000);
}

#[test]
fn what_another_kind_of_operation_reads_is_written() {
    let passing = |inputs: &[usize]| Activation { traffic: Some(20), ..unsaved(Role::Fleeting, inputs) };
    let activations = [
        from(&[]),
        passing(&[0]),
        unsaved(Role::Fleeting, &[1]),
        Activation { traffic: Some(30), ..unsaved(Role::Saved, &[1, 2]) },
    ];
    let work = Workload { activations: activations.to_vec(), ..Workload::default() };
    let prediction = work.simulate(&[Keep, Again, Again, Again], &Machine::default(), &Budgets::default());
    // Only the last one is spared something, by this estimate: a third, for what it reads of the first.
    assert_eq!(prediction.recomputed.as_millis(), 2666);
    assert_eq!(prediction.memory_bound.as_millis(), 2666, "it is as fast as they are");
    let mut slow = activations;
    slow[2].recompute = Some(Recompute { time: 40 * S, inputs: vec![1] });
    let work = Workload { activations: slow.to_vec(), ..Workload::default() };
    let prediction = work.simulate(&[Keep, Again, Again, Again], &Machine::default(), &Budgets::default());
    assert_eq!((prediction.recomputed.as_millis(), prediction.memory_bound.as_millis()), (41666, 1666));
}

#[test]
fn what_autograd_does_not_save_is_freed_after_its_last_reader() {
    let through = |second: Role| {
        let activations = [from(&[]), unsaved(Role::Fleeting, &[0]), unsaved(second, &[1]), from(&[2])];
        simulate(&activations, &[Keep, Again, Again, Again])
    };
    // Beside what is kept, two at a time.
    assert_eq!(through(Role::Fleeting), (3, 30));
    assert_eq!(through(Role::Spare), (3, 30));
}

#[test]
fn what_is_read_twice_in_one_go_is_computed_once_and_again_in_another() {
    let f = unsaved(Role::Fleeting, &[0]);
    // The last reads the one before it, and both read `f`.
    let together = [from(&[]), f.clone(), from(&[1]), from(&[1, 2])];
    assert_eq!(simulate(&together, &[Keep, Again, Again, Again]), (3, 40));
    let apart = [from(&[]), f, from(&[1]), from(&[1])];
    assert_eq!(simulate(&apart, &[Keep, Again, Again, Again]), (4, 30));
}

#[test]
fn a_spare_one_is_saved_in_place_of_others_and_stays_until_all_are_used() {
    let activations = [from(&[]), unsaved(Role::Spare, &[0]), from(&[1]), from(&[1])];
    assert_eq!(simulate(&activations, &[Keep, Again, Keep, Keep]), (0, 30), "costs nothing");
    // The spare one is there for both, with one of them at a time.
    assert_eq!(simulate(&activations, &[Keep, Keep, Again, Again]), (2, 30));
    assert_eq!(simulate(&activations, &[Keep, Host, Again, Again]), (2, 30));
    assert_eq!(simulate(&activations, &[Keep, Keep, Keep, Keep]), (0, 30), "not saved for nothing");
}

#[test]
fn what_comes_back_for_others_comes_back_once() {
    let activations = [unsaved(Role::Spare, &[]), from(&[0]), from(&[0])];
    let work = Workload { activations: activations.to_vec(), ..Workload::default() };
    let machine = Machine { copy_out: 10.0, copy_in: 10.0, ..Machine::default() };
    let budgets = Budgets { device_budget: 0, backward_budget: 0, ..Budgets::default() };
    let prediction = work.simulate(&[Host, Again, Again], &machine, &budgets);
    assert_eq!((prediction.copied_out, prediction.copied_in), (10, 10));
    assert_eq!((prediction.stall.load, prediction.backward_peak), (S, 20));
}

#[test]
fn what_is_saved_after_what_is_computed_from_it_is_computed_for_both() {
    let activations = [from(&[]), from(&[2]), from(&[0])];
    assert_eq!(simulate(&activations, &[Keep, Again, Again]), (3, 30));
    // It stays for the other if it is kept.
    assert_eq!(simulate(&activations, &[Keep, Again, Keep]), (1, 30));
    let alone = [from(&[]), Activation { bytes: 50, ..from(&[2]) }, from(&[0])];
    assert_eq!(simulate(&alone, &[Keep, Again, Keep]), (1, 70));
}

#[test]
fn what_cannot_be_computed_is_kept() {
    let nothing = Activation { recompute: None, ..unsaved(Role::Spare, &[]) };
    let activations = [nothing, from(&[0]), from(&[1])];
    assert_eq!(simulate(&activations, &[Again, Again, Again]), (1, 20));
    assert_eq!(simulate(&activations, &[Keep, Again, Again]), (2, 30));
    let cycle = [from(&[1]), from(&[0])];
    assert_eq!(simulate(&cycle, &[Again, Again]), (0, 20));
}

/// What is needed when backward asks is needed while it computes again as well.
#[test]
fn what_backward_needs_besides_counts_while_it_computes_again() {
    let wide = Activation { bytes: 100, ..unsaved(Role::Fleeting, &[0]) };
    let mut activations = [from(&[]), wide, from(&[1])];
    activations[2].backward_extra = 7;
    let work = Workload { activations: activations.to_vec(), turn_extra: 5, ..Workload::default() };
    let placements = [Keep, Again, Again];
    let prediction = work.simulate(&placements, &Machine::default(), &Budgets::default());
    assert_eq!(prediction.backward_peak, 10 + 110 + 5);
}
