use std::collections::HashMap;

use ssdtrain_plan::{Budgets, Schedule, ScopeId};

use super::*;

const KEEP: Placement = Placement::Keep;
const HOST: Placement = Placement::Host;
const TWO: [(u64, Placement); 2] = [(10, KEEP), (20, HOST)];

/// A course with these lines, and so much room on the device.
fn course(saves: &[(u64, Placement)], device_budget: u64) -> Course {
    let save = |(number, &(bytes, placement)): (usize, &(u64, Placement))| PlannedSave {
        bytes,
        scope: ScopeId::default(),
        placement,
        position: Position { strand: 0, index: 2 * number as u64 },
        varies: false,
    };
    let schedule = Arc::new(Schedule::new(saves.iter().enumerate().map(save).collect(), HashMap::new(), 0));
    Course {
        schedule,
        budgets: Budgets { device_budget, ..Budgets::default() },
        is_baseline: false,
        is_interim: false,
        in_graph: 0,
        whole_up_to: 0.0,
    }
}

fn cursor(courses: &[Course]) -> Cursor {
    Cursor::new(&Saves::Scheduled { courses: courses.to_vec(), unplanned: Headroom::Free })
}

fn planned(saves: &[(u64, Placement)]) -> Cursor {
    cursor(&[course(saves, 1)])
}

fn placed(cursor: &Cursor, bytes: u64) -> Placed {
    cursor.next(Saving { bytes, scope: ScopeId::default(), position: None })
}

fn next(cursor: &Cursor, bytes: u64) -> Option<Placement> {
    placed(cursor, bytes).placement
}

fn how(cursor: &Cursor) -> Option<Adherence> {
    cursor.followed().map(|followed| followed.how)
}

#[test]
fn what_a_course_leaves_in_the_graph_stays_there_unless_it_is_too_much_limited_or_lost() {
    let step = |in_graph, unplanned, saved: [u64; 4]| {
        let courses = vec![Course { in_graph, ..course(&[(10, KEEP), (20, KEEP)], 0) }];
        let cursor = Cursor::new(&Saves::Scheduled { courses, unplanned });
        saved.map(|bytes| placed(&cursor, bytes).in_graph)
    };
    let (as_known, lost, larger) = ([10, 20, 10, 20], [10, 20, 10, 7000], [10, 20, 35, 70]);
    assert_eq!(step(60, Headroom::Free, as_known), [true; 4]);
    assert_eq!(
        step(59, Headroom::Free, as_known),
        [true, true, true, false],
        "it went on without a backward"
    );
    assert_eq!(step(7040, Headroom::Free, lost), [true, true, true, false]);
    assert_eq!(step(70, Headroom::Free, larger), [true, true, true, false]);
    assert_eq!(step(60, Headroom::Bytes(1 << 30), as_known), [false; 4], "what stays counts");
    assert_eq!(step(0, Headroom::Free, as_known), [false; 4]);
}

#[test]
fn what_a_backward_was_told_to_need_no_more_is_no_longer_open_unless_others_are() {
    for (several, most) in [(false, 1.0), (true, 2.0)] {
        let cursor = cursor(&[Course { in_graph: 30, ..course(&[(10, KEEP), (20, KEEP)], 0) }]);
        for _ in 0..2 {
            if several {
                cursor.switch();
            }
            assert_eq!([10, 20].map(|bytes| next(&cursor, bytes)), [Some(KEEP); 2]);
            cursor.backward_ended();
        }
        assert_eq!(cursor.followed().map(|followed| followed.at_once), Some(most));
        assert_eq!(placed(&cursor, 10).in_graph, !several);
    }
}

#[test]
fn each_micro_batch_reads_it_from_the_beginning() {
    for told in [true, false] {
        let cursor = planned(&TWO);
        for _ in 0..2 {
            if told {
                cursor.backward_ended();
            }
            assert_eq!([10, 20].map(|bytes| next(&cursor, bytes)), [Some(KEEP), Some(HOST)]);
        }
        assert_eq!(how(&cursor), Some(Adherence::Whole(2)));
    }
}

#[test]
fn a_micro_batch_stays_whole_as_long_as_it_is_small() {
    let lines = [(100, HOST), (200, HOST), (200, HOST)];
    let small = || cursor(&[Course { whole_up_to: 0.5, ..course(&lines, 1) }]);
    let placements = |cursor: &Cursor, saves: [u64; 3]| saves.map(|bytes| next(cursor, bytes));
    let [small_one, as_planned, growing] =
        [[50, 100, 100], [60, 120, 120], [50, 100, 200]].map(|saves| placements(&small(), saves));
    assert_eq!((small_one, as_planned), ([Some(KEEP); 3], [Some(HOST); 3]));
    assert_eq!(growing, [Some(KEEP), Some(KEEP), Some(HOST)]);
    let repeating = small();
    let repeated = [50, 100, 100, 100].map(|bytes| next(&repeating, bytes));
    assert_eq!(repeated[..3], [Some(KEEP); 3]);
    assert_ne!(repeated[3], Some(KEEP), "it is as large as others by now");
    for opens in [Cursor::switch, Cursor::keeps_graph] {
        let several = small();
        opens(&several);
        assert_eq!(placements(&several, [50, 100, 100]), [Some(HOST); 3], "others may be open");
    }
}

