//! Days, by which writes are counted.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

const SECONDS: u64 = 24 * 60 * 60;

/// A day of UTC. Shown as in `2026-11-25`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Day(
    /// How many days after 1970-01-01 it is.
    pub u32,
);

impl Day {
    /// The day of this time.
    pub fn of(time: SystemTime) -> Day {
        Day(u32::try_from(seconds(time) / SECONDS).unwrap_or(u32::MAX))
    }

    /// How long the day of this time still lasts.
    pub fn left(time: SystemTime) -> Duration {
        Duration::from_secs(SECONDS - seconds(time) % SECONDS)
    }
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl fmt::Display for Day {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Years that begin in March have their leap day at the end. Their cycle of 400 years began on 0000-03-01.
        const CYCLE: u64 = 146_097;
        let days = u64::from(self.0) + 719_468;
        let (cycle, day) = (days / CYCLE, days % CYCLE);
        let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
        let day = day - (365 * year + year / 4 - year / 100);
        // Months from March on have 31, 30, 31, 30 and 31 days, again and again.
        let month = (5 * day + 2) / 153;
        let of_month = day - (153 * month + 2) / 5 + 1;
        let (year, month) = if month < 10 { (year, month + 3) } else { (year + 1, month - 9) };
        write!(f, "{:04}-{month:02}-{of_month:02}", 400 * cycle + year)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_have_the_dates_of_the_calendar() {
        for (day, date) in [
            (0, "1970-01-01"),
            (58, "1970-02-28"),
            (11_016, "2000-02-29"),
            (11_017, "2000-03-01"),
            (20_782, "2026-11-25"),
            (20_818, "2026-12-31"),
            (20_819, "2027-01-01"),
            (47_540, "2100-02-28"),
            (47_541, "2100-03-01"),
        ] {
            assert_eq!(Day(day).to_string(), date);
        }
        assert!(!Day(u32::MAX).to_string().is_empty());
    }

    #[test]
    fn a_day_ends_at_midnight() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        assert_eq!((Day::of(at(0)), Day::left(at(0))), (Day(0), Duration::from_secs(86_400)));
        assert_eq!((Day::of(at(86_399)), Day::left(at(86_399))), (Day(0), Duration::from_secs(1)));
        assert_eq!(Day::of(at(86_400)), Day(1));
        assert_eq!(Day::of(UNIX_EPOCH - Duration::from_secs(1)), Day(0), "a clock that is wrong");
    }
}
