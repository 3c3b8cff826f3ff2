//! What happens when memory comes and goes: the book is updated, and cuFile is called.
//!
//! Registering takes milliseconds, so it is left to a thread of the hook's own, and the allocating thread continues
//! at once. Memory is deregistered by the thread that frees it. The book's lock is not held while cuFile is called. A
//! thread waits for another in four cases only: before it frees memory (or records its addresses anew) that another
//! thread is registering or deregistering at that moment, when the hook is turned off, when the process ends, and
//! where the program asks for it.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::book::{Book, Counts, Kind, Leave, Segment};

/// The error of registrations if the thread that would make them cannot be started.
pub const NO_THREAD: i32 = -2;

/// Registers memory for transfers. Errors are the registrar's own codes, and none of them is [`NO_THREAD`].
pub trait Registrar: Sync + 'static {
    /// The calling thread's CUDA context. It is stored with the memory that the thread makes accessible.
    fn context(&self) -> usize;

    /// Prepares the registrar. Called once, on the registering thread, before the first registration, when CUDA is
    /// certain to be there. If it fails, every registration after it reports that.
    fn open(&self);

    /// Registers memory that is live and accessible. Always called on the same thread.
    fn register(&self, segment: Segment) -> Result<(), i32>;

    /// Undoes the registration that starts here.
    fn deregister(&self, start: u64) -> Result<(), i32>;
}

/// The book of a process, and the registrar that acts on it.
#[derive(Debug)]
pub struct Hook<R> {
    on: AtomicBool,
    /// Permanently: the process is ending, or it is a fork, in which the thread does not exist.
    abandoned: AtomicBool,
    book: Mutex<Book>,
    /// Signalled when a segment is waiting to be registered.
    waiting: Condvar,
    /// Signalled when a segment is no longer waiting, or a thread has finished with one that it was busy with.
    done: Condvar,
    /// Held while the hook is turned on or off.
    switch: Mutex<()>,
    /// Whether the registering thread has been started.
    started: AtomicBool,
    /// The thread has to be woken: it is not checking the book by itself. Changed with the book's lock held.
    asleep: AtomicBool,
    /// Held by that thread while it is in the registrar.
    calling: Mutex<()>,
    registrar: R,
    last_error: AtomicI32,
}

impl<R: Registrar> Hook<R> {
    /// A hook that is off.
    pub const fn new(registrar: R) -> Hook<R> {
        Hook {
            on: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
            book: Mutex::new(Book::new()),
            waiting: Condvar::new(),
            done: Condvar::new(),
            switch: Mutex::new(()),
            started: AtomicBool::new(false),
            asleep: AtomicBool::new(true),
            calling: Mutex::new(()),
            registrar,
            last_error: AtomicI32::new(0),
        }
    }

    /// Whether new memory is registered. This check is the whole cost of a call while the hook is off.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Turns the hook on or off, and returns its previous state. When it has been turned off, all registrations have
    /// been undone on return. If it is called from within a registration or after [`Hook::abandon`], it does nothing
    /// and returns `None`.
    pub fn turn(&self, on: bool) -> Option<bool> {
        if self.abandoned.load(Ordering::Relaxed) {
            return None;
        }
        outside(|| {
            let _switch = self.switch.lock();
            let was = self.is_on();
            if on {
                self.book.lock().open();
                self.on.store(true, Ordering::Relaxed);
            } else if was {
                // Threads that free memory check the book until it is empty.
                self.empty();
                self.on.store(false, Ordering::Relaxed);
            }
            was
        })
    }

    /// Waits until every live segment has been registered or refused. Returns false while the hook is off. If it is
    /// called from within a registration, it does not wait and returns `None`.
    pub fn wait(&self) -> Option<bool> {
        outside(|| {
            let mut book = self.book.lock();
            while self.is_on() && !book.is_settled() {
                self.done.wait(&mut book);
            }
            self.is_on()
        })
    }

    /// The registrar.
    pub fn registrar(&self) -> &R {
        &self.registrar
    }