#[test]
fn what_may_become_larger_than_its_course_lets_expect_does_not_stay_whole() {
    // Both begin alike, and the smaller one may stay whole.
    let task = |head: u64, whole_up_to: f64| Course {
        whole_up_to,
        ..course(&[(100, HOST), (100, HOST), (head, HOST)], 1)
    };
    let saves = |cursor: &Cursor, head: u64| [100, 100, head].map(|bytes| next(cursor, bytes));
    for courses in [[task(50, 1.02), task(300, 0.0)], [task(300, 0.0), task(50, 1.02)]] {
        assert_eq!(saves(&cursor(&courses), 300), [Some(HOST); 3]);
    }
    assert_eq!(saves(&cursor(&[task(50, 1.02), task(300, 1.02)]), 300), [Some(KEEP); 3]);
}

#[test]
fn micro_batches_come_one_by_one_if_each_was_told_to_have_ended() {
    let one_by_one = |between: &dyn Fn(&Cursor)| {
        let cursor = planned(&TWO);
        for _ in 0..2 {
            assert_eq!([10, 20].map(|bytes| next(&cursor, bytes)), [Some(KEEP), Some(HOST)]);
            between(&cursor);
        }
        cursor.followed().map(|followed| followed.one_by_one)
    };
    assert_eq!(one_by_one(&Cursor::backward_ended), Some(true));
    assert_eq!(one_by_one(&|_| {}), Some(false), "the program ran backward itself, or not yet");
    for opens in [Cursor::switch, Cursor::keeps_graph] {
        let ends = |cursor: &Cursor| {
            opens(cursor);
            cursor.backward_ended();
        };
        assert_eq!(one_by_one(&ends), Some(false));
    }
    let twice = |cursor: &Cursor| {
        cursor.backward_ended();
        cursor.backward_ended();
    };
    assert_eq!(one_by_one(&twice), Some(true), "two losses");
}

#[test]
fn a_step_stayed_whole_if_nothing_of_it_went_as_planned() {
    let lines = [(100, HOST), (200, HOST), (200, HOST)];
    let whole = |micro_batches: &[[u64; 3]]| {
        let cursor = cursor(&[Course { whole_up_to: 0.5, ..course(&lines, 1) }]);
        for saves in micro_batches {
            saves.iter().for_each(|bytes| {
                next(&cursor, *bytes);
            });
            cursor.backward_ended();
        }
        let Followed { stayed_whole, outgrew, .. } = cursor.followed().unwrap();
        (stayed_whole, outgrew)
    };
    let (small, large, growing) = ([50, 100, 100], [100, 200, 200], [50, 100, 200]);
    assert_eq!(whole(&[small, small]), (true, false));
    assert_eq!(whole(&[small, large]), (false, false));
    assert_eq!(whole(&[large]), (false, false));
    assert_eq!(whole(&[growing]), (false, true));
    assert_eq!(whole(&[growing, small]), (false, true));
    // A shrinking one does not become small again.
    assert_eq!(whole(&[[60, 20, 20]]), (false, false));
}

#[test]
fn nothing_is_stored_in_others_place_while_a_micro_batch_stays_whole() {
    let position = |index| Position { strand: 0, index };
    let save = PlannedSave {
        bytes: 100,
        scope: ScopeId::default(),
        placement: Placement::Recompute,
        position: position(1),
        varies: false,
    };
    let results = HashMap::from([((position(2), 0), HOST)]);
    let schedule = Arc::new(Schedule::new(vec![save], results, 0));
    for (bytes, expected) in [(100, Some(HOST)), (50, None)] {
        let budgets = Budgets::default();
        let (is_baseline, is_interim, in_graph, whole_up_to) = (false, false, 0, 0.5);
        let schedule = Arc::clone(&schedule);
        let cursor = cursor(&[Course { schedule, budgets, is_baseline, is_interim, in_graph, whole_up_to }]);
        cursor.next(Saving { bytes, scope: ScopeId::default(), position: Some(position(1)) });
        assert_eq!(cursor.result(position(2), 0), expected);
    }
}

