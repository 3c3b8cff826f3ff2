//! How long threads wait for a device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use ssdtrain_store::sync::Mutex;

use super::is_unanswered;
use crate::error::{Error, ErrorKind, Result};

/// The shortest and the longest pause before it is asked again whether the device is done. What has taken long is asked about less often:
/// a wait takes about a thirtieth longer than it has to, and no more than a tenth of a millisecond.
const PAUSES: (Duration, Duration) = (Duration::from_micros(10), Duration::from_micros(100));
/// How often a thread looks whether the wait of another one takes too long.
const LOOK: Duration = Duration::from_millis(50);
/// By how much longer a pause may take than it should. The rest was not waited: the process was stopped.
const LATE: Duration = Duration::from_millis(10);

/// A point in one of a device's queues.
pub(super) trait Queued: Clone {
    /// Whether it cannot be reached before `other` is.
    fn follows(&self, other: &Self) -> bool;
}

/// Waits for a device up to a limit. When one was in vain, those for what follows in the same queue end at once, until the device has
/// reached what that one waited for.
pub(super) struct Patience<E> {
    limit: Duration,
    /// What the device has not reached in time.
    missed: Mutex<Vec<E>>,
    /// Whether the threads have ended that were left to wait for all of the device.
    left: Mutex<Vec<Arc<AtomicBool>>>,
}

impl<E: Queued> Patience<E> {
    pub(super) fn new(limit: Duration) -> Patience<E> {
        Patience { limit, missed: Mutex::default(), left: Mutex::default() }
    }

    /// Sleeps until `event` is reached, as `is_reached` tells. Fails with [`ErrorKind::TimedOut`] after the limit.
    pub(super) fn wait(&self, event: &E, is_reached: impl Fn(&E) -> Result<bool>) -> Result<()> {
        self.wait_unless(|missed| event.follows(missed), event, is_reached)
    }

    /// As [`wait`](Patience::wait), but ends at once while anything is left that was waited for in vain.
    pub(super) fn wait_unless_late(&self, event: &E, is_reached: impl Fn(&E) -> Result<bool>) -> Result<()> {
        self.wait_unless(|_| true, event, is_reached)
    }

    /// Does not begin to wait if the device is late with something of this `kind`.
    fn wait_unless(
        &self,
        kind: impl Fn(&E) -> bool,
        event: &E,
        is_reached: impl Fn(&E) -> Result<bool>,
    ) -> Result<()> {
        if is_reached(event)? {
            return Ok(());
        }
        if self.has_missed(kind, &is_reached) {
            return Err(unanswered(self.limit));
        }
        wait(self.limit, || is_reached(event)).inspect_err(|error| {
            if is_unanswered(error) {
                self.missed.lock().push(event.clone());
            }
        })
    }

    /// Runs `work`, which waits for all of the device by itself, in a thread of its own. After the limit, the thread is left to it. It is
    /// not begun while anything is left that was waited for in vain.
    pub(super) fn outlast(
        &self,
        is_reached: impl Fn(&E) -> Result<bool>,
        work: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Result<()> {
        self.outlast_in(thread::Builder::new().name("ssdtrain-wait".to_owned()), is_reached, work)
    }

    fn outlast_in(
        &self,
        thread: thread::Builder,
        is_reached: impl Fn(&E) -> Result<bool>,
        work: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let mut left = self.left.lock();
        left.retain(|has_ended| !has_ended.load(Ordering::Acquire));
        // The work tells what is the matter with a device that fails.
        let is_late = |event| matches!(is_reached(event), Ok(false));
        if !left.is_empty() || self.missed.lock().iter().any(is_late) {
            return Err(unanswered(self.limit));
        }
        drop(left);
        let (tell, told) = channel();
        let has_ended = Arc::new(AtomicBool::new(false));
        let ends = Ends(Arc::clone(&has_ended));
        let run = move || {
            let _ends = ends;
            // Nobody may want to hear of it any more.
            tell.send(work()).unwrap_or_default();
        };
        if let Err(error) = thread.spawn(run) {
            return Err(unknown(&format!("there is no thread to wait for the device with ({error})")));
        }
        let mut waited = Waited::of(self.limit);
        loop {
            let begun = Instant::now();
            match told.recv_timeout(LOOK) {
                Ok(outcome) => return outcome,
                Err(RecvTimeoutError::Timeout) => waited.adds(begun.elapsed(), LOOK),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(unknown(
                        "internal error: the thread that waited for the device has panicked",
                    ));
                }
            }
            if waited.is_over() {
                self.left.lock().push(has_ended);
                return Err(unanswered(waited.so_far));
            }
        }
    }

