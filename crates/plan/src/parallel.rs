//! Work that several threads share.

use std::num::NonZero;
use std::thread::{self, Builder};

/// How many threads run at once.
pub(crate) fn processors() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

/// The results for all items, in their order, from at most so many threads, of which this is one. What the system refuses a thread for is
/// done by this one.
pub(crate) fn map<T: Sync, R: Send>(items: &[T], threads: usize, of: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let all = |chunk: &[T]| chunk.iter().map(&of).collect::<Vec<R>>();
    let mut chunks = items.chunks(items.len().div_ceil(threads.max(1)).max(1));
    let Some(own) = chunks.next() else { return Vec::new() };
    thread::scope(|scope| {
        let all = &all;
        let begin = |chunk| Builder::new().name(NAME.to_owned()).spawn_scoped(scope, move || all(chunk));
        let others: Vec<_> = chunks.map(|chunk| (chunk, begin(chunk))).collect();
        let mut results = all(own);
        for (chunk, thread) in others {
            // One that panicked does so here as well.
            let part = thread.ok().and_then(|thread| thread.join().ok());
            results.extend(part.unwrap_or_else(|| all(chunk)));
        }
        results
    })
}

const NAME: &str = "ssdtrain-plan";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_the_order_of_the_items_however_many_threads_there_are() {
        let items: Vec<usize> = (0..100).collect();
        let squares: Vec<usize> = items.iter().map(|item| item * item).collect();
        for threads in [0, 1, 2, 3, 7, 200] {
            assert_eq!(map(&items, threads, |item| item * item), squares, "{threads}");
        }
        assert!(map(&items[..0], 4, |item| *item).is_empty());
    }
}
