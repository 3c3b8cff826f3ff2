//! How long threads wait for a device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use ssdtrain_store::no_thread;
use ssdtrain_store::sync::Mutex;

use crate::error::{Error, ErrorKind, Result};

/// The shortest and the longest pause before it is asked again whether the device is done. What has taken long is asked about less often:
/// a wait takes about a thirtieth longer than it has to, and no more than a tenth of a millisecond.
const PAUSES: (Duration, Duration) = (Duration::from_micros(10), Duration::from_micros(100));

/// Waits for a device up to a limit. When one was in vain, the following ones end at once, until the device has reached what that one
/// waited for.
pub(super) struct Patience<E> {
    limit: Duration,
    /// What the device has not reached in time.
    missed: Mutex<Option<E>>,
    /// Whether the thread has ended that was left to wait for it.
    left: Mutex<Option<Arc<AtomicBool>>>,
}

impl<E: Clone> Patience<E> {
    pub(super) fn new(limit: Duration) -> Patience<E> {
        Patience { limit, missed: Mutex::default(), left: Mutex::default() }
    }

    /// Sleeps until `event` is reached, as `is_reached` tells. Fails with [`ErrorKind::TimedOut`] after the limit, or once `is_over`.
    pub(super) fn wait(
        &self,
        event: &E,
        is_reached: impl Fn(&E) -> Result<bool>,
        is_over: impl Fn() -> bool,
    ) -> Result<()> {
        if is_reached(event)? {
            return Ok(());
        }
        if !self.answers(&is_reached)? {
            return Err(unanswered(self.limit));
        }
        // A process that is stopped meanwhile has not waited.
        let mut waited = Duration::ZERO;
        let mut worry = self.limit / 10;
        loop {
            let (least, most) = PAUSES;
            let pause = (waited / 32).clamp(least, most);
            thread::sleep(pause);
            waited += pause;
            if is_reached(event)? {
                return Ok(());
            }
            if waited >= self.limit || is_over() {
                self.missed.lock().get_or_insert_with(|| event.clone());
                return Err(unanswered(waited));
            }
            if waited >= worry {
                tracing::warn!(limit = ?self.limit, "the device has not answered for {waited:.0?}");
                worry = Duration::MAX;
            }
        }
    }

    /// Runs `work`, which waits for the device by itself, in a thread of its own. After the limit, the thread is left to it.
    pub(super) fn outlast(
        &self,
        is_reached: impl Fn(&E) -> Result<bool>,
        work: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Result<()> {
        if !self.answers(is_reached)? {
            return Err(unanswered(self.limit));
        }
        let (tell, told) = channel();
        let has_ended = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&has_ended);
        let run = move || {
            let outcome = work();
            ends.store(true, Ordering::Release);
            // Nobody may want to hear of it any more.
            tell.send(outcome).unwrap_or_default();
        };
        let thread = thread::Builder::new().name("ssdtrain-wait".to_owned()).spawn(run);
        drop(thread.map_err(|error| no_thread("a thread that waits for the device", error))?);
        told.recv_timeout(self.limit).unwrap_or_else(|_| {
            *self.left.lock() = Some(has_ended);
            Err(unanswered(self.limit))
        })
    }

    /// Whether the device has done by now what a thread has waited for in vain.
    fn answers(&self, is_reached: impl Fn(&E) -> Result<bool>) -> Result<bool> {
        let (mut missed, mut left) = (self.missed.lock(), self.left.lock());
        let is_here = missed.as_ref().map_or(Ok(true), is_reached)?;
        if is_here {
            *missed = None;
        }
        let has_ended = left.as_ref().is_none_or(|ended| ended.load(Ordering::Acquire));
        if has_ended {
            *left = None;
        }
        Ok(is_here && has_ended)
    }
}

fn unanswered(waited: Duration) -> Error {
    let message = format!(
        "the device has not done within {waited:.0?} what is waited for; memory that it may still use is kept until it has; see what \
         holds it up (nvidia-smi, dmesg), or raise the time limit (device_timeout, --device-timeout)"
    );
    Error::new(ErrorKind::TimedOut, message)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const NEVER: fn(&u32) -> Result<bool> = |_| Ok(false);

    fn is_in_vain(waited: Result<()>) {
        assert_eq!(waited.unwrap_err().kind(), ErrorKind::TimedOut);
    }

    #[test]
    fn what_is_reached_is_not_waited_for_and_what_comes_in_time_is() {
        let patience = Patience::new(Duration::MAX);
        patience.wait(&1, |_| Ok(true), || true).unwrap();
        let asked = Cell::new(0);
        let third = |_: &u32| Ok(asked.replace(asked.get() + 1) == 2);
        patience.wait(&1, third, || false).unwrap();
        assert_eq!(asked.get(), 3);
    }

    #[test]
    fn a_wait_in_vain_ends_the_following_ones_until_what_it_waited_for_is_reached() {
        let patience = Patience::new(Duration::from_millis(2));
        is_in_vain(patience.wait(&1, NEVER, || false));
        let over = || -> bool { panic!("waited again") };
        is_in_vain(patience.wait(&2, NEVER, over));
        patience.wait(&2, |event| Ok(*event == 2), over).unwrap();
        // The first is reached, so the second is waited for.
        is_in_vain(patience.wait(&2, |event| Ok(*event == 1), || true));
        is_in_vain(patience.wait(&1, NEVER, over));
    }

    #[test]
    fn a_device_that_fails_says_so() {
        let refused = |_: &u32| Err(Error::new(ErrorKind::Device, "failed"));
        let error = Patience::new(Duration::MAX).wait(&1, refused, || false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Device);
    }

    #[test]
    fn work_that_does_not_end_is_left_alone_and_not_waited_for_again_until_it_has_ended() {
        let patience = Patience::new(Duration::from_millis(20));
        let (hold, holds) = channel::<()>();
        is_in_vain(patience.outlast(NEVER, move || holds.recv().map_err(Error::torch)));
        let over = || -> bool { panic!("waited again") };
        is_in_vain(patience.wait(&1, NEVER, over));
        is_in_vain(patience.outlast(NEVER, || panic!("begun again")));
        hold.send(()).unwrap();
        while patience.outlast(NEVER, || Ok(())).is_err() {
            thread::yield_now();
        }
        let asked = Cell::new(0);
        let second = |_: &u32| Ok(asked.replace(asked.get() + 1) == 1);
        patience.wait(&1, second, || false).unwrap();
    }
}
