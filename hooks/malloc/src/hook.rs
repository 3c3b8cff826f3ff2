//! What is done when memory comes and goes: the book is kept, and cuFile is told.
//!
//! The book's lock is not held while cuFile is called. A thread waits for another in two places only: before memory is freed whose
//! registration another thread is making or undoing at that moment, and when the hook is turned off.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, Ordering};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::book::{Book, Counts, Kind, Leave, Segment};

/// Whoever registers memory for transfers. Errors are its own codes.
pub trait Registrar {
    /// Makes it ready. Called once, before the first registration, when CUDA is there for sure. What fails here is told by
    /// every registration after it.
    fn open(&self);

    /// Registers memory that is live and accessible.
    fn register(&self, start: u64, bytes: usize) -> Result<(), i32>;

    /// Undoes the registration that starts here.
    fn deregister(&self, start: u64) -> Result<(), i32>;
}

/// The book of a process and the registrar that it is kept for.
#[derive(Debug)]
pub struct Hook<R> {
    on: AtomicBool,
    book: Mutex<Book>,
    /// A thread is done with a segment that it was busy with.
    done: Condvar,
    /// Held while the hook is turned on or off.
    switch: Mutex<()>,
    registrar: R,
    gate: AtomicU8,
    /// Memory of pools was refused once; it is all of one kind, so cuFile is not asked again.
    pools_refused: AtomicBool,
    last_error: AtomicI32,
}

/// The states of the gate before the registrar. While one thread opens it, others leave their segments for it to register: they
/// may be in places that must not wait, such as the constructor of a library.
const SHUT: u8 = 0;
const OPENING: u8 = 1;
const OPEN: u8 = 2;

impl<R: Registrar> Hook<R> {
    /// A hook that is off.
    pub const fn new(registrar: R) -> Hook<R> {
        Hook {
            on: AtomicBool::new(false),
            book: Mutex::new(Book::new()),
            done: Condvar::new(),
            switch: Mutex::new(()),
            registrar,
            gate: AtomicU8::new(SHUT),
            pools_refused: AtomicBool::new(false),
            last_error: AtomicI32::new(0),
        }
    }

    /// Whether memory that comes is registered. All that a call costs while the hook is off.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Turns the hook on or off, and says what it was. Off, all registrations are undone on return. None if it is called from
    /// within a registration, where it does nothing.
    pub fn turn(&self, on: bool) -> Option<bool> {
        outside(|| {
            let _switch = self.switch.lock();
            let was = self.is_on();
            if on {
                self.book.lock().open();
                self.on.store(true, Ordering::Relaxed);
            } else if was {
                // Threads that free look into the book until it is empty.
                self.empty();
                self.on.store(false, Ordering::Relaxed);
            }
            was
        })
    }

    /// Whoever registers.
    pub fn registrar(&self) -> &R {
        &self.registrar
    }

    /// Lets go of everything without undoing it: the process ends, and the kernel undoes the rest.
    pub fn abandon(&self) {
        self.on.store(false, Ordering::Relaxed);
    }

    /// Memory was allocated.
    pub fn allocated(&self, start: u64, bytes: usize, kind: Kind) {
        outside(|| {
            if self.enter(start, bytes, kind) {
                self.register(&[start]);
            }
        });
    }

    /// Memory was mapped.
    pub fn mapped(&self, start: u64, bytes: usize) {
        outside(|| self.enter(start, bytes, Kind::Mapped));
    }

    /// Access to mapped memory was granted.
    pub fn granted(&self, start: u64, bytes: usize) {
        outside(|| {
            let granted = self.book.lock().granted(start, bytes);
            self.register(&granted);
        });
    }

    /// Memory that starts here is about to be freed.
    pub fn freed(&self, start: u64) {
        outside(|| self.leave(|book| book.free(start), |book| book.leave(start, 1, true)));
    }

