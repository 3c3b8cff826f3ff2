//! The end of a rerun before its function returns: backward needs nothing more of it.
//!
//! Only an operation can end the function that called it, by failing. The function then returns the error, or it panics, as it does
//! where it uses the operations of tch that return no `Result`. Both are planned here and leave no trace: nothing is printed, and no lock
//! is poisoned.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind, set_hook, take_hook};
use std::thread;

use ssdtrain_libtorch::{Packed, PerProcess, RandomState, TorchError};
use ssdtrain_store::sync::Mutex;

thread_local! {
    /// Where the function that this thread is running again was stopped.
    static STOPPED: RefCell<Option<Stopped>> = const { RefCell::new(None) };
}

/// Whether our panic hook is in place. A process that was forked off has that of its parent, and puts its own before it.
static IS_QUIET: PerProcess<Mutex<bool>> = PerProcess::new(Mutex::new(false));

struct Stopped {
    random: RandomState,
    /// Whether our panic hook has kept a panic to itself since.
    was_quiet: bool,
}

/// How a function ended that could be stopped.
pub(super) enum Ended<T> {
    /// In its own way: what it returned, or its panic.
    Itself(thread::Result<T>),
    /// It was stopped, with the generators in this state. What it did after that means nothing.
    Stopped(RandomState),
}

/// Whether a function that the calling thread is about to run can be stopped. A panic must then neither end the process nor be printed.
pub(super) fn is_possible() -> bool {
    cfg!(panic = "unwind") && is_quiet()
}

/// Installs the panic hook, unless it is in place. A thread that is panicking cannot do that.
fn is_quiet() -> bool {
    let mut is_quiet = IS_QUIET.here().lock();
    if !*is_quiet && !thread::panicking() {
        // Between these two, a panic elsewhere is reported by the default hook.
        let others = take_hook();
        set_hook(Box::new(move |info| {
            if !keep_quiet() {
                others(info);
            }
        }));
        *is_quiet = true;
    }
    *is_quiet
}

/// Whether the calling thread's panic comes from a stop.
fn keep_quiet() -> bool {
    let kept = STOPPED.try_with(|stopped| {
        let mut stopped = stopped.try_borrow_mut().ok()?;
        stopped.as_mut().map(|stopped| stopped.was_quiet = true)
    });
    matches!(kept, Ok(Some(())))
}

/// Stops the function that the calling thread [runs](run), from within its hooks; `random` is the state of the generators by then. From
/// now on, hooks have no other answer.
pub(super) fn stop(random: impl FnOnce() -> Result<RandomState, TorchError>) -> Result<Packed, TorchError> {
    if STOPPED.with_borrow(Option::is_none) {
        let random = random()?;
        STOPPED.set(Some(Stopped { random, was_quiet: false }));
    }
    Ok(Packed::Stop)
}

/// Runs `function`, whose hooks may [stop] it.
pub(super) fn run<T>(function: impl FnOnce() -> T) -> Ended<T> {
    // It may itself be called by a function that can be stopped.
    let outer = STOPPED.take();
    let outcome = without_poison(function);
    let Some(stopped) = STOPPED.replace(outer) else { return Ended::Itself(outcome) };
    if outcome.is_err() && !stopped.was_quiet {
        // The program has replaced our panic hook, and has printed this panic. The next one has our hook before the program's.
        *IS_QUIET.here().lock() = false;
    }
    Ended::Stopped(stopped.random)
}

/// Runs `function` while the thread counts as panicking: a lock of the standard library that is taken then is not poisoned if a panic
/// releases it. The lock of a module, for example, which its next forward pass takes again.
fn without_poison<T>(function: impl FnOnce() -> T) -> thread::Result<T> {
    struct Running<'a, T, F: FnOnce() -> T> {
        function: Option<F>,
        outcome: &'a mut thread::Result<T>,
    }
    impl<T, F: FnOnce() -> T> Drop for Running<'_, T, F> {
        fn drop(&mut self) {
            if let Some(function) = self.function.take() {
                *self.outcome = catch_unwind(AssertUnwindSafe(function));
            }
        }
    }

    let mut outcome = Err(Box::new("it did not run") as _);
    let running = Running { function: Some(function), outcome: &mut outcome };
    // This payload is ours, and no hook sees it.
    drop(catch_unwind(AssertUnwindSafe(move || {
        let _running = running;
        resume_unwind(Box::new(()))
    })));
    outcome
}

#[cfg(test)]
mod tests {
    use std::panic::panic_any;

    use super::*;

    fn stopped() -> Result<Packed, TorchError> {
        stop(|| RandomState::of(&[]))
    }

    fn is_stopped<T>(ended: &Ended<T>) -> bool {
        matches!(ended, Ended::Stopped(_))
    }

    #[test]
    fn a_function_that_was_stopped_may_end_in_any_way() {
        assert!(is_possible());
        assert!(is_stopped(&run(|| stopped().is_ok())));
        assert!(is_stopped(&run(|| -> () {
            stopped().unwrap();
            panic_any(1)
        })));
        assert!(matches!(run(|| 3), Ended::Itself(Ok(3))));
        assert!(matches!(run(|| resume_unwind(Box::new(1))), Ended::<()>::Itself(Err(_))));
    }

    #[test]
    fn a_stop_within_is_not_one_of_the_function_around() {
        let ended = run(|| {
            let within = run(stopped);
            assert!(is_stopped(&within));
        });
        assert!(matches!(ended, Ended::Itself(Ok(()))));
    }
}
