//! A thread that sleeps until the device has reached an event, and then runs the task that was to follow it.

use std::sync::Arc;

use ssdtrain_store::{contained, no_thread};

use crate::device::Device;
use crate::error::{Completion, Result};
use crate::sync::{Sender, Thread, channel};

/// Runs tasks after events, in the order they were given.
pub(super) struct EventThread<D: Device> {
    /// `None` ends the thread.
    tasks: Sender<Option<Task<D>>>,
    thread: Option<Thread>,
}

struct Task<D: Device> {
    after: Vec<D::Event>,
    /// Called with the outcome of the wait.
    then: Completion,
}

impl<D: Device> EventThread<D> {
    pub(super) fn start(name: &str, device: Arc<D>) -> Result<EventThread<D>> {
        let (tasks, given) = channel::<Option<Task<D>>>();
        let thread = Thread::start(name, move || {
            while let Ok(Some(Task { after, then })) = given.recv() {
                // A panic ends only this task.
                contained("a wait for the device", || {
                    let reached = after.iter().try_for_each(|event| device.block_on(event));
                    then.call(reached);
                });
            }
        });
        let thread = thread.map_err(|error| no_thread(&format!("the thread {name}"), error))?;
        Ok(EventThread { tasks, thread: Some(thread) })
    }

    /// Calls `then` on this thread once all of `after` are reached.
    pub(super) fn after(&self, after: Vec<D::Event>, then: impl FnOnce(Result<()>) + Send + 'static) {
        let task = Task { after, then: Completion::new(then) };
        // The thread lives as long as this value. If it did not, dropping the completion that comes back here would still answer it.
        drop(self.tasks.send(Some(task)));
    }
}

impl<D: Device> Drop for EventThread<D> {
    fn drop(&mut self) {
        drop(self.tasks.send(None));
        // The last reference may be dropped by a task of this very thread.
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
        let thread = EventThread::start("ssdtrain-test", device).unwrap();
        let (tell, told) = channel();
        let done = Completion::new(move |outcome| tell.send(outcome).unwrap());
        thread.after(Vec::new(), move |_| {
            let _done = done;
            panic!("on purpose, in a task");
        });
        let (tell, next) = channel();
        thread.after(Vec::new(), move |reached| tell.send(reached).unwrap());
        assert!(told.recv().unwrap().is_err());
        assert!(next.recv().unwrap().is_ok());
    }

    #[test]
    fn a_device_that_panics_is_an_answer_and_the_next_task_runs() {
        let device = Arc::new(ModelDevice::new(Copies::AtOnce, Some(Fault::WaitPanics)));
        let event = device.record(Lane::Out).unwrap();
        let thread = EventThread::start("ssdtrain-test", device).unwrap();
        let (tell, told) = channel();
        for after in [vec![event], Vec::new()] {
            let tell = tell.clone();
            thread.after(after, move |reached| tell.send(reached).unwrap());
        }
        assert!(told.recv().unwrap().is_err());
        assert!(told.recv().unwrap().is_ok());
    }

    #[test]
    fn what_was_given_before_the_end_is_done() {
        let device = Arc::new(Simulated::start(Duration::ZERO).unwrap());
        let thread = EventThread::start("ssdtrain-test", device).unwrap();
        let (tell, told) = channel();
        for _ in 0..3 {
            let tell = tell.clone();
            thread.after(Vec::new(), move |reached| tell.send(reached).unwrap());
        }
        drop((thread, tell));
        assert_eq!(told.iter().filter(Result::is_ok).count(), 3);
    }
}