    /// A range is about to be unmapped.
    pub fn unmapped(&self, start: u64, bytes: usize) {
        let ask = |book: &mut Book| book.leave(start, bytes, true);
        outside(|| self.leave(ask, ask));
    }

    /// What was counted, and the last error of the registrar, or 0.
    pub fn counts(&self) -> (Counts, i32) {
        (self.book.lock().counts(), self.last_error.load(Ordering::Relaxed))
    }

    /// The segment with all of these bytes, if it is registered now.
    pub fn registered(&self, start: u64, bytes: usize) -> Option<Segment> {
        self.book.lock().registered(start, bytes)
    }

    fn enter(&self, start: u64, bytes: usize, kind: Kind) -> bool {
        // Whatever the book still has there is gone: its end was not seen.
        let ask = |book: &mut Book| book.leave(start, bytes, false);
        self.leave(ask, ask);
        self.book.lock().enter(start, bytes, kind)
    }

    /// Asks until there is nothing left to do.
    fn leave(&self, first: impl FnOnce(&mut Book) -> Leave, again: impl Fn(&mut Book) -> Leave) {
        let mut book = self.book.lock();
        let mut next = first(&mut book);
        loop {
            match next {
                Leave::Done => return,
                Leave::Gone => {}
                Leave::Busy => self.done.wait(&mut book),
                Leave::Deregister(segment) => MutexGuard::unlocked(&mut book, || self.deregister(segment)),
            }
            next = again(&mut book);
        }
    }

    fn register(&self, starts: &[u64]) {
        if starts.is_empty() {
            return;
        }
        match self.gate.compare_exchange(SHUT, OPENING, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                self.registrar.open();
                self.gate.store(OPEN, Ordering::Release);
                // Whoever found the gate opening entered its segment before, so it is seen here.
                while let Some(segment) = self.take_any() {
                    self.register_one(segment);
                }
            }
            Err(OPENING) => {}
            Err(_) => {
                starts.iter().filter_map(|start| self.take(*start)).for_each(|it| self.register_one(it))
            }
        }
    }

    fn take(&self, start: u64) -> Option<Segment> {
        self.book.lock().take(start)
    }

    fn take_any(&self) -> Option<Segment> {
        self.book.lock().take_any()
    }

    fn register_one(&self, segment: Segment) {
        let of_pool = segment.kind == Kind::Pool;
        let outcome = if of_pool && self.pools_refused.load(Ordering::Relaxed) {
            Err(None)
        } else {
            // A panic refuses, so that nobody waits for what does not come.
            let register = || self.registrar.register(segment.start, segment.bytes).map_err(Some);
            catch_unwind(AssertUnwindSafe(register)).unwrap_or(Err(None))
        };
        if let Err(Some(code)) = outcome {
            self.last_error.store(code, Ordering::Relaxed);
            self.pools_refused.fetch_or(of_pool, Ordering::Relaxed);
        }
        let undo = self.book.lock().settle(segment, outcome.is_ok());
        if undo {
            self.deregister(segment);
        }
        self.done.notify_all();
    }

    fn deregister(&self, segment: Segment) {
        if let Err(code) = self.registrar.deregister(segment.start) {
            self.last_error.store(code, Ordering::Relaxed);
        }
        self.book.lock().deregistered(segment);
        self.done.notify_all();
    }

    fn empty(&self) {
        let registered = self.book.lock().close();
        for segment in registered {
            self.deregister(segment);
        }
        let mut book = self.book.lock();
        while !book.is_empty() {
            self.done.wait(&mut book);
        }
    }
}

thread_local! {
    /// This thread is in the hook. It has no destructor, so it is there as long as the thread is.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work` unless this thread is in the hook already: memory that cuFile allocates for itself is none of ours. A panic ends
/// here, and the caller goes on as if there were no hook.
fn outside<T>(work: impl FnOnce() -> T) -> Option<T> {
    if INSIDE.replace(true) {
        return None;
    }
    let outcome = catch_unwind(AssertUnwindSafe(work));
    INSIDE.set(false);
    outcome.ok()
}
