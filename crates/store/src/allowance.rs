//! How many bytes may still be written.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The bytes that blobs may still be reserved for; `u64::MAX` for any number.
#[derive(Debug)]
pub(super) struct Allowance(AtomicU64);

impl Default for Allowance {
    fn default() -> Allowance {
        Allowance(AtomicU64::new(u64::MAX))
    }
}

impl Allowance {
    pub(super) fn set(&self, bytes: Option<u64>) {
        self.0.store(bytes.unwrap_or(u64::MAX), Relaxed);
    }

    /// Takes this many of them. False if there are not enough.
    pub(super) fn take(&self, bytes: u64) -> bool {
        let less = |left: u64| if left == u64::MAX { Some(left) } else { left.checked_sub(bytes) };
        self.0.fetch_update(Relaxed, Relaxed, less).is_ok()
    }

    /// Gives back what was taken and is not needed.
    pub(super) fn give_back(&self, bytes: u64) {
        let more =
            |left: u64| if left == u64::MAX { left } else { left.saturating_add(bytes).min(u64::MAX - 1) };
        self.0.update(Relaxed, Relaxed, more);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_is_gone_until_it_is_given_back() {
        let allowance = Allowance::default();
        assert!(allowance.take(u64::MAX) && allowance.take(u64::MAX), "there is no limit");
        allowance.set(Some(10));
        assert!(allowance.take(6) && !allowance.take(5) && allowance.take(4) && !allowance.take(1));
        allowance.give_back(4);
        assert!(allowance.take(4) && !allowance.take(1));
        allowance.set(None);
        allowance.give_back(1);
        assert!(allowance.take(u64::MAX));
    }
}
