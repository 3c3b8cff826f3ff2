//! The book by itself: what it asks for keeps a fake cuFile in step with memory that comes and goes.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

mod world;

use proptest::prelude::*;
use ssdtrain_malloc_hook::book::{Book, Kind, Leave};

use self::world::{Event, PAGE, World};

fn event() -> impl Strategy<Value = Event> {
    let (page, pages) = (|| 0..48_u64, || 1..9_u64);
    prop_oneof![
        4 => (page(), pages(), any::<bool>()).prop_map(|(page, pages, pool)| Event::Allocate { page, pages, pool }),
        6 => prop::bool::weighted(0.9).prop_map(|accept| Event::Register { accept }),
        4 => page().prop_map(|page| Event::Free { page }),
        3 => (page(), pages()).prop_map(|(page, pages)| Event::Map { page, pages }),
        3 => (page(), 1..30_u64).prop_map(|(page, pages)| Event::Grant { page, pages }),
        2 => (page(), 1..30_u64).prop_map(|(page, pages)| Event::Unmap { page, pages }),
        1 => page().prop_map(|page| Event::Lose { page }),
        1 => Just(Event::Reopen),
    ]
}

proptest! {
    #[test]
    fn registrations_follow_memory_whatever_comes(events in prop::collection::vec(event(), 1..200)) {
        let mut world = World::new();
        for event in events {
            world.run(event);
        }
        world.finish();
    }
}

fn opened() -> Book {
    let mut book = Book::new();
    book.open();
    book
}

fn register(book: &mut Book) {
    let segment = book.take().unwrap();
    assert!(!book.settle(segment, true));
}

#[test]
fn a_closed_book_takes_nothing() {
    let mut book = Book::new();
    assert!(!book.enter(PAGE, 1, Kind::Plain, 0));
    assert!(book.is_empty());
}

#[test]
fn empty_memory_is_not_entered() {
    let mut book = opened();
    assert!(!book.enter(PAGE, 0, Kind::Plain, 0));
    assert!(!book.enter(0, 4096, Kind::Plain, 0));
}

#[test]
fn frees_of_unknown_memory_go_on_and_are_counted() {
    let mut book = opened();
    assert_eq!(book.free(PAGE), Leave::Done);
    assert_eq!(book.counts().unknown_frees, 1);
    assert_eq!(book.counts().frees, 0);
}

#[test]
fn a_free_inside_a_segment_leaves_it_alone() {
    let mut book = opened();
    assert!(book.enter(PAGE, 4096, Kind::Plain, 0));
    assert_eq!(book.free(PAGE + 8), Leave::Done);
    assert_eq!(book.counts().live, 1);
}

#[test]
fn a_refused_segment_stays_live_and_is_not_tried_again() {
    let mut book = opened();
    assert!(book.enter(PAGE, 4096, Kind::Mapped, 0));
    book.granted(PAGE, 4096, 0);
    let segment = book.take().unwrap();
    assert!(!book.settle(segment, false));
    book.granted(PAGE, 4096, 0);
    assert_eq!(book.take(), None);
    assert_eq!(book.counts().refusals, 1);
    assert_eq!(book.counts().live, 1);
    assert_eq!(book.leave(PAGE, 4096, true), Leave::Gone);
}

#[test]
fn a_mapping_waits_until_all_of_it_is_accessible() {
    let mut book = opened();
    assert!(book.enter(PAGE, 8192, Kind::Mapped, 0));
    book.granted(PAGE, 4096, 0);
    assert_eq!(book.take(), None);
    book.granted(PAGE, 8192, 0);
    assert_eq!(book.take().map(|segment| segment.start), Some(PAGE));
}

#[test]
fn a_segment_has_the_context_in_which_it_became_accessible() {
    let mut book = opened();
    assert!(book.enter(PAGE, 4096, Kind::Plain, 7));
    assert_eq!(book.take().map(|segment| segment.context), Some(7));
    assert!(book.enter(2 * PAGE, 4096, Kind::Mapped, 0));
    book.granted(2 * PAGE, 4096, 8);
    assert_eq!(book.take().map(|segment| segment.context), Some(8));
}