    /// Gives up everything permanently without undoing it: the rest is left to the kernel.
    pub fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
        self.on.store(false, Ordering::Relaxed);
    }

    /// The same when the process is ending and the registrar is about to be shut down. It also waits, at most for
    /// `most`, until the thread has left the registrar, and keeps it out from then on.
    pub fn end(&self, most: Duration) {
        if !self.abandoned.load(Ordering::Relaxed) {
            self.abandon();
            // A thread that ends the process from within the registrar would wait for itself.
            outside(|| drop(self.calling.try_lock_for(most)));
        }
    }

    /// Memory was allocated.
    pub fn allocated(&'static self, start: u64, bytes: usize, kind: Kind) {
        outside(|| {
            let context = self.registrar.context();
            if self.enter(start, bytes, kind, context) {
                self.wake();
            }
        });
    }

    /// Memory was mapped.
    pub fn mapped(&self, start: u64, bytes: usize) {
        outside(|| self.enter(start, bytes, Kind::Mapped, 0));
    }

    /// Access to mapped memory was granted.
    pub fn granted(&'static self, start: u64, bytes: usize) {
        outside(|| {
            let context = self.registrar.context();
            let mut book = self.book.lock();
            book.granted(start, bytes, context);
            let wake = self.must_wake(&book);
            drop(book);
            if wake {
                self.wake();
            }
        });
    }

    /// Memory that starts here is about to be freed.
    pub fn freed(&self, start: u64) {
        outside(|| drop(self.leave(|book| book.free(start), |book| book.leave(start, 1, true))));
    }

    /// A range is about to be unmapped.
    pub fn unmapped(&self, start: u64, bytes: usize) {
        let ask = |book: &mut Book| book.leave(start, bytes, true);
        outside(|| drop(self.leave(ask, ask)));
    }

    /// The counts, and the last error of the registrar, or 0.
    pub fn counts(&self) -> (Counts, i32) {
        (self.book.lock().counts(), self.last_error.load(Ordering::Relaxed))
    }

    /// The segment that contains all of these bytes, if it is registered now.
    pub fn registered(&self, start: u64, bytes: usize) -> Option<Segment> {
        self.book.lock().registered(start, bytes)
    }

    /// Whether the thread has to be woken for what is waiting now.
    fn must_wake(&self, book: &Book) -> bool {
        book.is_waiting() && self.asleep.load(Ordering::Relaxed)
    }

    /// The same, after recording this memory.
    fn enter(&self, start: u64, bytes: usize, kind: Kind, context: usize) -> bool {
        // Whatever the book still has at these addresses is gone: its end was not seen.
        let ask = |book: &mut Book| book.leave(start, bytes, false);
        let mut book = self.leave(ask, ask);
        book.enter(start, bytes, kind, context);
        self.must_wake(&book)
    }

    /// Asks until there is nothing left to do.
    fn leave(
        &self,
        first: impl FnOnce(&mut Book) -> Leave,
        again: impl Fn(&mut Book) -> Leave,
    ) -> MutexGuard<'_, Book> {
        let mut book = self.book.lock();
        let mut next = first(&mut book);
        loop {
            match next {
                Leave::Done => return book,
                Leave::Gone => drop(self.done.notify_all()),
                Leave::Busy => self.done.wait(&mut book),
                Leave::Deregister(segment) => MutexGuard::unlocked(&mut book, || self.deregister(segment)),
            }
            next = again(&mut book);
        }
    }

    fn empty(&self) {
        let registered = self.book.lock().close();
        self.done.notify_all();
        for segment in registered {
            self.deregister(segment);
        }
        let mut book = self.book.lock();
        while !book.is_empty() {
            self.done.wait(&mut book);
        }
    }

    fn deregister(&self, segment: Segment) {
        let outcome = caught(|| self.registrar.deregister(segment.start));
        self.note(outcome);
        self.book.lock().deregistered(segment);
        self.done.notify_all();
    }

    /// Makes the thread check the book. The first call starts it; it is never joined, since the hook lives as long as
    /// the process.
    fn wake(&'static self) {
        if self.started.swap(true, Ordering::Relaxed) {
            self.waiting.notify_one();
            return;
        }
        let thread = thread::Builder::new().name("ssdtrain-reg".to_owned()).stack_size(STACK);
        if thread.spawn(|| self.work()).is_err() {
            self.last_error.store(NO_THREAD, Ordering::Relaxed);
            self.started.store(false, Ordering::Relaxed);
            // Refused, rather than left waiting. Memory recorded from now on tries again.
            let mut book = self.book.lock();
            while let Some(segment) = book.take() {
                book.settle(segment, false);
            }
            drop(book);
            self.done.notify_all();
        }
    }

    /// The body of the thread: it registers the waiting segments, one after the other.
    fn work(&self) {
        // Memory that the registrar allocates is not for us to register.
        INSIDE.set(true);
        let book = self.book.lock();
        self.asleep.store(false, Ordering::Relaxed);
        drop(book);
        step_back();
        // Done before any segment is taken: the loader may make this wait for a library's constructor, which must
        // then not wait for this thread when it frees memory.
        let mut goes_on = self.unless_abandoned(|| {
            // After a panic the registrar stays unopened, which registrations report.
            let _ = caught(|| self.registrar.open());
        });
        while goes_on {
            self.wait_for_work();
            goes_on = self.unless_abandoned(|| self.register_next());
        }
    }

    fn wait_for_work(&self) {
        let mut book = self.book.lock();
        let mut looks = 0;
        while !book.is_waiting() {
            if looks < LOOKS {
                looks += 1;
                self.waiting.wait_for(&mut book, BETWEEN_LOOKS);
            } else {
                self.asleep.store(true, Ordering::Relaxed);
                self.waiting.wait(&mut book);
                self.asleep.store(false, Ordering::Relaxed);
                looks = 0;
            }
        }
    }

    fn unless_abandoned(&self, call: impl FnOnce()) -> bool {
        let _calling = self.calling.lock();
        let goes_on = !self.abandoned.load(Ordering::Relaxed);
        if goes_on {
            call();
        }
        goes_on
    }

    fn register_next(&self) {
        let taken = self.book.lock().take();
        if let Some(segment) = taken {
            // A panic counts as a refusal, so that nobody waits for a result that never comes.
            let outcome = caught(|| self.registrar.register(segment));
            let registered = outcome == Some(Ok(()));
            self.note(outcome);
            if self.book.lock().settle(segment, registered) {
                self.deregister(segment);
            }
        }
        self.done.notify_all();
    }

    fn note(&self, outcome: Option<Result<(), i32>>) {
        if let Some(Err(code)) = outcome {
            self.last_error.store(code, Ordering::Relaxed);
        }
    }
}

