//! Tests of the rings.

use std::process::Command;

use super::*;
use crate::Completion;
use crate::mem::{AlignedBuf, BLOCK};
use crate::watch::{Clock, Watch};

#[test]
fn its_thread_is_gone_after_drop() {
    let Ok(uring) = Uring::new(4) else { return eprintln!("skipped: io_uring is refused here") };
    let shared = Arc::downgrade(&uring.shared);
    drop(uring);
    assert_eq!(shared.strong_count(), 0);
}

/// Reads of a pipe end when something is written to it, or nobody can any more.
struct Pipe {
    region: Arc<dyn Region>,
    write_end: OwnedFd,
}

impl Pipe {
    fn new() -> Pipe {
        let mut ends = [0; 2];
        // SAFETY: `ends` has room for both descriptors.
        assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
        // SAFETY: they were just opened, and nobody else has them.
        let [read_end, write_end] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
        Pipe { region: Arc::new(SpillFile::over(read_end)), write_end }
    }
}

/// The operation of a transfer, which is given up soon. Then `told` is called.
fn read(
    watch: &Watch,
    pipe: &Pipe,
    tell: &mpsc::Sender<&'static str>,
    told: impl Fn() + Send + Sync + 'static,
) -> Op {
    let (transfer, tell) = (watch.watcher().transfer(), tell.clone());
    let (ends, late) = (Arc::clone(&transfer), tell.clone());
    let give_up = move |on_lost: &dyn Fn()| {
        if !ends.is_given_up() {
            ends.give_up();
            on_lost();
            told();
            tell.send("given up").unwrap();
            ends.end();
        }
    };
    let ended = move |_: io::Result<()>| {
        // The receiver may be gone.
        late.send("ended").ok();
        Vec::new()
    };
    let memory = (Arc::new(AlignedBuf::new(BLOCK).unwrap()) as _, 0, BLOCK);
    let place = (Arc::clone(&pipe.region), 0);
    Op::new(Direction::Read, place, memory, Box::new(ended)).timed(Clock::new(&transfer, give_up))
}

/// As many such operations.
fn reads(watch: &Watch, pipe: &Pipe, count: usize) -> (Vec<Op>, mpsc::Receiver<&'static str>) {
    let (tell, told) = mpsc::channel();
    ((0..count).map(|_| read(watch, pipe, &tell, || {})).collect(), told)
}

fn write(uring: &Uring) -> io::Result<()> {
    let region = uring.open(Place::Memory, BLOCK as u64).unwrap();
    let (tell, told) = mpsc::channel();
    let ended = move |outcome| {
        tell.send(outcome).unwrap();
        Vec::new()
    };
    let memory = (Arc::new(AlignedBuf::new(BLOCK).unwrap()) as _, 0, BLOCK);
    uring.submit(vec![Op::new(Direction::Write, (region, 0), memory, Box::new(ended))]);
    told.recv().unwrap()
}

#[test]
fn operations_that_never_end_leave_the_ring_to_others() {
    let Ok(uring) = Uring::new(2) else { return eprintln!("skipped: io_uring is refused here") };
    let (watch, pipe) = (Watch::new(Duration::from_millis(20)).unwrap(), Pipe::new());
    let (ops, told) = reads(&watch, &pipe, 5);
    uring.submit(ops);
    assert!((0..5).all(|_| told.recv() == Ok("given up")));
    write(&uring).unwrap();
    drop(pipe.write_end);
    assert!((0..5).all(|_| told.recv() == Ok("ended")));
    write(&uring).unwrap();
}

#[test]
fn a_ring_full_of_what_never_ends_refuses_more_until_something_does() {
    let Ok(uring) = Uring::new(2) else { return eprintln!("skipped: io_uring is refused here") };
    let (watch, pipe) = (Watch::new(Duration::from_millis(5)).unwrap(), Pipe::new());
    let (ops, told) = reads(&watch, &pipe, MAX_LOST + 2);
    uring.submit(ops);
    assert!((0..MAX_LOST + 2).all(|_| told.recv() == Ok("given up")));
    assert_eq!(write(&uring).unwrap_err().kind(), io::ErrorKind::TimedOut);
    // Ends one of the reads.
    // SAFETY: one byte is there to be written.
    assert_eq!(unsafe { libc::write(pipe.write_end.as_raw_fd(), [1_u8].as_ptr().cast(), 1) }, 1);
    assert_eq!(told.recv(), Ok("ended"));
    write(&uring).unwrap();
}

