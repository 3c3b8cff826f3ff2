//! A thread that sleeps until the device has reached a mark, and then does what was to be done after it.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;

use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};

/// Does things after marks, in the order they were given.
pub(super) struct Waiter<D: Device> {
    queue: Option<Mutex<Sender<Task<D>>>>,
    thread: Option<JoinHandle<()>>,
}

struct Task<D: Device> {
    after: Vec<D::Mark>,
    /// Told how the waiting went.
    then: Box<dyn FnOnce(Result<()>) + Send>,
}

impl<D: Device> Waiter<D> {
    pub(super) fn start(name: &str, device: Arc<D>) -> Result<Waiter<D>> {
        let (queue, tasks) = channel::<Task<D>>();
        let run = move || {
            for Task { after, then } in tasks {
                then(after.iter().try_for_each(|mark| device.block_on(mark)));
            }
        };
        let thread = thread::Builder::new().name(name.to_owned()).spawn(run);
        let thread = thread.map_err(|error| {
            Error::io(ErrorKind::Device, format!("thread {name} could not be started"), error)
        })?;
        Ok(Waiter { queue: Some(Mutex::new(queue)), thread: Some(thread) })
    }

    /// Calls `then` on this thread once all of `after` are reached.
    pub(super) fn after(&self, after: Vec<D::Mark>, then: impl FnOnce(Result<()>) + Send + 'static) {
        let task = Task { after, then: Box::new(then) };
        if let Some(queue) = &self.queue {
            // The thread ends only after the queue does, unless it panicked; that is told when it is joined.
            drop(queue.lock().send(task));
        }
    }
}

impl<D: Device> Drop for Waiter<D> {
    fn drop(&mut self) {
        drop(self.queue.take());
        let Some(thread) = self.thread.take() else { return };
        // The last to let go may be a task of this very thread, which then ends by itself.
        if thread.thread().id() != thread::current().id() && thread.join().is_err() {
            tracing::error!("a thread that waits for the device panicked");
        }
    }
}
