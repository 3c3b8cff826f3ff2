//! A fake CUDA and cuFile, kept in step by the book: shared by the tests of the book and by a fuzz target.

use std::collections::BTreeMap;

use ssdtrain_malloc_hook::book::{Book, Kind, Leave, Segment};

pub(crate) const PAGE: u64 = 4096;

/// Memory and registrations as CUDA and cuFile would have them, and a book that is consulted before anything is done.
pub(crate) struct World {
    book: Book,
    /// The live memory: start, bytes, and whether it is accessible.
    live: BTreeMap<u64, (usize, bool)>,
    /// What cuFile has registered.
    registered: BTreeMap<u64, usize>,
}

#[derive(Clone, Debug)]
pub(crate) enum Event {
    Allocate {
        page: u64,
        pages: u64,
        pool: bool,
    },
    /// One waiting segment is registered, or refused.
    Register {
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
    },
    Unmap {
        page: u64,
        pages: u64,
    },
    /// The owner frees memory without the book noticing.
    Lose {
        page: u64,
    },
    Reopen,
}

impl World {
    pub(crate) fn new() -> World {
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

    /// Returns false if nothing is waiting.
    fn register(&mut self, accept: bool) -> bool {
        let Some(segment) = self.book.take() else { return false };
        // Memory whose end was not seen may be taken after it; cuFile refuses memory that does not exist.
        let there = self.live.get(&segment.start);
        if let Some(memory) = there {
            assert_eq!(*memory, (segment.bytes, true), "it is live and accessible as a whole");
        }
        let accept = accept && there.is_some();
        if accept {
            self.registered.insert(segment.start, segment.bytes);
        }
        assert!(!self.book.settle(segment, accept), "the book is open");
        true
    }

    pub(crate) fn run(&mut self, event: Event) {
        let at = |page: u64| PAGE * (1 + page);
        let long = |pages: u64| usize::try_from(PAGE * pages).unwrap();
        match event {
            Event::Allocate { page, pages, pool } => {
                let (start, bytes) = (at(page), long(pages));
                if self.is_free(start, bytes) {
                    self.live.insert(start, (bytes, true));
                    let stale = self.book.leave(start, bytes, false);
                    self.leave(stale, start, bytes, false);
                    assert!(self.book.enter(start, bytes, if pool { Kind::Pool } else { Kind::Plain }, 0));
                }
            }
            Event::Register { accept } => drop(self.register(accept)),
            Event::Map { page, pages } => {
                let (start, bytes) = (at(page), long(pages));
                if self.is_free(start, bytes) {
                    self.live.insert(start, (bytes, false));
                    let stale = self.book.leave(start, bytes, false);
                    self.leave(stale, start, bytes, false);
                    assert!(self.book.enter(start, bytes, Kind::Mapped, 0));
                }
            }
            Event::Grant { page, pages } => {
                let (start, end) = (at(page), at(page + pages));
                for (_, (bytes, accessible)) in
                    self.live.range_mut(start..end).filter(|(at, (long, _))| **at + *long as u64 <= end)
                {
                    assert!(*bytes > 0);
                    *accessible = true;
                }
                self.book.granted(start, long(pages), 0);
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

    /// Registers what waits, and closes the book.
    pub(crate) fn finish(mut self) {
        while self.register(true) {}
        assert!(self.book.is_settled());
        self.run(Event::Reopen);
        assert_eq!(self.book.counts().live, 0);
    }
}
