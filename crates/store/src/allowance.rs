//! How many bytes may still be written.

use std::sync::Arc;

use crate::sync::Mutex;

/// The bytes that blobs may still be reserved for.
#[derive(Debug, Default)]
pub(super) struct Allowance(Mutex<Books>);

#[derive(Debug, Default)]
struct Books {
    /// `None`: there is none.
    limit: Option<Limit>,
    /// Granted, and neither written nor given back.
    pending: u64,
    /// Granted since the beginning, and not given back. It wraps around.
    granted: u64,
}

/// How many bytes may be written after a moment.
#[derive(Debug)]
struct Limit {
    most: u64,
    /// Those that were granted then and not yet written, and those that were granted since.
    counted: u64,
}

/// Bytes that may be written. What is not is pending no more once this is dropped, but counts until the next limit is set.
#[derive(Debug)]
pub(super) struct Grant {
    allowance: Arc<Allowance>,
    bytes: Mutex<u64>,
}

/// What a store has yet to write at a moment (`Store::outlook`).
#[derive(Clone, Copy, Debug)]
pub struct Outlook {
    pending: u64,
    granted: u64,
}

impl Allowance {
    /// Takes this many of them; `None` if there are not enough.
    pub(super) fn take(self: &Arc<Self>, bytes: u64) -> Option<Grant> {
        let mut books = self.0.lock();
        if let Some(Limit { most, counted }) = &mut books.limit {
            *counted = counted.checked_add(bytes).filter(|counted| *counted <= *most)?;
        }
        books.pending = books.pending.wrapping_add(bytes);
        books.granted = books.granted.wrapping_add(bytes);
        Some(Grant { allowance: Arc::clone(self), bytes: Mutex::new(bytes) })
    }

    pub(super) fn outlook(&self) -> Outlook {
        let books = self.0.lock();
        Outlook { pending: books.pending, granted: books.granted }
    }

    /// From now on, so many may be granted, less those that were granted and not yet written at the moment of `since`, and those that
    /// were granted after it.
    pub(super) fn set(&self, bytes: Option<u64>, since: Outlook) {
        let mut books = self.0.lock();
        let later = books.granted.wrapping_sub(since.granted);
        let counted = since.pending.wrapping_add(later);
        books.limit = bytes.map(|most| Limit { most, counted });
    }
}

impl Grant {
    /// So many of them were written.
    pub(super) fn written(&self, bytes: u64) {
        let mut left = self.bytes.lock();
        // What is written again is granted no more.
        let bytes = bytes.min(*left);
        *left -= bytes;
        let mut books = self.allowance.0.lock();
        books.pending = books.pending.wrapping_sub(bytes);
    }

    /// They are not needed, and may be granted to others.
    pub(super) fn give_back(self) {
        let bytes = *self.bytes.lock();
        let mut books = self.allowance.0.lock();
        if let Some(Limit { counted, .. }) = &mut books.limit {
            *counted = counted.saturating_sub(bytes);
        }
        books.granted = books.granted.wrapping_sub(bytes);
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.written(u64::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowance(bytes: u64) -> Arc<Allowance> {
        let allowance = Arc::<Allowance>::default();
        allowance.set(Some(bytes), allowance.outlook());
        allowance
    }

    #[test]
    fn what_is_taken_is_gone_until_it_is_given_back() {
        let unlimited = Arc::<Allowance>::default();
        assert!(unlimited.take(u64::MAX).is_some_and(|_| unlimited.take(u64::MAX).is_some()));
        let allowance = allowance(10);
        assert!(allowance.take(6).is_some() && allowance.take(5).is_none());
        let rest = allowance.take(4).unwrap();
        assert!(allowance.take(1).is_none());
        rest.give_back();
        assert!(allowance.take(4).is_some() && allowance.take(1).is_none());
        allowance.set(None, allowance.outlook());
        assert!(allowance.take(1 << 60).is_some());
    }

    #[test]
    fn what_is_granted_and_not_yet_written_counts_against_the_next_limit() {
        let allowance = allowance(100);
        let [written, pending, dropped] = [10, 20, 30].map(|bytes| allowance.take(bytes).unwrap());
        written.written(10);
        drop(dropped);
        let before = allowance.outlook();
        // Meanwhile some of it is written, and more is granted.
        pending.written(15);
        let later = allowance.take(7).unwrap();
        allowance.take(9).unwrap().give_back();
        allowance.set(Some(50), before);
        assert!(allowance.take(24).is_none() && allowance.take(23).is_some());
        drop((written, later));
        let before = allowance.outlook();
        pending.give_back();
        allowance.set(Some(50), before);
        assert!(allowance.take(51).is_none() && allowance.take(50).is_some());
    }

    #[test]
    fn what_is_given_back_after_a_lower_limit_leaves_no_more_than_that() {
        let allowance = allowance(100);
        let grant = allowance.take(100).unwrap();
        allowance.set(Some(10), allowance.outlook());
        grant.give_back();
        assert!(allowance.take(11).is_none() && allowance.take(10).is_some());
    }
}