#[test]
fn what_is_left_out_or_repeated_alters_the_plan_and_does_not_end_it() {
    let lines = [(10, KEEP), (20, HOST), (30, KEEP), (20, HOST), (400, KEEP)];
    for saves in [&[10, 20, 400][..], &[10, 20, 30, 20, 30, 20, 400]] {
        let cursor = planned(&lines);
        let expected =
            saves.iter().map(|bytes| lines.iter().find(|line| line.0 == *bytes).map(|line| line.1));
        let placements = saves.iter().map(|bytes| next(&cursor, *bytes));
        assert_eq!(placements.collect::<Vec<_>>(), expected.collect::<Vec<_>>(), "{saves:?}");
        assert_eq!(how(&cursor), Some(Adherence::Altered), "{saves:?}");
    }
}

#[test]
fn too_much_without_a_place_ends_the_plan() {
    let cursor = planned(&[(100, HOST), (200, HOST), (200, HOST)]);
    assert_eq!(next(&cursor, 100), Some(HOST));
    assert_eq!(next(&cursor, 60), Some(HOST), "it may be the next one, which is smaller now");
    assert_eq!((next(&cursor, 7000), how(&cursor)), (None, Some(Adherence::Lost)));
    cursor.backward_ended();
    assert_eq!(next(&cursor, 100), None, "to the end of the step");
    let little = planned(&[(8000, HOST), (100, HOST), (8000, HOST)]);
    let placements = [8000, 1300, 100, 8000].map(|bytes| next(&little, bytes));
    assert_eq!(placements, [Some(HOST), Some(KEEP), Some(HOST), Some(HOST)], "a little stays");
    assert_eq!(how(&little), Some(Adherence::Altered));
}

#[test]
fn what_stays_without_a_plan_is_limited_once_it_is_lost() {
    let cursor = planned(&TWO);
    assert_eq!(placed(&cursor, 10).room, None);
    assert_eq!(placed(&cursor, 7000).room, Some(Room::Fitting(Headroom::Free)));
    assert_eq!(placed(&cursor, 7000), Placed::default());
}

#[test]
fn smaller_saves_and_fewer_of_them_keep_to_a_part_of_the_plan() {
    let smaller = planned(&TWO);
    assert_eq!([5, 10].map(|bytes| next(&smaller, bytes)), TWO.map(|(_, placement)| Some(placement)));
    assert_eq!(smaller.followed().map(|followed| followed.size), Some(0.5));
    let fewer = planned(&TWO);
    next(&fewer, 10);
    let begun_again = planned(&TWO);
    next(&begun_again, 10);
    begun_again.backward_ended();
    assert_eq!([10, 20].map(|bytes| next(&begun_again, bytes)), TWO.map(|(_, placement)| Some(placement)));
    for cursor in [smaller, fewer, begun_again, planned(&TWO)] {
        assert_eq!(how(&cursor), Some(Adherence::Part), "{cursor:?}");
    }
}

#[test]
fn larger_saves_follow_with_more_room_unless_bytes_are_limited() {
    let larger = planned(&TWO);
    let more = Room::Within(Budgets { device_budget: 1, ..Budgets::default() }).times(3.0);
    assert_eq!(placed(&larger, 30), Placed { placement: Some(KEEP), room: Some(more), ..Placed::default() });
    assert_eq!(placed(&larger, 60), Placed { placement: Some(HOST), room: None, ..Placed::default() });
    assert_eq!(how(&larger), Some(Adherence::Larger));
    let limited = Cursor { unplanned: Headroom::Bytes(1), ..planned(&TWO) };
    assert_eq!((next(&limited, 30), how(&limited)), (None, Some(Adherence::Lost)));
}

#[test]
fn what_is_kept_has_a_limit_where_bytes_do() {
    let lines = [(10, KEEP), (20, HOST), (40, KEEP)];
    let limited = Cursor { unplanned: Headroom::Bytes(1), ..planned(&lines) };
    assert_eq!(placed(&limited, 10).kept_up_to, Some(50));
    assert_eq!(placed(&planned(&lines), 10).kept_up_to, None);
}

#[test]
fn results_that_are_not_planned_stay_where_a_step_follows_its_plan_and_bytes_are_not_limited() {
    let followed = planned(&TWO);
    assert!(followed.keeps_unplanned() && !Cursor::default().keeps_unplanned());
    assert!(!Cursor { unplanned: Headroom::Bytes(1), ..planned(&TWO) }.keeps_unplanned());
    next(&followed, 10);
    next(&followed, 1 << 20);
    next(&followed, 1 << 20);
    assert_eq!((how(&followed), followed.keeps_unplanned()), (Some(Adherence::Lost), false));
}