/// Waking a thread costs a twentieth of a `cudaMalloc`, and allocations come in bursts. After its last work the
/// thread therefore checks the book by itself for a tenth of a second before it sleeps.
const LOOKS: u32 = 100;
const BETWEEN_LOOKS: Duration = Duration::from_millis(1);
/// The stack size of C threads: the registrar is a C library.
const STACK: usize = 8 << 20;

thread_local! {
    /// Whether this thread is inside the hook. It has no destructor, so it exists as long as the thread does.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work` unless this thread is already inside the hook: memory that cuFile allocates for itself is not for us
/// to register. A panic stops here, and the caller continues as if there were no hook.
fn outside<T>(work: impl FnOnce() -> T) -> Option<T> {
    if INSIDE.replace(true) {
        return None;
    }
    let outcome = caught(work);
    INSIDE.set(false);
    outcome
}

/// Makes the kernel run this thread when there is room for it, instead of at once in place of the thread that wakes
/// it.
fn step_back() {
    let parameters = libc::sched_param { sched_priority: 0 };
    // Threads that the registrar starts from here are scheduled like any other.
    let policy = libc::SCHED_BATCH | libc::SCHED_RESET_ON_FORK;
    // If this is refused, allocations are slower.
    // SAFETY: it concerns this thread alone, and the parameters are ours.
    let _ = unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) };
}

fn caught<T>(work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work)).ok()
}
