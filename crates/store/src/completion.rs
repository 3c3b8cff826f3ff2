//! The callback for the end of a transfer: called exactly once, whatever happens on the way.

use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::{Error, ErrorKind, Result};

/// Called once, when a transfer has ended; by then the store holds neither the transfer's memory nor its blob, unless the
/// transfer [timed out](ErrorKind::TimedOut). If it is dropped without having been called, it is called with an error.
///
/// It runs on an I/O thread or the one that watches the time, so it should be short and must not wait for another transfer. A panic in it is logged
/// and does not propagate. Transfers that fail before they begin, and those of empty blobs, complete on the calling
/// thread before the call returns.
///
/// `E` is the error type of the code that is called, which may know more about what went wrong than a store does.
pub struct Completion<E: From<Error> = Error>(Option<Box<Told<E>>>);

thread_local! {
    /// Whether the thread runs a completion, or a listener.
    static COMPLETING: Cell<bool> = const { Cell::new(false) };
}

/// Whether this is called from a completion or a listener, which must not wait for transfers or growth: it may run on the very
/// thread that would give them up.
pub(crate) fn is_completing() -> bool {
    COMPLETING.get()
}

/// Runs a completion or a listener. A panic in it is logged and does not propagate.
pub(crate) fn complete(what: &str, work: impl FnOnce()) {
    let nested = COMPLETING.replace(true);
    contained(what, work);
    COMPLETING.set(nested);
}

type Told<E> = dyn FnOnce(Result<(), E>) + Send;

impl<E: From<Error>> Completion<E> {
    /// Calls `told` with the outcome.
    pub fn new(told: impl FnOnce(Result<(), E>) + Send + 'static) -> Completion<E> {
        Completion(Some(Box::new(told)))
    }

    /// Reports the outcome.
    pub fn call(mut self, outcome: Result<(), E>) {
        self.tell(outcome);
    }

    /// Drops the callback without calling it. Whatever it owns is dropped too; other completions among that are still
    /// called, with an error.
    pub fn dismiss(mut self) {
        drop(self.0.take());
    }

    /// A completion for a store's transfer, which converts the store's error into `E`.
    pub fn of_transfer(self) -> Completion
    where
        E: 'static,
    {
        Completion::new(move |outcome: Result<()>| self.call(outcome.map_err(E::from)))
    }

    fn tell(&mut self, outcome: Result<(), E>) {
        if let Some(told) = self.0.take() {
            complete("the completion of a transfer", || told(outcome));
        }
    }
}

impl<E: From<Error>> Drop for Completion<E> {
    fn drop(&mut self) {
        if self.0.is_some() {
            let message = "internal error: a transfer was dropped before its end";
            self.tell(Err(Error::new(ErrorKind::Io, message).into()));
        }
    }
}

impl<E: From<Error>> fmt::Debug for Completion<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completion").finish_non_exhaustive()
    }
}

/// Runs `work`. A panic in it is logged and does not propagate, so that a thread that others depend on stays alive.
pub fn contained<T>(what: &str, work: impl FnOnce() -> T) -> Option<T> {
    let outcome = catch_unwind(AssertUnwindSafe(work));
    if outcome.is_err() {
        tracing::error!("{what} panicked");
    }
    outcome.ok()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use super::*;

    fn completion() -> (Completion, Receiver<Result<()>>) {
        let (tell, told) = channel();
        (Completion::new(move |outcome| tell.send(outcome).unwrap()), told)
    }

    #[test]
    fn one_that_is_dropped_answers_with_an_error() {
        let (done, told) = completion();
        drop(done);
        let error = told.recv().unwrap().unwrap_err();
        assert!(error.to_string().contains("was dropped"), "{error}");
        assert!(told.recv().is_err(), "once");
    }

    #[test]
    fn one_that_is_called_or_dismissed_answers_no_more() {
        let (done, told) = completion();
        done.call(Ok(()));
        assert!(told.recv().unwrap().is_ok());
        assert!(told.recv().is_err());
        let (done, told) = completion();
        done.dismiss();
        assert!(told.recv().is_err());
    }

    #[test]
    fn one_whose_task_panics_answers_all_the_same() {
        let (done, told) = completion();
        let task = move || {
            let _done = done;
            panic!("on purpose");
        };
        assert!(contained("a task", task).is_none());
        assert!(told.recv().unwrap().is_err());
    }
}