#[test]
fn a_step_follows_the_course_that_it_fits() {
    let courses = [
        course(&[(100, KEEP), (200, KEEP), (50, KEEP)], 1),
        course(&[(100, HOST), (300, HOST), (50, HOST)], 2),
        course(&[(80, KEEP)], 3),
    ];
    let room = |bytes| Some(Room::Within(Budgets { device_budget: bytes, ..Budgets::default() }));
    for _ in 0..2 {
        let second = cursor(&courses);
        assert_eq!(placed(&second, 100).room, None, "the first one as yet");
        assert_eq!(
            placed(&second, 300),
            Placed { placement: Some(HOST), room: room(2), ..Placed::default() }
        );
        assert_eq!(placed(&second, 50), Placed { placement: Some(HOST), room: None, ..Placed::default() });
        let whole = Adherence::Whole(1);
        let followed = Followed::new(1, whole);
        assert_eq!(second.followed(), Some(followed));
    }
    let third = cursor(&courses);
    assert_eq!(placed(&third, 80).room, room(3), "the one that is closest in size");
    assert_eq!(third.followed().map(|followed| followed.course), Some(2));
}

#[test]
fn each_thread_follows_its_own_strand() {
    let save = |(strand, bytes, placement)| {
        let position = Position { strand, index: 0 };
        PlannedSave { bytes, scope: ScopeId::default(), placement, position, varies: false }
    };
    let saves = [(0, 100, KEEP), (1, 33, HOST), (0, 200, KEEP), (1, 44, HOST)].map(save);
    let schedule = Arc::new(Schedule::new(saves.to_vec(), HashMap::new(), 0));
    let both = cursor(&[Course {
        schedule,
        budgets: Budgets::default(),
        is_baseline: false,
        is_interim: false,
        in_graph: 0,
        whole_up_to: 0.0,
    }]);
    // The thread that saves the smaller ones comes first this time, and the other between its saves.
    assert_eq!(next(&both, 33), Some(HOST));
    let others =
        thread::scope(|scope| scope.spawn(|| [100, 200].map(|bytes| next(&both, bytes))).join().unwrap());
    assert_eq!((others, next(&both, 44)), ([Some(KEEP), Some(KEEP)], Some(HOST)));
    assert_eq!(how(&both), Some(Adherence::Whole(1)));
}

#[test]
fn where_bytes_have_a_limit_parts_may_differ_in_size_that_are_no_larger_in_all() {
    let save = |(number, bytes): (usize, u64)| {
        let position = Position { strand: 0, index: 2 * number as u64 };
        let varies = (1..3).contains(&number);
        PlannedSave { bytes, scope: ScopeId::default(), placement: HOST, position, varies }
    };
    let saves = [400, 100, 100, 70].into_iter().enumerate().map(save).collect();
    let courses = vec![Course::new(Schedule::new(saves, HashMap::new(), 0))];
    let step = |micro_batches: &[[u64; 4]], is_told| {
        let unplanned = Headroom::Bytes(0);
        let cursor = Cursor::new(&Saves::Scheduled { courses: courses.clone(), unplanned });
        for (number, bytes) in micro_batches.iter().flat_map(|saves| (0..).zip(saves)) {
            let position = Some(Position { strand: 0, index: 2 * number });
            cursor.next(Saving { bytes: *bytes, scope: ScopeId::default(), position });
            if number == 3 && is_told {
                cursor.backward_ended();
            }
        }
        how(&cursor)
    };
    for is_told in [true, false] {
        assert_eq!(step(&[[400, 150, 45, 70], [400, 40, 160, 70]], is_told), Some(Adherence::Whole(2)));
        assert_eq!(step(&[[400, 150, 60, 70]], is_told), Some(Adherence::Lost), "more in all");
        assert_eq!(
            step(&[[400, 150, 100, 70]], is_told),
            Some(Adherence::Lost),
            "each as large as some line"
        );
        assert_eq!(step(&[[400, 100, 90, 80]], is_told), Some(Adherence::Lost), "what does not vary");
    }
}

#[test]
fn without_a_script_nothing_is_planned_or_lost() {
    for saves in [Saves::Count, Saves::Move] {
        let cursor = Cursor::new(&saves);
        assert_eq!((next(&cursor, 1), cursor.followed()), (None, None), "{saves:?}");
    }
}

#[test]
fn what_is_placed_in_turn_is_never_lost() {
    let places = [KEEP, Placement::Disk];
    for (saves, expected) in
        [(Saves::Keep, [KEEP; 3]), (Saves::InTurn(Arc::new(places)), [KEEP, Placement::Disk, KEEP])]
    {
        let cursor = Cursor::new(&saves);
        assert_eq!([1, 9, 1].map(|bytes| next(&cursor, bytes)), expected.map(Some), "{saves:?}");
        assert_eq!((cursor.followed(), cursor.is_lost()), (None, false), "{saves:?}");
    }
}
