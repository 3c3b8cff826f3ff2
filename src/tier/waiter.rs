//! A thread that sleeps until the device has reached a mark, and then does what was to be done after it.

use std::sync::Arc;

use ssdtrain_store::contained;

use crate::device::Device;
use crate::error::{Completion, Error, ErrorKind, Result};
use crate::sync::{Sender, Thread, channel};

/// Does things after marks, in the order they were given.
pub(super) struct Waiter<D: Device> {
    /// None is the last.
    tasks: Sender<Option<Task<D>>>,
    thread: Option<Thread>,
}

struct Task<D: Device> {
    after: Vec<D::Mark>,
    /// Told how the waiting went.
    then: Completion,
}

impl<D: Device> Waiter<D> {
    pub(super) fn start(name: &str, device: Arc<D>) -> Result<Waiter<D>> {
        let (tasks, given) = channel::<Option<Task<D>>>();
        let thread = Thread::start(name, move || {
            while let Ok(Some(Task { after, then })) = given.recv() {
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
        Ok(Waiter { tasks, thread: Some(thread) })
    }

    /// Calls `then` on this thread once all of `after` are reached.
    pub(super) fn after(&self, after: Vec<D::Mark>, then: impl FnOnce(Result<()>) + Send + 'static) {
        let task = Task { after, then: Completion::new(then) };
        // The thread lives as long as this does. If it did not, the completion that comes back here would answer as it is dropped.
        drop(self.tasks.send(Some(task)));
    }
}

impl<D: Device> Drop for Waiter<D> {
    fn drop(&mut self) {
        drop(self.tasks.send(None));
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
