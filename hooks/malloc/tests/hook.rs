//! The hook with a registrar that waits where a test wants it to.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "what cannot be set up has failed")]

use std::collections::BTreeSet;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use parking_lot::Mutex;
use ssdtrain_malloc_hook::book::Kind;
use ssdtrain_malloc_hook::hook::{Hook, Registrar};

const PAGE: u64 = 4096;

/// Says when it begins to register, and goes on when it is told to.
struct Gated {
    registered: Mutex<BTreeSet<u64>>,
    began: SyncSender<u64>,
    go: Mutex<Receiver<()>>,
}

impl Gated {
    fn new() -> (Gated, Receiver<u64>, SyncSender<()>) {
        let ((began, began_at), (go, gone)) = (sync_channel(16), sync_channel(16));
        (Gated { registered: Mutex::default(), began, go: Mutex::new(gone) }, began_at, go)
    }
}

impl Registrar for &Gated {
    fn open(&self) {}

    fn register(&self, start: u64, _bytes: usize) -> Result<(), i32> {
        self.began.send(start).expect("the test listens");
        self.go.lock().recv().expect("the test says when");
        assert!(self.registered.lock().insert(start));
        Ok(())
    }

    fn deregister(&self, start: u64) -> Result<(), i32> {
        if self.registered.lock().remove(&start) { Ok(()) } else { Err(5024) }
    }
}

#[test]
fn memory_is_not_freed_before_another_threads_registration_of_it_ends() {
    let (registrar, began, go) = Gated::new();
    let hook = Hook::new(&registrar);
    hook.turn(true);
    thread::scope(|scope| {
        scope.spawn(|| hook.allocated(PAGE, 4096, Kind::Plain));
        began.recv().unwrap();
        let free = scope.spawn(|| {
            hook.freed(PAGE);
            assert!(registrar.registered.lock().is_empty(), "deregistered before it is freed");
        });
        go.send(()).unwrap();
        free.join().unwrap();
    });
    let (counts, error) = hook.counts();
    assert_eq!((counts.registrations, counts.deregistrations, counts.live, error), (1, 1, 0, 0));
}

#[test]
fn turning_off_waits_for_a_registration_and_undoes_it() {
    let (registrar, began, go) = Gated::new();
    let hook = Hook::new(&registrar);
    hook.turn(true);
    thread::scope(|scope| {
        scope.spawn(|| hook.allocated(PAGE, 4096, Kind::Plain));
        began.recv().unwrap();
        let off = scope.spawn(|| hook.turn(false));
        go.send(()).unwrap();
        assert_eq!(off.join().unwrap(), Some(true));
        assert!(!hook.is_on());
        assert!(registrar.registered.lock().is_empty());
    });
    assert_eq!(hook.counts().0.live, 0);
}

#[test]
fn threads_do_not_wait_while_another_opens_the_registrar() {
    struct Opening {
        began: SyncSender<()>,
        go: Mutex<Receiver<()>>,
        registered: Mutex<BTreeSet<u64>>,
    }
    impl Registrar for Opening {
        fn open(&self) {
            self.began.send(()).unwrap();
            self.go.lock().recv().unwrap();
        }
        fn register(&self, start: u64, _bytes: usize) -> Result<(), i32> {
            self.registered.lock().insert(start);
            Ok(())
        }
        fn deregister(&self, start: u64) -> Result<(), i32> {
            self.registered.lock().remove(&start);
            Ok(())
        }
    }

    let ((began, began_at), (go, gone)) = (sync_channel(1), sync_channel(1));
    let hook = Hook::new(Opening { began, go: Mutex::new(gone), registered: Mutex::default() });
    hook.turn(true);
    thread::scope(|scope| {
        let opener = scope.spawn(|| hook.allocated(PAGE, 4096, Kind::Plain));
        began_at.recv().unwrap();
        hook.allocated(2 * PAGE, 4096, Kind::Plain);
        hook.allocated(3 * PAGE, 4096, Kind::Plain);
        hook.freed(3 * PAGE);
        assert_eq!(hook.counts().0.registered, 0);
        go.send(()).unwrap();
        opener.join().unwrap();
    });
    let (counts, _) = hook.counts();
    assert_eq!((counts.registered, counts.registrations, counts.live), (2, 2, 2));
}

#[test]
fn a_registrar_that_allocates_is_not_registered_itself() {
    struct Nested(Mutex<Option<&'static Hook<Nested>>>);
    impl Registrar for Nested {
        fn open(&self) {}
        fn register(&self, _start: u64, _bytes: usize) -> Result<(), i32> {
            let hook = *self.0.lock();
            let hook = hook.unwrap();
            hook.allocated(9 * PAGE, 4096, Kind::Plain);
            hook.freed(9 * PAGE);
            assert_eq!(hook.turn(false), None);
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
    assert_eq!(HOOK.counts().0.allocations, 1);
    assert_eq!(HOOK.counts().0.registered, 1);
    assert!(HOOK.is_on());
}

#[test]
fn a_panic_in_the_hook_does_not_reach_its_caller_and_later_calls_work() {
    struct Panics;
    impl Registrar for Panics {
        fn open(&self) {}
        fn register(&self, start: u64, _bytes: usize) -> Result<(), i32> {
            assert_ne!(start, PAGE, "a panic that is wanted");
            Ok(())
        }
        fn deregister(&self, _start: u64) -> Result<(), i32> {
            Ok(())
        }
    }

    let hook = Hook::new(Panics);
    hook.turn(true);
    hook.allocated(PAGE, 4096, Kind::Plain);
    hook.allocated(2 * PAGE, 4096, Kind::Plain);
    assert_eq!(hook.counts().0.registered, 1);
    hook.freed(PAGE);
    assert_eq!(hook.counts().0.live, 1);
}
