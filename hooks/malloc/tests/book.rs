//! The book by itself: what it asks for keeps a pretended cuFile in step with memory that comes and goes.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

use std::collections::BTreeMap;

use proptest::prelude::*;
use ssdtrain_malloc_hook::book::{Book, Kind, Leave, Segment};

const PAGE: u64 = 4096;

/// Memory and registrations as CUDA and cuFile would have them, and a book that is asked before anything is done.
struct World {
    book: Book,
    /// What is live: start, bytes, and whether it is accessible.
    live: BTreeMap<u64, (usize, bool)>,
    /// What cuFile has registered.
    registered: BTreeMap<u64, usize>,
}

#[derive(Clone, Debug)]
enum Event {
    Allocate {
        page: u64,
        pages: u64,
        pool: bool,
        accept: bool,
    },
    Free {
        page: u64,
    },
    Map {
        page: u64,
        pages: u64,
    },
    Grant {
        page: u64,
        pages: u64,
        accept: bool,
    },
    Unmap {
        page: u64,
        pages: u64,
    },
    /// The owner frees memory in a way that is not seen.
    Lose {
        page: u64,
    },
    Reopen,
}

impl World {
    fn new() -> World {
        let mut book = Book::new();
        book.open();
        World { book, live: BTreeMap::new(), registered: BTreeMap::new() }
    }

    fn is_free(&self, start: u64, bytes: usize) -> bool {
        self.live.iter().all(|(at, (long, _))| at + *long as u64 <= start || start + bytes as u64 <= *at)
    }

    fn leave(&mut self, mut next: Leave, start: u64, bytes: usize, seen: bool) {
        while next != Leave::Done {
            match next {
                Leave::Deregister(segment) => self.deregister(segment),
                Leave::Busy => panic!("nobody is busy: there is one thread"),
                Leave::Gone | Leave::Done => {}
            }
            next = self.book.leave(start, bytes, seen);
        }
    }

    fn deregister(&mut self, segment: Segment) {
        let bytes = self.registered.remove(&segment.start);
        assert_eq!(bytes, Some(segment.bytes), "cuFile has what is to be deregistered");
        self.book.deregistered(segment);
    }

    fn register(&mut self, start: u64, accept: bool) {
        let segment = self.book.take(start).expect("it waits for its registration");
        let (bytes, accessible) = self.live[&start];
        assert_eq!((bytes, true), (segment.bytes, accessible), "it is live and accessible as a whole");
        if accept {
            self.registered.insert(start, bytes);
        }
        assert!(!self.book.settle(segment, accept), "the book is open");
    }

    fn run(&mut self, event: Event) {
        let at = |page: u64| PAGE * (1 + page);
        let long = |pages: u64| usize::try_from(PAGE * pages).unwrap();
        match event {
            Event::Allocate { page, pages, pool, accept } => {
                let (start, bytes) = (at(page), long(pages));
                if self.is_free(start, bytes) {
                    self.live.insert(start, (bytes, true));
                    let stale = self.book.leave(start, bytes, false);
                    self.leave(stale, start, bytes, false);
                    assert!(self.book.enter(start, bytes, if pool { Kind::Pool } else { Kind::Plain }));
                    self.register(start, accept);
                }
            }
            Event::Map { page, pages } => {
                let (start, bytes) = (at(page), long(pages));
                if self.is_free(start, bytes) {
                    self.live.insert(start, (bytes, false));
                    let stale = self.book.leave(start, bytes, false);
                    self.leave(stale, start, bytes, false);
                    assert!(self.book.enter(start, bytes, Kind::Mapped));
                    assert_eq!(self.book.take(start), None, "nobody may access it yet");
                }
            }
            Event::Grant { page, pages, accept } => {
                let (start, end) = (at(page), at(page + pages));
                for (_, (bytes, accessible)) in
                    self.live.range_mut(start..end).filter(|(at, (long, _))| **at + *long as u64 <= end)
                {
                    assert!(*bytes > 0);
                    *accessible = true;
                }
                let granted = self.book.granted(start, long(pages));
                for start in granted {
                    // A mapping whose end was not seen may be granted after it; cuFile refuses what is not there.
                    if self.live.contains_key(&start) {
                        self.register(start, accept);
                    } else {
                        let segment = self.book.take(start).unwrap();
                        self.book.settle(segment, false);
                    }
                }
            }
            Event::Free { page } => {
                let start = at(page);
                let next = self.book.free(start);
                self.leave(next, start, 1, true);
                assert!(!self.registered.contains_key(&start), "it is deregistered before it is freed");
                self.live.remove(&start);
            }
            Event::Unmap { page, pages } => {
                let (start, bytes) = (at(page), long(pages));
                let next = self.book.leave(start, bytes, true);
                self.leave(next, start, bytes, true);
                let end = at(page + pages);
                let mapped: Vec<u64> = self.live.range(start..end).map(|(start, _)| *start).collect();
                for start in mapped {
                    assert!(
                        !self.registered.contains_key(&start),
                        "it is deregistered before it is unmapped"
                    );
                    self.live.remove(&start);
                }
            }
            Event::Lose { page } => {
                self.live.remove(&at(page));
            }
            Event::Reopen => {
                for segment in self.book.close() {
                    self.deregister(segment);
                }
                assert!(self.book.is_empty() && self.registered.is_empty());
                self.live.clear();
                self.book.open();
            }
        }
        let counts = self.book.counts();
        assert_eq!(counts.registered, self.registered.len() as u64);
        assert_eq!(counts.registered_bytes, self.registered.values().map(|bytes| *bytes as u64).sum::<u64>());
        assert_eq!(counts.registrations - counts.deregistrations, counts.registered);
        assert!(counts.live >= counts.registered);
    }
}

