//! Steps in whatever order they come, and orders that once failed.

use proptest::prelude::*;

use super::*;

fn settings() -> impl Strategy<Value = TableSettings> {
    let bytes = || prop_oneof![(0..100_u64), Just(u64::MAX)];
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    (flags, bytes(), bytes(), bytes(), bytes(), 0..1000_u64).prop_map(
        |(
            (in_stream_order, evicts, late),
            device_budget,
            backward_budget,
            prefetch,
            stores_in_flight,
            room,
        )| {
            TableSettings {
                in_stream_order,
                evicts,
                late,
                room,
                device_budget,
                backward_budget,
                prefetch,
                stores_in_flight: stores_in_flight.max(1),
            }
        },
    )
}

fn steps() -> impl Strategy<Value = Vec<TableStep>> {
    let index = any::<usize>;
    let step = prop_oneof![
        2 => Just(TableStep::OpenTape),
        1 => index().prop_map(TableStep::CloseTape),
        8 => (index(), 1..6_u8, any::<bool>(), any::<bool>())
            .prop_map(|(tape, words, keeps, holds)| TableStep::Save { tape, words, keeps, holds }),
        2 => (index(), index()).prop_map(|(tape, storage)| TableStep::SaveHeld(tape, storage)),
        2 => index().prop_map(TableStep::Write),
        2 => index().prop_map(TableStep::Drop),
        1 => Just(TableStep::Flush),
        6 => index().prop_map(TableStep::HandOver),
        6 => (index(), any::<bool>()).prop_map(|(transfer, succeeds)| TableStep::End(transfer, succeeds)),
        8 => (index(), any::<bool>()).prop_map(|(handle, holds)| TableStep::Ask(handle, holds)),
        6 => index().prop_map(TableStep::Serve),
        4 => index().prop_map(TableStep::Release),
        1 => Just(TableStep::Relieve),
        1 => (any::<bool>(), any::<bool>()).prop_map(|(short, refuses)| TableStep::Weather(short, refuses)),
        1 => any::<bool>().prop_map(TableStep::HoldBack),
        1 => Just(TableStep::Sample),
        1 => Just(TableStep::BeginStep),
    ];
    proptest::collection::vec(step, 1..150)
}

#[test]
fn what_was_held_back_counts_as_long_as_the_program_holds_it() {
    let none = u64::MAX;
    let settings = TableSettings {
        in_stream_order: false,
        evicts: false,
        late: false,
        room: none,
        device_budget: 100,
        backward_budget: none,
        prefetch: none,
        stores_in_flight: none,
    };
    let save = |holds| TableStep::Save { tape: 0, words: 5, keeps: false, holds };
    let leaves = [TableStep::HandOver(0), TableStep::End(0, true)];
    let begins = [TableStep::HoldBack(true), TableStep::OpenTape, save(true)];
    for is_over in [TableStep::HoldBack(false), TableStep::Sample] {
        let goes_on = [is_over, save(false), save(false)];
        compare(settings, begins.into_iter().chain(leaves).chain(goes_on).collect::<Vec<_>>());
    }
}

proptest! {
    #[test]
    fn what_is_saved_comes_back_and_all_sums_are_those_of_the_entries(
        settings in settings(),
        steps in steps(),
    ) {
        compare(settings, steps);
    }
}
