//! The hook with a registrar that blocks where a test wants it to.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use ssdtrain_malloc_hook::book::{Kind, Segment};
use ssdtrain_malloc_hook::hook::{Hook, Registrar};

const PAGE: u64 = 4096;

/// The registrar's actions; opening it is page 0.
type Call = u64;

/// Reports when it begins to open or to register, and continues when it is told to.
struct Gated {
    registered: Mutex<BTreeSet<u64>>,
    began: Mutex<Option<Sender<Call>>>,
    go: Mutex<Receiver<()>>,
}

thread_local! {
    /// The lock that the registering thread holds from its opening to its end.
    static BEGAN: RefCell<Option<Sender<Call>>> = const { RefCell::new(None) };
}

/// A hook that is on, its calls as they begin, and the means to let them continue.
struct Setup {
    hook: &'static Hook<Gated>,
    began: Receiver<Call>,
    go: Sender<()>,
}

impl Setup {
    fn new() -> Setup {
        let ((began, began_at), (go, gone)) = (channel(), channel());
        let gated =
            Gated { registered: Mutex::default(), began: Mutex::new(Some(began)), go: Mutex::new(gone) };
        let hook = started(gated);
        Setup { hook, began: began_at, go }
    }

    /// The same, with the registrar open and the first page being registered.
    fn registering() -> Setup {
        let setup = Setup::new();
        setup.hook.allocated(PAGE, 4096, Kind::Plain);
        assert_eq!(setup.began.recv().unwrap(), 0);
        setup.go.send(()).unwrap();
        assert_eq!(setup.began.recv().unwrap(), PAGE);
        setup
    }
}

impl Gated {
    fn registered(&self) -> Vec<u64> {
        self.registered.lock().iter().copied().collect()
    }

    fn pass(&self, call: Call) {
        BEGAN.with_borrow(|began| began.as_ref().unwrap().send(call)).expect("the test listens");
        self.go.lock().recv().expect("the test says when");
    }
}

impl Registrar for Gated {
    fn context(&self) -> usize {
        0
    }

    fn open(&self) {
        BEGAN.set(self.began.lock().take());
        self.pass(0);
    }

    fn register(&self, segment: Segment) -> Result<(), i32> {
        self.pass(segment.start);
        assert!(self.registered.lock().insert(segment.start));
        Ok(())
    }

    fn deregister(&self, start: u64) -> Result<(), i32> {
        if self.registered.lock().remove(&start) { Ok(()) } else { Err(5024) }
    }
}

/// The hook of a registrar, turned on. Its thread lives as long as the test's process.
fn started<R: Registrar>(registrar: R) -> &'static Hook<R> {
    let hook = Box::leak(Box::new(Hook::new(registrar)));
    hook.turn(true);
    hook
}

#[test]
fn an_allocation_does_not_wait_for_its_registration_or_that_of_others() {
    let setup = Setup::registering();
    let hook = setup.hook;
    hook.allocated(2 * PAGE, 4096, Kind::Plain);
    assert_eq!(hook.registrar().registered(), []);
    setup.go.send(()).unwrap();
    setup.go.send(()).unwrap();
    assert_eq!(hook.wait(), Some(true));
    assert_eq!(hook.registrar().registered(), [PAGE, 2 * PAGE]);
}

#[test]
fn allocations_and_frees_do_not_wait_while_the_registrar_opens() {
    let setup = Setup::new();
    let hook = setup.hook;
    hook.allocated(PAGE, 4096, Kind::Plain);
    assert_eq!(setup.began.recv().unwrap(), 0);
    hook.allocated(2 * PAGE, 4096, Kind::Plain);
    hook.freed(PAGE);
    setup.go.send(()).unwrap();
    assert_eq!(setup.began.recv().unwrap(), 2 * PAGE, "what was freed meanwhile is never registered");
    setup.go.send(()).unwrap();
    assert_eq!(hook.wait(), Some(true));
    assert_eq!(hook.counts().0.registrations, 1);
}

#[test]
fn memory_is_not_freed_before_the_registration_of_it_ends() {
    let setup = Setup::registering();
    let hook = setup.hook;
    thread::scope(|scope| {
        let free = scope.spawn(|| {
            hook.freed(PAGE);
            assert_eq!(hook.registrar().registered(), [], "deregistered before it is freed");
            assert_eq!(hook.counts().0.registrations, 1, "and registered before that");
        });
        setup.go.send(()).unwrap();
        free.join().unwrap();
    });
    let (counts, error) = hook.counts();
    assert_eq!((counts.registrations, counts.deregistrations, counts.live, error), (1, 1, 0, 0));
}