    /// Whether a thread has waited in vain for something of this `kind` that the device has still not reached.
    fn has_missed(&self, kind: impl Fn(&E) -> bool, is_reached: impl Fn(&E) -> Result<bool>) -> bool {
        let mut missed = self.missed.lock();
        missed.retain(|event| !is_reached(event).unwrap_or(false));
        missed.iter().any(kind)
    }
}

/// Sleeps until something is reached. Fails with [`ErrorKind::TimedOut`] after the limit.
pub(super) fn wait(limit: Duration, is_reached: impl Fn() -> Result<bool>) -> Result<()> {
    let mut waited = Waited::of(limit);
    while !is_reached()? {
        if waited.is_over() {
            return Err(unanswered(waited.so_far));
        }
        let (least, most) = PAUSES;
        let pause = (waited.so_far / 32).clamp(least, most);
        let begun = Instant::now();
        thread::sleep(pause);
        waited.adds(begun.elapsed(), pause);
    }
    Ok(())
}

/// How long a thread has waited.
struct Waited {
    limit: Duration,
    so_far: Duration,
    has_warned: bool,
}

impl Waited {
    fn of(limit: Duration) -> Waited {
        Waited { limit, so_far: Duration::ZERO, has_warned: false }
    }

    /// A pause took so long. A process that was stopped meanwhile has not waited.
    fn adds(&mut self, took: Duration, pause: Duration) {
        self.so_far += took.min(pause + LATE);
        if self.so_far >= self.limit / 10 && !self.has_warned {
            tracing::warn!(limit = ?self.limit, "the device has not answered for {:.0?}", self.so_far);
            self.has_warned = true;
        }
    }

    fn is_over(&self) -> bool {
        self.so_far >= self.limit
    }
}

