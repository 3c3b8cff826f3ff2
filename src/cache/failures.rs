//! The latest failed loads of all caches. Errors cross libtorch as text, and a backward may need what was saved through another cache than
//! that of its step.

use std::collections::VecDeque;
use std::time::Duration;

use ssdtrain_store::sync::Mutex;

use crate::error::Error;

/// How many are kept: a backward ends with the first one.
const LATEST: usize = 64;

/// Nobody has the lock for so long, except in a process that was forked off meanwhile. There it is never free.
const PATIENCE: Duration = Duration::from_secs(1);

static FAILURES: Mutex<VecDeque<Error>> = Mutex::new(VecDeque::new());

/// Keeps a failure for [`find`].
pub(super) fn note(failure: &Error) {
    let Some(mut failures) = FAILURES.try_lock_for(PATIENCE) else { return };
    failures.truncate(LATEST - 1);
    failures.push_front(failure.clone());
}

/// The failure whose message is part of `text`, if there is one.
pub(super) fn find(text: &str) -> Option<Error> {
    let failures = FAILURES.try_lock_for(PATIENCE)?;
    failures.iter().find(|failure| text.contains(&failure.to_string())).cloned()
}
