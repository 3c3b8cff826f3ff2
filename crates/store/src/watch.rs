//! The time limit of operations: a thread that sleeps until the next one is overdue, and then gives it up.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::sync::{Condvar, Mutex};

use crate::completion::{contained, is_completing};
use crate::error::Result;
use crate::limits;

/// Called when operations of a backend were given up, so that it goes on without them.
pub(super) type OnLost = Arc<dyn Fn() + Send + Sync>;

/// Watches the operations of a store. Dropping it waits until every transfer has ended or was given up, except in a
/// completion or a listener.
pub(super) struct Watch {
    watcher: Arc<Watcher>,
}

/// What the thread and the operations share.
pub(super) struct Watcher {
    limit: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

/// The thread sleeps no longer at a time while the disk has operations, so that it notices when the process was stopped.
const SLICE: Duration = Duration::from_secs(1);
/// A thread that wakes up so much too late has not just waited for a processor.
const LATE: Duration = Duration::from_secs(1);

#[derive(Default)]
struct State {
    time: RunningTime,
    /// The operations that the disk has now, by the moment at which each is overdue.
    due: BTreeMap<Key, Entry>,
    next: u64,
    /// There is none where the limit never ends.
    thread: Option<JoinHandle<()>>,
    /// The moment at which the thread will have something to do; `None` if it sleeps until it is woken.
    sleeps_until: Option<Instant>,
    /// When it was started or woken, until it runs: the process may be stopped meanwhile.
    called: Option<Instant>,
    /// Transfers that have neither ended nor been given up.
    transfers: usize,
    closed: bool,
}

/// In running time.
type Key = (Instant, u64);

/// The time, without that in which the whole process was stopped: by Ctrl-Z, a batch system or a frozen container. Disks
/// may have answered meanwhile, and nobody could notice.
#[derive(Default)]
struct RunningTime {
    stopped: Duration,
}

impl RunningTime {
    fn at(&self, real: Instant) -> Instant {
        real - self.stopped
    }

    /// A thread went to sleep, meant to wake up at `until`, and did at `woken`. If that is much later, the process was stopped, and
    /// none of this time counts.
    fn slept(&mut self, since: Instant, until: Instant, woken: Instant) {
        if woken.saturating_duration_since(until) > LATE {
            self.stopped += woken - since;
        }
    }
}

struct Entry {
    clock: Weak<Clock>,
    on_lost: OnLost,
}

/// A transfer that may be given up, and whether it has been.
pub(super) struct GivenUp {
    watcher: Arc<Watcher>,
    is_given_up: AtomicBool,
}

/// The clock of one operation. It runs while the disk has the operation.
pub(super) struct Clock {
    transfer: Arc<GivenUp>,
    runs: Mutex<Option<Key>>,
    /// Gives the transfer up, unless it has ended. Calls its argument before anybody hears of that.
    give_up: Box<GiveUp>,
}

type GiveUp = dyn Fn(&dyn Fn()) + Send + Sync;

impl Watch {
    /// Operations may take as long as `limit`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Io`](crate::ErrorKind::Io) if the system refuses the thread.
    pub(super) fn new(limit: Duration) -> Result<Watch> {
        let watcher = Arc::new(Watcher { limit, state: Mutex::default(), changed: Condvar::new() });
        if Instant::now().checked_add(limit).is_some() {
            let watches = Arc::clone(&watcher);
            let thread = thread::Builder::new().name("ssdtrain-watch".to_owned());
            let thread = thread.spawn(move || watches.watch());
            let thread = thread.map_err(|error| {
                limits::no_thread("the thread that watches how long transfers take", error)
            })?;
            watcher.state.lock().thread = Some(thread);
        }
        Ok(Watch { watcher })
    }

    pub(super) fn watcher(&self) -> &Arc<Watcher> {
        &self.watcher
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut state = self.watcher.state.lock();
        state.closed = true;
        let thread = state.thread.take();
        drop(state);
        self.watcher.changed.notify_one();
        // A completion may drop the store. What it ends need not have ended by then, and the thread ends by itself.
        if let Some(thread) = thread.filter(|_| !is_completing())
            && thread.join().is_err()
        {
            tracing::error!("the thread that watches transfers panicked");
        }
    }
}

impl Watcher {
    /// A transfer begins.
    pub(super) fn transfer(self: &Arc<Self>) -> Arc<GivenUp> {
        self.state.lock().transfers += 1;
        Arc::new(GivenUp { watcher: Arc::clone(self), is_given_up: AtomicBool::new(false) })
    }

