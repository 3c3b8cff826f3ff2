//! How much of a day's limit on writes to the disks a plan may use.

use std::time::Duration;

use bytesize::ByteSize;

use super::Today;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// Plans are made for so many different rates, from nothing up to the whole limit spread over a day.
const LEVELS: u32 = 16;
/// A lower level is taken when less than it is left by so much, and a higher one when more than it is left by so much. In between nothing is
/// planned anew.
const LESS: f64 = 0.75;
const MORE: f64 = 1.25;

/// A limit on the bytes that are written in a day by all runs together, and the part of it that plans may use at present.
///
/// Plans write evenly: no faster than the limit spread over a whole day, so that the next day can go on like this, and no faster than
/// what is left of today spread over the rest of it, so that it lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DailyLimit {
    most: u64,
    level: u32,
    /// The day that the level is of.
    day: u32,
}

impl DailyLimit {
    pub(super) fn new(most: u64) -> DailyLimit {
        DailyLimit { most, level: LEVELS, day: 0 }
    }

    /// A step begins. Returns whether plans may write more or less than until now.
    pub(super) fn begins(&mut self, today: &Today) -> bool {
        let left = self.left(today) as f64 / (self.most.max(1)) as f64;
        let of_day = today.left.min(DAY).max(Duration::from_secs(1)).div_duration_f64(DAY);
        let levels = f64::from(LEVELS) * left / of_day;
        // Less than one level is nothing.
        let reached = levels.min(f64::from(LEVELS)) as u32;
        let known = if self.day == today.day { self.level } else { LEVELS };
        let is_other = levels < f64::from(known) - LESS || levels >= f64::from(known) + MORE;
        let level = if is_other { reached } else { known };
        self.day = today.day;
        std::mem::replace(&mut self.level, level) != level
    }

    /// Bytes that may be written in a day of steps at the present level.
    pub(super) fn per_day(&self) -> u64 {
        (u128::from(self.most) * u128::from(self.level) / u128::from(LEVELS)) as u64
    }

    /// Bytes that may be written while the device computes for so long.
    pub(super) fn within(&self, computed: Duration) -> u64 {
        (self.per_day() as f64 * computed.div_duration_f64(DAY)) as u64
    }

    /// Bytes that may still be written today.
    pub(super) fn left(&self, today: &Today) -> u64 {
        self.most.saturating_sub(today.written)
    }

    /// What users should know of it.
    pub(super) fn warning(&self) -> Option<String> {
        (self.level == 0).then(|| {
            format!(
                "the disks have taken what written_per_day allows for today ({}), but for a small rest: until midnight UTC, storages stay on \
                 the device or are computed again instead",
                ByteSize(self.most).display().si()
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: u64 = 1_000_000;

    fn today(day: u32, written: u64, hour: f64) -> Today {
        Today { day, written, left: DAY.mul_f64(1.0 - hour / 24.0) }
    }

    #[test]
    fn a_day_that_goes_as_planned_has_the_whole_rate_to_its_end() {
        let mut limit = DailyLimit::new(MOST);
        for quarter in 0..96 {
            let hour = f64::from(quarter) / 4.0;
            assert!(!limit.begins(&today(0, (MOST as f64 * hour / 24.0) as u64, hour)), "{hour}");
        }
        assert_eq!((limit.per_day(), limit.within(DAY / 4)), (MOST, MOST / 4));
    }

    #[test]
    fn what_others_have_written_is_left_out() {
        let mut limit = DailyLimit::new(MOST);
        assert!(limit.begins(&today(5, MOST / 2, 0.0)));
        assert_eq!(limit.per_day(), MOST / 2);
        assert!(limit.begins(&today(5, MOST, 1.0)) && limit.warning().is_some());
        assert_eq!((limit.within(DAY), limit.left(&today(5, MOST + 1, 1.0))), (0, 0));
        assert!(!limit.begins(&today(5, MOST, 23.9)));
        assert!(limit.begins(&today(6, 0, 0.0)) && limit.warning().is_none());
        assert_eq!(limit.per_day(), MOST);
    }

    #[test]
    fn time_without_writes_does_not_raise_the_rate_beyond_that_of_a_day() {
        let mut limit = DailyLimit::new(MOST);
        assert!(!limit.begins(&today(0, 0, 23.0)));
        assert_eq!(limit.per_day(), MOST);
    }

    #[test]
    fn small_differences_are_no_reason_to_plan_anew() {
        let mut limit = DailyLimit::new(MOST);
        assert!(!limit.begins(&today(0, MOST / 32, 0.0)), "31 of 32 parts are left");
        assert!(limit.begins(&today(0, MOST / 8, 0.0)));
        assert!(!limit.begins(&today(0, MOST / 9, 0.0)));
        assert!(limit.begins(&today(0, MOST / 8, 4.0)), "as much is left in less time");
    }

    #[test]
    fn a_limit_of_nothing_and_a_clock_at_midnight_are_no_division_by_zero() {
        let mut none = DailyLimit::new(0);
        none.begins(&Today { day: 0, written: 0, left: Duration::ZERO });
        assert_eq!((none.per_day(), none.within(DAY)), (0, 0));
        let mut most = DailyLimit::new(u64::MAX);
        most.begins(&Today { day: 0, written: 0, left: Duration::MAX });
        assert_eq!(most.per_day(), u64::MAX);
    }
}