#[test]
fn a_free_does_not_wait_for_the_registration_of_other_memory() {
    let setup = Setup::registering();
    let hook = setup.hook;
    hook.allocated(2 * PAGE, 4096, Kind::Plain);
    setup.go.send(()).unwrap();
    assert_eq!(setup.began.recv().unwrap(), 2 * PAGE);
    hook.allocated(3 * PAGE, 4096, Kind::Plain);
    hook.freed(PAGE); // it is registered
    hook.freed(3 * PAGE); // it waits
    assert_eq!(hook.registrar().registered(), []);
    assert_eq!(hook.counts().0.live, 1);
}

#[test]
fn turning_off_waits_for_a_registration_and_undoes_it() {
    let setup = Setup::registering();
    let hook = setup.hook;
    hook.allocated(2 * PAGE, 4096, Kind::Plain);
    thread::scope(|scope| {
        let off = scope.spawn(|| hook.turn(false));
        setup.go.send(()).unwrap();
        // Another call may have begun before the hook was off.
        setup.go.send(()).unwrap();
        assert_eq!(off.join().unwrap(), Some(true));
        assert!(!hook.is_on());
        assert_eq!(hook.registrar().registered(), []);
    });
    assert_eq!(hook.counts().0.live, 0);
}

#[test]
fn waiting_ends_when_what_waits_is_freed() {
    let setup = Setup::new();
    let hook = setup.hook;
    hook.allocated(PAGE, 4096, Kind::Plain);
    assert_eq!(setup.began.recv().unwrap(), 0);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| hook.wait());
        hook.freed(PAGE);
        assert_eq!(waiter.join().unwrap(), Some(true));
    });
}

#[test]
fn waiting_for_a_hook_that_is_off_ends_at_once() {
    let setup = Setup::registering();
    let hook = setup.hook;
    assert_eq!(Hook::new(Panics).wait(), Some(false));
    hook.abandon();
    assert_eq!(hook.wait(), Some(false));
}

#[test]
fn the_end_of_the_process_waits_for_a_registration_but_not_for_ever() {
    let setup = Setup::registering();
    let hook = setup.hook;
    hook.end(Duration::from_millis(1));
    assert_eq!(hook.registrar().registered(), []);
}

#[test]
fn after_the_end_nothing_is_registered_and_the_thread_ends() {
    let setup = Setup::registering();
    let hook = setup.hook;
    hook.allocated(2 * PAGE, 4096, Kind::Plain);
    thread::scope(|scope| {
        let end = scope.spawn(|| hook.end(Duration::from_secs(60)));
        while hook.is_on() {
            thread::yield_now();
        }
        setup.go.send(()).unwrap();
        end.join().unwrap();
    });
    assert_eq!(hook.registrar().registered(), [PAGE], "what was under way came to its end");
    assert!(setup.began.recv().is_err(), "no other begins");
    assert_eq!(hook.turn(true), None, "it is for good");
}

#[test]
fn a_registrar_that_allocates_is_not_registered_itself() {
    struct Nested(Mutex<Option<&'static Hook<Nested>>>);
    impl Registrar for Nested {
        fn context(&self) -> usize {
            0
        }
        fn open(&self) {}
        fn register(&self, _segment: Segment) -> Result<(), i32> {
            let hook = *self.0.lock();
            let hook = hook.unwrap();
            hook.allocated(9 * PAGE, 4096, Kind::Plain);
            hook.freed(9 * PAGE);
            assert_eq!(hook.turn(false), None);
            assert_eq!(hook.wait(), None);
            Ok(())
        }
        fn deregister(&self, _start: u64) -> Result<(), i32> {
            Ok(())
        }
    }

    static HOOK: Hook<Nested> = Hook::new(Nested(Mutex::new(None)));
    *HOOK.registrar().0.lock() = Some(&HOOK);
    HOOK.turn(true);
    HOOK.allocated(PAGE, 4096, Kind::Plain);
    assert_eq!(HOOK.wait(), Some(true));
    assert_eq!(HOOK.counts().0.allocations, 1);
    assert_eq!(HOOK.counts().0.registered, 1);
    assert!(HOOK.is_on());
}

/// Panics when it is opened, and when it registers the first page.
struct Panics;

impl Registrar for Panics {
    fn context(&self) -> usize {
        0
    }
    fn open(&self) {
        panic!("a panic that is wanted");
    }
    fn register(&self, segment: Segment) -> Result<(), i32> {
        assert_ne!(segment.start, PAGE, "a panic that is wanted");
        Ok(())
    }
    fn deregister(&self, _start: u64) -> Result<(), i32> {
        Ok(())
    }
}

#[test]
fn a_panic_refuses_and_the_thread_goes_on() {
    let hook = started(Panics);
    hook.allocated(PAGE, 4096, Kind::Plain);
    assert_eq!(hook.wait(), Some(true));
    assert_eq!(hook.counts().0.refusals, 1);
    hook.allocated(2 * PAGE, 4096, Kind::Plain);
    assert_eq!(hook.wait(), Some(true));
    assert_eq!(hook.counts().0.registered, 1);
    hook.freed(PAGE);
    assert_eq!(hook.counts().0.live, 1);
}
