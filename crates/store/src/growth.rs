//! Grows and shrinks volumes on a dedicated thread: saving a tensor never waits for a file system, and nobody waits for a disk
//! that does not answer.

use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};

use crate::sync::{Condvar, Mutex};

use super::volume::Volume;
use super::watch::{Clock, OnLost, Watcher};
use crate::completion::{complete, is_completing};

/// Called after a volume has grown or shrunk, or has failed to.
pub(super) type Listener = dyn Fn() + Send + Sync;

/// Grows and shrinks volumes, one after the other. A thread that the disk does not answer is left behind, and another one goes on.
pub(super) struct Growth {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    /// Signalled when there is a task, and when the thread ends or is stuck.
    changed: Condvar,
    listeners: Mutex<Vec<Weak<Listener>>>,
    spawn: Box<Spawn>,
    watcher: Arc<Watcher>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Task>,
    /// The thread that does what is queued; started when it is first needed.
    worker: Option<Worker>,
    /// Attempts begun so far.
    attempts: u64,
    /// How many threads the disk has not answered yet. Nobody waits for them.
    stuck: usize,
    /// The store has been dropped: what has not begun is skipped.
    over: bool,
}

/// Starts the thread, if the system allows one.
type Spawn = dyn Fn(Work) -> io::Result<JoinHandle<()>> + Send + Sync;
type Work = Box<dyn FnOnce() + Send>;

struct Worker {
    thread: JoinHandle<()>,
    /// The number of the attempt that is under way.
    on: Option<u64>,
    ended: bool,
}

struct Task {
    volume: Arc<Volume>,
    change: Change,
}

enum Change {
    /// To at least this size in bytes.
    Grow(u64),
    /// To what is in use. Whoever waits for it is told how many bytes were given back.
    Shrink(Sender<u64>),
}

impl Growth {
    /// The disk may take as long as the watcher allows.
    pub(super) fn new(watcher: &Arc<Watcher>) -> Growth {
        let spawn = |work| thread::Builder::new().name("ssdtrain-grow".to_owned()).spawn(work);
        Growth::on(watcher, spawn)
    }

    fn on(
        watcher: &Arc<Watcher>,
        spawn: impl Fn(Work) -> io::Result<JoinHandle<()>> + Send + Sync + 'static,
    ) -> Growth {
        let shared = Shared {
            state: Mutex::default(),
            changed: Condvar::new(),
            listeners: Mutex::default(),
            spawn: Box::new(spawn),
            watcher: Arc::clone(watcher),
        };
        Growth { shared: Arc::new(shared) }
    }

    /// Calls `listener` after each attempt, for as long as somebody holds the `Arc`.
    pub(super) fn listen(&self, listener: &Arc<Listener>) {
        let mut listeners = self.shared.listeners.lock();
        listeners.retain(|listener| listener.strong_count() > 0);
        listeners.push(Arc::downgrade(listener));
    }

    /// Grows a volume in the background, unless that is already under way. Returns whether listeners will be called.
    /// If no thread can be started, the volume has grown, or failed to, by the time this returns; listeners are then
    /// not called, since the caller may hold a lock that they need.
    pub(super) fn begin(&self, volume: &Arc<Volume>, end: u64) -> bool {
        let given = self.shared.give(volume, Change::Grow(end));
        if !given {
            volume.grow(end);
        }
        given
    }

    /// Gives back what lies behind the last extent of each volume. Returns the bytes. Leaves out volumes that are to grow,
    /// and those whose disk does not answer in time.
    pub(super) fn shrink(&self, volumes: &[Arc<Volume>]) -> u64 {
        let begin = |volume| {
            let (tell, told) = channel();
            self.shared.give(volume, Change::Shrink(tell)).then_some(told)
        };
        let begun: Vec<Receiver<u64>> = volumes.iter().filter_map(begin).collect();
        // A task that is left out drops its sender.
        begun.into_iter().map(|told| told.recv().unwrap_or(0)).sum()
    }
}

