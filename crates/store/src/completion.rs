//! What is told when a transfer has ended: exactly once, whatever happens on the way.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::{Error, ErrorKind, Result};

/// Called once, when a transfer has ended; the store then holds neither its memory nor its blob any more. One that is dropped
/// without having been called is an answer too: an error.
///
/// It runs on an I/O thread, so it should be short and must not wait for another transfer. A panic in it is logged and goes no
/// further. Transfers that fail before they begin, and those of empty blobs, complete on the calling thread, before the call returns.
///
/// `E` is the error of whoever is told, who may know more of what went wrong than a store does.
pub struct Completion<E: From<Error> = Error>(Option<Box<Told<E>>>);

type Told<E> = dyn FnOnce(Result<(), E>) + Send;

impl<E: From<Error>> Completion<E> {
    /// Has `told` told how it went.
    pub fn new(told: impl FnOnce(Result<(), E>) + Send + 'static) -> Completion<E> {
        Completion(Some(Box::new(told)))
    }

    /// Tells how it went.
    pub fn call(mut self, outcome: Result<(), E>) {
        self.tell(outcome);
    }

    /// Nobody needs to be told. What it owns is dropped, other completions too: those answer.
    pub fn dismiss(mut self) {
        drop(self.0.take());
    }

    /// The same for a store's transfer, whose errors become those of whoever is told.
    pub fn of_transfer(self) -> Completion
    where
        E: 'static,
    {
        Completion::new(move |outcome: Result<()>| self.call(outcome.map_err(E::from)))
    }

    fn tell(&mut self, outcome: Result<(), E>) {
        if let Some(told) = self.0.take() {
            contained("the completion of a transfer", || told(outcome));
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

/// Runs `work`. A panic in it is logged and goes no further, so that the thread that many wait for lives on.
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
