//! The latest failures of all caches' loads and reruns. Errors cross libtorch as text, and a backward may need what was saved through another cache than
//! that of its step.

use std::collections::VecDeque;

use ssdtrain_libtorch::PerProcess;
use ssdtrain_store::sync::Mutex;

use crate::error::Error;

/// How many are kept: a backward ends with the first one.
const LATEST: usize = 64;

static FAILURES: PerProcess<Mutex<VecDeque<Error>>> = PerProcess::new(Mutex::new(VecDeque::new()));

/// Keeps a failure for [`find`].
pub(crate) fn note(failure: &Error) {
    let mut failures = FAILURES.here().lock();
    failures.truncate(LATEST - 1);
    failures.push_front(failure.clone());
}

/// The failure whose message is part of `text`, if there is one.
pub(super) fn find(text: &str) -> Option<Error> {
    let failures = FAILURES.here().lock();
    failures.iter().find(|failure| text.contains(&failure.to_string())).cloned()
}