impl Shared {
    /// Queues the change for the thread, unless the volume is about to change. Returns whether there is such a thread.
    fn give(self: &Arc<Self>, volume: &Arc<Volume>, change: Change) -> bool {
        let mut state = self.state.lock();
        // Growing in place must not set the volume's flag: other callers would then wait for a notification that
        // never comes.
        if !self.has_worker(&mut state) {
            return false;
        }
        if volume.takes_change_on() {
            state.queue.push_back(Task { volume: Arc::clone(volume), change });
            self.changed.notify_all();
        }
        true
    }

    /// Whether there is a thread that does what is queued; starts one if need be.
    fn has_worker(self: &Arc<Self>, state: &mut State) -> bool {
        if state.worker.as_ref().is_none_or(|worker| worker.ended) {
            let shared = Arc::clone(self);
            // It begins with taking the lock that the caller holds.
            state.worker = (self.spawn)(Box::new(move || shared.work()))
                .inspect_err(
                    |error| tracing::warn!(%error, "no thread lets spill files grow; whoever saves does"),
                )
                .ok()
                .map(|thread| Worker { thread, on: None, ended: false });
        }
        state.worker.is_some()
    }

    /// Does what is queued, until the store is dropped or another thread does so instead.
    fn work(self: &Arc<Self>) {
        /// However the thread ends, nobody waits for it longer.
        struct End<'a>(&'a Shared);
        impl Drop for End<'_> {
            fn drop(&mut self) {
                let here = thread::current().id();
                let mut state = self.0.state.lock();
                for worker in state.worker.iter_mut().filter(|worker| worker.thread.thread().id() == here) {
                    worker.ended = true;
                }
                drop(state);
                self.0.changed.notify_all();
            }
        }

        let _end = End(self);
        while let Some(task) = self.next() {
            if !self.carry_out(&task) {
                return;
            }
        }
    }

    /// The next task; `None` once the store has been dropped.
    fn next(&self) -> Option<Task> {
        let mut state = self.state.lock();
        loop {
            if state.over {
                return None;
            }
            if let Some(task) = state.queue.pop_front() {
                return Some(task);
            }
            self.changed.wait(&mut state);
        }
    }

    /// Changes a volume. If the disk does not answer in time, the volume counts as full until it does. Returns false if
    /// another thread has taken this one's place meanwhile.
    fn carry_out(self: &Arc<Self>, Task { volume, change }: &Task) -> bool {
        let (attempt, number) = (self.watcher.transfer(), self.begin_attempt());
        let give_up = {
            let (shared, attempt, volume) = (Arc::clone(self), Arc::clone(&attempt), Arc::clone(volume));
            let waits = match change {
                Change::Grow(_) => None,
                Change::Shrink(tell) => Some(tell.clone()),
            };
            move |on_lost: &dyn Fn()| {
                if shared.leave_behind(number, || volume.is_overdue()) {
                    attempt.give_up();
                    on_lost();
                    if let Some(tell) = &waits {
                        // Whoever has waited may be gone by now.
                        tell.send(0).ok();
                    }
                    shared.tell();
                    attempt.end();
                }
            }
        };
        let (clock, nobody): (_, OnLost) = (Clock::new(&attempt, give_up), Arc::new(|| {}));
        clock.start(None, &nobody);
        let given_back = match change {
            Change::Grow(end) => {
                volume.grow(*end);
                None
            }
            Change::Shrink(tell) => Some((tell, volume.shrink())),
        };
        clock.stop();
        let in_time = self.end_attempt(number, || volume.has_changed());
        if in_time {
            attempt.end();
        }
        if let Some((tell, bytes)) = given_back {
            // As above.
            tell.send(bytes).ok();
        }
        self.tell();
        in_time
    }

    /// Returns the number of the attempt that begins.
    fn begin_attempt(&self) -> u64 {
        let mut state = self.state.lock();
        state.attempts += 1;
        let number = state.attempts;
        state.worker.iter_mut().for_each(|worker| worker.on = Some(number));
        number
    }

    /// Unless that attempt has ended, its thread is stuck: `then` runs before it can end, and another thread does what is
    /// queued.
    fn leave_behind(self: &Arc<Self>, number: u64, then: impl FnOnce()) -> bool {
        let mut state = self.state.lock();
        if state.take_worker_on(number).is_none() {
            return false;
        }
        state.stuck += 1;
        then();
        if !state.queue.is_empty() && !self.has_worker(&mut state) {
            // Whoever waits for these is told to ask again, and does it then.
            state.queue.drain(..).for_each(|task| task.volume.has_changed());
        }
        drop(state);
        self.changed.notify_all();
        true
    }

    /// Ends an attempt. Returns whether its thread goes on: it was not left behind.
    fn end_attempt(&self, number: u64, then: impl FnOnce()) -> bool {
        let mut state = self.state.lock();
        then();
        let worker = state.worker.as_mut().filter(|worker| worker.on == Some(number));
        let goes_on = worker.map(|worker| worker.on = None).is_some();
        if !goes_on {
            state.stuck -= 1;
        }
        goes_on
    }

    fn tell(&self) {
        let listeners: Vec<_> = self.listeners.lock().iter().filter_map(Weak::upgrade).collect();
        for listener in listeners {
            complete("what follows a change of a spill file's size", || listener());
        }
    }
}

