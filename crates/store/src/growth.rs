//! Grows volumes on a dedicated thread, so that saving a tensor never waits for a file system.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};

use parking_lot::{Condvar, Mutex};

use super::contained;
use super::volume::Volume;
use super::watch::{Clock, OnLost, Watcher};

/// Called after a volume has grown, or has failed to.
pub(super) type Listener = dyn Fn() + Send + Sync;

/// Grows volumes, one after the other.
pub(super) struct Growth {
    listeners: Arc<Mutex<Vec<Weak<Listener>>>>,
    /// Started when it is first needed.
    worker: Mutex<Option<Worker>>,
    spawn: Box<Spawn>,
    /// The store has been dropped: growth that has not begun is skipped.
    over: Arc<AtomicBool>,
    watcher: Arc<Watcher>,
    progress: Arc<Progress>,
}

/// What the thread does, for whoever waits for its end.
#[derive(Default)]
struct Progress {
    at: Mutex<(u64, Stage)>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Idle,
    Growing,
    /// The disk has not answered in time.
    Stuck,
    Ended,
}

/// Starts the thread, if the system allows one.
type Spawn = dyn Fn(Work) -> io::Result<JoinHandle<()>> + Send + Sync;
type Work = Box<dyn FnOnce() + Send>;

struct Worker {
    queue: Sender<Task>,
    thread: JoinHandle<()>,
}

/// A volume, and the size in bytes that it must grow to at least.
type Task = (Arc<Volume>, u64);

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
        Growth {
            watcher: Arc::clone(watcher),
            progress: Arc::default(),
            listeners: Arc::default(),
            worker: Mutex::default(),
            spawn: Box::new(spawn),
            over: Arc::default(),
        }
    }

    /// Calls `listener` after each growth attempt, for as long as somebody holds the `Arc`.
    pub(super) fn listen(&self, listener: &Arc<Listener>) {
        let mut listeners = self.listeners.lock();
        listeners.retain(|listener| listener.strong_count() > 0);
        listeners.push(Arc::downgrade(listener));
    }

    /// Grows a volume in the background, unless that is already under way. Returns whether listeners will be called.
    /// If no thread can be started, the volume has grown, or failed to, by the time this returns; listeners are then
    /// not called, since the caller may hold a lock that they need.
    pub(super) fn begin(&self, volume: &Arc<Volume>, end: u64) -> bool {
        let given = self.give(volume, end);
        if !given {
            volume.grow(end);
        }
        given
    }

    /// Queues the growth for the thread. Returns whether the thread will do it, either because of this call or an
    /// earlier one.
    fn give(&self, volume: &Arc<Volume>, end: u64) -> bool {
        let mut worker = self.worker.lock();
        if worker.is_none() {
            *worker = self.start();
        }
        // Growing in place must not set the volume's flag: other callers would then wait for a notification that
        // never comes.
        let Some(worker) = &*worker else { return false };
        if !volume.takes_growth_on() {
            return true;
        }
        let given = worker.queue.send((Arc::clone(volume), end)).is_ok();
        if !given {
            volume.has_grown();
        }
        given
    }

    fn start(&self) -> Option<Worker> {
        let (queue, tasks) = channel::<Task>();
        let (listeners, over) = (Arc::clone(&self.listeners), Arc::clone(&self.over));
        let (watcher, progress) = (Arc::clone(&self.watcher), Arc::clone(&self.progress));
        let run = move || {
            let _end = End(&progress);
            for (volume, end) in tasks.iter().take_while(|_| !over.load(Ordering::Relaxed)) {
                grow(&volume, end, &watcher, &progress, &listeners);
            }
        };
        (self.spawn)(Box::new(run))
            .inspect_err(
                |error| tracing::warn!(%error, "no thread lets spill files grow; whoever saves does"),
            )
            .ok()
            .map(|thread| Worker { queue, thread })
    }
}

/// Grows a volume. If the disk does not answer in time, the volume counts as full until it does.
fn grow(
    volume: &Arc<Volume>,
    end: u64,
    watcher: &Arc<Watcher>,
    progress: &Arc<Progress>,
    listeners: &Arc<Mutex<Vec<Weak<Listener>>>>,
) {
    let (attempt, number) = (watcher.transfer(), progress.begin());
    let give_up = {
        let (attempt, volume) = (Arc::clone(&attempt), Arc::clone(volume));
        let (progress, listeners) = (Arc::clone(progress), Arc::clone(listeners));
        move |on_lost: &dyn Fn()| {
            if progress.is_stuck(number, || volume.is_overdue()) {
                attempt.give_up();
                on_lost();
                tell(&listeners);
                attempt.end();
            }
        }
    };
    let (clock, nobody): (_, OnLost) = (Clock::new(&attempt, give_up), Arc::new(|| {}));
    clock.start(None, &nobody);
    volume.grow(end);
    clock.stop();
    if progress.end(|| volume.has_grown()) != Stage::Stuck {
        attempt.end();
    }
    tell(listeners);
}

impl Progress {
    /// Begins an attempt, and returns its number.
    fn begin(&self) -> u64 {
        let mut at = self.at.lock();
        *at = (at.0 + 1, Stage::Growing);
        at.0
    }

    /// Unless that attempt has ended, it is stuck, and `then` runs before it can end.
    fn is_stuck(&self, number: u64, then: impl FnOnce()) -> bool {
        let mut at = self.at.lock();
        let grows = *at == (number, Stage::Growing);
        if grows {
            at.1 = Stage::Stuck;
            then();
            self.changed.notify_all();
        }
        grows
    }

    /// Ends an attempt; returns what it was before.
    fn end(&self, then: impl FnOnce()) -> Stage {
        let mut at = self.at.lock();
        then();
        std::mem::replace(&mut at.1, Stage::Idle)
    }
}

/// However the thread ends, nobody waits for it longer.
struct End<'a>(&'a Progress);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.at.lock().1 = Stage::Ended;
        self.0.changed.notify_all();
    }
}

fn tell(listeners: &Mutex<Vec<Weak<Listener>>>) {
    let listeners: Vec<_> = listeners.lock().iter().filter_map(Weak::upgrade).collect();
    for listener in listeners {
        contained("what follows the growth of a spill file", || listener());
    }
}

impl Drop for Growth {
    fn drop(&mut self) {
        let Some(Worker { queue, thread }) = self.worker.get_mut().take() else { return };
        self.over.store(true, Ordering::Relaxed);
        drop(queue);
        // The last handle to the store may be dropped by a listener, on this very thread.
        if thread.thread().id() == thread::current().id() {
            return;
        }
        let mut at = self.progress.at.lock();
        self.progress.changed.wait_while(&mut at, |(_, stage)| matches!(stage, Stage::Idle | Stage::Growing));
        let ended = at.1 == Stage::Ended;
        drop(at);
        if !ended {
            tracing::warn!(
                "the thread that lets spill files grow is left behind: the disk has not answered it"
            );
        } else if thread.join().is_err() {
            tracing::error!("the thread that lets spill files grow panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::region::tests::Pretended;
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
        let watch = Watch::new(Duration::from_millis(5));
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
        let progress = Arc::clone(&growth.progress);
        drop((growth, watch));
        assert_eq!(progress.at.lock().1, Stage::Stuck, "nobody waits for the thread");
        drop(open);
        told.recv().unwrap();
        assert!(volume.reserve(1).is_ok());
        drop(full);
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
        let watch = Watch::new(Duration::MAX);
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
        let watch = Watch::new(Duration::MAX);
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
