//! Several tasks, and what follows once all of them have ended.

use crate::sync::Mutex;

use crate::backend::Op;

/// The results of several tasks, and what follows them. If a task is dropped before its end, what follows is dropped
/// with the last of the others.
pub(super) struct Gather<R> {
    state: Mutex<State<R>>,
}

struct State<R> {
    results: Vec<Option<R>>,
    pending: usize,
    follow: Option<Follow<R>>,
}

/// Called with the results, in the order of the tasks; returns the operations to carry out next.
type Follow<R> = Box<dyn FnOnce(Vec<R>) -> Vec<Op> + Send>;

impl<R> Gather<R> {
    /// Waits for so many tasks, at least 1.
    pub(super) fn new(tasks: usize) -> Gather<R> {
        let results = (0..tasks).map(|_| None).collect();
        Gather { state: Mutex::new(State { results, pending: tasks, follow: None }) }
    }

    /// A task has ended, which happens once. Returns the operations to carry out next.
    #[must_use = "the operations are to be carried out"]
    pub(super) fn end(&self, task: usize, result: R) -> Vec<Op> {
        let mut state = self.state.lock();
        state.results[task] = Some(result);
        state.pending -= 1;
        Gather::go_on(state)
    }

    /// Says what follows, once. Returns the operations to carry out next, if all tasks have ended.
    #[must_use = "the operations are to be carried out"]
    pub(super) fn then(&self, follow: impl FnOnce(Vec<R>) -> Vec<Op> + Send + 'static) -> Vec<Op> {
        let mut state = self.state.lock();
        state.follow = Some(Box::new(follow));
        Gather::go_on(state)
    }

    fn go_on(mut state: crate::sync::MutexGuard<'_, State<R>>) -> Vec<Op> {
        let Some(follow) = (state.pending == 0).then(|| state.follow.take()).flatten() else {
            return Vec::new();
        };
        let results = std::mem::take(&mut state.results).into_iter().flatten().collect();
        drop(state);
        follow(results)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn what_follows_comes_once_after_the_last_in_the_order_of_the_tasks() {
        for last in 0..3 {
            let (gather, (tell, told)) = (Gather::new(2), channel());
            let mut follow = Some(move |results| {
                tell.send(results).unwrap();
                Vec::new()
            });
            for step in [1, 2, 0].map(|step| (step + last) % 3) {
                assert!(told.try_recv().is_err(), "something is to end yet");
                let next = match step {
                    0 => gather.then(follow.take().unwrap()),
                    task => gather.end(2 - task, 2 - task),
                };
                assert!(next.is_empty());
            }
            assert_eq!(told.try_recv().unwrap(), [0, 1]);
        }
    }

    #[test]
    fn what_follows_a_task_that_is_dropped_goes_with_the_others() {
        let (gather, follower) = (Arc::new(Gather::new(2)), Arc::new(()));
        let held = Arc::clone(&follower);
        let tasks = [0, 1].map(|_| Arc::clone(&gather));
        assert!(
            gather
                .then(move |_| {
                    drop(held);
                    Vec::new()
                })
                .is_empty()
        );
        drop(gather);
        let [dropped, other] = tasks;
        drop(dropped);
        assert!(other.end(0, ()).is_empty());
        assert_eq!(Arc::strong_count(&follower), 2, "it waits");
        drop(other);
        assert_eq!(Arc::strong_count(&follower), 1);
    }
}