impl State {
    /// The worker, if it is at this attempt.
    fn take_worker_on(&mut self, number: u64) -> Option<Worker> {
        self.worker.take_if(|worker| worker.on == Some(number))
    }
}

impl Drop for Growth {
    fn drop(&mut self) {
        let Shared { state, changed, .. } = &*self.shared;
        let mut state = state.lock();
        state.over = true;
        let skipped = std::mem::take(&mut state.queue);
        changed.notify_all();
        if is_completing() {
            return;
        }
        changed.wait_while(&mut state, |state| state.worker.as_ref().is_some_and(|worker| !worker.ended));
        let (worker, stuck) = (state.worker.take(), state.stuck);
        drop(state);
        drop(skipped);
        if stuck > 0 {
            tracing::warn!(
                "{stuck} threads that let spill files grow are left behind: the disk has not answered them"
            );
        }
        if let Some(Worker { thread, .. }) = worker
            && thread.join().is_err()
        {
            tracing::error!("the thread that lets spill files grow panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::any::Any;
    use std::time::Duration;

    use super::*;
    use crate::mem::BLOCK;
    use crate::region::tests::Pretended;
    use crate::region::{Region, RegionInfo};
    use crate::volume::{Full, GROWTH_BYTES};
    use crate::watch::Watch;

    #[test]
    fn a_file_that_does_not_grow_in_time_is_full_until_it_has_grown() {
        let (open, gate) = channel::<()>();
        let gate = Mutex::new(gate);
        let region = Pretended(move |from, _| {
            if from > 0 {
                assert!(gate.lock().recv().is_err());
            }
            Ok(())
        });
        let volume = Arc::new(Volume::new(Arc::new(region), 2 * GROWTH_BYTES, None, &Arc::default()));
        let full = volume.reserve(GROWTH_BYTES).unwrap();
        let watch = Watch::new(Duration::from_millis(5)).unwrap();
        let growth = Growth::new(watch.watcher());
        let (tell, told) = channel();
        let listener: Arc<Listener> = Arc::new(move || tell.send(()).unwrap_or_default());
        growth.listen(&listener);
        assert!(growth.begin(&volume, 2 * GROWTH_BYTES));
        told.recv().unwrap();
        let Err(Full::Refused(error)) = volume.reserve(1) else {
            panic!("it is not known when there is room")
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let shared = Arc::clone(&growth.shared);
        drop((growth, watch));
        assert_eq!(shared.state.lock().stuck, 1, "nobody waits for the thread");
        drop(open);
        told.recv().unwrap();
        assert!(volume.reserve(1).is_ok());
        drop(full);
    }

    #[test]
    fn a_disk_that_does_not_answer_keeps_no_other_from_growing() {
        let (open, gate) = channel::<()>();
        let gate = Mutex::new(gate);
        let hangs = Pretended(move |from, _| {
            if from > 0 {
                assert!(gate.lock().recv().is_err());
            }
            Ok(())
        });
        let volume = |region| Arc::new(Volume::new(region, 2 * GROWTH_BYTES, None, &Arc::default()));
        let (hanging, healthy) = (volume(Arc::new(hangs)), volume(Arc::new(Pretended(|_, _| Ok(())))));
        let watch = Watch::new(Duration::from_millis(5)).unwrap();
        let growth = Growth::new(watch.watcher());
        let (tell, told) = channel();
        let (healthy_grows, grows) = (Arc::clone(&healthy), Arc::clone(&hanging));
        let listener: Arc<Listener> = Arc::new(move || {
            tell.send([&grows, &healthy_grows].map(|volume| volume.grown_bytes())).unwrap_or_default();
        });
        growth.listen(&listener);
        assert!([&hanging, &healthy].iter().all(|volume| growth.begin(volume, 2 * GROWTH_BYTES)));
        assert_eq!(told.recv().unwrap()[0], GROWTH_BYTES, "the first is given up");
        while told.recv().unwrap() != [GROWTH_BYTES, 2 * GROWTH_BYTES] {}
        assert!(healthy.reserve(2 * GROWTH_BYTES).is_ok());
        drop(open);
        while told.recv().unwrap()[0] < 2 * GROWTH_BYTES {}
        let shared = Arc::clone(&growth.shared);
        drop(growth);
        assert_eq!(shared.state.lock().stuck, 0);
    }

    #[test]
    fn a_listener_that_drops_the_store_does_not_wait_for_a_disk_that_hangs() {
        let ((begin, begun), (open, gate)) = (channel(), channel::<()>());
        let gate = Arc::new(Mutex::new(gate));
        let volumes = [(); 2].map(|()| {
            let (begin, gate) = (begin.clone(), Arc::clone(&gate));
            let region = Pretended(move |from, _| {
                if from > 0 {
                    begin.send(()).unwrap();
                    assert!(gate.lock().recv().is_err());
                }
                Ok(())
            });
            Arc::new(Volume::new(Arc::new(region), 2 * GROWTH_BYTES, None, &Arc::default()))
        });
        let watch = Watch::new(Duration::from_millis(5)).unwrap();
        let growth = Growth::new(watch.watcher());
        let ((tell, told), begun) = (channel(), Mutex::new(begun));
        let last = Arc::new(Mutex::new(None));
        let listener: Arc<Listener> = Arc::new({
            let last = Arc::clone(&last);
            move || {
                // The first is called by the thread that watches, and there is nobody else to give the second growth up.
                if let Some(store) = last.lock().take() {
                    (0..2).for_each(|_| begun.lock().recv().unwrap());
                    drop::<(Growth, Watch)>(store);
                }
                tell.send(()).unwrap_or_default();
            }
        });
        growth.listen(&listener);
        let mut place = last.lock();
        assert!(volumes.iter().all(|volume| growth.begin(volume, 2 * GROWTH_BYTES)));
        *place = Some((growth, watch));
        drop(place);
        (0..2).for_each(|_| told.recv().unwrap());
        drop(open);
        (0..2).for_each(|_| told.recv().unwrap());
        assert!(volumes.iter().all(|volume| volume.grown_bytes() == 2 * GROWTH_BYTES));
    }

    /// A region that shrinks once the test lets it.
    struct Reluctant(Mutex<Receiver<()>>);

    impl Region for Reluctant {
        fn grow(&self, _from: u64, _to: u64) -> io::Result<()> {
            Ok(())
        }

        fn shrink(&self, _to: u64) -> io::Result<()> {
            assert!(self.0.lock().recv().is_err());
            Ok(())
        }

        fn describe(&self) -> RegionInfo {
            Pretended(|_, _| Ok(())).describe()
        }

        fn backing(&self) -> &dyn Any {
            self
        }
    }

    #[test]
    fn a_file_that_does_not_shrink_in_time_is_not_waited_for_and_keeps_no_other_from_it() {
        let (open, gate) = channel();
        let volume = |gate| {
            let region = Reluctant(Mutex::new(gate));
            Arc::new(Volume::new(Arc::new(region), GROWTH_BYTES, None, &Arc::default()))
        };
        let volumes = [volume(gate), volume(channel().1)];
        let held = volumes[0].reserve(BLOCK as u64).unwrap();
        let watch = Watch::new(Duration::from_millis(5)).unwrap();
        let growth = Growth::new(watch.watcher());
        let (tell, told) = channel();
        let listener: Arc<Listener> = Arc::new(move || tell.send(()).unwrap_or_default());
        growth.listen(&listener);
        growth.shrink(&volumes);
        while volumes[1].grown_bytes() > 0 {
            told.recv().unwrap();
        }
        assert_eq!(growth.shrink(&volumes), 0, "the first is left out from now on");
        let Err(Full::Refused(error)) = volumes[0].reserve(BLOCK as u64) else {
            panic!("it is not known how much room there is")
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(open);
        while growth.begin(&volumes[0], 2 * BLOCK as u64) && volumes[0].grown_bytes() < GROWTH_BYTES {
            told.recv().unwrap();
        }
        assert!(volumes[0].reserve(BLOCK as u64).is_ok());
        drop(held);
    }

    #[test]
    fn nobody_waits_to_be_told_where_there_is_no_thread_to_tell_them() {
        #[derive(Debug, PartialEq)]
        enum Event {
            ThreadRefused,
            Begun { listeners_will_hear: bool },
        }
        let (happened, events) = channel();
        let refuses = happened.clone();
        let spawn = move |_| {
            refuses.send(Event::ThreadRefused).unwrap();
            Err(io::ErrorKind::WouldBlock.into())
        };
        let watch = Watch::new(Duration::MAX).unwrap();
        let growth = Growth::on(watch.watcher(), spawn);
        let (open, gate) = channel::<()>();
        let gate = Mutex::new(gate);
        let region = Pretended(move |from, _| {
            if from > 0 {
                assert!(gate.lock().recv().is_err());
            }
            Ok(())
        });
        let volume = Arc::new(Volume::new(Arc::new(region), 2 * GROWTH_BYTES, None, &Arc::default()));
        let ask = || {
            let listeners_will_hear = growth.begin(&volume, 2 * GROWTH_BYTES);
            happened.send(Event::Begun { listeners_will_hear }).unwrap();
        };
        thread::scope(|scope| {
            // Dropped in any case, even on a panic, before the scope waits for its threads.
            let closed = open;
            for _ in 0..2 {
                scope.spawn(ask);
                assert_eq!(events.recv().unwrap(), Event::ThreadRefused);
            }
            drop(closed);
            for _ in 0..2 {
                assert_eq!(events.recv().unwrap(), Event::Begun { listeners_will_hear: false });
            }
        });
        assert_eq!(volume.grown_bytes(), 2 * GROWTH_BYTES);
    }

    #[test]
    fn what_is_still_to_grow_does_not_once_the_store_is_gone() {
        let (happened, events) = channel();
        let (open, gate) = channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let volumes = [0, 1].map(|index| {
            let (grows, gate) = (happened.clone(), Arc::clone(&gate));
            let region = Pretended(move |from, _| {
                if from > 0 {
                    assert!(gate.lock().recv().is_err());
                    grows.send(index).unwrap();
                }
                Ok(())
            });
            Arc::new(Volume::new(Arc::new(region), 2 * GROWTH_BYTES, None, &Arc::default()))
        });
        drop(happened);
        let watch = Watch::new(Duration::MAX).unwrap();
        let growth = Arc::new(Growth::new(watch.watcher()));
        let last = Mutex::new(Some(Arc::clone(&growth)));
        let listener: Arc<Listener> = Arc::new(move || drop(last.lock().take()));
        growth.listen(&listener);
        for volume in volumes {
            assert!(growth.begin(&volume, 2 * GROWTH_BYTES));
        }
        drop(growth);
        // The listener drops the last handle once the first volume has grown.
        drop(open);
        assert_eq!(events.iter().collect::<Vec<_>>(), [0]);
    }
}
