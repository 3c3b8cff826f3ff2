//! Whether checksums are taken of what steps write, and what was compared with them.

use std::time::Duration;

use ssdtrain_plan::Tally;
use ssdtrain_store::{Store, StoreStats, checksum_rate};

use crate::route::{Route, Way};
use crate::verify::{ByteWork, Verify};

/// Steps that move fewer bytes say nothing of those that move more.
const TELLING_BYTES: u64 = 8 << 20;

/// Has a store take checksums, or not, at the level that was asked for.
pub(super) struct Checksums {
    level: Verify,
    /// Whether the processor sees the bytes, and nothing else tells whether they came back changed.
    possible: bool,
    /// Whether steps compute on the processor's cores.
    shares_cores: bool,
}

impl Checksums {
    pub(super) fn new(level: Verify, route: &Route, shares_cores: bool) -> Checksums {
        Checksums { level, possible: route.way != Way::Direct && !route.is_encrypted(), shares_cores }
    }

    /// Decides before the first step.
    pub(super) fn begin(&self, store: &Store) {
        store.take_checksums(self.possible && self.level.takes_checksums());
    }

    /// Decides for the next step, after one that took so long and began with these statistics.
    pub(super) fn end(&self, store: &Store, before: &StoreStats, step: Duration) {
        let now = store.stats();
        if let Some(take) = self.decide(before, &now, step, store.checksum_threads(), checksum_rate) {
            store.take_checksums(take);
        }
    }

    /// Whether checksums are to be taken; `None` if the step does not tell.
    fn decide(
        &self,
        before: &StoreStats,
        now: &StoreStats,
        step: Duration,
        threads: usize,
        rate: impl FnOnce() -> f64,
    ) -> Option<bool> {
        let bytes = now.bytes_written - before.bytes_written + now.bytes_read - before.bytes_read;
        if !self.possible || self.level != Verify::Auto || bytes < TELLING_BYTES {
            return None;
        }
        let (busy, shares_cores) = (now.busy.saturating_sub(before.busy), self.shares_cores);
        let work = ByteWork { bytes, busy, step, rate: rate(), threads, shares_cores };
        tracing::debug!(cost = work.cost(), "what checksums of all that a step moves cost, as a share of it");
        Some(work.is_little())
    }
}

/// What was read between two statistics and compared with checksums, and what was read without any.
pub(super) fn read_between(before: &StoreStats, now: &StoreStats) -> (Tally, Tally) {
    let all = Tally { count: now.reads - before.reads, bytes: now.bytes_read - before.bytes_read };
    let checked = Tally {
        count: now.reads_checked - before.reads_checked,
        bytes: now.bytes_checked - before.bytes_checked,
    };
    // A read that ends meanwhile may be counted in one of them only.
    let count = all.count.saturating_sub(checked.count);
    (checked, Tally { count, bytes: all.bytes.saturating_sub(checked.bytes) })
}

#[cfg(test)]
mod tests {
    use ssdtrain_store::StoreConfig;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const GB: u64 = 1_000_000_000;

    fn route(way: Way) -> Route {
        Route { way, why: None, pool: None, store: None }
    }

    fn written(bytes: u64) -> StoreStats {
        let mut stats = StoreStats::default();
        stats.bytes_written = bytes;
        stats
    }

    /// The decision after a step of a second that wrote so much, where a thread takes checksums of 10 GB per second.
    fn decided(checksums: &Checksums, bytes: u64) -> Option<bool> {
        checksums.decide(&written(GB), &written(GB + bytes), SECOND, 1, || 1e10)
    }

    #[test]
    fn steps_decide_only_if_that_is_left_to_them_and_they_tell() {
        let on = |way| Checksums::new(Verify::Auto, &route(way), true);
        assert_eq!(decided(&on(Way::Disk), GB), Some(false), "a tenth of the step");
        assert_eq!(decided(&on(Way::Disk), 50_000_000), Some(true));
        assert_eq!(decided(&on(Way::Disk), 1_000_000), None, "too little to tell");
        assert_eq!(decided(&on(Way::Direct), GB), None, "nobody sees the bytes");
        let store = Some(StoreConfig { encrypt: true, ..StoreConfig::default() });
        let encrypted = Checksums::new(Verify::Auto, &Route { store, ..route(Way::Disk) }, true);
        assert_eq!(decided(&encrypted, 50_000_000), None, "it does not decrypt if it was changed");
        for level in [Verify::Off, Verify::Checksums, Verify::Full] {
            assert_eq!(decided(&Checksums::new(level, &route(Way::Disk), true), GB), None);
        }
    }

    #[test]
    fn what_was_read_is_told_apart() {
        let (before, mut now) = (StoreStats::default(), StoreStats::default());
        (now.reads, now.bytes_read, now.reads_checked, now.bytes_checked) = (5, 500, 3, 350);
        let (checked, unchecked) = read_between(&before, &now);
        assert_eq!((checked, unchecked), (Tally { count: 3, bytes: 350 }, Tally { count: 2, bytes: 150 }));
    }
}