#[test]
fn what_leaves_while_it_waits_is_never_registered() {
    let mut book = opened();
    assert!(book.enter(PAGE, 4096, Kind::Plain, 0));
    assert!(book.is_waiting() && !book.is_settled());
    assert_eq!(book.free(PAGE), Leave::Gone);
    assert!(!book.is_waiting() && book.is_settled());
    assert_eq!(book.take(), None);
    assert_eq!(book.counts().frees, 1);
}

#[test]
fn what_is_being_registered_is_not_settled() {
    let mut book = opened();
    assert!(book.enter(PAGE, 4096, Kind::Plain, 0));
    let segment = book.take().unwrap();
    assert!(!book.is_waiting() && !book.is_settled());
    assert!(!book.settle(segment, true));
    assert!(book.is_settled());
}

#[test]
fn memory_of_pools_is_not_tried_once_some_was_refused() {
    let mut book = opened();
    assert!(book.enter(PAGE, 4096, Kind::Pool, 0) && book.enter(2 * PAGE, 4096, Kind::Pool, 0));
    let segment = book.take().unwrap();
    assert!(!book.settle(segment, false));
    assert!(book.enter(3 * PAGE, 4096, Kind::Pool, 0));
    assert!(book.enter(4 * PAGE, 4096, Kind::Plain, 0));
    assert_eq!(book.take().map(|segment| segment.kind), Some(Kind::Plain));
    assert_eq!(book.counts().refusals, 3);
}

#[test]
fn each_mapping_of_a_range_is_registered_by_itself() {
    let mut book = opened();
    assert!(book.enter(PAGE, 4096, Kind::Mapped, 0));
    assert!(book.enter(2 * PAGE, 4096, Kind::Mapped, 0));
    book.granted(PAGE, 8192, 0);
    register(&mut book);
    register(&mut book);
    let Leave::Deregister(segment) = book.leave(2 * PAGE, 4096, true) else { panic!("it is registered") };
    book.deregistered(segment);
    assert_eq!(book.leave(2 * PAGE, 4096, true), Leave::Done);
    assert_eq!(book.counts().registered, 1);
}

#[test]
fn memory_is_not_freed_while_another_thread_registers_it() {
    let mut book = opened();
    assert!(book.enter(PAGE, 4096, Kind::Plain, 0));
    let segment = book.take().unwrap();
    assert_eq!(book.free(PAGE), Leave::Busy);
    assert!(!book.settle(segment, true));
    assert!(matches!(book.free(PAGE), Leave::Deregister(_)));
    assert_eq!(book.leave(PAGE, 1, true), Leave::Busy, "another thread deregisters it now");
}

#[test]
fn a_registration_that_ends_in_a_closed_book_is_undone() {
    let mut book = opened();
    assert!(book.enter(PAGE, 4096, Kind::Plain, 0));
    let segment = book.take().unwrap();
    assert!(book.close().is_empty());
    assert!(!book.is_empty(), "it is waited for");
    assert!(book.settle(segment, true));
    book.deregistered(segment);
    assert!(book.is_empty());
}

#[test]
fn a_refusal_in_a_closed_book_leaves_nothing() {
    let mut book = opened();
    assert!(book.enter(PAGE, 4096, Kind::Plain, 0));
    let segment = book.take().unwrap();
    assert!(book.close().is_empty());
    assert!(!book.settle(segment, false));
    assert!(book.is_empty());
}

#[test]
fn bytes_are_found_in_the_segment_that_has_them_all_while_it_is_registered() {
    let mut book = opened();
    let starts = |book: &Book, start, bytes| book.registered(start, bytes).map(|segment| segment.start);
    assert!(book.enter(PAGE, 4096, Kind::Plain, 0) && book.enter(2 * PAGE, 4096, Kind::Plain, 0));
    assert_eq!(starts(&book, PAGE, 1), None, "it waits for its registration");
    register(&mut book);
    register(&mut book);
    assert_eq!([PAGE, PAGE + 4095].map(|at| starts(&book, at, 1)), [Some(PAGE); 2]);
    assert_eq!(starts(&book, PAGE - 1, 2), None);
    assert_eq!(
        starts(&book, PAGE + 4095, 2),
        None,
        "two segments are never one, even where one follows the other"
    );
    let Leave::Deregister(segment) = book.free(PAGE) else { panic!("it is registered") };
    assert_eq!(starts(&book, PAGE, 1), None);
    book.deregistered(segment);
    assert_eq!(starts(&book, 2 * PAGE, 4096), Some(2 * PAGE));
}
