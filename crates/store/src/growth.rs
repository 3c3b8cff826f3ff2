//! Volumes grow on a thread of their own, so that nobody who saves a tensor waits for a file system.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;

use super::contained;
use super::volume::Volume;

/// Called after a volume has grown, or could not.
pub(super) type Listener = dyn Fn() + Send + Sync;

/// Lets volumes grow, one after the other.
#[derive(Default)]
pub(super) struct Growth {
    listeners: Arc<Mutex<Vec<Weak<Listener>>>>,
    /// Started when it is first needed.
    worker: Mutex<Option<Worker>>,
}

struct Worker {
    queue: Sender<Task>,
    thread: JoinHandle<()>,
}

/// A volume, and how many bytes it is to grow to at least.
type Task = (Arc<Volume>, u64);

impl Growth {
    /// Has `listener` hear of every growth that ends, for as long as somebody holds it.
    pub(super) fn listen(&self, listener: &Arc<Listener>) {
        let mut listeners = self.listeners.lock();
        listeners.retain(|listener| listener.strong_count() > 0);
        listeners.push(Arc::downgrade(listener));
    }

    /// Lets a volume grow, unless it does already. Whether listeners will hear of it: if no thread can be had, it is over already, and
    /// they are not told, since the caller may hold what they need.
    pub(super) fn begin(&self, volume: &Arc<Volume>, end: u64) -> bool {
        if !volume.takes_growth_on() {
            return true;
        }
        let mut worker = self.worker.lock();
        if worker.is_none() {
            *worker = self.start();
        }
        let given =
            worker.as_ref().is_some_and(|worker| worker.queue.send((Arc::clone(volume), end)).is_ok());
        drop(worker);
        if !given {
            grow(volume, end);
        }
        given
    }

    fn start(&self) -> Option<Worker> {
        let (queue, tasks) = channel::<Task>();
        let listeners = Arc::clone(&self.listeners);
        let run = move || {
            for (volume, end) in tasks {
                grow(&volume, end);
                tell(&listeners);
            }
        };
        let thread = thread::Builder::new().name("ssdtrain-grow".to_owned()).spawn(run);
        thread
            .inspect_err(
                |error| tracing::warn!(%error, "no thread lets spill files grow; whoever saves does"),
            )
            .ok()
            .map(|thread| Worker { queue, thread })
    }
}

fn grow(volume: &Volume, end: u64) {
    volume.grow(end);
    volume.has_grown();
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
        drop(queue);
        // The last to let go of the store may be a listener, on this very thread.
        if thread.thread().id() != thread::current().id() && thread.join().is_err() {
            tracing::error!("the thread that lets spill files grow panicked");
        }
    }
}
