//! A thread that sleeps until the device has reached a mark, and then does what was to be done after it.

use std::collections::VecDeque;
use std::sync::Arc;

use ssdtrain_store::contained;

use crate::device::Device;
use crate::error::{Completion, Error, ErrorKind, Result};
use crate::sync::{Condvar, Mutex, Thread};

/// Does things after marks, in the order they were given.
pub(super) struct Waiter<D: Device> {
    queue: Arc<Queue<D>>,
    thread: Option<Thread>,
}

struct Queue<D: Device> {
    tasks: Mutex<Tasks<D>>,
    /// Signalled when a task is given, and when none will be any more.
    changed: Condvar,
}

struct Tasks<D: Device> {
    waiting: VecDeque<Task<D>>,
    closed: bool,
}

struct Task<D: Device> {
    after: Vec<D::Mark>,
    /// Told how the waiting went.
    then: Completion,
}

impl<D: Device> Waiter<D> {
    pub(super) fn start(name: &str, device: Arc<D>) -> Result<Waiter<D>> {
        let tasks = Mutex::new(Tasks { waiting: VecDeque::new(), closed: false });
        let queue = Arc::new(Queue { tasks, changed: Condvar::new() });
        let given = Arc::clone(&queue);
        let thread = Thread::start(name, move || {
            while let Some(Task { after, then }) = given.next() {
                // A panic ends this task and no other.
                contained("a wait for the device", || {
                    let reached = after.iter().try_for_each(|mark| device.block_on(mark));
                    then.call(reached);
                });
            }
        });
        let thread = thread.map_err(|error| {
            Error::io(ErrorKind::Device, format!("thread {name} could not be started"), error)
        })?;
        Ok(Waiter { queue, thread: Some(thread) })
    }

    /// Calls `then` on this thread once all of `after` are reached.
    pub(super) fn after(&self, after: Vec<D::Mark>, then: impl FnOnce(Result<()>) + Send + 'static) {
        let task = Task { after, then: Completion::new(then) };
        self.queue.tasks.lock().waiting.push_back(task);
        self.queue.changed.notify_all();
    }
}

impl<D: Device> Queue<D> {
    /// Sleeps until there is a task; none once all are done and no more will come.
    fn next(&self) -> Option<Task<D>> {
        let mut tasks = self.tasks.lock();
        while tasks.waiting.is_empty() && !tasks.closed {
            self.changed.wait(&mut tasks);
        }
        tasks.waiting.pop_front()
    }
}

impl<D: Device> Drop for Waiter<D> {
    fn drop(&mut self) {
        self.queue.tasks.lock().closed = true;
        self.queue.changed.notify_all();
        // The last to let go may be a task of this very thread.
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("a thread that waits for the device panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::super::modelled::{Copies, Fault, ModelDevice};
    use super::*;
    use crate::device::{Lane, Simulated};

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

    #[test]
    fn a_device_that_panics_is_an_answer_and_the_next_task_runs() {
        let device = Arc::new(ModelDevice::new(Copies::AtOnce, Some(Fault::WaitPanics)));
        let mark = device.mark(Lane::Out).unwrap();
        let waiter = Waiter::start("ssdtrain-test", device).unwrap();
        let (tell, told) = channel();
        for after in [vec![mark], Vec::new()] {
            let tell = tell.clone();
            waiter.after(after, move |reached| tell.send(reached).unwrap());
        }
        assert!(told.recv().unwrap().is_err());
        assert!(told.recv().unwrap().is_ok());
    }

    #[test]
    fn what_was_given_before_the_end_is_done() {
        let device = Arc::new(Simulated::start(Duration::ZERO).unwrap());
        let waiter = Waiter::start("ssdtrain-test", device).unwrap();
        let (tell, told) = channel();
        for _ in 0..3 {
            let tell = tell.clone();
            waiter.after(Vec::new(), move |reached| tell.send(reached).unwrap());
        }
        drop((waiter, tell));
        assert_eq!(told.iter().filter(Result::is_ok).count(), 3);
    }
}
