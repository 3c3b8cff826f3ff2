//! What was written to each drive, day by day.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::day::Day;
use super::drive::Drive;

/// The bytes of days nearer to today than this are kept, and so many others at most; of the rest only the total.
const DAYS: u32 = 90;
/// What a drive takes in a day is the mean of this many days.
const RECENT: u32 = 30;

/// What was written to each drive, by its [`id`](Drive::id).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    pub(super) drives: BTreeMap<String, DriveHistory>,
}

/// What was written to a drive.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DriveHistory {
    /// The kernel's latest name for it.
    pub name: String,
    /// The first day.
    pub since: Day,
    /// Bytes of all days.
    pub total: u64,
    /// Bytes of each day, as far as anything was written on it: of the last 90 days at least.
    pub days: BTreeMap<Day, u64>,
}

impl History {
    /// What was written to `drive`; `None` if nothing was.
    pub fn of(&self, drive: &Drive) -> Option<&DriveHistory> {
        self.drives.get(&drive.id)
    }

    /// What was written to `drive` on this day.
    pub(super) fn on(&self, drive: &Drive, day: Day) -> u64 {
        self.of(drive).and_then(|known| known.days.get(&day)).copied().unwrap_or(0)
    }

    /// What was written to `drive` in all.
    pub(super) fn total(&self, drive: &Drive) -> u64 {
        self.of(drive).map_or(0, |known| known.total)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.drives.is_empty()
    }

    /// `bytes` were written to `drive` on `today`.
    pub(super) fn add(&mut self, drive: &Drive, today: Day, bytes: u64) {
        if bytes > 0 {
            let news = DriveHistory {
                name: drive.name.clone(),
                since: today,
                total: bytes,
                days: BTreeMap::from([(today, bytes)]),
            };
            self.drives.entry(drive.id.clone()).or_default().add(&news);
        }
    }

    /// Adds what others have counted.
    pub(super) fn merge(&mut self, news: &History) {
        for (id, news) in &news.drives {
            self.drives.entry(id.clone()).or_default().add(news);
        }
    }

    /// Forgets the oldest of the days that are far from `today`. Some of them stay: where the clock is wrong, they may be the real ones.
    pub(super) fn forget(&mut self, today: Day) {
        let is_far = |day: &Day| day.0.abs_diff(today.0) >= DAYS;
        for DriveHistory { days, .. } in self.drives.values_mut() {
            let mut too_many = days.keys().filter(|day| is_far(day)).count().saturating_sub(DAYS as usize);
            days.retain(|day, _| {
                let goes = too_many > 0 && is_far(day);
                too_many -= usize::from(goes);
                !goes
            });
        }
    }
}

impl DriveHistory {
    /// Bytes that were written on a day; 0 if that is longer ago than is kept.
    pub fn on(&self, day: Day) -> u64 {
        self.days.get(&day).copied().unwrap_or(0)
    }

    /// The mean of the bytes written in a day, of up to 30 days before `today`; `None` on the first day.
    pub fn per_day(&self, today: Day) -> Option<u64> {
        let first = self.since.max(Day(today.0.saturating_sub(RECENT)));
        let count = today.0.checked_sub(first.0).filter(|count| *count > 0)?;
        let bytes = self.days.range(first..today).fold(0_u64, |all, (_, bytes)| all.saturating_add(*bytes));
        Some(bytes / u64::from(count))
    }

    fn add(&mut self, news: &DriveHistory) {
        // One without days has just been made.
        self.since = if self.total == 0 { news.since } else { self.since.min(news.since) };
        self.name.clone_from(&news.name);
        self.total = self.total.saturating_add(news.total);
        for (day, bytes) in &news.days {
            let known = self.days.entry(*day).or_default();
            *known = known.saturating_add(*bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::iter;

    use super::*;

    fn drive() -> Drive {
        Drive::named(std::path::Path::new("/no/such/root"), "nvme9n9")
    }

    #[test]
    fn days_add_up_and_old_ones_are_forgotten_but_for_the_total() {
        let (mut history, drive) = (History::default(), drive());
        for day in 0..200 {
            history.add(&drive, Day(day), 10);
            history.forget(Day(day));
        }
        let known = history.of(&drive).unwrap();
        assert_eq!((known.total, known.since, known.days.len()), (2000, Day(0), 2 * DAYS as usize));
        assert_eq!((history.on(&drive, Day(199)), history.on(&drive, Day(19))), (10, 0));
    }

    #[test]
    fn what_a_wrong_clock_counts_costs_no_day_that_is_near() {
        let drive = drive();
        for wrong in [0, 40_000] {
            let mut history = History::default();
            let real = (20_000 - 2 * DAYS..20_000).map(|day| (day, 7));
            let others = (wrong..wrong + DAYS / 2).map(|day| (day, 5));
            for (day, bytes) in real.chain(others).chain([(20_000, 1)]) {
                history.add(&drive, Day(day), bytes);
                history.forget(Day(day));
            }
            let days = (20_001 - DAYS..20_000).map(|day| history.on(&drive, Day(day)));
            assert!(days.eq(iter::repeat_n(7, DAYS as usize - 1)), "{wrong}: {history:?}");
            assert!(history.of(&drive).unwrap().days.len() <= 3 * DAYS as usize);
        }
    }

    #[test]
    fn the_mean_is_that_of_whole_days() {
        let mut history = History::default();
        history.add(&drive(), Day(100), 50);
        assert_eq!(history.of(&drive()).unwrap().per_day(Day(100)), None);
        assert_eq!(history.of(&drive()).unwrap().per_day(Day(102)), Some(25));
        history.add(&drive(), Day(149), 300);
        history.add(&drive(), Day(150), 1_000_000);
        assert_eq!(history.of(&drive()).unwrap().per_day(Day(150)), Some(10), "300 in 30 days");
    }

    #[test]
    fn sums_do_not_overflow() {
        let mut history = History::default();
        for _ in 0..2 {
            history.add(&drive(), Day(1), u64::MAX);
        }
        assert_eq!((history.total(&drive()), history.on(&drive(), Day(1))), (u64::MAX, u64::MAX));
        assert_eq!(history.of(&drive()).unwrap().per_day(Day(u32::MAX)), Some(0));
    }
}
