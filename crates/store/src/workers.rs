//! Threads for work on bytes, such as checksums, so that no thread that carries out I/O is held up by it.

use std::collections::VecDeque;
use std::io;
use std::num::NonZero;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use crate::sync::{Condvar, Mutex};

use crate::completion::{contained, is_completing};

/// More threads than this check bytes faster than any disk delivers them.
const MOST: usize = 4;

/// The worker threads of a store, `ssdtrain-bytes-N`. They start when tasks wait for them, and sleep when there is none.
/// Dropping it waits until every task has ended, except in a completion.
pub(super) struct Workers {
    queue: Arc<WorkQueue>,
}

/// Where the threads take their tasks from.
pub(super) struct WorkQueue {
    most: usize,
    state: Mutex<State>,
    work: Condvar,
    spawn: Box<Spawn>,
}

pub(super) type Task = Box<dyn FnOnce() + Send>;
type Spawn = dyn Fn(String, Task) -> io::Result<JoinHandle<()>> + Send + Sync;

#[derive(Default)]
struct State {
    tasks: VecDeque<Task>,
    /// How many threads sleep.
    idle: usize,
    threads: Vec<JoinHandle<()>>,
    closed: bool,
}

impl Workers {
    pub(super) fn new() -> Workers {
        let most = thread::available_parallelism().map_or(1, NonZero::get).min(MOST);
        Workers::on(most, |name, work| thread::Builder::new().name(name).spawn(work))
    }

    fn on(
        most: usize,
        spawn: impl Fn(String, Task) -> io::Result<JoinHandle<()>> + Send + Sync + 'static,
    ) -> Workers {
        let (state, work) = (Mutex::default(), Condvar::new());
        Workers { queue: Arc::new(WorkQueue { most, state, work, spawn: Box::new(spawn) }) }
    }

    pub(super) fn queue(&self) -> &Arc<WorkQueue> {
        &self.queue
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let mut state = self.queue.state.lock();
        state.closed = true;
        let threads = std::mem::take(&mut state.threads);
        drop(state);
        self.queue.work.notify_all();
        // A completion must not wait for other transfers. The threads end by themselves.
        if is_completing() {
            return;
        }
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a thread for work on bytes panicked");
            }
        }
    }
}

impl WorkQueue {
    /// How many threads there may be.
    pub(super) fn most(&self) -> usize {
        self.most
    }

    /// Has the threads carry out so many tasks, which are made if they can be. Returns false if not, because the store is
    /// being dropped or the system refuses every thread: then the caller has to do the work.
    #[must_use = "somebody has to do the work"]
    pub(super) fn give(self: &Arc<Self>, count: usize, tasks: impl FnOnce() -> Vec<Task>) -> bool {
        let mut state = self.state.lock();
        if state.closed {
            return false;
        }
        let waiting = state.tasks.len() + count;
        self.start(&mut state, waiting);
        if state.threads.is_empty() {
            return false;
        }
        // Under the lock, so that a drop that does not find them yet finds the queue closed to them.
        state.tasks.extend(tasks());
        drop(state);
        for _ in 0..count {
            self.work.notify_one();
        }
        true
    }

    /// Starts threads, as far as more tasks wait than threads sleep.
    fn start(self: &Arc<Self>, state: &mut State, waiting: usize) {
        let wanted = waiting.saturating_sub(state.idle).min(self.most - state.threads.len());
        for _ in 0..wanted {
            let queue = Arc::clone(self);
            let name = format!("ssdtrain-bytes-{}", state.threads.len());
            // The thread begins with taking the lock that the caller holds.
            match (self.spawn)(name, Box::new(move || queue.work())) {
                Ok(thread) => state.threads.push(thread),
                Err(error) => {
                    let left = state.threads.len();
                    tracing::warn!(%error, "a thread for work on bytes cannot be started; {left} do it");
                    return;
                }
            }
        }
    }

    /// Carries out tasks until the store is dropped and none is left.
    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some(task) = state.tasks.pop_front() {
                drop(state);
                contained("work on the bytes of a transfer", task);
                state = self.state.lock();
            } else if state.closed {
                return;
            } else {
                state.idle += 1;
                self.work.wait(&mut state);
                state.idle -= 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    /// A task that tells the name of its thread.
    fn named() -> (Task, Receiver<Option<String>>) {
        let (tell, told) = channel();
        (Box::new(move || tell.send(thread::current().name().map(str::to_owned)).unwrap()), told)
    }

    fn give(workers: &Workers, tasks: Vec<Task>) -> bool {
        workers.queue().give(tasks.len(), || tasks)
    }

    #[test]
    fn tasks_run_on_named_threads_of_which_there_are_no_more_than_allowed() {
        let workers = Workers::on(2, |name, work| thread::Builder::new().name(name).spawn(work));
        let (tasks, told): (Vec<_>, Vec<_>) = (0..20).map(|_| named()).unzip();
        assert!(give(&workers, tasks));
        for name in told {
            let name = name.recv().unwrap().unwrap();
            assert!(["ssdtrain-bytes-0", "ssdtrain-bytes-1"].contains(&&*name), "{name}");
        }
    }

    #[test]
    fn a_thread_that_sleeps_is_used_before_another_one_starts() {
        let workers = Workers::on(4, |name, work| thread::Builder::new().name(name).spawn(work));
        for _ in 0..5 {
            let (task, told) = named();
            assert!(give(&workers, vec![task]));
            assert_eq!(told.recv().unwrap().unwrap(), "ssdtrain-bytes-0");
            while workers.queue.state.lock().idle == 0 {
                thread::yield_now();
            }
        }
    }

    #[test]
    fn a_task_that_panics_leaves_its_thread_to_others() {
        let workers = Workers::on(1, |name, work| thread::Builder::new().name(name).spawn(work));
        let (task, told) = named();
        assert!(give(&workers, vec![Box::new(|| panic!("on purpose, in a task")), task]));
        told.recv().unwrap().unwrap();
    }

    #[test]
    fn without_any_thread_no_task_is_taken() {
        let workers = Workers::on(2, |_, _| Err(io::ErrorKind::WouldBlock.into()));
        assert!(!workers.queue().give(1, || panic!("nobody would do it")));
    }

    #[test]
    fn a_drop_waits_for_tasks_and_no_more_are_taken() {
        let workers = Workers::on(1, |name, work| thread::Builder::new().name(name).spawn(work));
        let queue = Arc::clone(workers.queue());
        let (tasks, told): (Vec<_>, Vec<_>) = (0..5).map(|_| named()).unzip();
        assert!(give(&workers, tasks));
        drop(workers);
        assert!(told.iter().all(|told| told.try_recv().is_ok()));
        assert_eq!(Arc::strong_count(&queue), 1, "the threads have ended");
        assert!(!queue.give(1, || panic!("nobody would do it")));
    }
}
