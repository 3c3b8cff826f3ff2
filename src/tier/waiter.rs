//! A thread that sleeps until the device has reached a mark, and then does what was to be done after it.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;
use ssdtrain_store::contained;

use crate::device::Device;
use crate::error::{Completion, Error, ErrorKind, Result};

/// Does things after marks, in the order they were given.
pub(super) struct Waiter<D: Device> {
    queue: Option<Mutex<Sender<Task<D>>>>,
    thread: Option<JoinHandle<()>>,
}

struct Task<D: Device> {
    after: Vec<D::Mark>,
    /// Told how the waiting went.
    then: Completion,
}

impl<D: Device> Waiter<D> {
    pub(super) fn start(name: &str, device: Arc<D>) -> Result<Waiter<D>> {
        let (queue, tasks) = channel::<Task<D>>();
        let run = move || {
            for Task { after, then } in tasks {
                // A panic ends this task and no other.
                contained("a wait for the device", || {
                    let reached = after.iter().try_for_each(|mark| device.block_on(mark));
                    then.call(reached);
                });
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
        let task = Task { after, then: Completion::new(then) };
        if let Some(queue) = &self.queue {
            // The thread ends only after the queue does; a task that it would not get answers by itself.
            let refused = queue.lock().send(task);
            drop(refused);
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::device::Simulated;

    #[test]
    fn a_task_that_panics_answers_and_the_next_one_runs() {
        let device = Arc::new(Simulated::start(Duration::ZERO).unwrap());
        let waiter = Waiter::start("ssdtrain-test", device).unwrap();
        let (tell, told) = channel();
        let done = Completion::new(move |outcome| tell.send(outcome).unwrap());
        waiter.after(Vec::new(), move |_| {
            let _done = done;
            panic!("on purpose, in a task");
        });
        let (tell, next) = channel();
        waiter.after(Vec::new(), move |reached| tell.send(reached).unwrap());
        assert!(told.recv().unwrap().is_err());
        assert!(next.recv().unwrap().is_ok());
    }
}