/// Notes on drop that a thread has ended.
struct Ends(Arc<AtomicBool>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

pub(super) fn unanswered(waited: Duration) -> Error {
    let message = format!(
        "the device has not done within {waited:.0?} what is waited for; memory that it may still use is not used for anything else; \
         see what holds it up (nvidia-smi, dmesg), or raise the time limit (device_timeout, --device-timeout)"
    );
    Error::new(ErrorKind::TimedOut, message)
}

/// Nobody knows whether the device is done.
pub(super) fn unknown(why: &str) -> Error {
    let message = format!("{why}; memory that the device may still use is not used for anything else");
    Error::new(ErrorKind::TimedOut, message)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::process::{Command, id};

    use super::*;

    /// A place in a queue: its number, and that of the queue.
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct At(u32, u32);

    impl Queued for At {
        fn follows(&self, other: &At) -> bool {
            self.1 == other.1 && self.0 >= other.0
        }
    }

    const NEVER: fn(&At) -> Result<bool> = |_| Ok(false);

    /// How often it is asked whether a place is reached in a wait that is in vain; once if that ends at once.
    fn asked_in_vain(patience: &Patience<At>, place: At, is_reached: impl Fn(&At) -> bool) -> u32 {
        let asked = Cell::new(0);
        let ask = |at: &At| {
            asked.set(asked.get() + u32::from(*at == place));
            Ok(is_reached(at))
        };
        is_in_vain(patience.wait(&place, ask));
        asked.get()
    }

    fn is_in_vain(waited: Result<()>) {
        assert_eq!(waited.unwrap_err().kind(), ErrorKind::TimedOut);
    }

    #[test]
    fn what_is_reached_is_not_waited_for_and_what_comes_in_time_is() {
        let patience = Patience::new(Duration::MAX);
        patience.wait(&At(1, 0), |_| Ok(true)).unwrap();
        let asked = Cell::new(0);
        let third = |_: &At| Ok(asked.replace(asked.get() + 1) == 2);
        patience.wait(&At(1, 0), third).unwrap();
        assert_eq!(asked.get(), 3);
    }

    #[test]
    fn a_wait_in_vain_takes_its_limit() {
        let (limit, start) = (Duration::from_millis(200), Instant::now());
        is_in_vain(Patience::new(limit).wait(&At(1, 0), NEVER));
        assert!(start.elapsed() >= limit);
    }

    #[test]
    fn a_wait_in_vain_ends_those_that_follow_in_its_queue_until_what_it_waited_for_is_reached() {
        let patience = Patience::new(Duration::from_millis(2));
        assert!(asked_in_vain(&patience, At(2, 0), |_| false) > 1);
        assert_eq!(asked_in_vain(&patience, At(3, 0), |_| false), 1);
        // What comes before it or in another queue is waited for.
        for other in [At(1, 0), At(3, 1)] {
            let asked = Cell::new(0);
            let in_time = |at: &At| Ok(*at == other && asked.replace(asked.get() + 1) == 2);
            patience.wait(&other, in_time).unwrap();
        }
        // Once it is reached, the next one is waited for, too.
        assert!(asked_in_vain(&patience, At(3, 0), |at| *at == At(2, 0)) > 1);
        assert_eq!(asked_in_vain(&patience, At(4, 0), |_| false), 1);
    }

    #[test]
    fn waits_that_only_measure_end_at_once_while_anything_is_late() {
        let patience = Patience::new(Duration::from_millis(2));
        assert!(asked_in_vain(&patience, At(2, 0), |_| false) > 1);
        for other in [At(1, 0), At(3, 1)] {
            let asked = Cell::new(0);
            is_in_vain(patience.wait_unless_late(&other, |at| {
                asked.set(asked.get() + u32::from(*at == other));
                Ok(false)
            }));
            assert_eq!(asked.get(), 1);
            patience.wait_unless_late(&other, |at| Ok(*at == other)).unwrap();
        }
    }

    #[test]
    fn a_device_that_fails_says_so() {
        let refused = |_: &At| Err(Error::new(ErrorKind::Device, "failed"));
        let error = Patience::new(Duration::MAX).wait(&At(1, 0), refused).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Device);
    }

    #[test]
    fn work_that_does_not_end_is_left_alone_and_not_begun_again_before_it_has_ended() {
        let patience = Patience::<At>::new(Duration::from_millis(20));
        let (hold, holds) = channel::<()>();
        is_in_vain(patience.outlast(NEVER, move || holds.recv().map_err(Error::torch)));
        is_in_vain(patience.outlast(NEVER, || panic!("begun again")));
        hold.send(()).unwrap();
        while patience.outlast(NEVER, || Ok(())).is_err() {
            thread::yield_now();
        }
    }

    #[test]
    fn all_of_a_device_is_not_waited_for_while_a_part_of_it_is_late() {
        let patience = Patience::new(Duration::from_millis(2));
        assert!(asked_in_vain(&patience, At(1, 0), |_| false) > 1);
        is_in_vain(patience.outlast(NEVER, || panic!("begun")));
        patience.outlast(|_| Ok(true), || Ok(())).unwrap();
    }

    #[test]
    fn what_is_the_matter_with_a_device_that_was_late_and_has_failed_is_told() {
        let patience = Patience::new(Duration::from_millis(2));
        assert!(asked_in_vain(&patience, At(1, 0), |_| false) > 1);
        let failed = || Error::new(ErrorKind::Device, "failed");
        let error = patience.outlast(|_| Err(failed()), move || Err(failed())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Device);
    }

    #[test]
    fn work_that_panics_is_an_error_and_the_next_one_runs() {
        let patience = Patience::<At>::new(Duration::MAX);
        is_in_vain(patience.outlast(NEVER, || panic!("on purpose, in a wait")));
        patience.outlast(NEVER, || Ok(())).unwrap();
    }

    #[test]
    fn nobody_waits_without_a_limit_where_there_is_no_thread_for_it() {
        let patience = Patience::<At>::new(Duration::MAX);
        let too_large = thread::Builder::new().stack_size(1 << 47);
        let error = patience.outlast_in(too_large, NEVER, || panic!("begun")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!(error.to_string().contains("no thread to wait"), "{error}");
        patience.outlast(NEVER, || Ok(())).unwrap();
    }

    #[test]
    fn time_in_which_the_process_was_stopped_does_not_count() {
        let script = format!("sleep 0.1; kill -STOP {0}; sleep 4; kill -CONT {0}", id());
        let mut child = Command::new("sh").arg("-c").arg(script).spawn().unwrap();
        let work = || {
            (0..30).for_each(|_| thread::sleep(Duration::from_millis(10)));
            Ok(())
        };
        let outcome = Patience::<At>::new(Duration::from_secs(3)).outlast(NEVER, work);
        child.wait().unwrap();
        outcome.unwrap();
    }
}
