//! The orders of saving within one step. Each thread has its own in each micro-batch, because backward asks in the reverse of it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::{self, ThreadId};

use ssdtrain_store::sync::Mutex;

use crate::cache::{Cache, NO_TAPE, TapeKey};

/// The tapes of one step.
pub(crate) struct Orders {
    /// The current micro-batch, or [`ENDED`].
    micro_batch: AtomicUsize,
    tapes: Mutex<HashMap<(ThreadId, usize), Opened>>,
}

struct Opened {
    tape: TapeKey,
    /// Whether its thread has saved anything.
    is_used: bool,
}

/// Takes the place of a micro-batch once the step has ended.
const ENDED: usize = usize::MAX;

/// The tape that a thread got last.
pub(crate) struct Latest {
    micro_batch: AtomicUsize,
    tape: AtomicU64,
}

impl Orders {
    /// With `first` as the tape of the calling thread's first micro-batch.
    pub(crate) fn new(first: TapeKey) -> Orders {
        let tapes = HashMap::from([((thread::current().id(), 0), Opened { tape: first, is_used: false })]);
        Orders { micro_batch: AtomicUsize::new(0), tapes: Mutex::new(tapes) }
    }

    /// The tape for what the calling thread saves now; [`NO_TAPE`] once the step has ended.
    pub(crate) fn tape(&self, cache: &Cache, latest: &Latest) -> TapeKey {
        if latest.micro_batch.load(Ordering::Relaxed) == self.micro_batch.load(Ordering::Acquire) {
            return latest.tape.load(Ordering::Relaxed);
        }
        let mut tapes = self.tapes.lock();
        let micro_batch = self.micro_batch.load(Ordering::Acquire);
        let tape = match micro_batch {
            ENDED => NO_TAPE,
            _ => {
                let opened = || Opened { tape: cache.open_tape(), is_used: true };
                let known = tapes.entry((thread::current().id(), micro_batch)).or_insert_with(opened);
                known.is_used = true;
                known.tape
            }
        };
        latest.tape.store(tape, Ordering::Relaxed);
        latest.micro_batch.store(micro_batch, Ordering::Relaxed);
        tape
    }

    /// What is saved from now on, on whichever thread, belongs to that micro-batch.
    pub(crate) fn switch_to(&self, micro_batch: usize) {
        self.micro_batch.store(micro_batch.min(ENDED - 1), Ordering::Release);
    }

    /// Whether no thread but one has saved anything, as far as the cache has seen.
    pub(crate) fn is_one_threads(&self) -> bool {
        let tapes = self.tapes.lock();
        let mut threads = tapes.iter().filter(|(_, opened)| opened.is_used).map(|((thread, _), _)| thread);
        let first = threads.next();
        threads.all(|thread| Some(thread) == first)
    }

    /// The step has ended. Returns its tapes, which the caller closes.
    pub(crate) fn end(&self) -> Vec<TapeKey> {
        let mut tapes = self.tapes.lock();
        self.micro_batch.store(ENDED, Ordering::Release);
        tapes.drain().map(|(_, opened)| opened.tape).collect()
    }
}

impl Default for Latest {
    /// For a thread that has got no tape yet.
    fn default() -> Latest {
        Latest { micro_batch: AtomicUsize::new(ENDED), tape: AtomicU64::new(NO_TAPE) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Limits;

    #[test]
    fn a_thread_that_saves_in_several_micro_batches_is_one() {
        let cache = Cache::new(None, Limits::none(0), None);
        let orders = Orders::new(cache.open_tape());
        orders.switch_to(1);
        orders.tape(&cache, &Latest::default());
        assert!(orders.is_one_threads());

        thread::scope(|scope| {
            scope.spawn(|| orders.tape(&cache, &Latest::default()));
        });
        assert!(!orders.is_one_threads());
    }
}