fn event() -> impl Strategy<Value = Event> {
    let (page, pages) = (|| 0..48_u64, || 1..9_u64);
    prop_oneof![
        4 => (page(), pages(), any::<bool>(), prop::bool::weighted(0.8))
            .prop_map(|(page, pages, pool, accept)| Event::Allocate { page, pages, pool, accept }),
        4 => page().prop_map(|page| Event::Free { page }),
        3 => (page(), pages()).prop_map(|(page, pages)| Event::Map { page, pages }),
        3 => (page(), 1..30_u64, prop::bool::weighted(0.8))
            .prop_map(|(page, pages, accept)| Event::Grant { page, pages, accept }),
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
        world.run(Event::Reopen);
        prop_assert_eq!(world.book.counts().live, 0);
    }
}

fn opened() -> Book {
    let mut book = Book::new();
    book.open();
    book
}

fn register(book: &mut Book, start: u64) {
    let segment = book.take(start).unwrap();
    assert!(!book.settle(segment, true));
}

#[test]
fn a_closed_book_takes_nothing() {
    let mut book = Book::new();
    assert!(!book.enter(PAGE, 1, Kind::Plain));
    assert!(book.is_empty());
}

#[test]
fn empty_memory_is_not_entered() {
    let mut book = opened();
    assert!(!book.enter(PAGE, 0, Kind::Plain));
    assert!(!book.enter(0, 4096, Kind::Plain));
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
    assert!(book.enter(PAGE, 4096, Kind::Plain));
    assert_eq!(book.free(PAGE + 8), Leave::Done);
    assert_eq!(book.counts().live, 1);
}

#[test]
fn a_refused_segment_stays_live_and_is_not_tried_again() {
    let mut book = opened();
    assert!(book.enter(PAGE, 4096, Kind::Mapped));
    assert_eq!(book.granted(PAGE, 4096), [PAGE]);
    let segment = book.take(PAGE).unwrap();
    assert!(!book.settle(segment, false));
    assert_eq!(book.granted(PAGE, 4096), []);
    assert_eq!(book.take(PAGE), None);
    assert_eq!(book.counts().refusals, 1);
    assert_eq!(book.counts().live, 1);
    assert_eq!(book.leave(PAGE, 4096, true), Leave::Gone);
}

#[test]
fn a_mapping_waits_until_all_of_it_is_accessible() {
    let mut book = opened();
    assert!(book.enter(PAGE, 8192, Kind::Mapped));
    assert_eq!(book.granted(PAGE, 4096), []);
    assert_eq!(book.granted(PAGE, 8192), [PAGE]);
}

#[test]
fn each_mapping_of_a_range_is_registered_by_itself() {
    let mut book = opened();
    assert!(book.enter(PAGE, 4096, Kind::Mapped));
    assert!(book.enter(2 * PAGE, 4096, Kind::Mapped));
    assert_eq!(book.granted(PAGE, 8192), [PAGE, 2 * PAGE]);
    register(&mut book, PAGE);
    register(&mut book, 2 * PAGE);
    let Leave::Deregister(segment) = book.leave(2 * PAGE, 4096, true) else { panic!("it is registered") };
    book.deregistered(segment);
    assert_eq!(book.leave(2 * PAGE, 4096, true), Leave::Done);
    assert_eq!(book.counts().registered, 1);
}

#[test]
fn memory_is_not_freed_while_another_thread_registers_it() {
    let mut book = opened();
    assert!(book.enter(PAGE, 4096, Kind::Plain));
    let segment = book.take(PAGE).unwrap();
    assert_eq!(book.free(PAGE), Leave::Busy);
    assert!(!book.settle(segment, true));
    assert!(matches!(book.free(PAGE), Leave::Deregister(_)));
    assert_eq!(book.leave(PAGE, 1, true), Leave::Busy, "another thread deregisters it now");
}

#[test]
fn a_registration_that_ends_in_a_closed_book_is_undone() {
    let mut book = opened();
    assert!(book.enter(PAGE, 4096, Kind::Plain));
    let segment = book.take(PAGE).unwrap();
    assert!(book.close().is_empty());
    assert!(!book.is_empty(), "it is waited for");
    assert!(book.settle(segment, true));
    book.deregistered(segment);
    assert!(book.is_empty());
}

#[test]
fn a_refusal_in_a_closed_book_leaves_nothing() {
    let mut book = opened();
    assert!(book.enter(PAGE, 4096, Kind::Plain));
    let segment = book.take(PAGE).unwrap();
    assert!(book.close().is_empty());
    assert!(!book.settle(segment, false));
    assert!(book.is_empty());
}

#[test]
fn bytes_are_found_in_the_segment_that_has_them_all_while_it_is_registered() {
    let mut book = opened();
    let starts = |book: &Book, start, bytes| book.registered(start, bytes).map(|segment| segment.start);
    assert!(book.enter(PAGE, 4096, Kind::Plain) && book.enter(2 * PAGE, 4096, Kind::Plain));
    assert_eq!(starts(&book, PAGE, 1), None, "it waits for its registration");
    register(&mut book, PAGE);
    register(&mut book, 2 * PAGE);
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