    pub(super) fn limit(&self) -> Duration {
        self.limit
    }

    /// The clock runs from now on, unless it would never end.
    fn start(&self, clock: &Arc<Clock>, limit: Duration, on_lost: &OnLost) {
        let mut state = self.state.lock();
        let Some(due) = state.time.at(Instant::now()).checked_add(limit) else { return };
        state.next += 1;
        let key = (due, state.next);
        let entry = Entry { clock: Arc::downgrade(clock), on_lost: Arc::clone(on_lost) };
        let wakes = state.due.is_empty() && state.sleeps_until.is_none();
        let wakes = wakes || state.sleeps_until.is_some_and(|until| due < until);
        state.due.insert(key, entry);
        if wakes {
            state.called.get_or_insert_with(Instant::now);
        }
        let before = clock.runs.lock().replace(key);
        let before = before.and_then(|before| state.due.remove(&before));
        drop(state);
        drop(before);
        if wakes {
            self.changed.notify_one();
        }
    }

    /// Gives up whatever is overdue, until the store is gone and no transfer is left.
    fn watch(&self) {
        let mut state = self.state.lock();
        loop {
            let real = Instant::now();
            if let Some(called) = state.called.take() {
                state.time.slept(called, called, real);
            }
            let now = state.time.at(real);
            state.sleeps_until = state.due.first_key_value().map(|((due, _), _)| *due);
            match state.sleeps_until {
                Some(due) if due <= now => {
                    let overdue = state.due.pop_first();
                    drop(state);
                    contained("the end of a transfer that was given up", || {
                        if let Some((_, Entry { clock, on_lost })) = overdue
                            && let Some(clock) = clock.upgrade()
                        {
                            (clock.give_up)(&*on_lost);
                        }
                    });
                    state = self.state.lock();
                }
                _ if state.closed && state.transfers == 0 => return,
                Some(due) => {
                    let until = real + (due - now).min(SLICE);
                    self.changed.wait_until(&mut state, until);
                    state.time.slept(real, until, Instant::now());
                }
                None => self.changed.wait(&mut state),
            }
        }
    }
}

impl GivenUp {
    pub(super) fn is_given_up(&self) -> bool {
        self.is_given_up.load(Ordering::Acquire)
    }

    pub(super) fn give_up(&self) {
        self.is_given_up.store(true, Ordering::Release);
    }

    /// The transfer has ended, or whoever waits for it was told that it was given up. Called once.
    pub(super) fn end(&self) {
        let mut state = self.watcher.state.lock();
        state.transfers -= 1;
        let last = state.closed && state.transfers == 0;
        drop(state);
        if last {
            self.watcher.changed.notify_one();
        }
    }
}

impl Clock {
    /// A clock that stands still. When it runs out, `give_up` is called, which calls its argument before it answers.
    pub(super) fn new(
        transfer: &Arc<GivenUp>,
        give_up: impl Fn(&dyn Fn()) + Send + Sync + 'static,
    ) -> Arc<Clock> {
        let (transfer, give_up) = (Arc::clone(transfer), Box::new(give_up));
        Arc::new(Clock { transfer, runs: Mutex::default(), give_up })
    }

    /// Runs from now on, anew if it ran; `limit` replaces the store's. Once it has run out, `on_lost` is called.
    pub(super) fn start(self: &Arc<Self>, limit: Option<Duration>, on_lost: &OnLost) {
        let watcher = &self.transfer.watcher;
        watcher.start(self, limit.unwrap_or(watcher.limit), on_lost);
    }

    pub(super) fn stop(&self) {
        let key = self.runs.lock().take();
        if let Some(key) = key {
            let entry = self.transfer.watcher.state.lock().due.remove(&key);
            drop(entry);
        }
    }