#[test]
fn a_drop_leaves_behind_what_never_ends() {
    let Ok(uring) = Uring::new(2) else { return eprintln!("skipped: io_uring is refused here") };
    let (watch, pipe) = (Watch::new(Duration::from_millis(20)).unwrap(), Pipe::new());
    let (ops, told) = reads(&watch, &pipe, 3);
    uring.submit(ops);
    let shared = Arc::downgrade(&uring.shared);
    drop(uring);
    assert!((0..3).all(|_| told.recv() == Ok("given up")));
    assert!(shared.strong_count() > 0, "the thread still has the operations");
    drop(pipe.write_end);
    assert!((0..3).all(|_| told.recv() == Ok("ended")));
}

#[test]
fn a_completion_of_what_was_given_up_may_drop_the_ring_while_more_never_ends() {
    let Ok(uring) = Uring::new(2) else { return eprintln!("skipped: io_uring is refused here") };
    let (watch, pipe) = (Watch::new(Duration::from_millis(20)).unwrap(), Pipe::new());
    let (tell, told) = mpsc::channel();
    let last = Arc::new(Mutex::new(None));
    let drops = {
        let last = Arc::clone(&last);
        move || {
            let last = Arc::clone(&last);
            let done: Completion = Completion::new(move |_| drop(last.lock().take()));
            done.call(Ok(()));
        }
    };
    let mut place = last.lock();
    uring.submit(vec![read(&watch, &pipe, &tell, drops), read(&watch, &pipe, &tell, || {})]);
    *place = Some(uring);
    drop(place);
    assert!((0..2).all(|_| told.recv() == Ok("given up")));
    drop(pipe.write_end);
    assert!((0..2).all(|_| told.recv() == Ok("ended")));
}

#[test]
fn a_ring_that_has_failed_refuses_more_while_it_waits_for_what_never_ends() {
    let shared = Arc::new(Shared::new().unwrap());
    let (watch, pipe) = (Watch::new(Duration::from_millis(20)).unwrap(), Pipe::new());
    let (ops, told) = reads(&watch, &pipe, 1);
    shared.state.lock().queue.extend(ops);
    let fails = thread::Builder::new().name("fails".to_owned()).spawn({
        let shared = Arc::clone(&shared);
        move || {
            let Ok(mut engine) = Engine::new(shared, 2) else { return };
            engine.take_work();
            engine.enter(0).unwrap();
            // As where a call of the kernel was refused.
            drop(engine);
        }
    });
    let fails = fails.unwrap();
    while !(shared.state.lock().ends || fails.is_finished()) {
        thread::yield_now();
    }
    if fails.is_finished() {
        return eprintln!("skipped: io_uring is refused here");
    }
    let uring = Uring { shared, thread: None };
    write(&uring).unwrap_err();
    assert_eq!(told.recv(), Ok("given up"));
    write(&uring).unwrap_err();
    drop(pipe.write_end);
    assert_eq!(told.recv(), Ok("ended"));
    fails.join().unwrap();
}

#[test]
fn a_process_ends_with_operations_that_never_do() {
    let child = "backend::uring::tests::ends_with_operations_in_the_ring";
    let this = std::env::current_exe().unwrap();
    let ended = Command::new(this).args(["--exact", child, "--ignored"]).output().unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));
}

#[test]
#[ignore = "run in a process of its own by the test above"]
fn ends_with_operations_in_the_ring() {
    let Ok(uring) = Uring::new(2) else { return };
    let (watch, pipe) = (Watch::new(Duration::from_millis(5)).unwrap(), Pipe::new());
    let (ops, told) = reads(&watch, &pipe, 3);
    uring.submit(ops);
    assert!((0..3).all(|_| told.recv() == Ok("given up")));
    // The pipe stays open, and nothing is ever written to it.
    Box::leak(Box::new(pipe));
}

#[test]
fn a_ring_that_cannot_be_had_is_an_error() {
    assert!(Uring::new(1 << 20).is_err());
}