    pub(super) fn transfer(&self) -> &Arc<GivenUp> {
        &self.transfer
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use super::*;
    use crate::completion::Completion;

    const SOON: Duration = Duration::from_millis(1);

    /// A clock, and what is told when it runs out.
    fn clock(watch: &Watch) -> (Arc<Clock>, Receiver<&'static str>, OnLost) {
        let (tell, told) = channel();
        let (transfer, lost) = (watch.watcher().transfer(), tell.clone());
        let ends = Arc::clone(&transfer);
        let give_up = move |on_lost: &dyn Fn()| {
            ends.give_up();
            on_lost();
            tell.send("given up").ok();
            ends.end();
        };
        let on_lost: OnLost = Arc::new(move || lost.send("lost").unwrap_or_default());
        (Clock::new(&transfer, give_up), told, on_lost)
    }

    #[test]
    fn an_operation_that_takes_too_long_is_given_up_after_its_backend_was_told() {
        let watch = Watch::new(SOON).unwrap();
        let (clock, told, on_lost) = clock(&watch);
        assert!(!clock.transfer().is_given_up());
        clock.start(None, &on_lost);
        assert_eq!([told.recv().unwrap(), told.recv().unwrap()], ["lost", "given up"]);
        assert!(clock.transfer().is_given_up());
    }

    #[test]
    fn only_an_operation_that_the_disk_has_is_given_up() {
        let watch = Watch::new(SOON).unwrap();
        let [waiting, ended, dropped, overdue] = [(); 4].map(|()| clock(&watch));
        for (clock, _, on_lost) in [&ended, &dropped] {
            clock.start(Some(Duration::from_secs(3600)), on_lost);
        }
        ended.0.stop();
        let ends = [&waiting, &ended, &dropped].map(|(clock, ..)| Arc::clone(clock.transfer()));
        drop(dropped.0);
        // Sooner than what the thread sleeps for.
        overdue.0.start(None, &overdue.2);
        assert_eq!(overdue.1.recv().unwrap(), "lost");
        assert_eq!(watch.watcher.state.lock().due.len(), 0);
        assert!(waiting.1.try_recv().is_err() && ended.1.try_recv().is_err());
        dropped.1.try_recv().unwrap_err();
        ends.iter().for_each(|transfer| transfer.end());
    }

    #[test]
    fn a_clock_that_is_started_again_begins_anew() {
        let watch = Watch::new(Duration::from_secs(3600)).unwrap();
        let (clock, told, on_lost) = clock(&watch);
        clock.start(None, &on_lost);
        clock.start(Some(SOON), &on_lost);
        assert_eq!(told.recv().unwrap(), "lost");
        assert_eq!(watch.watcher.state.lock().due.len(), 0);
    }

    #[test]
    fn time_in_which_the_process_was_stopped_does_not_count() {
        let (start, hour) = (Instant::now(), Duration::from_secs(3600));
        let mut time = RunningTime::default();
        // On a busy machine, or woken early.
        time.slept(start, start + SLICE, start + SLICE + LATE);
        time.slept(start, start + SLICE, start);
        assert_eq!(time.at(start + hour), start + hour);
        time.slept(start, start + SLICE, start + hour);
        assert_eq!(time.at(start + hour), start);
        time.slept(start + hour, start + hour + SLICE, start + 2 * hour);
        assert_eq!(time.at(start + 3 * hour), start + hour);
    }

    #[test]
    fn a_limit_without_end_is_none() {
        let watch = Watch::new(Duration::MAX).unwrap();
        let (clock, _told, on_lost) = clock(&watch);
        clock.start(None, &on_lost);
        let state = watch.watcher.state.lock();
        assert!(state.due.is_empty() && state.thread.is_none());
        drop(state);
        clock.transfer().end();
    }

    #[test]
    fn a_store_that_goes_waits_for_what_is_to_be_given_up() {
        let watch = Watch::new(Duration::from_millis(20)).unwrap();
        let (clock, told, on_lost) = clock(&watch);
        clock.start(None, &on_lost);
        drop(watch);
        assert_eq!([told.try_recv().unwrap(), told.try_recv().unwrap()], ["lost", "given up"]);
        assert_eq!(Arc::strong_count(&clock.transfer.watcher), 1, "the thread has ended");
    }

    #[test]
    fn a_completion_that_drops_the_store_does_not_wait() {
        let watch = Watch::new(Duration::from_millis(20)).unwrap();
        let (clock, told, on_lost) = clock(&watch);
        clock.start(None, &on_lost);
        let done: Completion = Completion::new(move |_| drop(watch));
        done.call(Ok(()));
        assert_eq!([told.recv().unwrap(), told.recv().unwrap()], ["lost", "given up"]);
    }
}
